"""Choose the classes that gradients are multiplied with, for a bound on what each token leaves out.

A trained model gives nearly all of its probability to few classes. The gradient of a tile of logits,
dz (tokens, classes), is multiplied by the weight and by the input. Both products can leave out
classes of which a token has next to nothing:

    classes by their mass -->   targets | bucket | bucket  | bucket
                               +--------+--------+---------+-----------+
    tokens by the number       | ###### | ###### | ####### | ######### |
    of buckets that they need  | ###### | ###### | ####### | ......... |
                   |           | ###### | ###### | ....... | ......... |
                   v           | ###### | ...... | ....... | ......... |
                               +--------+--------+---------+-----------+

* The *mass* of a class is the sum of its probabilities over the tokens of a tile. Classes are
  ordered by mass, the targets of the tile first, and divided into *buckets* of growing width.
* A token needs the shortest prefix of buckets beyond which it has no more probability than it may
  leave out. Tokens are ordered by need, so each bucket is multiplied (#) for a prefix of them.
* What is left out of a bucket (.) is replaced by the product of its margins: B is about
  r c.T / s, with r = B 1, c = B.T 1, s = the sum of B. It has the same sums of rows and columns, and
  its products with weight and input are thin. For each token the classes that are left out count as
  one average class of each bucket, so no probability is lost.

Of a vocabulary that lies in several tiles, or on several ranks, each tile leaves out its share.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from storage_ops.loss.planning.cost import BUCKETS, GATHERED, probability_rows
from storage_ops.loss.planning.schedule import slices
from storage_ops.matmul import Matmul

PAYS = 0.75  # of all multiplications; with more of them a tile is multiplied whole


@dataclass(frozen=True)
class Selection:
    """What the gradient of a tile is multiplied with.

    Attributes:
        classes: (classes,) the classes of the tile by mass, its targets first.
        tokens: (rows,) the tokens of the tile by need.
        needs: (rows,) how many buckets each of `tokens` needs.
        bounds: where buckets begin among `classes`, and where the last one ends.
        counts: how many tokens need each bucket.
        dropped: (rows,) the probability that each token of the tile leaves out.
    """

    classes: Tensor
    tokens: Tensor
    needs: Tensor
    bounds: list[int]
    counts: list[int]
    dropped: Tensor

    def pieces(self) -> list[tuple[int, slice]]:
        """Return the bucket and the place among `classes` of what is gathered at a time."""
        bounds = zip(self.bounds, self.bounds[1:], strict=False)
        return [(k, part) for k, (a, b) in enumerate(bounds) for part in slices(b, GATHERED, a)]


def select(
    probabilities: Callable[[slice], Tensor],
    shape: tuple[int, int],
    targets: Tensor,
    may_drop: float,
    max_classes: float | None,
) -> Selection | None:
    """Choose what to multiply the gradient of a tile with; None if leaving out does not pay.

    Args:
        probabilities: returns those of some rows of the tile, 0 for ignored tokens.
        shape: rows and classes of the tile.
        targets: classes of the tile that no token may leave out; with duplicates.
        may_drop: the probability that a token may leave out.
        max_classes: the share of the classes that all tokens are multiplied with, whatever they
            leave out; None: as many as they need, which waits for the device once.
    """
    high, wide = shape
    blocks = slices(high, probability_rows(high, wide))
    mass = sum(probabilities(rows).sum(0) for rows in blocks)
    assert isinstance(mass, Tensor)
    mass.nan_to_num_(0.0, 0.0)
    mass[targets] = math.inf
    first = min(len(targets), wide)
    if mass.device.type == "cpu" and not isinstance(mass, FakeTensor):
        first = int(mass.isinf().count_nonzero())
    if max_classes is not None:
        first = max(first, math.ceil(max_classes * wide))
    classes, bounds = mass.argsort(descending=True, stable=True), _bounds(first, wide)
    indicator = _indicator(classes, bounds, mass.dtype)
    held = torch.cat([probabilities(rows) @ indicator for rows in blocks])
    # held[:, k:] summed from the last bucket on, where numbers are small.
    tails = torch.nn.functional.pad(held.flip(1).cumsum(1).flip(1), (0, 1))
    if max_classes is not None:
        needs = torch.ones_like(tails[:, 0], dtype=torch.int64)
        counts = [high] + [0] * (len(bounds) - 2)
    else:
        needs = tails[:, 1:-1].le(may_drop).logical_not_().sum(1) + 1  # of nan all
        counts = _counts(needs, len(bounds) - 1)
        widths = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
        multiplied = sum(n * width for n, width in zip(counts, widths, strict=True))
        if multiplied > PAYS * high * wide and not isinstance(mass, FakeTensor):
            return None
    dropped = tails.gather(1, needs.unsqueeze(1)).squeeze(1)
    tokens = needs.argsort(descending=True, stable=True)
    return Selection(classes, tokens, needs[tokens], bounds, counts, dropped)


def multiply(
    chosen: Selection,
    matmul: Matmul,
    dz: Tensor,
    x: Tensor,
    w: Tensor,
    sums: Tensor,
    into_input: Tensor | None,
    into_weight: Tensor | None,
) -> None:
    """Multiply the gradient of a tile with what was chosen.

    Args:
        chosen: for this tile.
        matmul: who multiplies.
        dz: (rows, classes) the gradient with respect to the logits.
        x, w: (rows, D) and (classes, D), in the dtype of dz.
        sums: (classes,) the sum of dz over its rows.
        into_input: (rows, D) zeros that get the input's gradient, in the order of `chosen.tokens`.
        into_weight: (classes, D) that the weight's gradient is added to.
    """
    x, wide = x[chosen.tokens], sums.dtype
    margins = sums.new_empty(len(x), len(chosen.counts))
    indicator = _indicator(chosen.classes, chosen.bounds, dz.dtype)
    matmul.input_gradient(dz, indicator, margins, False)
    del indicator
    bucket = torch.arange(len(chosen.counts), device=dz.device)
    left = margins[chosen.tokens].mul_(bucket >= chosen.needs.unsqueeze(1))
    total = left.sum(0)
    average = left * torch.where(total == 0, 0, total.reciprocal())
    of_input = sums.new_zeros(len(bucket), x.shape[1])
    matmul.weight_gradient(average.to(x.dtype), x, of_input, False)
    of_weight = sums.new_zeros(len(bucket), x.shape[1])
    for k, place in chosen.pieces():
        count, classes = chosen.counts[k], chosen.classes[place]
        weight, column = w[classes], sums[classes]
        part = sums.new_zeros(len(classes), x.shape[1]) if into_weight is not None else None
        if count:
            piece = dz[chosen.tokens[:count].unsqueeze(1), classes]
            column = column - piece.sum(0, dtype=wide)
            if into_input is not None:
                matmul.input_gradient(piece, weight, into_input[:count], True)
            if part is not None:
                matmul.weight_gradient(piece, x[:count], part, False)
            del piece
        if count < len(x):
            of_weight[k] += column.to(w.dtype) @ weight
            if part is not None:
                part.addr_(column, of_input[k])
        if part is not None and into_weight is not None:
            part += into_weight[classes]
            into_weight[classes] = part.to(into_weight.dtype)
    if into_input is not None:
        matmul.input_gradient(average.to(w.dtype), of_weight.to(w.dtype), into_input, True)


def _bounds(first: int, classes: int) -> list[int]:
    """Return where buckets begin and the last one ends: `first` classes, then in geometric ranks."""
    first = max(first, min(classes, GATHERED // 4), 1)
    growth = classes / first
    ranks = {math.ceil(first * growth ** (k / (BUCKETS - 1))) for k in range(BUCKETS)}
    return [0, *sorted(min(rank, classes) for rank in ranks | {classes} if rank <= classes)]


def _indicator(classes: Tensor, bounds: list[int], dtype: torch.dtype) -> Tensor:
    """Return a (classes, buckets) matrix with 1 where a class is in a bucket."""
    result = torch.zeros(len(classes), len(bounds) - 1, dtype=dtype, device=classes.device)
    for k, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        result[classes[begin:end], k] = 1
    return result


def _counts(needs: Tensor, buckets: int) -> list[int]:
    """Return how many tokens need each bucket; in a simulation, which has no values, all."""
    if isinstance(needs, FakeTensor):
        return [len(needs)] * buckets
    bucket = torch.arange(buckets, device=needs.device)
    counts: list[int] = (needs.unsqueeze(0) > bucket.unsqueeze(1)).sum(1).tolist()
    return counts
