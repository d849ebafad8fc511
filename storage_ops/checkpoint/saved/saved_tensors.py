"""The tensors that autograd saves in a region: described in the forward, compared afterwards.

A library for the torch at hand does this without Python code (`csrc/checkpoint/saved_tensors.cpp`),
in a third of the time. The classes here do the same in Python. They are used where there
is no such library, with checksums, and with `debug=True`. The library leaves tensors of subclasses
and tensors without strides to `Saved`, and every error to `compare`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from storage_ops import _library
from storage_ops.checkpoint.saved.outputs import producers
from storage_ops.checkpoint.saved.saved import Saved, compare, drop_graphs, without_graph

Note = Callable[[Tensor], object]


class AsFarAsNeeded(BaseException):
    """Ends a recompute when nothing more is needed; code that catches errors lets it through."""


class SavedTensors:
    """Descriptions of the tensors that one forward saves, and which of them a backward has read."""

    def __init__(self, checksums: bool = False) -> None:
        """Begin with no tensors.

        Args:
            checksums: whether descriptions include checksums.
        """
        self.checksums = checksums
        self.described: list[Saved] = []
        # The recompute that serves the current backward pass, while it is alive.
        self._recomputed: Callable[[], RecomputedTensors | None] = lambda: None
        self._unreleased: set[int] = set()

    def __len__(self) -> int:
        return len(self.described)

    def hook(self, note: Note, notes_all: bool) -> Callable[[Tensor], int]:
        """Return the pack hook of the forward, which returns an index.

        Args:
            note: is called with each tensor whose storage a region can recompute.
            notes_all: whether `note` is called with every tensor.
        """

        def pack(t: Tensor) -> int:
            if notes_all or producers:
                note(t)
            self.described.append(Saved(t, self.checksums))
            return len(self.described) - 1

        return pack

    def unpack_hook(self, read: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
        """Return the unpack hook of the forward, which returns the tensor with an index.

        Args:
            read: is called with the index if no recompute serves the backward pass that runs.
        """

        def unpack(index: int) -> Tensor:
            again = self._recomputed()
            value = None if again is None else again.take_in_task(index)
            return read(index) if value is None else value

        return unpack

    def serve(self, again: RecomputedTensors) -> None:
        """Let a recompute serve the backward pass that it knows."""
        self._recomputed = weakref.ref(again)

    def finish(self) -> None:
        """Note that the forward has ended. A backward may read each tensor from now on."""
        self._unreleased = set(range(len(self.described)))

    def release(self, index: int) -> None:
        """Note that no other backward reads this tensor."""
        self._unreleased.discard(index)

    def is_released(self) -> bool:
        """Return True if no backward reads any tensor again."""
        return not self._unreleased

    def recompute(self, stops: bool) -> RecomputedTensors:
        """Return the object that keeps the tensors of a recompute.

        Args:
            stops: whether to end the recompute with the last tensor that was saved by now.
        """
        return RecomputedTensors(self, stops)


class RecomputedTensors:
    """The tensors that one recompute saves, until backward reads them."""

    def __init__(self, first: SavedTensors, stops: bool) -> None:
        """Begin with no tensors; see `SavedTensors.recompute`."""
        self._first, self._limit, self._stops = first, len(first), stops
        self._stopped, self._task = 0, -1
        self._described: list[Saved] = []
        # They have their graph until the function has run.
        self._tensors: list[Tensor] = []
        self._left: dict[int, Tensor] = {}

    def __len__(self) -> int:
        """Return how many tensors backward has not read yet."""
        return len(self._left)

    def hook(self) -> Callable[[Tensor], int]:
        """Return the pack hook of the recompute, which returns an index."""

        def pack(t: Tensor) -> int:
            self._described.append(Saved(t, self._first.checksums))
            self._tensors.append(t)
            if self._stops and len(self._tensors) >= self._limit:
                self._stopped = self._limit
                raise AsFarAsNeeded
            return len(self._tensors) - 1

        return pack

    def read(self, index: int) -> Tensor:
        """Return a tensor, the unpack hook of the recompute."""
        return self._tensors[index]

    def drop_graphs(self) -> None:
        """Detach the tensors. Their nodes hold this object, and no garbage collector sees that."""
        try:
            drop_graphs(self._tensors)
        finally:
            self._left = dict(enumerate(self._tensors))

    def is_whole(self) -> bool:
        """Return True if the recompute saved as many tensors as the forward."""
        return len(self._described) == self._limit

    def stopped_at(self) -> int:
        """Return the number of tensors with which the recompute was stopped; 0 if it was not."""
        return self._stopped

    def fits(self) -> bool:
        """Return True if the tensors are surely those of the forward; here `compare` decides."""
        return False

    def before(self) -> list[Saved]:
        """Return the descriptions of the forward, as far as it had come."""
        return self._first.described[: self._limit]

    def after(self) -> list[Saved]:
        """Return the descriptions of the recompute."""
        return self._described

    def begin(self, task: int) -> None:
        """Let `take_in_task` serve the backward pass with this number; none with -1."""
        self._task = task
        self._first.serve(self)

    def has(self, index: int) -> bool:
        """Return True if a tensor is there, and no backward has taken it."""
        return index in self._left

    def take(self, index: int) -> Tensor:
        """Return a tensor and let go of it."""
        self._tensors = []
        return self._left.pop(index)

    def take_in_task(self, index: int) -> Tensor | None:
        """Return a tensor for the backward pass that runs; None where the region looks closer."""
        if self._task < 0 or self._task != torch._C._current_graph_task_id():
            return None
        if index == self._stopped - 2 or index not in self._left:
            return None
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            self._first.release(index)
        return self.take(index)


def saved_tensors(checksums: bool, logs_ops: bool) -> SavedTensors:
    """Return an object for the tensors of one region, of the library if it can be used.

    Args:
        checksums: whether descriptions include checksums.
        logs_ops: whether ops are logged, where time does not matter.
    """
    if _native is None or checksums or logs_ops:
        return SavedTensors(checksums)
    tensors: SavedTensors = _native.SavedTensors()
    return tensors


def check(again: RecomputedTensors, name: str, hint: Callable[[], str]) -> None:
    """Raise unless a region named `name` saved the same in its forward and in its recompute.

    Args:
        again: the tensors of the recompute, detached.
        name: what the error calls the region.
        hint: what the error ends with where the region did other work.
    """
    if not again.fits():
        after = again.after()
        tensors = [again.read(index) for index in range(len(after))]
        compare(name, again.before(), list(zip(after, tensors, strict=True)), hint)


def _set_up() -> Any:
    """Return the module of the library, or None without one."""
    native: Any = sys.modules.get(_library.SAVED_TENSORS)
    if native is not None:
        kinds = Tensor, nn.Parameter
        native.setup(*kinds, producers, Saved, Saved.of, without_graph, AsFarAsNeeded, __name__)
    return native


_native = _set_up()
