"""The steps in which linear cross-entropy processes its tiles of logits.

A `Step` covers the work on one tile of logits, rows (tokens) by classes. The tile is computed, the
row kernel processes it, and its products are added to the gradients of input and weight.
`Schedule.steps` yields the steps in order. `run` runs them, and `cost` adds up their bytes and
time.

A tile is computed in the tile buffer, unless its logits must be kept while others are computed. The
gradient of the weight, (V, D), is allocated in any case. Until it is written, it has room:

    classes:  |  borrowed for  | other slices ...          | last slice |
              |  input's sums  |                           |            |
    gradient  +----------------+-------------+-------------+------------+     +-------------+
    of the    | fp32 sums of   |             | logits of   | logits of  |     | tile buffer |
    weight    | the input's    | (parked:    | the slice   | the slice  |     | logits of   |
              | gradient       | own logits) | before      | before     |     | last slice  |
              +----------------+-------------+-------------+------------+     +-------------+

* Logits wait: with one chunk of tokens, the logits of a slice are stored in the rows of the next
  slice, which are written later. A slice's rows have room for D x classes numbers. So all logits
  have room if there are no more tokens than the hidden size. With more tokens, slices become
  narrower from the last to the first, and only some classes wait. See `waiting_widths`.
* Logits are parked: of a slice that does not wait, as many tokens as fit are stored in the slice's
  own rows. They are copied back into the tile buffer for their gradient. The other tokens are
  computed twice.
* Classes are borrowed: 16-bit arguments sum the input's gradient in fp32, and the rows of the first
  classes hold that sum. The gradient of these classes is written at the end. Their logits are
  computed twice more: for the input's gradient, and for the weight's. With one chunk of tokens,
  the last tile of the former stays for the latter.

If gradients are computed in a separate backward, the forward keeps its last tile for it. The logits
of this tile are not computed again, and with one tile these are all logits. The backward processes
the tiles from the last to the first. A *deferred* schedule has one chunk of tokens. Its forward
allocates the gradient of the weight too, and logits wait or are parked there until the backward.

No place is overwritten before its content was read for the last time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

from storage_ops.loss.planning.problem import Problem, padded, parts

Strategy = Literal["token-chunked", "vocab-sliced", "running-rescale"]

STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
TOKEN_CHUNKED, VOCAB_SLICED, RUNNING_RESCALE = STRATEGIES

# Phases of the row kernel (csrc/rows/row_math.h). MERGE is a phase among ranks: it begins the merge
# of whole rows, which ends when they are read. Without rows, it ends all merges.
UPDATE, GRADIENT, EXPONENTIALS, SLOPE, MERGE = 1, 2, 4, 8, 16
INPUT, WEIGHT = 1, 2  # the gradients that a tile contributes to

_NARROWEST, _NARROWEST_ON_GPU = 256, 1024  # classes of a slice whose products are still fast
ROWS = 16  # chunks of tokens and parked rows are multiples of this


class Place(NamedTuple):
    """A matrix of logits in memory.

    Attributes:
        rows, classes: the stored logits.
        borrowed: the classes whose rows of the weight's gradient store them. None: the tile buffer.
    """

    rows: slice
    classes: slice
    borrowed: slice | None = None


class Step(NamedTuple):
    """A tile of logits and the work on it, in this order.

    Attributes:
        rows, classes: the tile.
        place: where it is stored.
        source: where its logits are copied from; `place` if they are already there. None: they are
            computed.
        phases: phases of the row kernel; 0: it is not called.
        adds: the gradients, INPUT and WEIGHT, that the tile contributes to.
        times: how many tiles of this size the step stands for.
    """

    rows: slice
    classes: slice
    place: Place
    source: Place | None
    phases: int
    adds: int
    times: int


# The cost of a step depends on: the numbers of rows and classes, the source of the logits, the
# phases of the row kernel, and the gradients it adds to.
Work = tuple[int, int, int, int, int]
MULTIPLIED, IN_PLACE, COPIED = 0, 1, 2  # sources of logits

# Slices, each with the number of slices of its size that it represents.
Pieces = list[tuple[slice, int]]


def within(part: slice, whole: slice) -> slice:
    """Return a part of a slice, relative to the begin of the slice."""
    return slice(part.start - whole.start, part.stop - whole.start)


def slices(stop: int, size: int, start: int = 0) -> list[slice]:
    """Return pieces of up to this size."""
    return [slice(begin, min(begin + size, stop)) for begin in range(start, stop, size)]


def _one_by_one(start: int, stop: int, size: int) -> Pieces:
    return [(piece, 1) for piece in slices(stop, size, start)]


def _by_size(start: int, stop: int, size: int) -> Pieces:
    """Return the first full-size piece with the number of such pieces, and the remainder."""
    count, left = divmod(stop - start, size)
    pieces = [(slice(start, start + size), count)] if count else []
    return [*pieces, (slice(stop - left, stop), 1)] if left else pieces


def carried_out(steps: Iterable[Step]) -> Iterator[Step]:
    """Yield the steps that a simulation runs.

    A step that represents several is run twice, because the second adds to the tile's results.
    """
    for step in steps:
        yield step
        if step.times > 1:
            yield step


def _first_is_there(tiles: list[Step], phases: int = GRADIENT) -> Iterator[Step]:
    """Yield tiles of which the first is already in the tile buffer.

    `phases`: those that the first tile still has to pass.
    """
    for first in tiles[:1]:
        yield first._replace(source=first.place, phases=phases, times=1)
        if first.times > 1:
            yield first._replace(times=first.times - 1)
    yield from tiles[1:]


@dataclass(frozen=True)
class Schedule:
    """An order in which the logits of a problem are processed.

    Attributes:
        problem: the problem of the schedule.
        strategy: TOKEN_CHUNKED, VOCAB_SLICED or RUNNING_RESCALE.
        rows, columns: tokens and classes of the tile buffer.
        widest: classes that are multiplied at a time: `columns`, unless all logits wait.
        borrowed: for how many first classes the weight's gradient holds sums of the input's
            gradient.
    """

    problem: Problem
    strategy: str
    rows: int
    columns: int
    widest: int
    borrowed: int

    @property
    def by_slice(self) -> bool:
        """Return True if all tokens are processed for a slice of the vocabulary before the next."""
        return self.strategy != TOKEN_CHUNKED

    @property
    def num_chunks(self) -> int:
        """The number of tiles along the tokens."""
        return parts(self.problem.tokens, self.rows)

    @property
    def num_slices(self) -> int:
        """The number of tiles along the vocabulary."""
        p = self.problem
        widths = waiting_widths(p, self.strategy, self.rows, self.columns, self.borrowed)
        waiting = sum(parts(width, self.widest) for width in widths)
        others = parts(p.vocab - self.borrowed - sum(widths), self.columns)
        return waiting + others + parts(self.borrowed, self.columns)

    @property
    def tiles(self) -> int:
        """The number of tile buffers: 2 if a chunk waits for the merged state of its rows."""
        p = self.problem
        whole = self.strategy == TOKEN_CHUNKED and self.columns >= p.vocab and p.in_forward
        waits = p.several and p.alike and any(p.grads) and self.num_chunks > 1
        return 2 if whole and waits else 1

    @property
    def keeps(self) -> bool:
        """Return True if the last tile of the statistics stays in memory for the gradients."""
        return self.problem.keeps and (self.deferred or not self.borrowed)

    @property
    def deferred(self) -> bool:
        """Return True if logits are in the weight's gradient between forward and backward."""
        p = self.problem
        return self.strategy == TOKEN_CHUNKED and any(p.grads) and not p.in_forward

    @property
    def exposed_merges(self) -> int:
        """The number of merges that no product overlaps: the last, or one for each gradient."""
        if not self.problem.several:
            return 0
        ahead = self.tiles > 1 or self.strategy != TOKEN_CHUNKED
        return 1 if ahead else self.num_chunks

    @property
    def wide_input(self) -> bool:
        """Return True if the input's gradient is summed in a wider dtype than is returned."""
        p = self.problem
        parts_of_rows = self.columns < p.vocab or self.strategy == RUNNING_RESCALE
        return p.grads[0] and p.mixed and (parts_of_rows or p.sums_wide)

    def problem_of_rank(self, classes: int) -> Problem:
        """Return the problem of a rank with fewer classes, which sums in the same dtype."""
        return replace(self.problem, vocab=classes, sums_wide=self.wide_input)

    @property
    def wide_weight(self) -> bool:
        """Return True if the weight's gradient is summed in a wider dtype than is returned."""
        p = self.problem
        return p.grads[1] and p.mixed and (self.rows < p.tokens or p.into)

    def steps(self, every: bool = True) -> Iterator[Step]:
        """Yield the steps for statistics of the rows, and for gradients if requested.

        `every`: yield each tile. Otherwise one tile represents all of its size, for costs.
        """
        if not any(self.problem.grads):
            return self.statistics(every)
        return self.statistics_and_gradients(every)

    @functools.cached_property
    def work(self) -> dict[Work, int]:
        """Count the steps by kind of work."""
        amounts: dict[Work, int] = {}
        for rows, classes, place, source, phases, adds, times in self.steps(every=False):
            size = rows.stop - rows.start, classes.stop - classes.start
            origin = MULTIPLIED if source is None else IN_PLACE if source is place else COPIED
            work = (*size, origin, phases, adds)
            amounts[work] = amounts.get(work, 0) + times
        return {work: times for work, times in amounts.items() if work[0] and work[1]}

    def statistics(self, every: bool = True) -> Iterator[Step]:
        """Yield the steps for the state of every row."""
        if self.deferred:
            yield from self._halves(every)[0]
            return
        for step in self._tiles(0, self.problem.vocab, UPDATE, 0, every):
            yield step
            if step.classes.stop == self.problem.vocab:  # merge while the next chunk is multiplied
                yield self._merge(step.rows)
        yield self._merge(slice(0, 0))

    def gradients(self, every: bool = True, kept: bool = False) -> Iterator[Step]:
        """Yield the steps for gradients from the finished state. All logits are computed again.

        `kept`: the last tile is in the buffer, and not computed again. With a deferred schedule,
        nor are the logits in the weight's gradient.
        """
        if self.deferred and kept:
            yield from self._halves(every)[1]
            return
        tiles = self._tiles(self.borrowed, self.problem.vocab, GRADIENT, INPUT | WEIGHT, every)
        yield from _first_is_there(list(tiles)[::-1]) if kept else tiles
        yield from self._borrowed_last(every)

    def logits(self) -> Iterator[Step]:
        """Yield every tile of logits, for callers that need no gradient of this loss."""
        return self._tiles(0, self.problem.vocab, 0, 0, True)

    def statistics_and_gradients(self, every: bool = True) -> Iterator[Step]:
        """Yield the steps for statistics and gradients, in as few products as possible."""
        p, both = self.problem, INPUT | WEIGHT
        if self.strategy == RUNNING_RESCALE:
            yield from self._tiles(0, p.vocab, UPDATE | EXPONENTIALS, INPUT, every)
        elif self.strategy == VOCAB_SLICED or not p.in_forward:
            yield from self.statistics(every)
            yield from self.gradients(every, self.keeps)
        elif self.columns >= p.vocab and p.several:
            yield from self._merged(every)
        elif self.columns >= p.vocab:
            yield from self._tiles(0, p.vocab, UPDATE | GRADIENT, both, every)
        else:
            yield from self._in_weight(every)

    def _in_weight(self, every: bool) -> Iterator[Step]:
        """Yield statistics and gradients, with logits in the weight's gradient where they fit."""
        yield from self._tiles(0, self.borrowed, UPDATE, 0, every)
        yield from self._keeping(every)
        yield from self._borrowed_last(every)

    def _halves(self, every: bool) -> tuple[list[Step], list[Step]]:
        """Return the steps of a deferred schedule for its forward, and those for its backward."""
        steps = list(self._in_weight(every))
        middle = [step.phases for step in steps].index(MERGE) + 1 if steps else 0
        return steps[:middle], steps[middle:]

    def _tiles(self, start: int, stop: int, phases: int, adds: int, every: bool) -> Iterator[Step]:
        """Yield every tile of these classes in the buffer, slice by slice."""
        pieces = _one_by_one if every else _by_size
        chunks = pieces(0, self.problem.tokens, self.rows)
        for classes, count in pieces(start, stop, self.columns):
            for rows, times in chunks:
                tile = Place(rows, classes)
                yield Step(rows, classes, tile, None, phases, adds, count * times)

    def _merged(self, every: bool) -> Iterator[Step]:
        """Yield chunks whose state is merged with other ranks while the next is multiplied."""
        p, pieces, waiting = self.problem, _one_by_one if every else _by_size, list[Step]()
        for rows, times in pieces(0, p.tokens, self.rows):
            tile = Place(rows, slice(0, p.vocab))
            yield Step(*tile[:2], tile, None, UPDATE, 0, times)
            yield self._merge(rows, times)
            waiting.append(Step(*tile[:2], tile, tile, GRADIENT, INPUT | WEIGHT, times))
            if len(waiting) == self.tiles:
                yield waiting.pop(0)
        yield from waiting

    def _borrowed_last(self, every: bool) -> Iterator[Step]:
        """Yield the gradients of the borrowed classes, after those of all other classes.

        They complete the sums of the input's gradient in borrowed memory. Then the logits are
        computed again, for the weight's gradient in the same memory.
        """
        of_input, of_weight = (
            list(self._tiles(0, self.borrowed, GRADIENT, adds, every)) for adds in (INPUT, WEIGHT)
        )
        # A tile of wide logits was rounded in its own memory. With chunks of tokens, a tile is a
        # small part, and ranks that sum complete rows need the same order of chunks.
        if self.problem.wide_logits or self.num_chunks > 1:
            yield from (*of_input, *of_weight)
            return
        yield from of_input[::-1]  # the widest last
        yield from _first_is_there(of_weight, phases=0)

    def _merge(self, rows: slice, times: int = 1) -> Step:
        nothing = slice(0, 0)
        place = Place(rows, nothing)
        return Step(rows, nothing, place, place, MERGE, 0, times)

    def _keeping(self, every: bool) -> Iterator[Step]:
        """Yield statistics and gradients chunk by chunk, with room for some of the logits.

        The logits of the last classes wait until the statistics are known. The other classes, as
        few as the plan allows, are parked or computed twice.
        """
        p, pieces = self.problem, _one_by_one if every else _by_size
        widths = waiting_widths(p, self.strategy, self.rows, self.columns, self.borrowed)
        others = pieces(self.borrowed, p.vocab - sum(widths), self.columns)
        for rows, times in pieces(0, p.tokens, self.rows):
            statistics, gradients = self._waiting(rows, times, widths, every)
            for classes, count in others:
                parked, unparked = self._parking(rows, classes)
                for place in (parked, unparked):
                    if place is not None:
                        yield Step(place.rows, classes, place, None, UPDATE, 0, times * count)
            yield from statistics
            yield self._merge(rows, times)
            yield from gradients
            for classes, count in others:
                parked, unparked = self._parking(rows, classes)
                tile = Place(rows, classes)
                source = None if parked is None else tile
                if parked is not None:
                    yield Step(parked.rows, classes, tile, parked, 0, 0, times * count)
                    if unparked is not None:
                        yield Step(unparked.rows, classes, tile, None, 0, 0, times * count)
                yield Step(rows, classes, tile, source, GRADIENT, INPUT | WEIGHT, times * count)

    def _waiting(
        self, rows: slice, times: int, widths: list[int], every: bool
    ) -> tuple[list[Step], list[Step]]:
        """Return the steps for the statistics of the last classes, and those for their gradients.

        The logits wait in between.
        """
        p, pieces = self.problem, _one_by_one if every else _by_size
        statistics, gradients = list[Step](), list[Step]()
        # Products need scratch memory for one part at a time. The native row kernel needs none.
        at_once = self.widest if p.plain or p.cast_bytes else max(widths)
        joint = at_once == self.widest  # if so, one step does both

        def add(
            steps: list[Step], place: Place, size: int, source: Place | None, phases: int, adds: int
        ) -> None:
            for classes, count in pieces(place.classes.start, place.classes.stop, size):
                steps.append(Step(rows, classes, place, source, phases, adds, times * count))

        start = p.vocab - sum(widths)
        for width, following in zip(widths, [*widths[1:], 0], strict=True):
            stop = start + width
            borrowed = slice(stop, stop + following) if following else None
            place = Place(rows, slice(start, stop), borrowed)
            add(statistics, place, self.widest, None, UPDATE * joint, 0)
            if not joint:
                add(statistics, place, at_once, place, UPDATE, 0)
                add(gradients, place, at_once, place, GRADIENT, 0)
            add(gradients, place, self.widest, place, GRADIENT * joint, INPUT | WEIGHT)
            start = stop
        return statistics, gradients

    def _parking(self, rows: slice, classes: slice) -> tuple[Place | None, Place | None]:
        """Return the place of the parked logits of a slice of classes, and the other rows."""
        if not parks(self.problem, self.rows):
            return None, Place(rows, classes)
        count = rows.start + parked_rows(
            rows.stop - rows.start, classes.stop - classes.start, self.problem.hidden
        )
        parked = Place(slice(rows.start, count), classes, classes) if count > rows.start else None
        rest = Place(slice(count, rows.stop), classes) if count < rows.stop else None
        return parked, rest


