"""Describe the tensors that autograd saves in a region, and compare them with the recompute.

`csrc/checkpoint/saved_tensors.cpp` does this in C++, in a third of the time. Its library is built
for one version of torch. The classes here do the same in Python. They are used without a library
and with `debug=True`. The library calls `Saved` for tensors of subclasses and
tensors without strides, and it leaves every error to `compare`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinFunctionType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from storage_ops import _library
from storage_ops.checkpoint.saved.outputs import producers
from storage_ops.checkpoint.saved.saved import Saved, compare, drop_graphs, without_graph
from storage_ops.foundation.eager import eager

Note = Callable[[Tensor], object]


# If all saved tensors have at most these many elements, on a CPU and on other devices, a recompute
# runs to its end. The exception that stops a recompute takes about 25 us, and ops on such small
# tensors usually less. A product of square matrices of these sizes takes 4 million operations on a
# CPU, and 0.3 billion on a GPU.
SMALL_ON_CPU, SMALL = 1 << 14, 1 << 18


class StopRecompute(BaseException):
    """Ends a recompute that has saved enough tensors.

    Not an Exception, so that code of the region that catches errors does not catch this one.
    """


class SavedTensors:
    """Descriptions of the tensors that one forward saves, and which of them backward needs."""

    def __init__(self, checksums: bool = False) -> None:
        """Create an object without tensors.

        Args:
            checksums: whether descriptions include checksums.
        """
        self.checksums = checksums
        self.described: list[Saved] = []
        self.are_small = False  # whether all tensors of the whole forward are small
        # Returns the recompute that serves the current backward pass, or None.
        self._recomputed: Callable[[], RecomputedTensors | None] = lambda: None
        self._unreleased: set[int] = set()

    def __len__(self) -> int:
        return len(self.described)

    @eager
    def hook(self, note: Note, notes_all: bool) -> Callable[[Tensor], int]:
        """Return the pack hook of the forward, which returns an index.

        Args:
            note: called with each tensor whose storage a region can recompute.
            notes_all: whether to call `note` with every tensor.
        """

        def pack(t: Tensor) -> int:
            if notes_all or producers:
                note(t)
            self.described.append(Saved(t, self.checksums))
            return len(self.described) - 1

        return pack

    @eager
    def unpack_hook(self, read: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
        """Return the unpack hook of the forward, which takes an index and returns the tensor.

        Args:
            read: called with the index if no recompute serves the running backward pass.
        """

        def unpack(index: int) -> Tensor:
            recomputed = self._recomputed()
            value = None if recomputed is None else recomputed.take_in_task(index)
            return read(index) if value is None else value

        return unpack

    def serve(self, recomputed: RecomputedTensors) -> None:
        """Let the unpack hook take tensors from `recomputed`."""
        self._recomputed = weakref.ref(recomputed)

    def finish(self) -> None:
        """Note that the forward has ended, so that backward may read each tensor."""
        self._unreleased = set(range(len(self.described)))
        self.are_small = all(map(is_small, self.described))

    def release(self, index: int) -> None:
        """Note that no later backward pass reads this tensor."""
        self._unreleased.discard(index)

    def is_released(self) -> bool:
        """Return True if no later backward pass reads any of the tensors."""
        return not self._unreleased

    def recompute(self, stops: bool) -> RecomputedTensors:
        """Return the object that keeps the tensors of a recompute.

        Args:
            stops: whether the recompute ends when it has saved as many tensors as this object has
                now. If all of them are small, it ends only before another one.
        """
        return RecomputedTensors(self, stops)


class RecomputedTensors:
    """The tensors that one recompute saves, until backward reads them."""

    def __init__(self, first: SavedTensors, stops: bool) -> None:
        """Create an object without tensors, as `SavedTensors.recompute` describes."""
        self._first, self._limit, self._stops = first, len(first), stops
        self._stopped, self._task = 0, -1
        self._described: list[Saved] = []
        self._tensors: list[Tensor] = []  # with their graph, until `drop_graphs`
        self._unread: dict[int, Tensor] = {}

    def __len__(self) -> int:
        """Return the number of tensors that backward has not read yet."""
        return len(self._unread)

    @eager
    def hook(self) -> Callable[[Tensor], int]:
        """Return the pack hook of the recompute, which returns an index."""

        def pack(t: Tensor) -> int:
            if self._stops and len(self._tensors) == self._limit:
                self._stop()
            self._described.append(Saved(t, self._first.checksums))
            self._tensors.append(t)
            is_last = self._stops and len(self._tensors) == self._limit
            if is_last and not self._first.are_small:
                self._stop()
            return len(self._tensors) - 1

        return pack

    def _stop(self) -> NoReturn:
        self._stopped = self._limit
        raise StopRecompute

    def read(self, index: int) -> Tensor:
        """Return a tensor. This is the unpack hook of the recompute."""
        return self._tensors[index]

    def drop_graphs(self) -> None:
        """Detach the tensors. Their nodes reference this object, unseen by garbage collection."""
        try:
            drop_graphs(self._tensors)
        finally:
            self._unread = dict(enumerate(self._tensors))

    def is_whole(self) -> bool:
        """Return True if the recompute saved as many tensors as the forward."""
        return len(self._described) == self._limit

    def stopped_at(self) -> int:
        """Return the number of tensors after which the recompute was stopped; 0 if it was not."""
        return self._stopped

    def fits(self) -> bool:
        """Return True if the tensors certainly match the forward. In Python, `compare` decides."""
        return False

    def before(self) -> list[Saved]:
        """Return the descriptions of the forward, as many as it had when the recompute began."""
        return self._first.described[: self._limit]

    def after(self) -> list[Saved]:
        """Return the descriptions of the recompute."""
        return self._described

    def begin(self, task: int) -> None:
        """Let `take_in_task` serve the backward pass with this graph task id, or none for -1."""
        self._task = task
        self._first.serve(self)

    def has(self, index: int) -> bool:
        """Return True if the recompute saved a tensor with this index, and nothing took it yet."""
        return index in self._unread

    def take(self, index: int) -> Tensor:
        """Return a tensor, and drop the reference to it."""
        self._tensors = []
        return self._unread.pop(index)

    def take_in_task(self, index: int) -> Tensor | None:
        """Return a tensor for the running backward pass, or None to let the region decide."""
        if self._task < 0 or self._task != torch._C._current_graph_task_id():
            return None
        if index == self._stopped - 2 or index not in self._unread:
            return None
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            self._first.release(index)
        return self.take(index)


def is_small(saved: Saved) -> bool:
    """Return True if ops on tensors like this one take less time than an exception."""
    shape, _, _, device = saved.layout
    if type(shape) is not torch.Size or saved.is_jagged:
        return False
    return shape.numel() <= (SMALL_ON_CPU if device.type == "cpu" else SMALL)


def saved_tensors(checksums: bool, logs_ops: bool) -> SavedTensors:
    """Return an object for the tensors of one region. It is the library's if possible.

    Args:
        checksums: whether descriptions include checksums.
        logs_ops: whether ops are logged. Then speed does not matter.
    """
    if _native is None or logs_ops:
        return SavedTensors(checksums)
    tensors: SavedTensors = _native.SavedTensors(checksums)
    return tensors


def hooks(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Any:
    """Return a context manager that gives a region's hooks to autograd."""
    # The library's hooks need neither the GIL nor a Python object for each tensor.
    is_native = _native is not None and type(pack) is BuiltinFunctionType
    return _native.Hooks(pack, unpack) if is_native else saved_tensors_hooks(pack, unpack)


