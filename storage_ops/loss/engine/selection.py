"""Leave classes out of the gradient, with a bound on the probability that each token loses.

A trained model gives nearly all of its probability to few classes. The gradient dz (tokens,
classes) of a tile of logits is multiplied by the weight and by the input. Both products can leave
out classes of which a token has next to nothing:

    classes by their mass -->   targets | bucket | bucket  | rest
                               +--------+--------+---------+-----------------+
    flat tokens                | ###### | ###### | ####### | ############### |
    tokens by the number       | ###### | ###### | ####### | ............... |
    of buckets that they need  | ###### | ###### | ####### | ............... |
                   |           | ###### | ###### | ....... | ............... |
                   v           | ###### | ...... | ....... | ............... |
                               +--------+--------+---------+-----------------+

* The *mass* of a class is the sum of its probabilities over the tokens of a tile. A divergence,
  whose gradient is no probability, takes absolute gradients. Classes are ordered by mass, the
  targets of the tile first, and divided into *buckets* of growing width.
* A token *needs* the shortest prefix of buckets beyond which it has no more mass than it may leave
  out. Tokens are ordered by need, so each bucket is multiplied (#) for a prefix of them.
* Rows of the weight are gathered for a bucket, which costs as much as some tokens. *Flat* tokens,
  the few that need more than is worth that, are multiplied with all other classes in place.
* The part of a bucket that is left out (.) is replaced by the product of its margins: B is about
  r c.T / s, with r = B 1, c = |B|.T 1, s = the sum of |B|. It has the same sums of rows, and of
  columns where all tokens have one sign, and its products with weight and input are thin. Each
  token then has one average class for the classes that it leaves out of a bucket, so it loses no
  probability. A divergence leaves them out for good: a token has gradients of both signs.
* r and c need no pass over the gradient. They are the masses times a *factor* for each token, which
  is what its gradient has of each probability: 1 / tokens for a mean.

If a vocabulary lies in several tiles, or on several ranks, each tile leaves out its share.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from storage_ops.loss.call import arithmetic
from storage_ops.loss.planning.cost import BUCKETS, flat_tokens, gathered_classes
from storage_ops.loss.planning.schedule import slices
from storage_ops.matmul import Matmul

_OPS = torch.ops.storage_ops
LEAST = 256  # classes of the first bucket
PAYS = 0.9  # of the work of a whole tile; with more of it a tile is multiplied whole
# Tokens whose products take as long as to gather a row of the weight and to add its gradient.
GATHERING = {"cpu": 96, "cuda": 400}

# Adds up the masses of a tile: of each class, or of each token by bucket.
MassSums = Callable[[Tensor, Tensor | None], None]


@dataclass(frozen=True)
class Margins:
    """Sums of the gradient that the tokens of a tile leave out.

    Attributes:
        left: (rows, gathered buckets + 1) what each token leaves out of each gathered bucket and of
            the rest. Tokens are in the order of `Selection.tokens`.
        signs: (rows,) the sign of each token's gradient.
        columns: (classes,) the sum of the absolute gradient of each class, of all tokens.
    """

    left: Tensor
    signs: Tensor
    columns: Tensor

    def column(self, classes: slice | Tensor, kept: Tensor) -> Tensor:
        """Return the absolute gradient of classes, without that of the first tokens, `kept`.

        It is 0 where a token with a nan has all of them in its own.
        """
        own = self.columns.new_empty(kept.shape[1])
        _OPS._tile_sums(own, kept, None, self.signs[: len(kept)], None, None, 0.0, 1.0)
        return (self.columns[classes] - own).nan_to_num_(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Selection:
    """The part of a tile's gradient that is multiplied.

    Attributes:
        classes: (classes,) the classes of the tile by bucket, its targets in the first.
        tokens: (rows,) the tokens of the tile by need.
        needs: (rows,) how many buckets each token of the tile needs.
        buckets: (classes,) uint8, the bucket of each class of the tile.
        bounds: where buckets begin among `classes`, and where the last one ends.
        counts: how many tokens need each of the buckets that are gathered; the others are the rest.
        flat: how many of `tokens`, the first, are multiplied with the rest as well.
        dropped: (rows,) the mass that each token of the tile leaves out.
        margins: of what is left out; None if nothing replaces it.
    """

    classes: Tensor
    tokens: Tensor
    needs: Tensor
    buckets: Tensor
    bounds: list[int]
    counts: list[int]
    flat: int
    dropped: Tensor
    margins: Margins | None

    def pieces(self, at_once: int) -> list[tuple[int, slice]]:
        """Return the bucket and the place among `classes` of so many that are gathered at once."""
        ends = enumerate(itertools.pairwise(self.bounds))
        gathered = list(ends)[: len(self.counts)]
        return [(k, part) for k, (a, b) in gathered for part in slices(b, at_once, a)]


def select(
    mass_sums: MassSums,
    targets: Tensor,
    shape: torch.Size,
    like: Tensor,
    may_drop: float,
    max_classes: float | None,
    factors: Tensor | None,
) -> Selection | None:
    """Choose what to multiply the gradient of a tile with; None if leaving out does not pay.

    Args:
        mass_sums: see above; ignored tokens have none.
        targets: classes of the tile that no token may leave out; with duplicates.
        shape: rows and classes of the tile.
        like: a tensor in the dtype of the arithmetic, on the device.
        may_drop: the mass that a token may leave out.
        max_classes: the share of the classes that all tokens are multiplied with, whatever they
            leave out; None: as many as they need, which waits for the device once.
        factors: (rows,) see `RowFunction.factors`; None: nothing replaces what is left out.
    """
    high, wide = shape
    mass = like.new_empty(wide)
    mass_sums(mass, None)
    mass.nan_to_num_(0.0, 0.0)
    columns = mass.clone()
    mass[targets] = math.inf
    first = min(len(targets), wide)
    if mass.device.type == "cpu" and not isinstance(mass, FakeTensor):
        first = int(mass.isinf().count_nonzero())
    if max_classes is not None:
        first = max(first, math.ceil(max_classes * wide))
    classes, bounds = mass.argsort(descending=True, stable=True), _bounds(first, wide)
    buckets = torch.empty_like(classes, dtype=torch.uint8)
    for k, (begin, end) in enumerate(itertools.pairwise(bounds)):
        buckets[classes[begin:end]] = k
    classes = buckets.argsort(stable=True)  # in their order within a bucket: gathered faster
    bucket_mass = like.new_empty(high, len(bounds) - 1)
    mass_sums(bucket_mass, buckets)
    # held[:, k:] summed from the last bucket on, where numbers are small.
    tails = torch.nn.functional.pad(bucket_mass.flip(1).cumsum(1).flip(1), (0, 1))
    if max_classes is not None:
        needs, counts, flat = torch.ones_like(tails[:, 0], dtype=torch.int64), [high], 0
    else:
        needs = tails[:, 1:-1].le(may_drop).logical_not_().sum(1) + 1  # of nan all
        cheapest = _cheapest(_counts(needs, len(bounds) - 1), bounds, high, mass.device.type)
        if cheapest is None:
            return None
        counts, flat = cheapest
        needs.masked_fill_(needs > len(counts), len(bounds) - 1)
    dropped = tails.gather(1, needs.unsqueeze(1)).squeeze(1)
    tokens = needs.argsort(descending=True, stable=True)
    margins = None
    if factors is not None:
        used = len(counts)
        left = torch.cat((bucket_mass[:, :used], tails[:, used : used + 1]), 1) * factors.unsqueeze(
            1
        )
        left.masked_fill_(torch.arange(used + 1, device=needs.device) < needs.unsqueeze(1), 0)
        left.nan_to_num_(0.0, 0.0, 0.0)
        margins = Margins(left[tokens], factors.sign()[tokens], columns)
    return Selection(classes, tokens, needs, buckets, bounds, counts, flat, dropped, margins)


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
    x, at_once = x[chosen.tokens], gathered_classes(matmul.cuda)
    flat, count, margins = chosen.flat, len(x), chosen.margins
    like = dz.new_empty(0, dtype=arithmetic(dz.dtype))
    if margins is not None:
        # Each token's part of what is left out of a bucket, and its average input and weight.
        whole = margins.left.abs().sum(0)
        shares = (margins.left * torch.where(whole == 0, 0, whole.reciprocal())).to(x.dtype)
        inputs, weights = like.new_zeros(2, len(whole), x.shape[1])
        matmul.weight_gradient(shares, x, inputs, False)
    # The rest of the classes: those of flat tokens, and what others leave out as one more token.
    rows = x[:flat] if margins is None else torch.cat((x[:flat], inputs[-1:].to(x.dtype)))
    sums = like.new_zeros(rows.shape)
    for part in slices(len(w), at_once) if len(rows) else ():
        piece = dz.new_empty(len(rows), part.stop - part.start)
        piece[:flat] = dz[chosen.tokens[:flat], part]
        if margins is not None:
            piece[flat] = margins.column(part, piece[:flat])
        piece.masked_fill_(chosen.buckets[part] < len(chosen.counts), 0)
        matmul.input_gradient(piece, w[part], sums, True)
        if into_weight is not None:
            matmul.weight_gradient(piece, rows, into_weight[part], True)
        del piece
    if margins is not None:
        weights[-1] = sums[flat]
    if into_input is not None:
        into_input[:flat] = sums[:flat]
    del rows, sums
    for k, place in chosen.pieces(at_once):
        needed, classes = chosen.counts[k], chosen.classes[place]
        others = margins if needed < count else None
        weight, piece = w[classes], dz.new_empty(needed, len(classes))
        _OPS._gather_tile(piece, dz, chosen.tokens[:needed], classes)
        if others is not None:
            column = others.column(classes, piece)
            weights[k] += column.to(w.dtype) @ weight
        if into_input is not None:
            matmul.input_gradient(piece, weight, into_input[:needed], True)
        del weight
        if into_weight is not None:
            product = like.new_empty(len(classes), x.shape[1])
            matmul.weight_gradient(piece, x[:needed], product, False)
            if others is not None:
                product.addr_(column, inputs[k])
            into_weight.index_add_(0, classes, product.to(into_weight.dtype))
            del product
    if margins is not None and into_input is not None:
        matmul.input_gradient(shares, weights.to(w.dtype), into_input, True)


def _cheapest(
    counts: list[int], bounds: list[int], tokens: int, device: str
) -> tuple[list[int], int] | None:
    """Return how many tokens need each bucket that is worth to gather, and the flat tokens.

    None if all tokens are best multiplied with all classes.

    Args:
        counts: how many tokens need each bucket.
        bounds: where buckets begin and the last one ends.
        tokens: how many there are.
        device: its type.
    """
    gathering, classes, best = GATHERING.get(device, GATHERING["cuda"]), bounds[-1], None
    least, before = PAYS * tokens * classes, 0
    for used, begin in enumerate(bounds[:-1]):
        work = before + (counts[used] + 1) * classes
        if used and work < least and counts[used] <= flat_tokens(tokens):
            least, best = work, (counts[:used], counts[used])
        before += (gathering + counts[used]) * (bounds[used + 1] - begin)
    return best


def _bounds(first: int, classes: int) -> list[int]:
    """Return where buckets begin and the last one ends: `first`, then in geometric ranks."""
    first = max(first, min(classes, LEAST), 1)
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
