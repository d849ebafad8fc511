"""From shapes and a memory budget to a plan for linear cross-entropy, in pure Python.

The loss is computed in tiles of `rows` tokens by `columns` classes. What a tile needs and what it
costs is written down here once; `choose` then takes the fastest tiling that fits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from storage_ops.loss.devices import CPU, Rates
from storage_ops.loss.plan_memory import (
    RUNNING_RESCALE,
    TOKEN_CHUNKED,
    VOCAB_SLICED,
    Problem,
    lent_classes,
    parks,
    peak_bytes,
    waiting,
    waits,
    wide_sums,
    without_lent,
)
from storage_ops.loss.tile_memory import (
    ONE_PASS,
    ROWS,
    padded,
    parked_rows,
    parts,
    rounded_rows,
    unpadded,
)
from storage_ops.quantities import metric, readable

MIB, GIB = 1 << 20, 1 << 30
KEPT = 16  # no plan keeps less than this part of the logits of its rows and forms others twice
WIDTHS = tuple(unpadded(ONE_PASS >> k) for k in range(4))  # of parts of waiting logits
TILE_BYTES = 8 * MIB  # vocabulary slices no larger than this stay in a processor's cache


@dataclass(frozen=True)
class Plan:
    """How linear cross-entropy will run, and what it will cost.

    Attributes:
        strategy: "token-chunked": whole rows of logits, turned into their gradient at once. Where
            `columns` is less than the vocabulary, that many are kept. If there is one chunk, the
            others wait in the memory of the weight's gradient: all of them where there are no more
            tokens than the hidden size, else as many rows. What fits nowhere is formed twice.
            "vocab-sliced": one pass for the statistics of the rows, one more product to form the
            logits again for the gradient. "running-rescale": slices of the vocabulary with a frozen
            weight, in one pass; the sum is rescaled whenever a row's maximum grows.
        rows, columns: tokens and classes of the tile of logits in scratch memory.
        widest: classes that are worked on at a time: `columns`, unless all logits wait.
        threads: how many threads of a CPU have scratch memory to form products in. A budget may
            have no room for all of them.
        lent: the first so many classes lend the memory of their part of the weight's gradient to
            the input's, which 16-bit arguments sum in float32; their logits are formed three times.
        num_chunks, num_slices: tiles along the tokens and along the vocabulary.
        products: matrix products of size N x D x V, forward and backward together; not a whole
            number where a part of the logits is formed more often than the rest.
        peak_bytes: scratch memory beyond inputs, outputs and returned gradients.
        flops: floating-point operations of the matrix products.
        bytes_moved: what the tiles read from and write to memory.
        seconds: predicted time on `rates`.
        mode: the strategy and what is skipped, in words.
    """

    strategy: str
    rows: int
    columns: int
    widest: int
    threads: int
    lent: int
    num_chunks: int
    num_slices: int
    products: float
    peak_bytes: int
    flops: int
    bytes_moved: int
    seconds: float
    mode: str

    @property
    def key(self) -> str:
        """The choice as text, for the op's argument `plan`."""
        tiles = f"{self.rows} {self.columns} {self.widest}"
        return f"{self.strategy} {tiles} {self.threads} {int(self.lent > 0)}"

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