def leave_to_python() -> None:
    """Let Python follow the policies of the current regions from their next forwards on.

    These forwards save no results.
    """
    if _native is not None:
        _native.leave_to_python()


@contextlib.contextmanager
def left_to_python() -> Iterator[None]:
    """Call `leave_to_python` at the start of a `with` block."""
    leave_to_python()
    yield


def check(
    recomputed: RecomputedTensors,
    name: str,
    hint: Callable[[], str],
    inputs: Iterable[Tensor] = (),
) -> None:
    """Raise if a region did not save the same tensors in its forward and in its recompute.

    Args:
        recomputed: the tensors of the recompute, detached.
        name: the name of the region, for the error.
        hint: returns the end of the error if the region ran other ops.
        inputs: the inputs of the recompute, if saved-tensor hooks around the region may return
            copies of them.
    """
    after = recomputed.after()
    tensors = [recomputed.read(index) for index in range(len(after))]
    compare(name, recomputed.before(), list(zip(after, tensors, strict=True)), hint, inputs)


def _set_up() -> Any:
    """Return the library's module, or None without a library."""
    native: Any = sys.modules.get(_library.SAVED_TENSORS)
    if native is not None:
        # In a forked process, torch replaces its engine when Python first asks for it. The library
        # does not ask Python.
        engine: Any = torch.autograd.Variable._execution_engine
        os.register_at_fork(after_in_child=engine.is_checkpoint_valid)
        kinds = Tensor, nn.Parameter
        native.setup(
            *kinds, producers, Saved, Saved.of, is_small, without_graph, StopRecompute, __name__,
            SMALL_ON_CPU, SMALL,
        )  # fmt: skip
    return native


_native = _set_up()
