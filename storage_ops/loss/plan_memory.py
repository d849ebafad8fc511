"""What linear cross-entropy takes in memory, by shapes and the tiles that it works in."""

from __future__ import annotations

from dataclasses import dataclass, replace

from storage_ops.loss import tile_memory
from storage_ops.loss.tile_memory import SLICE, padded, parts, piece, plain_elements

PLAIN_COPIES = 9  # of the rows that it works on, most of them, by the row kernel in plain torch
STATE_ROWS = 6  # of a token: shift, sum, slope, dot, mass, logit of the target; csrc/row_math.h
PIECE = 256  # tokens whose rescaled sums are finished at a time

TOKEN_CHUNKED = "token-chunked"
VOCAB_SLICED = "vocab-sliced"
RUNNING_RESCALE = "running-rescale"


@dataclass(frozen=True)
class Problem:
    """All that a plan depends on.

    Attributes:
        tokens, hidden, vocab: N, D and V of `input (N, D) @ linear_weight (V, D).T`.
        itemsize: bytes per element of input and weight.
        grads: whether input, weight and bias need gradients.
        sums_fp32: gradients of 16-bit arguments are summed in fp32.
        early: the gradients are made in the forward: one upstream number scales them.
        rescale: a row's gradient is its probabilities times one number, less its target's part.
        into: the gradient of the weight is added to a given fp32 buffer, not returned.
        gather: rows of ignored tokens are left out; `tokens` counts the others.
        masked: rows of the input are copied, for those of weight 0 to be 0.
        left_out: how many rows are; the gradient of the input has them too.
        upcast: products of 16-bit arguments are formed in fp32, slice by slice.
        packs: products with an fp32 result are our own, which copy operands into scratch memory.
        rounds: so are products with a result in 16 bits.
        plain: the row kernel is plain torch, which makes copies of some rows of a tile.
        cuda: the arguments are on a GPU.
        threads: CPU threads that products have scratch for.
        cast_bytes: bytes per element of a tile that the target, given as probabilities, is cast to.
        fixed_bytes: copies of arguments whose strides or dtype no kernel takes.
    """

    tokens: int
    hidden: int
    vocab: int
    itemsize: int
    grads: tuple[bool, bool, bool] = (True, True, False)
    sums_fp32: bool = True
    early: bool = True
    rescale: bool = True
    into: bool = False
    gather: bool = False
    masked: bool = False
    left_out: int = 0
    upcast: bool = False
    packs: bool = False
    rounds: bool = False
    plain: bool = False
    cuda: bool = False
    threads: int = 1
    cast_bytes: int = 0
    fixed_bytes: int = 0

    @property
    def arithmetic(self) -> int:
        """Bytes per element of what is computed in full precision."""
        return max(self.itemsize, 4)

    @property
    def mixed(self) -> bool:
        """Whether gradients are summed in a wider dtype than they are returned in."""
        return self.itemsize < 4 and (self.sums_fp32 or self.upcast)


def lent_classes(p: Problem, strategy: str, rows: int) -> int:
    """The classes whose part of the weight's gradient has room for fp32 sums of the input's.

    Their own gradient is written when the sums are done, from logits that are formed once more. 0
    where it cannot wait for that, there are no such sums, or few classes are left: no tile is wider
    than those.
    """
    if not (p.mixed and p.grads[0] and p.grads[1] and p.tokens) or p.into:
        return 0
    if strategy != VOCAB_SLICED and not (strategy == TOKEN_CHUNKED and parks(p, rows)):
        return 0
    classes = (p.tokens + p.left_out) * 4 // p.itemsize
    return classes if 5 * classes <= 4 * p.vocab else 0


def without_lent(p: Problem, lent: int) -> Problem:
    """The problem without the classes that lend memory."""
    return replace(p, vocab=p.vocab - lent) if lent else p


def parks(p: Problem, rows: int) -> bool:
    """Whether logits wait in the memory of the weight's gradient: nothing was written there yet."""
    return p.early and p.grads[1] and not p.into and rows >= p.tokens


def waits(p: Problem, strategy: str, rows: int, columns: int) -> bool:
    """Whether the logits of all classes but the last wait in the weight's gradient."""
    left = p.vocab - columns
    if strategy != TOKEN_CHUNKED or not parks(p, rows) or left <= 0:
        return False
    return tile_memory.block_before(columns, left, p.tokens, p.hidden) > 0


def waiting(p: Problem, strategy: str, rows: int, columns: int) -> list[int]:
    """Widths of the slices of the vocabulary if the logits of all but the last wait; or empty."""
    if not waits(p, strategy, rows, columns):
        return []
    return tile_memory.blocks(p.vocab, p.tokens, p.hidden, columns)


