"""Chooses a plan for linear cross-entropy from shapes and a memory budget, in pure Python.

The loss is computed in tiles of `rows` tokens by `columns` classes. `cost` has the memory and time
of a tile. `choose` returns the fastest tiling that fits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from storage_ops.loss.planning import budgets, cost
from storage_ops.loss.planning.devices import Rates, named
from storage_ops.loss.planning.problem import Problem, padded, parts
from storage_ops.loss.planning.schedule import (
    ROWS,
    RUNNING_RESCALE,
    TOKEN_CHUNKED,
    VOCAB_SLICED,
    Schedule,
    borrowed_classes,
    parks,
    unpadded,
    waiting_widths,
)
from storage_ops.quantities import MIB, InLines, metric, next_multiple, readable

# A plan that computes logits twice keeps at least 1 / KEPT of its rows' logits.
KEPT = 16
WIDEST = 4096  # most columns of parts of waiting logits, if the products have no preferred width
FEWER = 8  # smallest chunks to consider: 1 / FEWER of the tokens whose logits fit whole
TILE_BYTES = 8 * MIB  # vocabulary slices no larger than this stay in a processor's cache
KEEPS = "keeps"  # the last word in the key of a plan that keeps its last tile


Tile = tuple[str, int, int, int, int]  # strategy, rows, columns, widest, borrowed


@dataclass(frozen=True)
class Plan(InLines):
    """The strategy and tiles of linear cross-entropy, and the cost.

    Attributes:
        strategy: "token-chunked": whole rows of logits, turned into their gradient at once. If
            `columns` is less than the vocabulary, that many classes are kept. With one chunk, the
            others wait in the memory of the weight's gradient. It has room for all of them if there
            are no more tokens than the hidden size, and otherwise for some. Logits without room are
            computed twice. If the backward computes the gradients, there is one chunk, and
            logits wait until then. "vocab-sliced": one pass for the statistics of the rows, then
            logits are computed again for the gradient. "running-rescale": slices of the vocabulary
            with a frozen weight, in one pass. The sum is rescaled whenever a row's maximum grows.
        rows, columns: tokens and classes of the tile of logits in scratch memory.
        widest: classes that are processed at a time: `columns`, unless all logits wait.
        threads: how many CPU threads have scratch memory for products. A budget may not have room
            for all threads.
        borrowed: for how many first classes the weight's gradient first holds fp32 sums of the
            input's gradient, with 16-bit arguments. Their logits are computed up to three times.
        num_chunks, num_slices: tiles along the tokens and along the vocabulary.
        products: matrix products of size N x D x V, forward and backward together. It is not an
            integer if some logits are computed more often than others.
        peak_bytes: scratch memory beyond inputs, outputs and returned gradients.
        flops: floating-point operations of the matrix products.
        bytes_moved: bytes that the tiles read from and write to memory.
        seconds: predicted time on `rates`.
        mode: a text with the strategy and the skipped products.
        keeps: whether the last tile of the forward stays in memory for the backward, which begins
            with it. Only in eager code, and if the backward computes the gradients.
    """

    strategy: str
    rows: int
    columns: int
    widest: int
    threads: int
    borrowed: int
    num_chunks: int
    num_slices: int
    products: float
    peak_bytes: int
    flops: int
    bytes_moved: int
    seconds: float
    mode: str
    keeps: bool

    @property
    def key(self) -> str:
        """Return the choice as text, for the op's argument `plan`."""
        tiles = f"{self.rows} {self.columns} {self.widest}"
        key = f"{self.strategy} {tiles} {self.threads} {int(self.borrowed > 0)}"
        return keeping(key, self.keeps)

    def __str__(self) -> str:
        products = f"{self.products:.3g} product{'s' if self.products > 1 else ''}"
        tiles = f"{self.num_chunks} x {self.num_slices} tiles of {self.rows} x {self.widest}"
        return (
            f"{self.mode}: {tiles} (tokens x classes)\n"
            f"  peak extra memory  {readable(self.peak_bytes, up=True)}\n"
            f"  matrix products    {metric(self.flops, 'FLOP')} in {products}\n"
            f"  memory traffic     {metric(self.bytes_moved, 'B')}\n"
            f"  predicted time     {metric(self.seconds, 's')}"
        )