def borrowed_classes(p: Problem, strategy: str, rows: int) -> int:
    """Return how many classes lend their part of the weight's gradient to fp32 sums.

    The sums are those of the input's gradient. The number is 0 if the classes cannot wait for their
    gradient, if there are no such sums, or if too few other classes would remain for a tile.
    """
    if not (p.mixed and p.grads[0] and p.grads[1] and p.tokens) or p.into or p.selects:
        return 0
    if strategy != VOCAB_SLICED and not (strategy == TOKEN_CHUNKED and parks(p, rows)):
        return 0
    classes = (p.tokens + p.left_out) * 4 // p.itemsize
    return classes if 5 * classes <= 4 * p.vocab else 0


def parks(p: Problem, rows: int) -> bool:
    """Return True if logits may be stored in the unwritten gradient of the weight."""
    if p.wide_logits:  # there would be room for half as many, and they might not be aligned
        return False
    # A tile adds to the gradient of the classes that it selects, so the gradient must start as 0.
    if p.selects:
        return False
    one_pass = p.in_forward or p.keeps
    return one_pass and p.grads[1] and not p.into and rows >= p.tokens


def parked_rows(rows: int, columns: int, hidden: int) -> int:
    """Return how many rows of a tile fit in the gradient of the weight of its classes."""
    room = hidden * columns // padded(columns)
    return rows if room >= rows else room // ROWS * ROWS