def _cost(
    p: Problem, strategy: str, rows: int, columns: int, slices: int, again: float, r: Rates
) -> tuple[int, int, float]:
    """FLOPs and bytes moved of all products, and the time they take with the row kernel."""
    chunks = parts(p.tokens, rows)
    columns = parts(p.vocab, slices)
    item, n, d, v = p.itemsize, p.tokens, p.hidden, p.vocab
    rate = r.flops(item, p.upcast)
    if item < 4 and not p.upcast and not p.rounds:
        rate /= 1 + r.few_rows16 / max(min(rows, n), 1)
    # A slice that stays in the cache is read from memory once, however many chunks use it in turn.
    reads = chunks if columns * d * item > r.cache_bytes or strategy == TOKEN_CHUNKED else 1
    read_weight, tiles, logits = reads * v * d * item, chunks * slices, n * v * item
    sum_item = 4 if p.mixed and chunks > 1 else item
    each = 2 * n * d * v
    # A CPU's sums in fp32 need products in fp32 where torch forms them.
    slow = 0.0 if p.cuda or p.packs else rate / r.flops32 - 1
    wide_weight, wide_input = (slow * wide for wide in wide_sums(p, rows, columns))
    # Of every product and row kernel: operations, bytes of operands and results, bytes of sums, and
    # how often our own copy a number of the operands, per multiplication with it.
    n_rows, n_columns = max(min(rows, n), 1), max(min(columns, v), 1)
    copied = 1 / n_rows
    forward = (each, read_weight + slices * n * d * item + logits, 0, copied)
    whole = any(p.grads) and (strategy == RUNNING_RESCALE or slices == 1)
    work: list[tuple[float, float, int, float]] = [forward]
    work.append((0, (2 if whole else 1) * logits, 0, 0))
    if any(p.grads) and not whole:
        work += [(again * each, again * forward[1], 0, copied), (0, 2 * logits, 0, 0)]
    if p.grads[0]:
        sums = 2 * slices * n * d * (4 if p.mixed else item) if slices > 1 else n * d * item
        if strategy == RUNNING_RESCALE:
            sums *= 2
        copied = 1 / rounded_rows(n_rows, d, n_columns)
        work.append((each, read_weight + logits, sums, copied))
    if p.grads[1]:
        sums = v * d * (item + (2 * reads * sum_item if reads > 1 else 0))
        copied = 1 / rounded_rows(n_columns, d, n_rows) + 2 / max(d, 1)
        work.append((each, logits + slices * n * d * item, sums, copied))
    flops, moved = sum(f for f, *_ in work), sum(b + s for _, b, s, _ in work)
    if r.overlaps:
        # A GPU product takes the longer of its arithmetic and its traffic. Its result is added to
        # the sum when the arithmetic of a tile is done, and has nothing to hide behind.
        seconds = sum(max(f / rate, b / r.bandwidth) + s / r.bandwidth for f, b, s, _ in work)
    elif p.rounds:  # all is fetched while our own products compute
        seconds = sum(
            max(f / rate * (1 + r.copying * copied), (b + s) / r.bandwidth)
            for f, b, s, copied in work
        )
    else:
        # Where sums are added to by our own products, they are fetched while those compute.
        ours = p.packs and (item >= 4 or p.mixed)
        hidden = sum(min(f / rate, s / r.bandwidth) for f, _, s, _ in work) if ours else 0
        seconds = flops / rate + moved / r.bandwidth - hidden
        seconds += each / rate * (p.grads[0] * wide_input + p.grads[1] * wide_weight)
    return round(flops), round(moved), seconds + tiles * len(work) * r.launch_seconds


def _formed_again(p: Problem, strategy: str, rows: int, columns: int, lent: int = 0) -> float:
    """The share of the logits that is formed again for the gradient; 2 if twice."""
    if strategy == RUNNING_RESCALE or not any(p.grads):
        return 0
    if lent:
        share = lent / p.vocab
        rest = _formed_again(without_lent(p, lent), strategy, rows, columns)
        return 2 * share + (1 - share) * rest
    if strategy == VOCAB_SLICED:
        return 1
    if waits(p, strategy, rows, columns):
        return 0
    parked = parked_rows(p.tokens, columns, p.hidden) if parks(p, rows) else 0
    return (1 - columns / max(p.vocab, 1)) * (1 - parked / max(p.tokens, 1))


def _mode(p: Problem, strategy: str, products: float) -> str:
    if not any(p.grads):
        return "no-grad 1-GEMM"
    frozen = (
        "" if p.grads[0] and p.grads[1] else "frozen-weight " if p.grads[0] else "frozen-input "
    )
    return f"{frozen}{strategy} {products:.3g}-GEMM"


