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

from storage_ops.loss.planning.cost import BUCKETS, GATHERED
from storage_ops.loss.planning.schedule import slices
from storage_ops.matmul import Matmul

_OPS = torch.ops.storage_ops
PAYS = 0.75  # of all multiplications; with more of them a tile is multiplied whole

# Adds up the probabilities of a tile's logits: of each class, or of each token by bucket of classes.
ProbabilitySums = Callable[[Tensor, Tensor | None], None]


@dataclass(frozen=True)
class Selection:
    """What the gradient of a tile is multiplied with.

    Attributes:
        classes: (classes,) the classes of the tile by mass, its targets first.
        tokens: (rows,) the tokens of the tile by need.
        needs: (rows,) how many buckets each of `tokens` needs.
        buckets: (classes,) uint8, the bucket of each class of the tile.
        bounds: where buckets begin among `classes`, and where the last one ends.
        counts: how many tokens need each bucket.
        dropped: (rows,) the probability that each token of the tile leaves out.
    """

    classes: Tensor
    tokens: Tensor
    needs: Tensor
    buckets: Tensor
    bounds: list[int]
    counts: list[int]
    dropped: Tensor

    @property
    def used(self) -> int:
        """How many buckets any token needs."""
        return sum(count > 0 for count in self.counts)

    def pieces(self) -> list[tuple[int, slice]]:
        """Return the bucket and the place among `classes` of what is gathered at a time."""
        bounds = list(zip(self.bounds, self.bounds[1:], strict=False))[: self.used]
        return [(k, part) for k, (a, b) in enumerate(bounds) for part in slices(b, GATHERED, a)]


def select(
    probability_sums: ProbabilitySums,
    targets: Tensor,
    shape: torch.Size,
    like: Tensor,
    may_drop: float,
    max_classes: float | None,
) -> Selection | None:
    """Choose what to multiply the gradient of a tile with; None if leaving out does not pay.

    Args:
        probability_sums: see above; ignored tokens have none.
        targets: classes of the tile that no token may leave out; with duplicates.
        shape: rows and classes of the tile.
        like: a tensor in the dtype of the arithmetic, on the device.
        may_drop: the probability that a token may leave out.
        max_classes: the share of the classes that all tokens are multiplied with, whatever they
            leave out; None: as many as they need, which waits for the device once.
    """
    high, wide = shape
    mass = like.new_empty(wide)
    probability_sums(mass, None)
    mass.nan_to_num_(0.0, 0.0)
    mass[targets] = math.inf
    first = min(len(targets), wide)
    if mass.device.type == "cpu" and not isinstance(mass, FakeTensor):
        first = int(mass.isinf().count_nonzero())
    if max_classes is not None:
        first = max(first, math.ceil(max_classes * wide))
    classes, bounds = mass.argsort(descending=True, stable=True), _bounds(first, wide)
    buckets = torch.empty_like(classes, dtype=torch.uint8)
    for k, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        buckets[classes[begin:end]] = k
    held = like.new_empty(high, len(bounds) - 1)
    probability_sums(held, buckets)
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
    return Selection(classes, tokens, needs[tokens], buckets, bounds, counts, dropped)


def multiply(
    chosen: Selection,
    matmul: Matmul,
    dz: Tensor,
    x: Tensor,
    w: Tensor,
    into_input: Tensor | None,
    into_weight: Tensor | None,
) -> None:
    """Multiply the gradient of a tile with what was chosen.

    Args:
        chosen: for this tile.
        matmul: who multiplies.
        dz: (rows, classes) the gradient with respect to the logits.
        x, w: (rows, D) and (classes, D), in the dtype of dz.
        into_input: (rows, D) zeros in the dtype of the arithmetic, that get the input's gradient in
            the order of `chosen.tokens`.
        into_weight: (classes, D) that the weight's gradient is added to.
    """
    used, size, x = chosen.used, x.shape[1], x[chosen.tokens]
    wide = dz.dtype if dz.dtype == torch.float64 else torch.float32
    columns = dz.new_empty(len(w), dtype=wide)
    _OPS._tile_sums(columns, dz, None, None, None, 0.0, 1.0)
    margins = columns.new_empty(len(x), len(chosen.counts))
    _OPS._tile_sums(margins, dz, None, None, chosen.buckets, 0.0, 1.0)
    # Buckets that no token needs are one; of the others what each token leaves out.
    margins = torch.cat((margins[:, :used], margins[:, used:].sum(1, keepdim=True)), 1)
    bucket = torch.arange(used + 1, device=dz.device)
    left = margins[chosen.tokens].mul_(bucket >= chosen.needs.unsqueeze(1))
    total = left.sum(0)
    shares = (left * torch.where(total == 0, 0, total.reciprocal())).to(x.dtype)
    inputs, weights = columns.new_zeros(2, used + 1, size)
    matmul.weight_gradient(shares, x, inputs, False)
    for k, place in chosen.pieces():
        count, classes = chosen.counts[k], chosen.classes[place]
        weight, column = w[classes], columns[classes]
        columns[classes] = 0
        piece = dz.new_empty(count, len(classes))
        _OPS._gather_tile(piece, dz, chosen.tokens[:count], classes)
        if count < len(x):
            inner = torch.empty_like(column)
            _OPS._tile_sums(inner, piece, None, None, None, 0.0, 1.0)
            column -= inner
            weights[k] += column.to(w.dtype) @ weight
        if into_input is not None:
            matmul.input_gradient(piece, weight, into_input[:count], True)
        if into_weight is not None:
            part = columns.new_empty(len(classes), size)
            matmul.weight_gradient(piece, x[:count], part, False)
            if count < len(x):
                part.addr_(column, inputs[k])
            into_weight.index_add_(0, classes, part.to(into_weight.dtype))
    rest = columns.to(w.dtype).unsqueeze(0)  # of the buckets that no token needs
    matmul.input_gradient(rest, w, weights[used:], False)
    if into_weight is not None:
        matmul.weight_gradient(rest, inputs[used:].to(w.dtype), into_weight, True)
    if into_input is not None:
        matmul.input_gradient(shares, weights.to(w.dtype), into_input, True)


def _bounds(first: int, classes: int) -> list[int]:
    """Return where buckets begin and the last one ends: `first` classes, then in geometric ranks."""
    first = max(first, min(classes, GATHERED // 4), 1)
    growth = classes / first
    ranks = {math.ceil(first * growth ** (k / (BUCKETS - 1))) for k in range(BUCKETS)}
    return [0, *sorted(min(rank, classes) for rank in ranks | {classes})]


def _counts(needs: Tensor, buckets: int) -> list[int]:
    """Return how many tokens need each bucket; in a simulation, which has no values, all."""
    if isinstance(needs, FakeTensor):
        return [len(needs)] * buckets
    bucket = torch.arange(buckets, device=needs.device)
    counts: list[int] = (needs.unsqueeze(0) > bucket.unsqueeze(1)).sum(1).tolist()
    return counts