def _packed_bytes(p: Problem, rows: int, columns: int) -> int:
    """The most scratch that one of our own products of a tile takes."""
    weight_sum, input_sum = wide_sums(p, rows, columns)
    work = []  # rows, columns and depth; whether it is rounded, whether left is read in place
    if p.itemsize >= 4 or p.upcast or p.rounds:
        work.append((rows, columns, p.hidden, p.rounds, True))
    if p.grads[0]:
        rounded = p.rounds and not input_sum
        work.append((rows, p.hidden, columns, rounded, True))
        if rounded and tile_memory.ONE_PASS < columns < p.vocab:
            # Other slices may be narrow enough for one pass, which takes more scratch.
            work.append((rows, p.hidden, tile_memory.ONE_PASS, rounded, True))
    if p.grads[1]:
        work.append((columns, p.hidden, rows, p.rounds and not weight_sum, False))
    slots = [piece(m, n, depth, p.threads, *how)[1] for m, n, depth, *how in work]
    return 4 * max(slots, default=0)


def product_bytes(p: Problem, rows: int, columns: int) -> int:
    """What forming the products of one tile allocates besides its operands and results."""
    if p.itemsize >= 4:
        return _packed_bytes(p, rows, columns) if p.packs else 0
    if p.cuda:  # where sums in fp32 are not added to by the product itself
        return 4 * SLICE * p.hidden * any(wide_sums(p, rows, columns))
    piece = min(SLICE, columns)
    if p.upcast and p.packs:  # what is formed in fp32 before it is rounded
        formed = (rows * piece, rows * p.hidden * p.grads[0], piece * p.hidden * p.grads[1])
        return 4 * max(formed) + _packed_bytes(p, rows, columns)
    # Products in fp32: the tile's rows of one operand, a slice of the other and of the tile.
    wide = 4 * (rows * p.hidden + piece * (p.hidden + rows))
    if p.upcast:
        return wide
    if p.rounds:
        return _packed_bytes(p, rows, columns)
    # What a thread of oneDNN packs operands in, measured: more where the strides of input and
    # weight are powers of two, and in proportion to the tokens for the weight's gradient.
    packed = 1_750_000 if rows >= SLICE and p.hidden % 4096 == 0 else 200_000
    if p.grads[1]:
        packed = max(packed, min(1_400_000, 60_000 + (750 if rows <= 512 else 1400) * rows))
    weight_sum, input_sum = wide_sums(p, rows, columns)
    if weight_sum or input_sum:
        wide -= 0 if weight_sum else 4 * rows * p.hidden
        return max(packed * p.threads, wide)
    return packed * p.threads


def wide_sums(p: Problem, rows: int, columns: int) -> tuple[bool, bool]:
    """Whether the products for the gradients of weight and input are summed in fp32."""
    weight = p.mixed and p.grads[1] and (rows < p.tokens or p.into)
    return weight, p.mixed and p.grads[0] and columns < p.vocab


def token_bytes(p: Problem) -> int:
    """Statistics, targets, losses and upstream gradients: a few numbers for each token."""
    numbers = 10 if p.early else 16
    kept = numbers * p.arithmetic + (32 if p.gather else 8)
    # The state of the rows is returned with zeros for those that are left out.
    return p.tokens * kept + p.left_out * STATE_ROWS * p.arithmetic + 512


def _working_bytes(p: Problem, rows: int, columns: int) -> int:
    """What working on a tile takes besides the tile."""
    number = PLAIN_COPIES if p.plain else int(p.grads[2] and p.itemsize < 4 and not p.cuda)
    copies = number * p.arithmetic * plain_elements(rows, columns)
    return max(product_bytes(p, rows, columns), copies) + rows * columns * p.cast_bytes


def peak_bytes(
    p: Problem, strategy: str, rows: int, columns: int, widest: int = 0, lent: int = 0
) -> int:
    """Peak scratch memory beyond inputs, outputs and returned gradients."""
    chunks, slices = parts(p.tokens, rows), parts(p.vocab, columns)
    item, wide = p.itemsize, p.arithmetic
    base = token_bytes(p) + p.fixed_bytes
    most = columns
    rest = without_lent(p, lent)
    if widest and waits(rest, strategy, rows, columns):  # none has more than the others have
        most = max(columns, min(widest, rest.vocab - columns))
    tile = rows * padded(columns) * item + _working_bytes(p, rows, most)
    if strategy == RUNNING_RESCALE:
        tile += rows * p.hidden * wide if p.gather else 0
        tile = max(tile, 3 * min(PIECE, p.tokens) * p.hidden * wide)
    tile += rows * p.hidden * item if p.masked else 0
    if p.gather:
        part = 0 if not p.grads[0] else 4 if p.mixed and slices > 1 else item
        tile += rows * p.hidden * (item + part)
    if p.grads[2]:
        base += p.vocab * wide + 2 * most * wide
    if not any(p.grads):
        return base + tile
    weight, weight_sum = p.vocab * p.hidden, 0
    returned_late = 0  # gradients that exist only once the tile is gone
    if p.grads[1] and p.mixed and chunks > 1 and not p.into:
        whole = slices == 1 or strategy == TOKEN_CHUNKED
        weight_sum = (p.vocab if whole else columns) * p.hidden * 4
        returned_late = weight * item if whole else 0
    input_sum = 0
    if p.grads[0]:
        tokens = (p.tokens + p.left_out) * p.hidden
        if p.mixed and not lent and (slices > 1 or strategy == RUNNING_RESCALE):
            input_sum, returned_late = tokens * 4, returned_late + tokens * item
    sums = weight_sum + input_sum
    return base + max(sums + tile - returned_late, sums)
