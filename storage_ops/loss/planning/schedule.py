"""The steps in which linear cross-entropy goes through its logits, made from a plan.

A `Step` covers the work on one tile of logits, rows (tokens) by classes. The tile is multiplied,
the row kernel works on it, and the gradients of input and weight take in its products.
`Schedule.steps` yields them in order. `run` carries them out, and `cost` adds up their bytes and
their time.

Where logits lie
----------------
A tile is formed in a buffer of its own size, unless its logits have to be kept while others are
formed. The gradient of the weight, (V, D) and allocated in any case, has room until it is written:

    classes:  |  borrowed for  | other slices ...          | last slice |
              |  input's sums  |                           |            |
    gradient  +----------------+-------------+-------------+------------+     +-------------+
    of the    | fp32 sums of   |             | logits of   | logits of  |     | tile buffer |
    weight    | the input's    | (parked:    | the slice   | the slice  |     | logits of   |
              | gradient       | own logits) | before      | before     |     | last slice  |
              +----------------+-------------+-------------+------------+     +-------------+

* Logits wait: with one chunk of tokens, those of a slice lie in the rows of the slice after it,
  which are written later. A slice's rows have room for D x classes numbers, so that all logits find
  a place if there are no more tokens than the hidden size. See `waiting_widths`.
* Logits are parked: with more tokens, as many rows of a slice as have room lie in its own rows, and
  go back into the tile buffer for their gradient. The other rows are formed a second time.
* Classes are borrowed: 16-bit arguments sum the input's gradient in fp32, and the rows of the first
  classes hold that sum. Their own gradient is written at the end, from logits formed once more for
  the input and once for the weight.

Where gradients are made in a backward of their own, the forward leaves its last tile to it. Its
logits are not formed a second time, and they are all of them if there is one tile. The backward
goes through the tiles from the last to the first.

Nothing is written to a place before its content was read for the last time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from storage_ops.loss.planning.problem import Problem, padded, parts

Strategy = Literal["token-chunked", "vocab-sliced", "running-rescale"]

STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
TOKEN_CHUNKED, VOCAB_SLICED, RUNNING_RESCALE = STRATEGIES

# Phases of the row kernel (csrc/rows/row_math.h). MERGE is one among ranks: whole rows begin to be
# merged, and are when they are read; without rows, all that began are.
UPDATE, GRADIENT, EXPONENTIALS, SLOPE, MERGE = 1, 2, 4, 8, 16
INPUT, WEIGHT = 1, 2  # what a tile's gradient is added to

ROWS = 16  # chunks of tokens and parked rows are multiples of this


class Place(NamedTuple):
    """A matrix of logits in memory.

    Attributes:
        rows, classes: the logits that are there.
        borrowed: the classes in whose rows of the weight's gradient it lies; None: the tile buffer.
    """

    rows: slice
    classes: slice
    borrowed: slice | None = None


class Step(NamedTuple):
    """A tile of logits and what is done with it, in this order.

    Attributes:
        rows, classes: the tile.
        place: where it lies.
        source: where its logits are copied from; `place` if they are there; None: multiplied.
        phases: of the row kernel; 0: it is not called.
        adds: which of INPUT and WEIGHT take in what the tile gives.
        times: how many tiles of this size the step stands for.
    """

    rows: slice
    classes: slice
    place: Place
    source: Place | None
    phases: int
    adds: int
    times: int


# What the cost of a step depends on: how many rows and classes, where their logits come from,
# phases of the row kernel, what takes in the gradient.
Work = tuple[int, int, int, int, int]
MULTIPLIED, THERE, COPIED = 0, 1, 2

Pieces = list[tuple[slice, int]]  # slices, and how many of this size each stands for


def within(part: slice, whole: slice) -> slice:
    """Return a part of a slice, counted from where that begins."""
    return slice(part.start - whole.start, part.stop - whole.start)


def slices(stop: int, size: int, start: int = 0) -> list[slice]:
    """Pieces of up to this size."""
    return [slice(begin, min(begin + size, stop)) for begin in range(start, stop, size)]


def _each(start: int, stop: int, size: int) -> Pieces:
    return [(piece, 1) for piece in slices(stop, size, start)]


def _by_size(start: int, stop: int, size: int) -> Pieces:
    """Return the first of the pieces of full size, with their number, and the rest."""
    count, left = divmod(stop - start, size)
    pieces = [(slice(start, start + size), count)] if count else []
    return [*pieces, (slice(stop - left, stop), 1)] if left else pieces


def carried_out(steps: Iterable[Step]) -> Iterator[Step]:
    """Yield steps as they are run.

    A step that stands for several is run twice, since they add to the tile that it writes.
    """
    for step in steps:
        yield step
        if step.times > 1:
            yield step


def _from_the_last(tiles: Iterator[Step]) -> Iterator[Step]:
    """Tiles in reverse, of which the last is there already."""
    backwards = list(tiles)[::-1]
    for last in backwards[:1]:
        yield last._replace(source=last.place, times=1)
        if last.times > 1:
            yield last._replace(times=last.times - 1)
    yield from backwards[1:]


@dataclass(frozen=True)
class Schedule:
    """One way to go through the logits of a problem.

    Attributes:
        problem: what it is made for.
        strategy: TOKEN_CHUNKED, VOCAB_SLICED or RUNNING_RESCALE.
        rows, columns: tokens and classes of the tile buffer.
        widest: classes that are multiplied at a time: `columns`, unless all logits wait.
        borrowed: how many classes, the first, hold the sums of the input's gradient in their rows.
    """

    problem: Problem
    strategy: str
    rows: int
    columns: int
    widest: int
    borrowed: int

    @property
    def by_slice(self) -> bool:
        """Return True if all tokens pass a slice of the vocabulary before the next."""
        return self.strategy != TOKEN_CHUNKED

    @property
    def num_chunks(self) -> int:
        """Tiles along the tokens."""
        return parts(self.problem.tokens, self.rows)

    @property
    def num_slices(self) -> int:
        """Tiles along the vocabulary."""
        p = self.problem
        widths = waiting_widths(p, self.strategy, self.rows, self.columns, self.borrowed)
        others = sum(parts(width, self.widest) for width in widths)
        others = others or parts(p.vocab - self.borrowed, self.columns)
        return others + parts(self.borrowed, self.columns)

    @property
    def tiles(self) -> int:
        """Tile buffers: a second one where a chunk of tokens waits for the state of its rows."""
        p = self.problem
        whole = self.strategy == TOKEN_CHUNKED and self.columns >= p.vocab and p.in_forward
        waits = p.several and p.alike and any(p.grads) and self.num_chunks > 1
        return 2 if whole and waits else 1

    @property
    def keeps(self) -> bool:
        """Return True if the last tile of the statistics stays for the gradients to begin with."""
        return self.problem.keeps and not self.borrowed

    @property
    def exposed_merges(self) -> int:
        """Merges among ranks that no product hides: the last, or each that a gradient waits for."""
        if not self.problem.several:
            return 0
        ahead = self.tiles > 1 or self.strategy != TOKEN_CHUNKED
        return 1 if ahead else self.num_chunks

    @property
    def wide_input(self) -> bool:
        """Return True if the input's gradient is summed in a wider dtype than it is returned in."""
        p = self.problem
        parts_of_rows = self.columns < p.vocab or self.strategy == RUNNING_RESCALE
        return p.grads[0] and p.mixed and parts_of_rows

    @property
    def wide_weight(self) -> bool:
        """Return True if the weight's gradient is summed in a wider dtype than it is returned."""
        p = self.problem
        return p.grads[1] and p.mixed and (self.rows < p.tokens or p.into)

    def steps(self, every: bool = True) -> Iterator[Step]:
        """Statistics of the rows, and gradients where any are asked for.

        `every`: each tile; else one for all of a size, for costs.
        """
        if not any(self.problem.grads):
            return self.statistics(every)
        return self.statistics_and_gradients(every)

    @functools.cached_property
    def work(self) -> dict[Work, int]:
        """Return how often each kind of work is done."""
        amounts: dict[Work, int] = {}
        for rows, classes, place, source, phases, adds, times in self.steps(every=False):
            size = rows.stop - rows.start, classes.stop - classes.start
            origin = MULTIPLIED if source is None else THERE if source is place else COPIED
            work = (*size, origin, phases, adds)
            amounts[work] = amounts.get(work, 0) + times
        return {work: times for work, times in amounts.items() if work[0] and work[1]}

    def statistics(self, every: bool = True) -> Iterator[Step]:
        """Yield the steps for the state of every row."""
        for step in self._tiles(0, self.problem.vocab, UPDATE, 0, every):
            yield step
            if step.classes.stop == self.problem.vocab:  # while the next chunk is multiplied
                yield self._merge(step.rows)
        yield self._merge(slice(0, 0))

    def gradients(self, every: bool = True, kept: bool = False) -> Iterator[Step]:
        """Gradients from the finished state of the rows: all logits are formed again.

        `kept`: but for the last tile, which is in the buffer.
        """
        tiles = self._tiles(self.borrowed, self.problem.vocab, GRADIENT, INPUT | WEIGHT, every)
        yield from _from_the_last(tiles) if kept else tiles
        yield from self._borrowed_last(every)

    def logits(self) -> Iterator[Step]:
        """Yield every tile as it is multiplied, for callers that need no gradient of this loss."""
        return self._tiles(0, self.problem.vocab, 0, 0, True)

    def statistics_and_gradients(self, every: bool = True) -> Iterator[Step]:
        """Yield the steps for both, in as few products as the strategy allows."""
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
            yield from self._tiles(0, self.borrowed, UPDATE, 0, every)
            widths = waiting_widths(p, self.strategy, self.rows, self.columns, self.borrowed)
            yield from self._waiting(widths, every) if widths else self._keeping(every)
            yield from self._borrowed_last(every)

    def _tiles(self, start: int, stop: int, phases: int, adds: int, every: bool) -> Iterator[Step]:
        """Yield every tile of these classes in the buffer, slice by slice."""
        pieces = _each if every else _by_size
        chunks = pieces(0, self.problem.tokens, self.rows)
        for classes, count in pieces(start, stop, self.columns):
            for rows, times in chunks:
                tile = Place(rows, classes)
                yield Step(rows, classes, tile, None, phases, adds, count * times)

    def _merged(self, every: bool) -> Iterator[Step]:
        """Chunks whose state is merged with that of other ranks, while the next is multiplied."""
        p, pieces, waiting = self.problem, _each if every else _by_size, list[Step]()
        for rows, times in pieces(0, p.tokens, self.rows):
            tile = Place(rows, slice(0, p.vocab))
            yield Step(*tile[:2], tile, None, UPDATE, 0, times)
            yield self._merge(rows, times)
            waiting.append(Step(*tile[:2], tile, tile, GRADIENT, INPUT | WEIGHT, times))
            if len(waiting) == self.tiles:
                yield waiting.pop(0)
        yield from waiting

    def _borrowed_last(self, every: bool) -> Iterator[Step]:
        """Gradients of the borrowed classes, when those of all others are there.

        They complete the sums of the input's gradient, which lie in their own gradient's memory.
        Then they are formed once more for that.
        """
        for adds in (INPUT, WEIGHT):
            yield from self._tiles(0, self.borrowed, GRADIENT, adds, every)

    def _merge(self, rows: slice, times: int = 1) -> Step:
        nothing = slice(0, 0)
        place = Place(rows, nothing)
        return Step(rows, nothing, place, place, MERGE, 0, times)

    def _waiting(self, widths: list[int], every: bool) -> Iterator[Step]:
        """Statistics and then gradients of all tokens, whose logits wait meanwhile."""
        p, pieces = self.problem, _each if every else _by_size
        rows, start, places = slice(0, p.tokens), self.borrowed, []
        for width, following in zip(widths, [*widths[1:], 0], strict=True):
            stop = start + width
            borrowed = slice(stop, stop + following) if following else None
            places.append(Place(rows, slice(start, stop), borrowed))
            start = stop
        # Products take scratch memory for a part at a time; the native row kernel takes none.
        at_once = self.widest if p.plain or p.cast_bytes else max(widths)

        def each(place: Place, size: int, source: Place | None, phases: int, adds: int):  # type: ignore[no-untyped-def]
            for classes, times in pieces(place.classes.start, place.classes.stop, size):
                yield Step(rows, classes, place, source, phases, adds, times)

        # Where both take as much at a time, what is multiplied meets the row kernel in one step.
        joint = at_once == self.widest
        for place in places:
            yield from each(place, self.widest, None, UPDATE * joint, 0)
            if not joint:
                yield from each(place, at_once, place, UPDATE, 0)
        yield self._merge(rows)
        for place in places:
            if not joint:
                yield from each(place, at_once, place, GRADIENT, 0)
            yield from each(place, self.widest, place, GRADIENT * joint, INPUT | WEIGHT)

    def _keeping(self, every: bool) -> Iterator[Step]:
        """Statistics and gradients of a chunk after the other, with room for some of the classes.

        The logits of the last classes are kept until their statistics are known. Those of the
        others, as few as the plan could make them, are parked or formed a second time.
        """
        p, pieces, both = self.problem, _each if every else _by_size, INPUT | WEIGHT
        last = slice(p.vocab - self.columns, p.vocab)
        others = pieces(self.borrowed, last.start, self.columns)
        for rows, times in pieces(0, p.tokens, self.rows):
            kept = Place(rows, last)
            for classes, count in others:
                parked, rest = self._parking(rows, classes)
                for place in (parked, rest):
                    if place is not None:
                        yield Step(place.rows, classes, place, None, UPDATE, 0, times * count)
            yield Step(rows, last, kept, None, UPDATE, 0, times)
            yield self._merge(rows, times)
            yield Step(rows, last, kept, kept, GRADIENT, both, times)
            for classes, count in others:
                parked, rest = self._parking(rows, classes)
                tile = Place(rows, classes)
                source = None if parked is None else tile
                if parked is not None:
                    yield Step(parked.rows, classes, tile, parked, 0, 0, times * count)
                    if rest is not None:
                        yield Step(rest.rows, classes, tile, None, 0, 0, times * count)
                yield Step(rows, classes, tile, source, GRADIENT, both, times * count)

    def _parking(self, rows: slice, classes: slice) -> tuple[Place | None, Place | None]:
        """Return where the logits of a slice of the vocabulary are parked, and the other rows."""
        if not parks(self.problem, self.rows):
            return None, Place(rows, classes)
        count = rows.start + parked_rows(
            rows.stop - rows.start, classes.stop - classes.start, self.problem.hidden
        )
        parked = Place(slice(rows.start, count), classes, classes) if count > rows.start else None
        rest = Place(slice(count, rows.stop), classes) if count < rows.stop else None
        return parked, rest