def waiting_widths(
    p: Problem, strategy: str, rows: int, columns: int, borrowed: int = 0
) -> list[int]:
    """Return the widths of the last slices of the vocabulary, whose logits wait, in order.

    The logits of a slice wait in the rows of the weight's gradient of the next slice. The last
    slice, `columns` wide, has memory of its own. With fewer tokens than the hidden size, the rows
    of a slice have room for more logits than its own. So slices grow from the last to the first,
    and all logits wait. With more tokens, slices shrink. They end when the next would be too narrow
    for fast products.

    Empty if the strategy is another one.
    """
    remaining = p.vocab - borrowed - columns
    if strategy != TOKEN_CHUNKED:
        return []
    sizes, least = [columns], _NARROWEST_ON_GPU if p.matmul.cuda else _NARROWEST
    while remaining > 0 and parks(p, rows):
        room = p.hidden * sizes[-1] // max(rows, 1)
        width = min(unpadded(room), remaining) if room >= 64 else 0
        if width < min(least, columns, remaining):
            break
        sizes.append(width)
        remaining -= width
    return sizes[::-1]


def unpadded(columns: int) -> int:
    """Return the largest width of a tile, up to this, whose rows need no padding."""
    width = max(columns // 64, 1) * 64
    return width - 64 * (width % 512 == 0)
