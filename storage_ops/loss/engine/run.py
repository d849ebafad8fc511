"""The engine of heads: walk a schedule's tiles of logits, with a row function and sums.

It generalises this loop, for N tokens, D hidden and V classes, in tiles of R tokens by C classes:

    for rows in chunks(N, R):                     # statistics
        for classes in slices(V, C):
            z = x[rows] @ w[classes].T            # (R, C), the only logits in memory
            update(state[:, rows], z)             # a few numbers per token: (6, N) in all
    loss = reduce(loss_of(state))                 # () or (N,), from the finished state
    for rows in chunks(N, R):                     # gradients
        for classes in slices(V, C):
            z = x[rows] @ w[classes].T            # (R, C), the same logits once more
            dz = gradient(z, state[:, rows])      # (R, C), in the memory of z
            dx[rows] += dz @ w[classes]           # (R, D)
            dw[classes] += dz.T @ x[rows]         # (C, D)

`Schedule` yields the steps of such loops: which tiles, in which order, where their logits lie, and
which need not be formed twice. `Run` forms the logits of each step. A `RowFunction` has `update`
and `gradient`, those of cross-entropy or of a divergence. `Sums` adds up `dx` and `dw`.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from storage_ops.loss.engine.head import Head
from storage_ops.loss.engine.kept import free
from storage_ops.loss.engine.ranks import traced
from storage_ops.loss.engine.selection import Gather, Selection, select
from storage_ops.loss.engine.sums import Sums
from storage_ops.loss.planning.problem import padded
from storage_ops.loss.planning.schedule import (
    GRADIENT,
    MERGE,
    RUNNING_RESCALE,
    UPDATE,
    WEIGHT,
    Place,
    Schedule,
    Step,
    carried_out,
    within,
)


class RowFunction(ABC):
    """A function that a head computes from the rows of its logits, tile by tile.

    Attributes:
        state: (numbers, n) statistics of the rows, kept for the backward.
        selects_by_gradient: True if the masses that choose classes are those of the gradient with
            respect to a tile of logits, False if they are probabilities of the logits.
    """

    state: Tensor
    selects_by_gradient = False

    @abstractmethod
    def work(self, step: Step, tile: Tensor) -> Tensor | None:
        """Work on a tile of logits in the phases of the step.

        UPDATE merges the tile into the state of its rows. GRADIENT overwrites it by the gradient
        with respect to its logits, from the finished state. EXPONENTIALS overwrites it by the
        exponentials that RUNNING_RESCALE adds up. Returns the change of the rows' maximum then.
        """

    @abstractmethod
    def mass_sums(
        self, step: Step, tile: Tensor, factors: Tensor | None, out: Tensor, buckets: Tensor | None
    ) -> None:
        """Add up what the classes of a tile weigh for its tokens; see `selection`.

        Ignored tokens weigh 0. With `factors`, the sum of a class is that of its absolute gradient.

        Args:
            step, tile: the tile of logits; with `selects_by_gradient` that of their gradient.
            factors: those of the rows.
            out: gets the sum of each class, or with `buckets` those of each token by bucket.
            buckets: (classes,) uint8, the bucket of each class of the tile, or None.
        """

    def factors(self, step: Step) -> Tensor | None:
        """Return what the masses of each token's classes are multiplied with in its gradient.

        The gradient of a class that is no target has the sign of its token's factor. None, as here,
        if there is no such factor.
        """
        return None

    def gather_gradient(self, step: Step, tile: Tensor) -> Gather:
        """Return a function of the gradient with respect to some logits of a tile.

        The tile stays as it is. Only a row function that does not select by gradient has it.
        """
        raise NotImplementedError

    @abstractmethod
    def needed_classes(self, step: Step) -> Tensor:
        """Return the classes of a tile that are targets of its tokens, with duplicates."""

    def merging(self, rows: slice) -> Iterator[None]:
        """Merge the state of rows over the ranks; stop wherever the ranks' numbers are under way.

        By default nothing is left to merge: `work` has done it.
        """
        yield from ()

    def finish_rescaled(self, sums: Sums) -> None:
        """Turn the sums of RUNNING_RESCALE into the gradient of the input.

        Only a row function with EXPONENTIALS has them.
        """
        raise NotImplementedError

    @abstractmethod
    def free(self) -> None:
        """Give back the memory that is held beside the tile of logits."""


Rows = TypeVar("Rows", bound=RowFunction)


class Run(Generic[Rows]):
    """A call of a head, and how far it is.

    Attributes:
        head: the operands.
        rows: the row function.
        schedule: the way through the logits. With `first` it is that of the gradients.
        dropped: (n,) the probability that each token leaves out of its gradient, if asked for.
    """

    def __init__(
        self,
        head: Head,
        rows: Rows,
        schedule: Schedule,
        first: Schedule | None = None,
        kept: Tensor | None = None,
    ):
        """Begin a call.

        Args:
            head, rows, schedule: see above.
            first: a schedule for the statistics alone; None: that of the gradients.
            kept: the tile that `statistics` returned in the forward, if this is the backward.
        """
        self.head, self.rows, self.schedule = head, rows, schedule
        self._first, self._kept = first, kept
        self._walked = schedule  # the one whose steps are carried out
        self._tile: Tensor | None = None
        self._merges: list[tuple[slice, Iterator[None]]] = []  # that are under way, oldest first
        self._chunk, self._x = slice(0, 0), head.tokens.x
        # Which classes suffice is a question of values, and a graph has the ops of all values.
        self._selects = head.problem.selects and not traced()
        self.dropped: Tensor | None = None
        if head.call.want_dropped:
            self.dropped = rows.state.new_zeros(head.tokens.count)

    @functools.cached_property
    def every(self) -> bool:
        """Return True if each tile is worked on; a simulation does with two of a size."""
        several = self.head.ranks.several or self.schedule.strategy == RUNNING_RESCALE
        return several or not _simulated(self.head.call.input)

    @functools.cached_property
    def sums(self) -> Sums:
        """Sums of the gradients; they take no memory before they are needed."""
        return Sums(self.head, self.schedule)

    def statistics(self) -> Tensor | None:
        """Compute the state of every row.

        Returns the buffer with the last tile, of its rows and columns, if that is to be kept.
        """
        schedule = self._first or self.schedule
        left = self._walk(schedule, schedule.statistics(self.every))
        return None if left is None or not schedule.keeps else left.as_strided(*self._layout())

    def gradients(self) -> list[Tensor]:
        """Return the gradients of input, weight and bias from the finished state.

        The logits are formed again.
        """
        there = self._take_over()
        self._walk(self.schedule, self.schedule.gradients(self.every, there))
        if there and self._kept is not None:
            free(self._kept)  # before sums are rounded
        return self.sums.finish()

    def statistics_and_gradients(self) -> list[Tensor]:
        """Compute the state, and return the gradients, in as few products as the plan allows."""
        if self._first is not None:
            self.statistics()
            return self.gradients()
        self._walk(self.schedule, self.schedule.statistics_and_gradients(self.every))
        if self.schedule.strategy == RUNNING_RESCALE:
            self.rows.finish_rescaled(self.sums)
        return self.sums.finish()

    def tiles(self) -> Iterator[tuple[Step, Tensor]]:
        """Form every tile of logits in turn, for what needs no gradient of this head."""
        for step in self.schedule.logits():
            yield step, self._logits(step)

    def left(self) -> Tensor:
        """Return a tensor like the one that `statistics` returns, without values."""
        x = self.head.tokens.x
        if not (self.schedule.keeps and self.head.tokens.count):
            return x.new_empty(0)
        return x.new_empty_strided(*self._layout(), dtype=self.head.call.logits_dtype)

    def _layout(self) -> tuple[tuple[int, int], tuple[int, int]]:
        s = self.schedule
        return (s.rows, s.columns), (padded(s.columns), 1)

    def _take_over(self) -> bool:
        """Put the tile that was kept into the buffer if it is this schedule's last.

        Returns:
            True if it is.
        """
        kept = self._kept
        if kept is None:
            return False
        shape, stride = self._layout()
        size = shape[0] * stride[0]
        fits = self.schedule.keeps and kept.shape == shape and kept.stride() == stride
        if fits and kept.untyped_storage().nbytes() >= size * kept.element_size():
            self._tile = kept.as_strided((1, size), (size, 1))
            return True
        free(kept)  # of other tiles, or copied, as hooks of what is saved may do
        return False

    def _walk(self, schedule: Schedule, steps: Iterable[Step]) -> Tensor | None:
        """Carry out the steps of a schedule; return the buffer of tiles, as they leave it."""
        self._walked = schedule
        try:
            for step in carried_out(steps):
                self._step(step)
            return self._tile
        finally:
            self._tile, self._x = None, self.head.tokens.x  # before sums are rounded
            self._merges.clear()
            self.rows.free()

    def _step(self, step: Step) -> None:
        if step.phases == MERGE:
            self._merge(step.rows)
            return
        tile, change, selection = self._logits(step), None, None
        gather: Gather | None = None
        if step.phases & GRADIENT:
            self._end_merges(step.rows)
        selects = bool(step.phases & GRADIENT and step.adds and self._selects)
        if selects and not self.rows.selects_by_gradient:
            if step.phases & UPDATE:
                self.rows.work(step._replace(phases=UPDATE), tile)
                step = step._replace(phases=GRADIENT)
            selection = self._select(step, tile)
            if selection is not None and not (step.adds & WEIGHT and self.sums.bias is not None):
                # Only what is multiplied is computed. The bias has a gradient of every class.
                gather = self.rows.gather_gradient(step, tile)
                step = step._replace(phases=0)
        if step.phases:
            change = self.rows.work(step, tile)
        if selects and self.rows.selects_by_gradient:
            selection = self._select(step, tile)
        if step.adds:
            if change is not None:
                self.sums.rescale(step, change)
            self.sums.add(step, self._gathered(step), tile, selection, gather)
            self._advance_merges()

    def _select(self, step: Step, tile: Tensor) -> Selection | None:
        """Choose the classes that the gradient of a tile is multiplied with; None: all of them."""
        head, factors = self.head, self.rows.factors(step)
        selection = select(
            functools.partial(self.rows.mass_sums, step, tile, factors),
            self.rows.needed_classes(step),
            tile.shape,
            self.rows.state,
            head.call.gradient_tolerance * tile.shape[1] / head.vocabulary,
            head.call.max_classes,
            factors,
        )
        if selection is None:  # nor does it for tokens of the same batch
            self._selects = False
        elif self.dropped is not None:
            self.dropped[step.rows] += selection.dropped
        return selection

    def _logits(self, step: Step) -> Tensor:
        """Return the tile of a step, multiplied, copied, or as it was left."""
        tile = self._at(step.place, step)
        if step.source is None:
            products = self.schedule.problem.matmul
            products.logits(self._gathered(step), self.head.weight[step.classes], tile)
        elif step.source is not step.place:
            tile.copy_(self._at(step.source, step))
        return tile

    def _at(self, place: Place, step: Step) -> Tensor:
        """Return the logits of a step in a place."""
        schedule = self._walked
        if place.borrowed is not None:
            memory = self.sums.unwritten(place.borrowed)
        else:
            if self._tile is None:
                size = schedule.tiles, schedule.rows * padded(schedule.columns)
                self._tile = self.head.tokens.x.new_empty(size, dtype=self.head.call.logits_dtype)
            memory = self._tile[place.rows.start // schedule.rows % schedule.tiles]
        high, wide = _length(place.rows), padded(_length(place.classes))
        whole = memory[: high * wide].view(high, wide)
        return whole[within(step.rows, place.rows), within(step.classes, place.classes)]

    def _gathered(self, step: Step) -> Tensor:
        """Return the input rows of a step; those of a chunk are gathered once."""
        size, tokens = self._walked.rows, self.head.tokens
        start = step.rows.start // size * size
        chunk = slice(start, min(start + size, tokens.count))
        if chunk != self._chunk or self._x is tokens.x:
            self._x = tokens.x  # before the next rows are gathered
            self._chunk, self._x = chunk, tokens.gather(chunk)
        return self._x[within(step.rows, chunk)]

    def _merge(self, rows: slice) -> None:
        """Begin to merge the state of rows with those of the other ranks, if there are any.

        On every rank merges begin, go on and end in one order, whatever its number of classes.
        """
        if not self.head.ranks.several:
            return
        if not _length(rows):
            self._end_merges(slice(0, self.head.tokens.count))
            return
        self._advance_merges()
        merging = self.rows.merging(rows)
        if next(merging, self) is not self:
            self._merges.append((rows, merging))

    def _advance_merges(self) -> None:
        """Let the merges under way, whose data has arrived, send what is next."""
        self._merges = [m for m in self._merges if next(m[1], self) is not self]

    def _end_merges(self, rows: slice) -> None:
        """End the merges of some rows, and those that began before."""
        while any(r.start < rows.stop and rows.start < r.stop for r, _ in self._merges):
            for _ in self._merges.pop(0)[1]:
                pass


def _simulated(t: Tensor) -> bool:
    """Return True for a tensor that stands for one whose memory is counted."""
    return isinstance(t, FakeTensor) and not traced()


def _length(part: slice) -> int:
    return int(part.stop - part.start)
