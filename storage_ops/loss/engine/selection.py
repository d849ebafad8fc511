"""Leaves classes out of the gradient, with a bound on the probability that each token loses.

A trained model gives nearly all of its probability to few classes. The gradient dz (tokens,
classes) of a tile of logits is multiplied by the weight and by the input. Both products can leave
out classes that have almost no probability:

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
* A token *needs* the shortest prefix of buckets such that the mass beyond it may be left out.
  Tokens are ordered by need, so each bucket is multiplied (#) for a prefix of the tokens.
* Rows of the weight are gathered for a bucket, which costs as much as some tokens. *Flat* tokens
  are the few that need more buckets than are worth gathering. They are multiplied with all other
  classes without a gather.
* For cross-entropy, only the part of the gradient that is multiplied is computed from the logits.
  It is written class by class, each as a run of tokens by need, for several buckets at a time. A
  gather of single classes of a row would read a whole memory sector for each number.
* The part of a bucket that is left out (.) is replaced by the product of its margins: B is about
  r c.T / s, with r = B 1, c = |B|.T 1, s = the sum of |B|. It has the same sums of rows, and of
  columns if all factors have one sign, and its products with weight and input are cheap. Each token
  then has one average class instead of the classes that it leaves out of a bucket, so it loses no
  probability. A divergence has no such replacement: a token has gradients of both signs.
* r and c of all tokens need no pass over the gradient. They are the masses times a *factor* for
  each token, from a probability to its gradient: 1 / tokens for a mean. The part of c that is
  multiplied is added up during the gather.

If a vocabulary lies in several tiles, or on several ranks, each tile leaves out its share.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from storage_ops.loss.call import arithmetic
from storage_ops.loss.planning.cost import (
    BUCKETS,
    flat_classes,
    flat_tokens,
    gathered_classes,
    gathered_numbers,
    padded_tokens,
)
from storage_ops.loss.planning.schedule import slices
from storage_ops.matmul import Matmul

_OPS = torch.ops.storage_ops
LEAST = 256  # classes of the first bucket
PAYS = 0.9  # the largest share of the work of a whole tile; above it, a tile is multiplied whole
# Gathering a row of the weight and adding its gradient takes as long as this many tokens.
GATHERING = {"cpu": 96, "cuda": 400}

# Adds up the masses of a tile, for each class, or for each token and bucket.
MassSums = Callable[[Tensor, Tensor | None], None]
# Computes the gradient with respect to logits of a tile. The arguments are out, sums, tokens, start
# and count, as in `reference.gather_gradient`.
Gather = Callable[[Tensor, Tensor | None, Tensor, Tensor, Tensor], None]


@dataclass(frozen=True)
class Margins:
    """Sums of the gradient that the tokens of a tile leave out.

    Attributes:
        left: (rows, gathered buckets + 1) the sum that each token leaves out of each gathered
            bucket and of the rest. Tokens are in the order of `Selection.tokens`.
        columns: (classes,) the sum of the absolute gradient of each class, over all tokens.
    """

    left: Tensor
    columns: Tensor

    def column(self, classes: slice | Tensor, kept: Tensor) -> Tensor:
        """Return the absolute gradient of classes, minus the part `kept` that is multiplied.

        It is 0 if a token has a nan, because that token keeps all classes.
        """
        return (self.columns[classes] - kept[classes]).nan_to_num_(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Selection:
    """The part of a tile's gradient that is multiplied.

    Attributes:
        classes: (classes,) the classes of the tile by bucket, its targets in the first.
        tokens: (rows,) the tokens of the tile by need.
        needs: (rows,) how many buckets each token needs.
        buckets: (classes,) uint8, the bucket of each class of the tile.
        bounds: the begin of each bucket in `classes`, and the end of the last.
        counts: how many tokens need each gathered bucket; the other buckets are the rest.
        flat: how many of the first `tokens` are multiplied with the rest, too.
        dropped: (rows,) the mass that each token of the tile leaves out.
        margins: the margins of the part that is left out. None if it is not replaced.
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

    def pieces(self, classes: int, numbers: int) -> Iterator[list[Piece]]:
        """Yield the pieces of the gathered buckets, in lists that are gathered at a time.

        Args:
            classes: the most classes of a piece.
            numbers: the most numbers of a list, which has at least one piece.
        """
        together: list[Piece] = []
        for k, count in enumerate(self.counts):
            for place in slices(self.bounds[k + 1], classes, self.bounds[k]):
                begin = together[-1].end if together else 0
                piece = Piece(k, place, count, begin)
                if together and piece.end > numbers:
                    yield together
                    piece, together = replace(piece, begin=0), []
                together.append(piece)
        if together:
            yield together


