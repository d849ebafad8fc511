"""The engine of heads: processes a schedule's tiles of logits with a row function and sums.

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

`Schedule` yields the steps of such loops: which tiles, in which order, where their logits are
stored, and which logits are computed only once. `Run` computes the logits of each step. A
`RowFunction` has `update` and `gradient` of cross-entropy or of a divergence. `Sums` adds up `dx`
and `dw`.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from storage_ops.loss.engine.head import Head
from storage_ops.loss.engine.kept import free, gradient_in
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
        selects_by_gradient: True if classes are chosen by the gradient with respect to a tile of
            logits, False if they are chosen by probabilities.
    """

    state: Tensor
    selects_by_gradient = False

    @abstractmethod
    def work(self, step: Step, tile: Tensor) -> Tensor | None:
        """Process a tile of logits in the phases of the step.

        UPDATE merges the tile into the state of its rows. GRADIENT overwrites the tile by the
        gradient with respect to its logits, from the finished state. EXPONENTIALS overwrites it by
        the exponentials that RUNNING_RESCALE adds up, and returns the change of the rows' maximum.
        """

    @abstractmethod
    def mass_sums(
        self, step: Step, tile: Tensor, factors: Tensor | None, out: Tensor, buckets: Tensor | None
    ) -> None:
        """Add up the mass of a tile's classes for its tokens; see `selection`.

        Ignored tokens have mass 0. With `factors`, the sum of a class is its absolute gradient.

        Args:
            step, tile: the tile of logits; with `selects_by_gradient` the tile of their gradient.
            factors: the factors of the rows.
            out: receives the sum of each class, or with `buckets` the sum of each token and bucket.
            buckets: (classes,) uint8, the bucket of each class of the tile, or None.
        """

    def factors(self, step: Step) -> Tensor | None:
        """Return the factor of each token from a class's mass to its gradient.

        The gradient of a class that is no target has the sign of its token's factor. Returns None,
        as here, if there is no such factor.
        """
        return None

    def gather_gradient(self, step: Step, tile: Tensor) -> Gather:
        """Return a function that computes the gradient with respect to some logits of a tile.

        The tile stays unchanged. Only a row function that does not select by gradient has this
        method.
        """
        raise NotImplementedError

    @abstractmethod
    def needed_classes(self, step: Step) -> Tensor:
        """Return the classes of a tile that are targets of its tokens, with duplicates."""

    def merging(self, rows: slice) -> Iterator[None]:
        """Merge the state of rows over the ranks. Yield while communication is in progress.

        By default there is nothing to merge, because `work` has done it.
        """
        yield from ()

    def finish_rescaled(self, sums: Sums) -> None:
        """Turn the sums of RUNNING_RESCALE into the gradient of the input.

        Only a row function with EXPONENTIALS has such sums.
        """
        raise NotImplementedError

    @abstractmethod
    def free(self) -> None:
        """Free the memory besides the tile of logits."""


Rows = TypeVar("Rows", bound=RowFunction)


