"""From shapes and a memory budget to a plan for linear cross-entropy, in pure Python.

The loss is computed in tiles of `rows` tokens by `columns` classes. The memory and the time of a
tile are written down here once. `choose` then takes the fastest tiling that fits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from storage_ops.loss.planning import cost
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
from storage_ops.quantities import InLines, metric, readable

MIB, GIB = 1 << 20, 1 << 30
KEPT = 16  # no plan keeps less than this part of the logits of its rows and forms others twice
WIDEST = 4096  # of parts of waiting logits, where products do not say what suits them
FEWER = 8  # of chunks that fit whole, those of an eighth of the tokens are the smallest looked at
TILE_BYTES = 8 * MIB  # vocabulary slices no larger than this stay in a processor's cache
KEEPS = "keeps"  # the last word of the key of a plan that does


Tile = tuple[str, int, int, int, int]  # strategy, rows, columns, widest, borrowed


@dataclass(frozen=True)
class Plan(InLines):
    """The way in which linear cross-entropy will run, and its cost.

    Attributes:
        strategy: "token-chunked": whole rows of logits, turned into their gradient at once. Where
            `columns` is less than the vocabulary, that many are kept. If there is one chunk, the
            others wait in the memory of the weight's gradient. That has room for all of them where
            there are no more tokens than the hidden size, else for as many rows. Logits that fit
            nowhere are formed twice.
            "vocab-sliced": one pass for the statistics of the rows, one more product to form the
            logits again for the gradient. "running-rescale": slices of the vocabulary with a frozen
            weight, in one pass; the sum is rescaled whenever a row's maximum grows.
        rows, columns: tokens and classes of the tile of logits in scratch memory.
        widest: classes that are worked on at a time: `columns`, unless all logits wait.
        threads: how many threads of a CPU have scratch memory to form products in. A budget may
            have no room for all of them.
        borrowed: how many classes, the first, have their rows of the weight's gradient used for the
            input's, which 16-bit arguments sum in float32; their logits are formed three times.
        num_chunks, num_slices: tiles along the tokens and along the vocabulary.
        products: matrix products of size N x D x V, forward and backward together. It is not a
            whole number where a part of the logits is formed more often than the rest.
        peak_bytes: scratch memory beyond inputs, outputs and returned gradients.
        flops: floating-point operations of the matrix products.
        bytes_moved: what the tiles read from and write to memory.
        seconds: predicted time on `rates`.
        mode: the strategy and what is skipped, in words.
        keeps: the last tile of the forward stays in memory until the backward, which begins with
            it. It does so only in eager code, and where the gradients are not made in the forward.
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

    "" with that word is any plan that may keep its last tile.
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
    """Return the schedule with tiles up to these, made equal.

    It borrows classes where it can if `borrows` is True.
    """
    borrowed = borrowed_classes(p, strategy, rows) if borrows else 0
    rest = p.vocab - borrowed
    columns, rows = max(1, min(columns, rest)), max(1, min(rows, p.tokens))
    if strategy == TOKEN_CHUNKED and not any(p.grads):
        columns = max(1, p.vocab)  # nothing is formed again
    slices = parts(rest, columns)
    # Products of 16 rows at a time have no remainder: up to a tenth faster, measured on a CPU.
    equal = max(1, parts(p.tokens, parts(p.tokens, rows) or 1))
    rows = min(rows, -(-equal // ROWS) * ROWS)
    if slices > 1:
        if strategy != TOKEN_CHUNKED:
            columns = min(columns, padded(parts(rest, slices)))
        elif columns > 64:
            columns = unpadded(columns)
    widths = waiting_widths(p, strategy, rows, columns, borrowed)
    widest = min(widest or columns, max(widths)) if widths else columns
    return Schedule(p, strategy, rows, columns, widest, borrowed)


def make(s: Schedule, rates: Rates | None = None, peak: int | None = None) -> Plan:
    """Return a plan: a schedule and its cost, by default on this processor.

    `peak`: its peak of memory, if that is known.
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
    """Return the schedule that `Plan.key` stands for; words after the third may be left out.

    Where its strategy would be wrong for the problem, it is that of slices of the vocabulary.
    """
    bare = keeping(key, False)
    p = replace(p, keeps=bare != key)
    strategy, rows, columns, *more = bare.split()
    strategy = strategy if strategy in allowed(p) else VOCAB_SLICED
    defaults = ["0", str(p.matmul.threads), "0"]
    widest, threads, borrows = map(int, more + defaults[len(more) :])
    fewer = with_threads(p, min(p.matmul.threads, threads))
    return schedule(fewer, strategy, int(rows), int(columns), widest, borrows > 0)


@functools.lru_cache(maxsize=256)
def resumed(
    p: Problem, tile: tuple[int, int], memory_budget: int | None, rates: Rates | None = None
) -> str:
    """Return the key of the plan that goes on with a tile of so many rows and columns.

    Where a budget has no room for it, it is the key of any other.
    """
    budget = default_budget(p) if memory_budget is None else memory_budget
    for fewer in _with_fewer_threads(p):
        tried = schedule(fewer, VOCAB_SLICED, *tile)
        if cost.peak(tried) <= budget:
            return make(tried, rates).key
    return choose(p, memory_budget, rates).key


def parse(p: Problem, key: str, rates: Rates | None = None) -> Plan:
    """Return the plan that `Plan.key` stands for: see `schedule_of`."""
    return _slowed(p, make(schedule_of(p, key), rates))


def with_threads(p: Problem, threads: int) -> Problem:
    """Return the problem with scratch for so many threads."""
    return replace(p, matmul=replace(p.matmul, threads=threads))


def largest(
    limit: int, peak: Callable[[int], int], budget: int, step: int = 1, least: int = 1
) -> int:
    """Return the largest multiple of step, `least` to limit, whose peak is in the budget, or 0.

    The whole may fit where a part does not: it needs no sums over parts. The peak of a part grows
    in proportion but for steps, so that a line through two of them tells where to look.
    """
    above = peak(limit)
    if above <= budget:
        return limit
    low, high = parts(least, step), -(-limit // step)  # the first fits, the last does not
    if low >= high or (below := peak(low * step)) > budget:
        return 0
    while high - low > 1:
        line = low + (high - low) * (budget - below) // (above - below)
        line = max(low + 1, min(line, high - 1))
        for guess in (line, line + 1, None):  # None: the middle of what is left then
            guess = (low + high) // 2 if guess is None else guess
            if low < guess < high:
                peak_bytes = peak(guess * step)
                if peak_bytes <= budget:
                    low, below = guess, peak_bytes
                else:
                    high, above = guess, peak_bytes
    return low * step


def _tallest(p: Problem, name: str, budget: int) -> int:
    """Return the most tokens whose logits fit whole."""
    vocab = max(p.vocab, 1)
    return largest(max(p.tokens, 1), lambda rows: peak_bytes(p, name, rows, vocab), budget)


def _widest(
    p: Problem, name: str, rows: int, budget: int, borrowed: int, widest: int = 0, least: int = 1
) -> int:
    """Return the most classes that fit with so many tokens."""

    def peak(columns: int) -> int:
        return peak_bytes(p, name, rows, columns, widest, borrowed)

    return largest(max(p.vocab - borrowed, 1), peak, budget, 64, least)


def allowed(p: Problem) -> list[str]:
    """Return the strategies that give the right result for a problem."""
    result: list[str] = [VOCAB_SLICED]
    if p.in_forward or not any(p.grads):
        result.insert(0, TOKEN_CHUNKED)
    if p.in_forward and p.rescales and not p.selects and p.grads == (True, False, False):
        result.append(RUNNING_RESCALE)
    return result


def peak_bytes(
    p: Problem, strategy: str, rows: int, columns: int, widest: int = 0, borrowed: int = 0
) -> int:
    """Peak scratch memory with tiles of exactly this size."""
    return cost.peak(Schedule(p, strategy, rows, columns, widest or columns, borrowed))


def candidates(
    p: Problem,
    budget: int,
    rates: Rates,
    strategy: str | None = None,
    num_chunks: int | None = None,
) -> Iterator[Plan]:
    """Yield every plan worth a look that keeps to the budget, with this strategy and chunk count.

    A larger budget loses no plans except for larger tiles of the same kind, so it gives no slower
    plans. There are two exceptions. One is the fixed cost of a slice: where all logits wait, a
    wider last one may divide the others into one more. The other is some percent where larger tiles
    leave a remainder that is slow for its size.
    """
    if p.keeps:  # the budget may have no room for a wide tile and for that
        yield from candidates(replace(p, keeps=False), budget, rates, strategy, num_chunks)
    tokens, vocab = max(p.tokens, 1), max(p.vocab, 1)
    in_cache = max(rates.cache_bytes // (max(p.hidden, 1) * p.itemsize), 64)
    # The widest slices that stay there when they are made equal.
    cached = largest(vocab, lambda columns: parts(vocab, parts(vocab, columns)), in_cache, 64)
    # Halves, and below a 32nd quarters, down to one token.
    last = (tokens - 1).bit_length()
    halved = {parts(tokens, 1 << k) for k in range(last + 1) if k < 6 or (last - k) % 2 == 0}
    heights = halved if num_chunks is None else {parts(tokens, num_chunks)}
    tiles: set[Tile] = set()
    names = allowed(p) if strategy is None else [strategy]
    for name in names:
        most = 0  # tokens whose logits fit whole
        if name != RUNNING_RESCALE:
            most = _tallest(p, name, budget) if num_chunks is None else 0
            whole = {n for n in heights | {most} if n and FEWER * n >= most}
            tiles |= {(name, rows, vocab, 0, 0) for rows in whole}
        for borrowed in {0, borrowed_classes(p, name, tokens)}:
            if name == TOKEN_CHUNKED:
                tiles |= set(_chunked(p, heights, most, borrowed, budget))
            else:
                tiles |= set(_sliced(p, name, heights, borrowed, budget, cached))
    schedules = [schedule(p, *tile[:-1], borrows=tile[-1] > 0) for tile in sorted(tiles)]
    for each in dict.fromkeys(schedules):
        if (peak := cost.peak(each)) <= budget:
            yield make(each, rates, peak)


def _chunked(
    p: Problem, heights: set[int], most: int, borrowed: int, budget: int
) -> Iterator[Tile]:
    """Chunks of tokens with room for a part of their logits: the others are formed twice, or wait.

    They are worth it for fewer chunks than those whose logits fit whole, `most` tokens.
    """
    name, whole = TOKEN_CHUNKED, parts(p.tokens, most) if most else 0
    heights = heights | {parts(p.tokens, whole - k) for k in (1, 2) if k < whole}
    for rows in {n for n in heights if n > most} if any(p.grads) else ():
        if borrowed and not borrowed_classes(p, name, rows):
            continue
        # Waiting logits can be worked on in wider slices than kept ones, with more scratch.
        pass_width = p.matmul.one_pass or WIDEST
        for widest in (0, *(unpadded(pass_width >> k) for k in range(4)), p.vocab - borrowed):
            columns = _widest(p, name, rows, budget, borrowed, widest, _least_kept(p, rows))
            if columns:
                yield name, rows, columns, widest, borrowed
            if not waiting_widths(p, name, rows, columns or 64, borrowed):
                break


def _sliced(
    p: Problem, name: str, heights: set[int], borrowed: int, budget: int, cached: int
) -> Iterator[Tile]:
    """Slices of the vocabulary: as wide as fits, and some that stay in the cache."""
    for rows in heights:
        columns = _widest(p, name, rows, budget, borrowed)
        for size in (columns, cached, padded(TILE_BYTES // (rows * p.logit_bytes) + 1)):
            if columns:
                yield name, rows, min(columns, size), 0, borrowed


def _least_kept(p: Problem, rows: int) -> int:
    """Return the fewest classes whose logits are worth keeping, of chunks of so many tokens."""
    return 1 if parks(p, rows) else parts(p.vocab, KEPT)


def smallest_budget(p: Problem, strategy: str | None = None, num_chunks: int | None = None) -> int:
    """Return the least scratch memory of any plan, with this strategy and number of chunks.

    Threads share a limit that is rounded down to a multiple of their number. Three threads can
    therefore take a few bytes less than one.
    """
    return min(
        _smallest_budget(replace(fewer, keeps=False), strategy, num_chunks)
        for fewer in _with_fewer_threads(p)
    )


def _smallest_budget(p: Problem, strategy: str | None, num_chunks: int | None) -> int:
    tokens, vocab = max(p.tokens, 1), max(p.vocab, 1)
    # One token, or all of them: a single product needs no sum.
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
    """Return the problem as it is, then with scratch for half of the threads, and so on to one."""
    threads = p.matmul.threads
    if not p.matmul.limits_threads:
        return [p]
    return [with_threads(p, threads >> k) for k in range(threads.bit_length())]


def _slowed(p: Problem, plan: Plan) -> Plan:
    """Return the plan for a problem with fewer threads, with the time that it takes with those."""
    return replace(plan, seconds=plan.seconds * (p.matmul.threads / plan.threads))


def bounded(part: int) -> int:
    """Return the bytes that a default budget has for a part of the logits: 32 MiB to 1 GiB."""
    return min(max(part, 32 * MIB), GIB)


def default_budget(p: Problem) -> int:
    """Return a part of the logits, 32 MiB to 1 GiB, plus the fp32 sum of a 16-bit weight gradient.

    The part is a quarter on a CPU. On a GPU, whose products are slow with few rows or columns, it
    is all of them. The sum serves chunks of tokens, which need a product less than other plans. It
    is left out if there are no more tokens than the hidden size: then all logits wait in the
    gradient of the weight. Where classes may be left out of the gradient, the memory to select them
    is added.
    """
    part = p.tokens * padded(p.vocab) * p.logit_bytes // (1 if p.matmul.cuda else 4)
    chunked = TOKEN_CHUNKED in allowed(p) and p.grads[1] and not p.into
    sums = p.vocab * p.hidden * 4 if p.mixed and chunked and p.tokens > p.hidden else 0
    least = peak_bytes(p, VOCAB_SLICED, 1, min(64, max(p.vocab, 1)))
    if p.selects:
        least += cost.selection_bytes(p, max(p.tokens, 1), max(p.vocab, 1))
    return least + sums + bounded(part)


@functools.lru_cache(maxsize=256)
def choose(
    p: Problem,
    memory_budget: int | None = None,
    rates: Rates | None = None,
    strategy: str | None = None,
    num_chunks: int | None = None,
) -> Plan:
    """Return the fastest plan that keeps to the budget, with this strategy and number of chunks.

    It is one for this processor unless rates are given.

    Raises:
        ValueError: no plan does; names the smallest budget that one does.
    """
    rates = rates or named("cpu")
    budget = default_budget(p) if memory_budget is None else memory_budget
    if memory_budget is None and (strategy or num_chunks):
        budget = max(budget, smallest_budget(p, strategy, num_chunks))
    forward_and_gradients = (1 + sum(p.grads[:2])) * 2 * p.tokens * p.hidden * p.vocab
    least_seconds = forward_and_gradients / p.matmul.rate(rates)
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