@dataclass(frozen=True)
class Piece:
    """A part of a bucket, and the place of its gradient.

    Attributes:
        bucket: the number of the bucket.
        place: the classes of the piece in `Selection.classes`.
        count: how many tokens need the bucket.
        begin: the begin of the piece's gradient in the memory of a gather.
    """

    bucket: int
    place: slice
    count: int
    begin: int

    @property
    def stride(self) -> int:
        """Return the distance between the gradients of two classes: count + 1, aligned."""
        return padded_tokens(self.count)

    @property
    def end(self) -> int:
        """Return the end of the piece's gradient."""
        width: int = self.place.stop - self.place.start
        return self.begin + width * self.stride

    def of(self, numbers: Tensor) -> Tensor:
        """Return the gradient of the piece, (classes, count + 1), from the memory of a gather."""
        return numbers[self.begin : self.end].view(-1, self.stride)[:, : self.count + 1]


def select(
    mass_sums: MassSums,
    targets: Tensor,
    shape: torch.Size,
    like: Tensor,
    may_drop: float,
    max_classes: float | None,
    factors: Tensor | None,
) -> Selection | None:
    """Choose the part of a tile's gradient to multiply. None if leaving out classes does not pay.

    Args:
        mass_sums: adds up masses; ignored tokens have mass 0.
        targets: classes of the tile that no token may leave out; with duplicates.
        shape: rows and classes of the tile.
        like: a tensor in the dtype of the arithmetic, on the device.
        may_drop: the mass that a token may leave out.
        max_classes: the share of the classes that is multiplied for all tokens, whatever they leave
            out. None: as many as they need, which waits for the device once.
        factors: (rows,) see `RowFunction.factors`; None: the part that is left out is not replaced.
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
    # Keeps their order within a bucket, which makes gathers faster.
    classes = buckets.argsort(stable=True)
    bucket_mass = like.new_empty(high, len(bounds) - 1)
    mass_sums(bucket_mass, buckets)
    # Sum held[:, k:] from the last bucket on, where numbers are small.
    tails = torch.nn.functional.pad(bucket_mass.flip(1).cumsum(1).flip(1), (0, 1))
    if max_classes is not None:
        needs, counts, flat = torch.ones_like(tails[:, 0], dtype=torch.int64), [high], 0
    else:
        needs = tails[:, 1:-1].le(may_drop).logical_not_().sum(1) + 1  # a nan needs all buckets
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
        margin_sums = torch.cat(
            (bucket_mass[:, :used], tails[:, used : used + 1]), 1
        ) * factors.unsqueeze(1)
        margin_sums.masked_fill_(
            torch.arange(used + 1, device=needs.device) < needs.unsqueeze(1), 0
        )
        margin_sums.nan_to_num_(0.0, 0.0, 0.0)
        margins = Margins(margin_sums[tokens], columns)
    return Selection(classes, tokens, needs, buckets, bounds, counts, flat, dropped, margins)


def multiply(
    chosen: Selection,
    matmul: Matmul,
    gather: Gather,
    x: Tensor,
    w: Tensor,
    into_input: Tensor | None,
    into_weight: Tensor | None,
    add: bool,
) -> None:
    """Multiply the selected part of a tile's gradient by weight and input.

    Args:
        chosen: the selection for this tile.
        matmul: the matrix products.
        gather: computes the gradient with respect to some logits.
        x, w: (rows, D) and (classes, D).
        into_input: (rows, D) zeros in the dtype of the arithmetic. They receive the input's
            gradient in the order of `chosen.tokens`.
        into_weight: (classes, D) the weight's gradient is added to it, or written to it.
        add: whether to add to `into_weight` instead of overwriting it.
    """
    count, margins, wide = len(x), chosen.margins, arithmetic(x.dtype)
    ordered = x.new_empty(count + 1, x.shape[1])
    ordered[:count], x = x[chosen.tokens], ordered
    if margins is not None:
        # Each token's sum that is left out of a bucket, and the average input and weight of that
        # sum.
        whole = margins.left.abs().sum(0)
        shares = (margins.left * torch.where(whole == 0, 0, whole.reciprocal())).to(x.dtype)
        inputs, weights = x.new_zeros(2, len(whole), x.shape[1], dtype=wide)
        matmul.weight_gradient(shares, x[:count], inputs, False)
    average = None if margins is None else inputs[-1]
    sums = _multiply_rest(chosen, matmul, gather, x, w, average, into_weight, add)
    if margins is not None:
        weights[-1] = sums[-1]
    if into_input is not None:
        into_input[: chosen.flat] = sums[: chosen.flat]
    del sums
    room = gathered_numbers(matmul.cuda, count, len(w))
    for pieces in chosen.pieces(gathered_classes(matmul.cuda), room):
        numbers, column_sums = _gathered(chosen, pieces, gather, x, len(w))
        for piece in pieces:
            classes, gradient = chosen.classes[piece.place], piece.of(numbers)
            weight, needed = w.index_select(0, classes), piece.count
            used, average_weight = needed, None
            if margins is not None and column_sums is not None and needed < count:
                # The sum that other tokens leave out acts as one more token. Later buckets have
                # fewer tokens.
                x[needed] = inputs[piece.bucket]
                gradient[:, needed] = margins.column(classes, column_sums)
                used, average_weight = needed + 1, weights[piece.bucket]
            if into_input is not None:
                if average_weight is not None:  # summed in the row of the next token
                    _swap(into_input[needed], average_weight)
                matmul.input_gradient(gradient[:, :used].t(), weight, into_input[:used], True)
                if average_weight is not None:
                    _swap(into_input[needed], average_weight)
            del weight
            if into_weight is not None:
                dtype = wide if add else into_weight.dtype
                product = x.new_empty(len(classes), x.shape[1], dtype=dtype)
                matmul.weight_gradient(gradient[:, :used].t(), x[:used], product, False)
                _OPS._put_rows(into_weight, classes, product, add)
                del product
    if margins is not None and into_input is not None:
        matmul.input_gradient(shares, weights.to(w.dtype), into_input, True)


def _swap(a: Tensor, b: Tensor) -> None:
    before = a.clone()
    a.copy_(b)
    b.copy_(before)


def _gathered(
    chosen: Selection, pieces: list[Piece], gather: Gather, x: Tensor, classes: int
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of some pieces, and the sum of each class; None without margins."""
    start = torch.full((classes,), -1, device=x.device)
    count = torch.zeros_like(start)
    for piece in pieces:
        of = chosen.classes[piece.place]
        start[of] = torch.arange(piece.begin, piece.end, piece.stride, device=x.device)
        count[of] = piece.count
    numbers = x.new_empty(pieces[-1].end)
    kept = None if chosen.margins is None else torch.empty_like(chosen.margins.columns)
    gather(numbers, kept, chosen.tokens, start, count)
    return numbers, kept


