"""Counts the bytes and the time of a schedule, from its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from storage_ops.loss.planning.devices import Rates
from storage_ops.loss.planning.problem import Problem, padded, parts
from storage_ops.loss.planning.schedule import (
    COPIED,
    EXPONENTIALS,
    GRADIENT,
    IN_PLACE,
    INPUT,
    MULTIPLIED,
    RUNNING_RESCALE,
    UPDATE,
    WEIGHT,
    Schedule,
    Work,
)
from storage_ops.matmul import Kind
from storage_ops.quantities import next_multiple

# Numbers per token: shift, sum, slope, dot, mass, logit of the target; csrc/rows/row_math.h
STATE_ROWS = 6
PIECE = 256  # tokens whose rescaled sums are finished at a time
# Most elements that the row kernel in plain torch processes at a time; at least one row.
PLAIN = 1 << 17
PICK_BYTES = 64  # for each token and each class whose log-probability is requested
GROUP = 32  # logits in a group, whose largest logit is found first
TOP_BYTES = 24  # for each logit among which the largest are searched, besides copies of the logit
PLAIN_COPIES = 9  # most copies of these elements in the row kernel in plain torch
BUCKETS = 16  # buckets of classes that a token's gradient includes or leaves out
ALIGNED = 8  # 16-bit numbers that a GPU reads at a time
NARROW = 1024  # a tile with fewer classes leaves none out, because it has most of the targets
# The share of all classes that each token's gradient is multiplied with, in a trained model.
EXPECTED = 0.4


def plain_rows(rows: int, columns: int) -> int:
    """Return how many rows the row kernel in plain torch processes at a time."""
    return max(1, min(rows, PLAIN // max(columns, 1)))


def plain_elements(rows: int, columns: int) -> int:
    """Return the most elements of a tile that are processed at a time.

    A tile with fewer columns needs no more.
    """
    return max(columns, min(rows * columns, PLAIN))


def in_groups(columns: int, k: int) -> bool:
    """Return True if the k largest of so many logits are searched in only some groups.

    These are the groups with the largest maximum.
    """
    return columns >= 8 * k * GROUP


def top_elements(cuda: bool) -> int:
    """Return how many logits, or maxima of groups, are searched for the largest at a time."""
    return PLAIN << 5 * cuda


def top_width(columns: int, k: int) -> int:
    """Return how many logits of each row are searched for the largest.

    These are all logits, or one of each group and then the logits of k groups.
    """
    return max(parts(columns, GROUP), k * GROUP) if in_groups(columns, k) else columns


def top_rows(rows: int, columns: int, k: int, cuda: bool) -> int:
    """Return how many rows of a tile are searched for their k largest logits at a time."""
    return max(1, min(rows, top_elements(cuda) // max(top_width(columns, k), 1)))


def selecting(p: Problem, share: float, rates: Rates) -> Problem:
    """Return a problem in which gradients are multiplied with this share of the classes.

    Returns the same problem if the selection takes longer than the products that it saves.
    """
    saved = (1 - share) * 2 * p.hidden * sum(p.grads[:2]) / p.matmul.rate(rates)
    selected = replace(p, multiplied=share)
    # Every logit is read twice for the masses, and once to gather the used part, which is written
    # and read. Without selection, a tile's gradient is written once.
    touched = (3 + share - selected.gathers_gradient) * p.logit_bytes
    return selected if saved > touched / rates.bandwidth else p


def gathered_classes(cuda: bool) -> int:
    """Return how many classes of a bucket are gathered at a time.

    Many small products would leave a GPU idle.
    """
    return 4096 if cuda else 1024


def gathered_numbers(cuda: bool, rows: int, classes: int) -> int:
    """Return how many numbers of a tile's gradient are gathered at a time, or one piece.

    The tile is read once for each gather. On a GPU there is one gather for the expected share of
    the tile. Budgets on a CPU are small, so memory for more tokens in a tile gains more.
    """
    share = EXPECTED if cuda else 1 / 12
    return max(gathered_classes(cuda) * padded_tokens(rows), int(share * rows * classes))


def padded_tokens(count: int) -> int:
    """Return the distance between the gradients of two classes for `count` + 1 tokens.

    The gradients begin at multiples of 16 bytes, which a GPU reads at a time.
    """
    return next_multiple(count + 1, ALIGNED)


def flat_tokens(rows: int) -> int:
    """Return the most tokens of a tile that are multiplied with all of its classes in place."""
    return rows // 2


def flat_classes(cuda: bool, rows: int, flat: int) -> int:
    """Return how many classes some flat tokens of a tile are multiplied with at a time.

    They take the memory of `gathered_classes` for as many flat tokens as there may be.
    """
    return gathered_classes(cuda) * padded_tokens(flat_tokens(rows) + 1) // padded_tokens(flat)


def selection_bytes(p: Problem, rows: int, classes: int) -> int:
    """Return the bytes for selecting classes of a tile and for the products with them.

    The scratch memory of products is not included.
    """
    wide, item, d, cuda = p.arithmetic, p.itemsize, p.hidden, p.matmul.cuda
    gathered = min(gathered_classes(cuda), classes)
    ranked = classes * (9 + 2 * wide)  # classes by bucket, their masses, sums of the gradient
    sorting = classes * 40
    fixed = rows * (BUCKETS * 4 * wide + 40)
    # Inputs ordered by need, and their gradient; averages of the part that each bucket leaves out.
    sums = d * ((rows + 1) * item + rows * wide + BUCKETS * (2 * wide + 2 * item))
    # Gathered gradients, the position of each class in them, and their sums.
    places = classes * (3 * 8 + wide)
    flat = flat_tokens(rows) + 1
    of_flat = flat * d * (item + wide) + gathered * padded_tokens(flat) * item + places
    # The weights of the classes of a piece, or their gradient.
    numbers = min(gathered_numbers(cuda, rows, classes), classes * padded_tokens(rows))
    piece = numbers * item + gathered * d * wide + places
    added = rows * d * wide  # the input's gradient from earlier tiles
    copies = PLAIN_COPIES * wide * plain_elements(rows, classes) * p.plain
    return (
        ranked + fixed + copies + max(sorting, sums + max(of_flat, piece, added - rows * d * item))
    )


def narrowed_rows(rows: int) -> int:
    """Return how many rows of a tile have their gradient rounded to 16 bits at a time."""
    return parts(rows, 8)


def token_bytes(p: Problem) -> int:
    """Return the bytes of statistics, targets, losses and upstream gradients for each token."""
    numbers = 10 if p.in_forward else 16
    per_token = numbers * p.arithmetic + (32 if p.gathers else 8)
    # The classes, their upstream gradients, and both sorted. Those of two slices are merged.
    per_token += p.picks * PICK_BYTES
    # The returned state has zeros for the rows that are left out.
    return p.tokens * per_token + p.left_out * STATE_ROWS * p.arithmetic + 512


def peak(s: Schedule, beside: int = 0) -> int:
    """Return the peak scratch memory beyond inputs, outputs and returned gradients.

    `beside`: bytes in memory besides a tile of logits.
    """
    p, d, item = s.problem, s.problem.hidden, s.problem.itemsize
    wide_input, wide_weight = s.wide_input, s.wide_weight
    tile = s.tiles * s.rows * padded(s.columns) * p.logit_bytes + beside
    if p.gathers or p.masks:
        tile += s.rows * d * item
    extra = _extra(p, wide_input, wide_weight)
    works = list(s.work)
    if 0 < p.matmul.one_pass < s.columns < p.vocab:  # a last slice may have any width
        works.append((min(s.rows, p.tokens), p.matmul.one_pass, IN_PLACE, 0, INPUT))
    tile += max(map(extra, works), default=0)
    # Sums in fp32. The results are rounded from them after the tile is freed.
    sums = late = 0
    if wide_weight and not p.into:
        whole = not s.by_slice or s.columns >= p.vocab
        sums += (p.vocab if whole else s.columns) * d * 4
        late += p.vocab * d * item * whole
    if wide_input and not s.borrowed:
        tokens = (p.tokens + p.left_out) * d
        sums, late = sums + tokens * 4, late + tokens * item
    if s.strategy == RUNNING_RESCALE:
        tile = max(tile, 3 * min(PIECE, p.tokens) * d * p.arithmetic)
    base = token_bytes(p) + p.fixed_bytes + p.vocab * p.arithmetic * p.grads[2]
    return base + max(sums + tile - late, sums)


def _extra(p: Problem, wide_input: bool, wide_weight: bool) -> Callable[[Work], int]:
    """Return a function that computes the most bytes of a step, besides its tile."""
    item, d, arithmetic, m = p.itemsize, p.hidden, p.arithmetic, p.matmul
    with_input, with_weight, with_bias = p.grads
    converts = with_bias and item < 4 and not m.cuda

    def extra(work: Work) -> int:
        rows, classes, origin, phases, adds = work
        most = 0
        if origin == MULTIPLIED:
            most = m.scratch_bytes(Kind.LOGITS, rows, classes, d, p.wide_logits)
        if adds and p.wide_logits:
            most = max(most, narrowed_rows(rows) * classes * item)
        if phases and (p.plain or p.cast_bytes):
            copies = PLAIN_COPIES * arithmetic * plain_elements(rows, classes) * p.plain
            most = max(most, copies + rows * classes * p.cast_bytes)
        if phases and p.picks:
            copies = PLAIN_COPIES * arithmetic + 24
            most = max(most, copies * plain_elements(rows, p.picks))
        if phases & UPDATE and p.top:
            k, copies = min(p.top, classes), 3 * arithmetic
            elements = top_rows(rows, classes, k, m.cuda) * top_width(classes, k)
            copied = max(classes, min(rows * classes, top_elements(m.cuda)))
            most = max(
                most, (TOP_BYTES + copies) * elements + copies * copied * in_groups(classes, k)
            )
        if adds & INPUT and with_input:
            size = m.scratch_bytes(Kind.INPUT, rows, classes, d, wide_input)
            if p.gathers:  # the rows' part, and with EXPONENTIALS the rescaled sum
                size += rows * d * (arithmetic if wide_input else item)
                size = max(size, rows * d * arithmetic * (phases & EXPONENTIALS > 0))
            most = max(most, size)
        if adds & WEIGHT and with_weight:
            most = max(most, m.scratch_bytes(Kind.WEIGHT, rows, classes, d, wide_weight))
        if adds and phases & GRADIENT and p.selects:
            gathered = min(gathered_classes(m.cuda), classes)
            size = max(
                m.scratch_bytes(Kind.INPUT, rows, gathered, d, True) * with_input,
                m.scratch_bytes(Kind.WEIGHT, rows + 1, gathered, d, True) * with_weight,
                m.scratch_bytes(Kind.WEIGHT, rows + 1, gathered, d, False) * with_weight,
            )
            most = max(most, selection_bytes(p, rows, classes) + size)
        if adds & WEIGHT and with_bias:
            copies = arithmetic * plain_elements(rows, classes) * converts
            most = max(most, copies + 2 * classes * arithmetic)
        return most

    return extra


def predict(s: Schedule, rates: Rates) -> tuple[int, int, float]:
    """Return the FLOPs of the products, the bytes read from and written to memory, and the time."""
    p, m, d, item = s.problem, s.problem.matmul, s.problem.hidden, s.problem.itemsize
    chunks = s.num_chunks
    # A slice that fits in the cache is read from memory once, for all chunks that use it in turn.
    slices = s.num_slices
    cached = s.by_slice and parts(p.vocab, slices) * d * item <= rates.cache_bytes
    share = 1 / chunks if cached and chunks else 1.0
    input_sum = d * (4 if p.mixed else item) * 2 if slices > 1 else d * item
    input_sum *= 2 if s.strategy == RUNNING_RESCALE else 1
    weight_sum = d * item / max(chunks, 1)
    if chunks > 1 and not cached:
        weight_sum += 2 * d * (4 if p.mixed else item)
    wide_input, wide_weight = s.wide_input, s.wide_weight
    flops, moved, seconds = 0, 0.0, s.exposed_merges * rates.merge_seconds
    for (rows, classes, origin, phases, adds), times in s.work.items():
        logits, tile = rows * classes * p.logit_bytes, rows * classes * item
        weight = classes * d * item * share
        selects = bool(adds and phases & GRADIENT and p.selects)
        used = max(round(p.multiplied * classes), min(classes, NARROW)) if selects else classes
        # Of each product: kind, classes, is it wide, bytes of operands and result, bytes of sums.
        products = []
        if origin == MULTIPLIED:
            read_bytes = weight + rows * d * item + logits
            products.append((Kind.LOGITS, classes, p.wide_logits, read_bytes, 0.0))
        if adds & INPUT and p.grads[0]:
            products.append((Kind.INPUT, used, wide_input, weight + tile, rows * input_sum))
        if adds & WEIGHT and p.grads[1]:
            read_bytes = float(tile + rows * d * item)
            products.append((Kind.WEIGHT, used, wide_weight, read_bytes, classes * weight_sum))
        # The row kernel overwrites the logits by the gradient.
        passes = 2 if origin == COPIED or phases & (GRADIENT | EXPONENTIALS) else int(phases > 0)
        if selects and not p.selects_late:  # statistics are finished before classes are selected
            passes = int(phases & UPDATE > 0) + 2 * (not p.gathers_gradient)
        touched = float(passes * logits)
        if adds and p.wide_logits:  # rounded to other memory, and copied back
            touched += logits + 3 * tile
        if selects:  # see `selecting`; rows of the weight and their gradients are copied
            wide = 4 if p.mixed else item
            rounded = item if chunks < 2 else wide  # the dtype of a product that is added
            rows_bytes = 2 * item + 2 * rounded + (item if chunks < 2 else 2 * wide)
            times_read = 2 + parts(used * rows, gathered_numbers(m.cuda, rows, classes))
            touched += times_read * logits + used * (rows * item + d * rows_bytes)
        time = touched / rates.bandwidth
        time += (len(products) + (passes > 0)) * rates.launch_seconds
        bytes_moved = touched
        for kind, width, wide, read_bytes, sums in products:
            time += m.seconds(kind, rows, width, d, wide, read_bytes, sums, rates)
            bytes_moved += read_bytes + sums
            flops += 2 * rows * width * d * times
        moved += bytes_moved * times
        seconds += time * times
    return flops, round(moved), seconds
