"""The state that a region depends on, before its forward.

`ExecutionState` captures and restores all of it, in Python. In most calls, the walk over the
surroundings is known, no mode is active, and a recompute finds everything as it was but the random
numbers. Then the library notes the state, and a recompute needs one comparison
(`csrc/checkpoint/snapshot.cpp`). If something differs, an `ExecutionState` is created from what
the library noted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.utils import parametrize

from storage_ops import _library
from storage_ops.checkpoint.state import contents, execution, known_walks
from storage_ops.checkpoint.state.code_writes import may_write_parameters
from storage_ops.checkpoint.state.execution import ExecutionState, is_disabled
from storage_ops.checkpoint.state.known_walks import Entry, Facts, KnownWalk
from storage_ops.checkpoint.state.reachable import Surroundings


class Snapshot:
    """The state before a call whose walk is known, with the methods of `ExecutionState`."""

    __slots__ = ("_attention", "_facts", "_full", "_native", "_running")
    writes_unseen = False  # else Python would capture the state

    def __init__(self, native: Any, facts: Facts, attention: Any, running: bool = True) -> None:
        """Create an object for a snapshot of the library.

        Args:
            native: the library's object.
            facts: the facts of the known walk.
            attention: the function that computed attention before the call.
            running: whether the call still runs.
        """
        self._native, self._facts = native, facts
        self._attention = attention
        self._running = running
        self._full: ExecutionState | None = None

    def _state(self) -> ExecutionState:
        """Return the state as an `ExecutionState`, because something has changed since."""
        if self._full is None:
            native, walk = self._native, KnownWalk(self._native.seen, self._facts)
            self._full = ExecutionState.of_snapshot(native, walk, self._attention, self._running)
        return self._full

    def finish(self) -> None:
        """Note that the forward has ended."""
        self._native.finish()
        if not self._native.is_unchanged():
            self._state().finish()
        self._running = False

    def modified(self, region: str) -> list[Tensor]:
        """Return the parameters that were modified in place since the forward."""
        if self._full is None and self._native.is_unwritten():
            return []
        return self._state().modified(region)

    def exchanged(self) -> list[Tensor]:
        """Return the parameters and buffers that were replaced or removed since."""
        return self._state().exchanged()

    def contexts(self, region: str, checks: bool) -> tuple[Any, ...]:
        """Return the context managers for a recompute, outermost first."""
        is_current = (
            self._full is None and self._native.is_current() and is_as_before(self._attention)
        )
        return (self._native,) if is_current else self._state().contexts(region, checks)

    def put_back(self) -> None:
        """Put back the state from before a recompute, if an interrupt ended its `__exit__`."""
        self._native.put_back()
        if self._full is not None:
            self._full.put_back()

    def check_dual_level(self, region: str) -> None:
        """Do nothing, because the forward ran in no level of dual numbers."""


def is_as_before(attention: Callable[..., Any]) -> bool:
    """Return True if the state that only Python knows is as before a call in `Snapshot`.

    Args:
        attention: the function that computed attention then.
    """
    return (
        attention is F.scaled_dot_product_attention
        and not is_disabled()
        and not parametrize._cache_enabled
        and forward_ad._current_level < 0
    )


def snapshot_before(
    fn: Callable[..., Any],
    arguments: list[Any],
    tensors: Iterable[Tensor],
    preserve_rng_state: bool,
) -> tuple[Any, Facts] | None:
    """Capture the state before a call with the library.

    Args:
        fn, arguments, tensors, preserve_rng_state: as in `state_before`.

    Returns:
        The library's object and the facts of the known walk, or None if Python must capture it.
    """
    # The library notes no other devices, generators and caches.
    if _native is None or execution.trackers or parametrize._cache_enabled:
        return None
    if forward_ad._current_level >= 0:
        return None
    for t in tensors:
        if not (t.is_cpu or t.is_cuda or t.is_meta):
            return None
    start = known_walks.start_of(fn, arguments)
    if start is None or (known := known_walks.known_from(start)) is None:
        return None
    in_place = may_write_parameters(known.facts.writes)
    if in_place and contents.is_any_parameter_written():  # Python may have to copy parameters
        return None
    gpus = len(execution.gpus_in_use())
    native = _native.Snapshot(
        known.walk, start.roots, preserve_rng_state, gpus, known.facts.trusted
    )
    if native is None or (in_place and not _are_looked_at(known, native.seen)):
        return None
    known.attempts = 0
    if native.settings not in execution.known_settings:
        execution.read_settings()
    return native, known.facts


def _are_looked_at(known: Entry, seen: Any) -> bool:
    """Return True if Python has copied the parameters of all modules before an earlier forward.

    Args:
        known: the known walk.
        seen: the library's object with what it has seen.
    """
    if not known.are_looked_at:
        modules, *_ = KnownWalk(seen, known.facts).objects()
        known.are_looked_at = all(module in contents.looked_at for module in modules)
    return known.are_looked_at


def state_before(
    fn: Callable[..., Any], arguments: list[Any], tensors: list[Tensor], preserve_rng_state: bool
) -> tuple[ExecutionState | Snapshot, list[Tensor]]:
    """Capture the state before a call.

    Args:
        fn: the function that is called.
        arguments: its arguments that are not tensors.
        tensors: the tensors among its arguments.
        preserve_rng_state: whether a recompute repeats random numbers.

    Returns:
        The state, and the tensors that the call reaches besides arguments, parameters and buffers.
    """
    snapshot = snapshot_before(fn, arguments, tensors, preserve_rng_state)
    if snapshot is not None:
        return Snapshot(*snapshot, F.scaled_dot_product_attention), []
    surroundings = Surroundings.of(fn, arguments, tensors)
    return ExecutionState(surroundings, preserve_rng_state), surroundings.tensors


_native: Any = sys.modules.get(_library.SAVED_TENSORS)