def _multiply_rest(
    chosen: Selection,
    matmul: Matmul,
    gather: Gather,
    x: Tensor,
    w: Tensor,
    average: Tensor | None,
    into_weight: Tensor | None,
    add: bool,
) -> Tensor:
    """Multiply flat tokens with the classes that are not gathered.

    Args:
        chosen, matmul, gather, w, into_weight, add: as in `multiply`.
        x: (rows, D) the tokens' inputs, by need.
        average: (D,) the average input of the part that the other tokens leave out, or None.

    Returns:
        (flat tokens, D) their input gradient; with `average` one row more: the weight of what the
        others leave out.
    """
    flat, margins, used = chosen.flat, chosen.margins, len(chosen.counts)
    rows = x[:flat] if average is None else torch.cat((x[:flat], average.to(x.dtype).unsqueeze(0)))
    sums = x.new_zeros(rows.shape, dtype=arithmetic(x.dtype))
    if not len(rows):
        if into_weight is not None and not add:
            into_weight.zero_()
        return sums
    not_gathered, stride = chosen.buckets >= used, padded_tokens(flat)
    column_sums = None if margins is None else torch.empty_like(margins.columns)
    for part in slices(len(w), flat_classes(matmul.cuda, len(chosen.tokens), flat)):
        width = part.stop - part.start
        start = torch.full((len(w),), -1, device=w.device)
        start[part] = torch.arange(0, width * stride, stride, device=w.device)
        start.masked_fill_(~not_gathered, -1)
        numbers = x.new_zeros(width, stride)
        gather(numbers.view(-1), column_sums, chosen.tokens, start, torch.full_like(start, flat))
        gradient = numbers[:, : len(rows)]
        if margins is not None and column_sums is not None:
            gradient[:, flat] = margins.column(part, column_sums)
            gradient[:, flat].masked_fill_(~not_gathered[part], 0)
        matmul.input_gradient(gradient.t(), w[part], sums, True)
        if into_weight is not None:
            matmul.weight_gradient(gradient.t(), rows, into_weight[part], add)
        del numbers, gradient
    return sums


def _cheapest(
    counts: list[int], bounds: list[int], tokens: int, device: str
) -> tuple[list[int], int] | None:
    """Return how many tokens need each bucket that is worth gathering, and the flat tokens.

    None if all tokens are best multiplied with all classes.

    Args:
        counts: how many tokens need each bucket.
        bounds: where buckets begin and the last one ends.
        tokens: the number of tokens.
        device: the type of the device.
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
    """Return the begins of buckets and the end of the last: `first`, then a geometric series."""
    first = max(first, min(classes, LEAST), 1)
    growth = classes / first
    ranks = {math.ceil(first * growth ** (k / (BUCKETS - 1))) for k in range(BUCKETS)}
    return [0, *sorted(min(rank, classes) for rank in ranks | {classes})]


def _counts(needs: Tensor, buckets: int) -> list[int]:
    """Return how many tokens need each bucket. A simulation, which has no values, returns all."""
    if isinstance(needs, FakeTensor):
        return [len(needs)] * buckets
    bucket = torch.arange(buckets, device=needs.device)
    counts: list[int] = (needs.unsqueeze(0) > bucket.unsqueeze(1)).sum(1).tolist()
    return counts