def borrowed_classes(p: Problem, strategy: str, rows: int) -> int:
    """Return how many classes lend their part of the weight's gradient to fp32 sums of the input's.

    There are none where they cannot wait for their gradient, there are no such sums, or few classes
    are left: no tile is wider than those.
    """
    if not (p.mixed and p.grads[0] and p.grads[1] and p.tokens) or p.into or p.selects:
        return 0
    if strategy != VOCAB_SLICED and not (strategy == TOKEN_CHUNKED and parks(p, rows)):
        return 0
    classes = (p.tokens + p.left_out) * 4 // p.itemsize
    return classes if 5 * classes <= 4 * p.vocab else 0


def parks(p: Problem, rows: int) -> bool:
    """Return True if logits may lie in the weight's gradient, where nothing was written."""
    if p.wide_logits:  # it has room for half as many, which may not be aligned
        return False
    if p.selects:  # a tile adds to the classes that it selects, of a gradient that begins as 0
        return False
    return p.in_forward and p.grads[1] and not p.into and rows >= p.tokens


def parked_rows(rows: int, columns: int, hidden: int) -> int:
    """Return how many rows of a tile fit in the gradient of the weight of its classes."""
    room = hidden * columns // padded(columns)
    return rows if room >= rows else room // ROWS * ROWS