class Run(Generic[Rows]):
    """The state of a call of a head while it runs.

    Attributes:
        head: the operands.
        rows: the row function.
        schedule: the order of the tiles of logits. With `first`, only for the gradients.
        dropped: (n,) the probability that each token leaves out of its gradient, if requested.
    """

    def __init__(
        self,
        head: Head,
        rows: Rows,
        schedule: Schedule,
        first: Schedule | None = None,
        kept: tuple[Tensor | None, Tensor | None] = (None, None),
    ):
        """Begin a call.

        Args:
            head, rows, schedule: see above.
            first: a schedule for the statistics alone. None: the same as for the gradients.
            kept: in the backward, the tile that `statistics` returned in the forward, and `parked`.
        """
        self.head, self.rows, self.schedule = head, rows, schedule
        self._first, self._kept = first, kept
        self._memory: Tensor | None = None  # with a deferred schedule: the weight's gradient
        self._walked = schedule  # the schedule that runs now
        self._tile: Tensor | None = None
        self._merges: list[tuple[slice, Iterator[None]]] = []  # pending merges, oldest first
        self._chunk, self._x = slice(0, 0), head.tokens.x
        # The choice of classes depends on values, but a graph must be right for all values.
        self._selects = head.problem.selects and not traced()
        self.dropped: Tensor | None = None
        if head.call.want_dropped:
            self.dropped = rows.state.new_zeros(head.tokens.count)

    @functools.cached_property
    def every(self) -> bool:
        """Return True if every tile is computed. A simulation computes two tiles of each size."""
        several = self.head.ranks.several or self.schedule.strategy == RUNNING_RESCALE
        return several or not _simulated(self.head.call.input)

    @functools.cached_property
    def sums(self) -> Sums:
        """Sums of the gradients. Their memory is allocated at the first use."""
        return Sums(self.head, self.schedule, self._memory)

    @property
    def parked(self) -> Tensor | None:
        """Memory of the weight's gradient with logits for the backward, or None.

        It begins after the borrowed classes, so its size tells how many these are.
        """
        if not self.schedule.deferred:
            return None
        if self._memory is None:
            weight = self.head.call.weight
            self._memory = torch.empty_like(weight, memory_format=torch.contiguous_format)
        return self._memory[self.schedule.borrowed :]

    @property
    def took_over(self) -> bool:
        """Return True if the weight's gradient is in the memory that the forward parked logits in.

        Only for a backward, when it has run.
        """
        return self._kept[1] is not None and self._memory is not None

    def statistics(self) -> Tensor | None:
        """Compute the state of every row.

        Returns the buffer with the last tile if it is kept for the backward.
        """
        schedule = self._first or self.schedule
        left = self._walk(schedule, schedule.statistics(self.every))
        return None if left is None or not schedule.keeps else left.as_strided(*self._layout())

    def gradients(self) -> list[Tensor]:
        """Return the gradients of input, weight and bias from the finished state.

        The logits are computed again.
        """
        kept_tiles = self._take_over()
        self._walk(self.schedule, self.schedule.gradients(self.every, kept_tiles))
        if kept_tiles:
            free(self._kept[0])  # free it before sums are rounded
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
        """Yield every tile of logits in turn, for callers that need no gradient of this head."""
        for step in self.schedule.logits():
            yield step, self._logits(step)

    def left(self) -> Tensor:
        """Return an uninitialised tensor like the result of `statistics`."""
        x = self.head.tokens.x
        if not (self.schedule.keeps and self.head.tokens.count):
            return x.new_empty(0)
        return x.new_empty_strided(*self._layout(), dtype=self.head.call.logits_dtype)

    def _layout(self) -> tuple[tuple[int, int], tuple[int, int]]:
        s = self.schedule
        return (s.rows, s.columns), (padded(s.columns), 1)

    def _take_over(self) -> bool:
        """Continue with the logits that the forward kept, if this schedule can.

        Returns:
            True if it can.
        """
        tile, parked = self._kept
        if tile is None:
            return False
        shape, stride = self._layout()
        size = shape[0] * stride[0]
        fits = self.schedule.keeps and tile.shape == shape and tile.stride() == stride
        fits = fits and tile.untyped_storage().nbytes() >= size * tile.element_size()
        if fits and self._takes_parked(parked):
            self._tile = tile.as_strided((1, size), (size, 1))
            return True
        free(tile, parked)  # of another schedule, or copied by hooks of saved tensors
        return False

    def _takes_parked(self, parked: Tensor | None) -> bool:
        """Use the memory of `parked` for the weight's gradient. Return False if it does not fit."""
        deferred = self.schedule.deferred
        if parked is None or not deferred:
            return parked is None and not deferred
        weight, skipped = self.head.call.weight, self.schedule.borrowed
        first = skipped * weight.shape[1]
        nbytes = weight.numel() * weight.element_size()
        same = len(parked) == len(weight) - skipped and parked.storage_offset() == first
        if same and parked.untyped_storage().nbytes() >= nbytes:
            self._memory = gradient_in(parked, weight)
        return self._memory is not None

    def _walk(self, schedule: Schedule, steps: Iterable[Step]) -> Tensor | None:
        """Run the steps of a schedule. Return the tile buffer with its final content."""
        self._walked = schedule
        try:
            for step in carried_out(steps):
                self._step(step)
            return self._tile
        finally:
            self._tile, self._x = None, self.head.tokens.x  # free both before sums are rounded
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
                # Only the part that is multiplied is computed. A bias needs the gradient of every
                # class.
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
        """Choose the classes for the products with a tile's gradient. None means all."""
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
        if selection is None:
            # If leaving out classes does not pay for one tile, try no other tile of the batch. A
            # narrow tile is no evidence, because it has other classes.
            self._selects = 2 * tile.shape[1] < self.schedule.problem.vocab
        elif self.dropped is not None:
            self.dropped[step.rows] += selection.dropped
        return selection

    def _logits(self, step: Step) -> Tensor:
        """Return the tile of a step: computed, copied, or already there."""
        tile = self._at(step.place, step)
        if step.source is None:
            products = self.schedule.problem.matmul
            products.logits(self._gathered(step), self.head.weight[step.classes], tile)
        elif step.source is not step.place:
            tile.copy_(self._at(step.source, step))
        return tile

    def _at(self, place: Place, step: Step) -> Tensor:
        """Return the logits of a step at a place in memory."""
        schedule = self._walked
        if place.borrowed is not None:
            if self.parked is None:
                memory = self.sums.unwritten(place.borrowed)
            else:  # the sums do not exist yet in the forward
                assert self._memory is not None
                memory = self._memory[place.borrowed].view(-1)
        else:
            if self._tile is None:
                size = schedule.tiles, schedule.rows * padded(schedule.columns)
                self._tile = self.head.tokens.x.new_empty(size, dtype=self.head.call.logits_dtype)
            memory = self._tile[place.rows.start // schedule.rows % schedule.tiles]
        high, wide = _length(place.rows), padded(_length(place.classes))
        whole = memory[: high * wide].view(high, wide)
        return whole[within(step.rows, place.rows), within(step.classes, place.classes)]

    def _gathered(self, step: Step) -> Tensor:
        """Return the input rows of a step. The rows of a chunk are gathered once."""
        size, tokens = self._walked.rows, self.head.tokens
        start = step.rows.start // size * size
        chunk = slice(start, min(start + size, tokens.count))
        if chunk != self._chunk or self._x is tokens.x:
            self._x = tokens.x  # free the old rows before the next are gathered
            self._chunk, self._x = chunk, tokens.gather(chunk)
        return self._x[within(step.rows, chunk)]

    def _merge(self, rows: slice) -> None:
        """Begin to merge the state of rows with other ranks, if there are any.

        On every rank merges begin, advance and end in the same order, whatever its number of
        classes.
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
        """Let pending merges whose data has arrived send their next data."""
        self._merges = [m for m in self._merges if next(m[1], self) is not self]

    def _end_merges(self, rows: slice) -> None:
        """End the merges of some rows, and those that began earlier."""
        while any(r.start < rows.stop and rows.start < r.stop for r, _ in self._merges):
            for _ in self._merges.pop(0)[1]:
                pass


def _simulated(t: Tensor) -> bool:
    """Return True for a simulated tensor, whose memory is counted but not allocated."""
    return isinstance(t, FakeTensor) and not traced()


def _length(part: slice) -> int:
    return int(part.stop - part.start)