def make(
    p: Problem,
    strategy: str,
    rows: int,
    columns: int,
    rates: Rates = CPU,
    widest: int = 0,
    lends: bool = False,
) -> Plan:
    """The plan with tiles up to these, made equal; `lends`: if it can."""
    lent = lent_classes(p, strategy, rows) if lends else 0
    rest = without_lent(p, lent)
    columns, rows = max(1, min(columns, rest.vocab)), max(1, min(rows, p.tokens))
    if strategy == TOKEN_CHUNKED and not any(p.grads):
        columns = max(1, p.vocab)  # nothing is formed again
    slices = parts(rest.vocab, columns)
    # Products of 16 rows at a time have no remainder: up to a tenth faster, measured on a CPU.
    equal = max(1, parts(p.tokens, parts(p.tokens, rows) or 1))
    rows = min(rows, -(-equal // ROWS) * ROWS)
    chunks = parts(p.tokens, rows)
    if slices > 1:
        if strategy != TOKEN_CHUNKED:
            columns = min(columns, padded(parts(rest.vocab, slices)))
        elif columns > 64:
            columns = unpadded(columns)
    blocks = waiting(rest, strategy, rows, columns)
    widest = min(widest or columns, max(blocks)) if blocks else columns
    slices = sum(parts(width, widest) for width in blocks) or parts(rest.vocab, columns)
    slices += parts(lent, columns)
    again = _formed_again(p, strategy, rows, columns, lent)
    products = 1 + p.grads[0] + p.grads[1] + again
    flops, moved, seconds = _cost(p, strategy, rows, columns, slices, again, rates)
    peak = peak_bytes(p, strategy, rows, columns, widest, lent)
    return Plan(
        strategy, rows, columns, widest, p.threads, lent, chunks, slices, products, peak, flops,
        moved, seconds, _mode(p, strategy, products),
    )  # fmt: skip


def parse(p: Problem, key: str, rates: Rates = CPU) -> Plan:
    """The plan that `Plan.key` stands for; its last three numbers may be left out.

    Where its strategy would be wrong for the problem, it is that of slices of the vocabulary.
    """
    strategy, rows, columns, *more = key.split()
    strategy = strategy if strategy in allowed(p) else VOCAB_SLICED
    defaults = ["0", str(p.threads), "0"]
    widest, threads, lends = map(int, more + defaults[len(more) :])
    fewer = replace(p, threads=min(p.threads, threads))
    return _slowed(p, make(fewer, strategy, int(rows), int(columns), rates, widest, lends > 0))


def _most(limit: int, fits: object, step: int = 1) -> int:
    """The largest multiple of step up to limit for which `fits` holds; 0 if there is none.

    The whole may fit where a part does not: it needs no sums over parts.
    """
    if fits(limit):  # type: ignore[operator]
        return limit
    low, high = 0, -(-limit // step)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * step) else (low, middle - 1)  # type: ignore[operator]
    return min(low * step, limit)


def allowed(p: Problem) -> list[str]:
    """The strategies that give the right result for a problem."""
    result = [VOCAB_SLICED]
    if p.early or not any(p.grads):
        result.insert(0, TOKEN_CHUNKED)
    if p.early and p.rescale and p.grads == (True, False, False):
        result.append(RUNNING_RESCALE)
    return result


def candidates(
    p: Problem,
    budget: int,
    rates: Rates = CPU,
    strategy: str | None = None,
    num_chunks: int | None = None,
) -> Iterator[Plan]:
    """Every plan worth a look that keeps to the budget, with this strategy and number of chunks.

    Larger budgets lose none but for larger tiles of the same kind, so they give no slower plans,
    but for the fixed cost of a slice (where all logits wait, a wider last one may divide the others
    into one more) and a fraction of a percent where a wider tile is not the better one.
    """
    tokens, vocab = max(p.tokens, 1), max(p.vocab, 1)
    in_cache = max(rates.cache_bytes // (max(p.hidden, 1) * p.itemsize), 64)
    # The widest slices that stay there when they are made equal.
    cached = _most(vocab, lambda columns: parts(vocab, parts(vocab, columns)) <= in_cache, 64)
    halved = {parts(tokens, 1 << k) for k in range((tokens - 1).bit_length() + 1)}
    heights = halved if num_chunks is None else {parts(tokens, num_chunks)}
    tiles: set[tuple[str, int, int, int, int]] = set()
    names = allowed(p) if strategy is None else [strategy]
    kinds = [(each, lent) for each in names for lent in {0, lent_classes(p, each, tokens)}]
    for name, lent in kinds:
        others = max(p.vocab - lent, 1)

        def fits(
            rows: int, columns: int, widest: int = 0, name: str = name, lent: int = lent
        ) -> bool:
            return peak_bytes(p, name, rows, columns, widest, lent) <= budget

        most = 0
        if name != RUNNING_RESCALE and not lent:
            most = _most(tokens, lambda rows: fits(rows, vocab)) if num_chunks is None else 0
            tiles |= {(name, rows, vocab, vocab, 0) for rows in heights | {most}}
        if name == TOKEN_CHUNKED:
            # Fewer chunks than fit, but for a part of the logits: those are formed twice.
            whole = parts(tokens, most) if most else 0
            fewer = {parts(tokens, whole - k) for k in (1, 2) if k < whole}
            for rows in heights | fewer if any(p.grads) else ():
                if lent and not lent_classes(p, name, rows):
                    continue
                # What waits can be worked on in wider slices than what is kept, with more scratch.
                for widest in {0, *WIDTHS, others} if parks(p, rows) else {0}:
                    columns = _most(
                        others,
                        lambda columns, rows=rows, widest=widest: fits(rows, columns, widest),
                        64,
                    )
                    if _keeps(p, rows, columns):
                        tiles.add((name, rows, columns, widest, lent))
            continue
        for rows in heights:
            columns = _most(others, lambda columns, rows=rows: fits(rows, columns), 64)
            sizes = (columns, cached, padded(TILE_BYTES // (rows * p.itemsize) + 1))
            tiles |= {(name, rows, min(columns, size), 0, lent) for size in sizes}
    for name, rows, columns, widest, lent in sorted(tiles):
        if rows and columns and peak_bytes(p, name, rows, columns, widest, lent) <= budget:
            yield make(p, name, rows, columns, rates, widest, lent > 0)


def _keeps(p: Problem, rows: int, columns: int) -> bool:
    """Whether token chunks with room for so many classes are worth a look."""
    return parks(p, rows) or columns * KEPT >= p.vocab


def smallest_budget(p: Problem, strategy: str | None = None, num_chunks: int | None = None) -> int:
    """The least scratch memory that any plan needs, with this strategy and number of chunks."""
    p = _with_fewer_threads(p)[-1]
    tokens, vocab = max(p.tokens, 1), max(p.vocab, 1)
    # One token, or all of them: a single product needs no sum.
    heights = {1, tokens} if num_chunks is None else {parts(tokens, num_chunks)}
    return min(
        peak_bytes(p, name, rows, columns, lent=lent)
        for name in (allowed(p) if strategy is None else [strategy])
        for rows in heights
        for lent in {0, lent_classes(p, name, rows)}
        for columns in {min(64, vocab - lent), vocab - lent}
        if columns == vocab or name != TOKEN_CHUNKED or (any(p.grads) and _keeps(p, rows, columns))
    )


def _with_fewer_threads(p: Problem) -> list[Problem]:
    """The problem as it is, and with scratch for half of the threads and so on, down to one.

    Scratch of other products than our own cannot be limited.
    """
    numbers = [p.threads >> k for k in range(p.threads.bit_length())] if p.packs else [p.threads]
    return [replace(p, threads=threads) for threads in numbers]


def _slowed(p: Problem, plan: Plan) -> Plan:
    """The plan, for a problem with fewer threads, with the time that it takes with those."""
    return replace(plan, seconds=plan.seconds * (p.threads / plan.threads))


def default_budget(p: Problem) -> int:
    """A part of the logits, 32 MiB to 1 GiB, plus the fp32 sum of a 16-bit weight gradient.

    A quarter on a CPU. On a GPU, whose products are slow with few rows or columns, all of them.

    The sum is what chunks of tokens take, which need a product less than other plans; unless there
    are no more tokens than the hidden size: then all logits wait in the gradient of the weight.
    """
    part = p.tokens * padded(p.vocab) * p.itemsize // (1 if p.cuda else 4)
    chunked = TOKEN_CHUNKED in allowed(p) and p.grads[1] and not p.into
    sums = p.vocab * p.hidden * 4 if p.mixed and chunked and p.tokens > p.hidden else 0
    least = peak_bytes(p, VOCAB_SLICED, 1, min(64, max(p.vocab, 1)))
    return least + sums + min(max(part, 32 * MIB), GIB)


@functools.lru_cache(maxsize=256)
def choose(
    p: Problem,
    memory_budget: int | None = None,
    rates: Rates = CPU,
    strategy: str | None = None,
    num_chunks: int | None = None,
) -> Plan:
    """The fastest plan that keeps to the budget, with this strategy and number of chunks of tokens.

    Raises:
        ValueError: no plan does; names the smallest budget that one does.
    """
    least = smallest_budget(p, strategy, num_chunks)
    budget = max(default_budget(p), least) if memory_budget is None else memory_budget
    forward_and_gradients = (1 + sum(p.grads[:2])) * 2 * p.tokens * p.hidden * p.vocab
    least_seconds = forward_and_gradients / rates.flops(p.itemsize, p.upcast)
    plans: list[Plan] = []
    for fewer in _with_fewer_threads(p):
        if any(plan.seconds <= least_seconds * p.threads / fewer.threads for plan in plans):
            break
        plans += [
            _slowed(p, plan)
            for plan in candidates(fewer, budget, rates, strategy, num_chunks)
            if plan.peak_bytes <= budget
        ]
    if not plans:
        raise ValueError(
            f"memory_budget is {budget} bytes; expected at least {least} "
            f"({readable(least, up=True)}) for {p.tokens} tokens, hidden size {p.hidden}, "
            f"vocabulary {p.vocab} and {p.itemsize} bytes per element"
        )
    return min(plans, key=lambda plan: (plan.seconds, plan.peak_bytes))