def waiting_widths(
    p: Problem, strategy: str, rows: int, columns: int, borrowed: int = 0
) -> list[int]:
    """Widths of slices of the vocabulary whose logits all wait, in order; empty if they cannot.

    Those of a slice wait in the rows that the gradient of the next slice is written to afterwards.
    Those of the last, `columns` wide, have memory of their own. With fewer tokens than the hidden
    size the rows of a slice have room for more logits than its own, so that slices grow from the
    last on. There are none where they would shrink instead.
    """
    left = p.vocab - borrowed - columns
    if strategy != TOKEN_CHUNKED or not parks(p, rows) or left <= 0:
        return []
    sizes = [columns]
    while left > 0:
        width = width_before(sizes[-1], left, p.tokens, p.hidden)
        if not width:
            return []
        sizes.append(width)
        left -= width
    return sizes[::-1]


def width_before(columns: int, left: int, rows: int, hidden: int) -> int:
    """Return the width of the slice before one, of so many classes left; 0 if it were narrower.

    If the last slice has one before it, then that has one too, and so on.
    """
    room = hidden * columns // max(rows, 1)
    width = min(unpadded(room), left) if room >= 64 else 0
    return width if width >= min(columns, left) else 0


def unpadded(columns: int) -> int:
    """Return the largest width of a tile, up to this, whose rows need no padding."""
    width = max(columns // 64, 1) * 64
    return width - 64 * (width % 512 == 0)