def keeping(key: str, keeps: bool) -> str:
    """Return the key of a plan with or without its last word.

    The key "" with that word means any plan that may keep its last tile.
    """
    bare = key.removesuffix(KEEPS).rstrip()
    return f"{bare} {KEEPS}".lstrip() if keeps else bare


def _mode(p: Problem, strategy: str, products: float) -> str:
    if not any(p.grads):
        return "no-grad 1-GEMM"
    frozen = (
        "" if p.grads[0] and p.grads[1] else "frozen-weight " if p.grads[0] else "frozen-input "
    )
    return f"{frozen}{strategy} {products:.3g}-GEMM"


def schedule(
    p: Problem, strategy: str, rows: int, columns: int, widest: int = 0, borrows: bool = False
) -> Schedule:
    """Return the schedule with equal tiles, at most of this size.

    With `borrows`, it borrows classes if it can.
    """
    if strategy == TOKEN_CHUNKED and any(p.grads) and not p.in_forward:
        # The forward must finish all statistics, so there is one chunk. If all logits fit into the
        # tile, none is elsewhere.
        rows, strategy = p.tokens, strategy if columns < p.vocab else VOCAB_SLICED
    borrowed = borrowed_classes(p, strategy, rows) if borrows else 0
    classes = p.vocab - borrowed
    columns, rows = max(1, min(columns, classes)), max(1, min(rows, p.tokens))
    if strategy == TOKEN_CHUNKED and not any(p.grads):
        columns = max(1, p.vocab)  # no logits are computed again
    slices = parts(classes, columns)
    # Products of multiples of 16 rows have no remainder. Up to a tenth faster, measured on a CPU.
    equal = max(1, parts(p.tokens, parts(p.tokens, rows) or 1))
    rows = min(rows, next_multiple(equal, ROWS))
    if slices > 1:
        if strategy != TOKEN_CHUNKED:
            columns = min(columns, padded(parts(classes, slices)))
        elif columns > 64:
            columns = unpadded(columns)
    widths = waiting_widths(p, strategy, rows, columns, borrowed)
    all_wait = columns < p.vocab and sum(widths) == classes
    widest = min(widest or columns, max(widths)) if all_wait else columns
    return Schedule(p, strategy, rows, columns, widest, borrowed)


def make(s: Schedule, rates: Rates | None = None, peak: int | None = None) -> Plan:
    """Return a plan, which is a schedule and its cost, by default for this processor.

    `peak`: the peak memory, if it is known.
    """
    p = s.problem
    flops, moved, seconds = cost.predict(s, rates or named("cpu"))
    once = 2 * p.tokens * p.hidden * p.vocab
    products = flops / once if once else 1.0 + p.grads[0] + p.grads[1]
    return Plan(
        s.strategy, s.rows, s.columns, s.widest, p.matmul.threads, s.borrowed, s.num_chunks,
        s.num_slices, products, cost.peak(s) if peak is None else peak, flops, moved, seconds,
        _mode(p, s.strategy, products), s.keeps,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def schedule_of(p: Problem, key: str) -> Schedule:
    """Return the schedule of `Plan.key`. Words after the third may be left out.

    If the key's strategy would be wrong for the problem, the schedule is vocab-sliced.
    """
    bare = keeping(key, False)
    p = replace(p, keeps=bare != key)
    strategy, rows, columns, *more = bare.split()
    wide = any(p.grads) or int(columns) >= p.vocab  # otherwise whole rows would exceed the tile
    strategy = strategy if strategy in allowed(p) and wide else VOCAB_SLICED
    defaults = ["0", str(p.matmul.threads), "0"]
    widest, threads, borrows = map(int, more + defaults[len(more) :])
    fewer = with_threads(p, min(p.matmul.threads, threads))
    return schedule(fewer, strategy, int(rows), int(columns), widest, borrows > 0)


@functools.lru_cache(maxsize=256)
def resumed(
    p: Problem, tile: tuple[int, int], memory_budget: int | None, rates: Rates | None = None
) -> str:
    """Return the key of the plan that continues with a tile of this size.

    If the budget has no room for such a plan, it is the key of another plan.
    """
    budget = memory_budget
    if budget is None:
        budget = default_budget(p, rates or named("cpu"))
    for fewer in _with_fewer_threads(p):
        tried = schedule(fewer, VOCAB_SLICED, *tile)
        if cost.peak(tried) <= budget:
            return make(tried, rates).key
    return choose(p, memory_budget, rates).key


def with_threads(p: Problem, threads: int) -> Problem:
    """Return the problem with scratch memory for this many threads."""
    return replace(p, matmul=replace(p.matmul, threads=threads))


def largest(
    limit: int, peak: Callable[[int], int], budget: int, step: int = 1, least: int = 1
) -> int:
    """Return the largest multiple of step, from `least` to limit, that fits the budget, or 0.

    The whole may fit if a part does not, because it needs no sums over parts. The peak grows almost
    in proportion to the size, so a line through two points gives a good guess.
    """
    above = peak(limit)
    if above <= budget:
        return limit
    low, high = parts(least, step), -(-limit // step)  # the first always fits, the last does not
    if low >= high or (below := peak(low * step)) > budget:
        return 0
    while high - low > 1:
        line = low + (high - low) * (budget - below) // (above - below)
        line = max(low + 1, min(line, high - 1))
        for guess in (line, line + 1, None):  # None: the middle of the remaining range
            guess = (low + high) // 2 if guess is None else guess
            if low < guess < high:
                peak_bytes = peak(guess * step)
                if peak_bytes <= budget:
                    low, below = guess, peak_bytes
                else:
                    high, above = guess, peak_bytes
    return low * step


def _tallest(p: Problem, name: str, budget: int) -> int:
    """Return the most tokens for which whole rows of logits fit."""
    vocab = max(p.vocab, 1)
    return largest(max(p.tokens, 1), lambda rows: peak_bytes(p, name, rows, vocab), budget)


def _widest(
    p: Problem, name: str, rows: int, budget: int, borrowed: int, widest: int = 0, least: int = 1
) -> int:
    """Return the most classes that fit with this many tokens."""

    def peak(columns: int) -> int:
        return peak_bytes(p, name, rows, columns, widest, borrowed)

    return largest(max(p.vocab - borrowed, 1), peak, budget, 64, least)


def allowed(p: Problem) -> list[str]:
    """Return the strategies that are right for a problem."""
    result: list[str] = [VOCAB_SLICED]
    if p.in_forward or not any(p.grads):
        result.insert(0, TOKEN_CHUNKED)
    elif p.keeps and p.tokens and parks(p, p.tokens):
        result.append(TOKEN_CHUNKED)
    if p.in_forward and p.rescales and not p.selects and p.grads == (True, False, False):
        result.append(RUNNING_RESCALE)
    return result


def peak_bytes(
    p: Problem, strategy: str, rows: int, columns: int, widest: int = 0, borrowed: int = 0
) -> int:
    """Return the peak scratch memory with tiles of exactly this size."""
    return cost.peak(Schedule(p, strategy, rows, columns, widest or columns, borrowed))


def candidates(
    p: Problem,
    budget: int,
    rates: Rates,
    strategy: str | None = None,
    num_chunks: int | None = None,
) -> Iterator[Plan]:
    """Yield every promising plan within the budget, with this strategy and number of chunks.

    A larger budget only adds plans, except that tiles of the same kind become larger. So it gives
    no slower plans, with two exceptions. If all logits wait, a wider last slice may divide the
    others into one more slice. Larger tiles may also leave a slow remainder, which costs some
    percent.
    """
    if p.keeps:  # the budget may have no room for both a wide tile and the kept one
        yield from candidates(replace(p, keeps=False), budget, rates, strategy, num_chunks)
    tokens, vocab = max(p.tokens, 1), max(p.vocab, 1)
    in_cache = max(rates.cache_bytes // (max(p.hidden, 1) * p.itemsize), 64)
    # The widest equal slices that stay in the cache.
    cached = largest(vocab, lambda columns: parts(vocab, parts(vocab, columns)), in_cache, 64)
    # Heights halve, below 1/32 they divide by four, down to one token.
    last = (tokens - 1).bit_length()
    halved = {parts(tokens, 1 << k) for k in range(last + 1) if k < 6 or (last - k) % 2 == 0}
    heights = halved if num_chunks is None else {parts(tokens, num_chunks)}
    tiles: set[Tile] = set()
    names = allowed(p) if strategy is None else [strategy]
    for name in names:
        whole_rows = 0  # tokens whose logits fit whole
        deferred = name == TOKEN_CHUNKED and any(p.grads) and not p.in_forward
        if name != RUNNING_RESCALE and not deferred:
            whole_rows = _tallest(p, name, budget) if num_chunks is None else 0
            whole = {n for n in heights | {whole_rows} if n and FEWER * n >= whole_rows}
            tiles |= {(name, rows, vocab, 0, 0) for rows in whole}
        for borrowed in {0, borrowed_classes(p, name, tokens)}:
            if name == TOKEN_CHUNKED:
                several = {tokens} & heights if deferred else heights
                tiles |= set(_chunked(p, several, whole_rows, borrowed, budget))
            else:
                tiles |= set(_sliced(p, name, heights, borrowed, budget, cached))
    schedules = [schedule(p, *tile[:-1], borrows=tile[-1] > 0) for tile in sorted(tiles)]
    for candidate in dict.fromkeys(schedules):
        if (peak := cost.peak(candidate)) <= budget:
            yield make(candidate, rates, peak)


def _chunked(
    p: Problem, heights: set[int], whole_rows: int, borrowed: int, budget: int
) -> Iterator[Tile]:
    """Yield chunks of tokens that keep some of their logits, and compute the others twice.

    They pay only if there are fewer chunks than with whole rows of logits, which fit for
    `whole_rows` tokens.
    """
    name, whole = TOKEN_CHUNKED, parts(p.tokens, whole_rows) if whole_rows else 0
    heights = heights | {parts(p.tokens, whole - k) for k in (1, 2) if k < whole}
    for rows in {n for n in heights if n > whole_rows} if any(p.grads) else ():
        if borrowed and not borrowed_classes(p, name, rows):
            continue
        # Waiting logits can be processed in wider slices than kept ones, with more scratch memory.
        pass_width = p.matmul.one_pass or WIDEST
        for widest in (0, *(unpadded(pass_width >> k) for k in range(4)), p.vocab - borrowed):
            columns = _widest(p, name, rows, budget, borrowed, widest, _least_kept(p, rows))
            if columns:
                yield name, rows, columns, widest, borrowed
            widths = waiting_widths(p, name, rows, columns or 64, borrowed)
            if sum(widths) < p.vocab - borrowed:
                break


def _sliced(
    p: Problem, name: str, heights: set[int], borrowed: int, budget: int, cached: int
) -> Iterator[Tile]:
    """Yield slices of the vocabulary: the widest that fit, and some that stay in the cache."""
    for rows in heights:
        columns = _widest(p, name, rows, budget, borrowed)
        for size in (columns, cached, padded(TILE_BYTES // (rows * p.logit_bytes) + 1)):
            if columns:
                yield name, rows, min(columns, size), 0, borrowed


def _least_kept(p: Problem, rows: int) -> int:
    """Return the fewest classes whose logits are worth keeping, for chunks of this many tokens."""
    return 1 if parks(p, rows) else parts(p.vocab, KEPT)


def smallest_budget(p: Problem, strategy: str | None = None, num_chunks: int | None = None) -> int:
    """Return the least scratch memory of any plan, with this strategy and number of chunks.

    Threads share a limit that is rounded down to a multiple of their number. So three threads can
    take a few bytes less than one.
    """
    return min(
        _smallest_budget(replace(fewer, keeps=False), strategy, num_chunks)
        for fewer in _with_fewer_threads(p)
    )


def _smallest_budget(p: Problem, strategy: str | None, num_chunks: int | None) -> int:
    tokens, vocab = max(p.tokens, 1), max(p.vocab, 1)
    # Try one token, and all tokens, because a single product needs no sum.
    heights = {1, tokens} if num_chunks is None else {parts(tokens, num_chunks)}
    return min(
        peak_bytes(p, name, rows, columns, borrowed=borrowed)
        for name in (allowed(p) if strategy is None else [strategy])
        for rows in heights
        for borrowed in {0, borrowed_classes(p, name, rows)}
        for columns in {min(64, vocab - borrowed), vocab - borrowed}
        if columns == vocab
        or name != TOKEN_CHUNKED
        or (any(p.grads) and columns >= _least_kept(p, rows))
    )


def _with_fewer_threads(p: Problem) -> list[Problem]:
    """Return the problem, then with scratch memory for half as many threads, down to one."""
    threads = p.matmul.threads
    if not p.matmul.limits_threads:
        return [p]
    return [with_threads(p, threads >> k) for k in range(threads.bit_length())]


def _slowed(p: Problem, plan: Plan) -> Plan:
    """Return the plan for fewer threads, with the time of its products on fewer threads."""
    return replace(plan, seconds=plan.seconds * (p.matmul.threads / plan.threads))


@functools.lru_cache(maxsize=256)
def default_budget(p: Problem, rates: Rates) -> int:
    """Return the default budget: for a part of the logits, and the fp32 sum of a weight gradient.

    The part is a quarter on a CPU, and all logits on a GPU, whose products are slow with few rows
    or columns. `budgets` has the bounds. The sum is that of a 16-bit weight gradient. It allows
    chunks of tokens, which need one product less than other plans. It is left out if there are no
    more tokens than the hidden size, because then all logits wait in the gradient of the weight.
    With gradient_tolerance, the memory of the selection is added.
    """
    part = p.tokens * padded(p.vocab) * p.logit_bytes // (1 if p.matmul.cuda else 4)
    chunked = p.in_forward and p.grads[1] and not p.into
    sums = p.vocab * p.hidden * 4 if p.mixed and chunked and p.tokens > p.hidden else 0
    least = peak_bytes(p, VOCAB_SLICED, 1, min(64, max(p.vocab, 1)))
    if p.selects:
        least += cost.selection_bytes(p, max(p.tokens, 1), max(p.vocab, 1))

    def budget(most: int) -> int:
        return least + sums + budgets.bounded(part, most)

    def seconds(budget: int) -> float:
        return _fastest(p, budget, rates).seconds

    return budgets.larger_if_worth(budget, seconds, budgets.most(rates))


@functools.lru_cache(maxsize=256)
def choose(
    p: Problem,
    memory_budget: int | None = None,
    rates: Rates | None = None,
    strategy: str | None = None,
    num_chunks: int | None = None,
) -> Plan:
    """Return the fastest plan that keeps to the budget, with this strategy and number of chunks.

    The plan is for this processor unless `rates` is given.

    Raises:
        ValueError: no plan keeps to the budget. The error has the smallest possible budget.
    """
    rates = rates or named("cpu")
    if memory_budget is not None:
        return _fastest(p, memory_budget, rates, strategy, num_chunks)
    budget = default_budget(p, rates)
    if strategy or num_chunks:
        budget = max(budget, smallest_budget(p, strategy, num_chunks))
    return _fastest(p, budget, rates, strategy, num_chunks)


def floor_seconds(p: Problem, rates: Rates) -> float:
    """Return the seconds of the matrix products alone, each computed once."""
    products = 1 + sum(p.grads[:2])
    return products * 2 * p.tokens * p.hidden * p.vocab / p.matmul.rate(rates)


def whole_budget(p: Problem) -> int:
    """Return the budget for all logits in one tile, with all other memory."""
    whole = peak_bytes(p, allowed(p)[0], max(p.tokens, 1), max(p.vocab, 1))
    return max(whole, smallest_budget(p))


def _fastest(
    p: Problem,
    budget: int,
    rates: Rates,
    strategy: str | None = None,
    num_chunks: int | None = None,
) -> Plan:
    """Return the fastest plan within a budget. Without one, raise the error of `choose`."""
    least_seconds = floor_seconds(p, rates)
    plans: list[Plan] = []
    for fewer in _with_fewer_threads(p):
        slower = p.matmul.threads / fewer.matmul.threads
        if any(plan.seconds <= least_seconds * slower for plan in plans):
            break
        plans += [
            _slowed(p, plan) for plan in candidates(fewer, budget, rates, strategy, num_chunks)
        ]
    if not plans:
        least = smallest_budget(p, strategy, num_chunks)
        raise ValueError(
            f"`memory_budget` is {budget} bytes. Expected at least {least} "
            f"({readable(least, up=True)}) for {p.tokens} tokens, hidden size {p.hidden}, "
            f"vocabulary {p.vocab} and {p.itemsize} bytes per element."
        )
    return min(plans, key=lambda plan: (plan.seconds, plan.peak_bytes))
