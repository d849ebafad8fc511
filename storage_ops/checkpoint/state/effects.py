"""Undo the side effects of a region before its recompute, and put them back afterwards.

Three kinds of state are restored, for all objects that a region reaches:

- The bytes of tensors: buffers, parameters that the code may write, and other tensors without a
  gradient that are captured, or are attributes of objects and arguments (`contents`).
- References: the parameters, buffers, attributes and submodules of modules, the attributes of
  objects, and the contents of containers in attributes. Tensors in other lists and mappings are
  restored too (`places`), and tensors and modules in variables that the code reads.
- The attributes of objects that are arguments, such as a key-value cache, and the contents of
  lists, dictionaries, sets and deques in these objects. If an argument itself is a container, the
  recompute gets a new one.

A recompute reads the state that the forward read. When the recompute ends, the state is as it was
before the recompute. So the side effects of a forward happen once, with any number of recomputes.
If a value is replaced between forward and backward, the recompute uses the one of the forward.
Examples are `functional_call`, a loop variable, and a tensor that a hypernetwork sets on a layer.

To restore references, only references are kept. Bytes must be copied before it is known if they
will be written. A write to bytes without a copy cannot be undone, so the recompute raises an error.
There is one exception: an embedding with `max_norm` may write its weight without a copy, because
the recompute leaves this write out (`repeated_writes`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from storage_ops.checkpoint.saved.outputs import producer_of
from storage_ops.checkpoint.saved.saved import fail
from storage_ops.checkpoint.state.code_writes import UNSEEN, may_write_parameters
from storage_ops.checkpoint.state.containers import Undo
from storage_ops.checkpoint.state.contents import (
    BUDGET,
    LARGE_BUDGET,
    SMALL,
    Contents,
    Uninitialized,
)
from storage_ops.checkpoint.state.contents import looked_at as _looked_at
from storage_ops.checkpoint.state.contents import written as _written
from storage_ops.checkpoint.state.holders import (
    Holders,
    is_uninitialized,
    values_of,
)
from storage_ops.checkpoint.state.known_walks import KnownWalk
from storage_ops.checkpoint.state.parameters import noted
from storage_ops.checkpoint.state.places import remembered, value_of
from storage_ops.checkpoint.state.reachable import Surroundings
from storage_ops.checkpoint.state.registered import buffers_of, named_tensors
from storage_ops.checkpoint.state.repeated_writes import RepeatedWrites, fail_parameter
from storage_ops.foundation.values import is_leaf

_parametrize: Any = parametrize
_COPIED = (Tensor, nn.Parameter, nn.Buffer)


class Effects:
    """The state that one call can change, as it is before the call."""

    def __init__(self, surroundings: Surroundings) -> None:
        """Remember the state, and copy tensors that may be written. Call `finish` afterwards."""
        # Only a known walk is kept. Other surroundings would keep objects that the forward frees.
        self._surroundings = None if surroundings.known is None else surroundings
        self._lazy_holders: Holders | None = None  # for a known walk, created if state changed
        self._parametrizations = dict(_parametrize._cache) if _parametrize._cache_enabled else None
        known = surroundings.known
        if known is None:
            self._lazy_holders = Holders(surroundings)
            self._noted = noted(self._lazy_holders.parameters)
            self._bytes = list(_bytes(surroundings))
        else:
            self._noted = known.noted()
            self._bytes = []
            if known.has_bytes:
                surroundings.look()
                self._bytes = list(_bytes(surroundings))
        self._written: list[tuple[Tensor, int]] = []  # parameters, and their versions before
        self._running = True

    @classmethod
    def of_snapshot(
        cls, walk: KnownWalk, noted_parameters: Any, copies: list[Contents], running: bool
    ) -> Effects:
        """Return the effects of a call that the library has noted.

        Args:
            walk: the known walk of the call.
            noted_parameters: the versions of parameters before the call.
            copies: the buffers that the library has copied.
            running: whether the call still runs. If not, it has changed nothing.
        """
        self = cls.__new__(cls)
        self._surroundings = Surroundings(known=walk)
        self._lazy_holders, self._parametrizations = None, None
        self._noted, self._bytes, self._written = noted_parameters, copies, []
        self._running = running
        return self

    def finish(self) -> None:
        """Drop the copies and references that no restore needs, after the forward has run."""
        if self._parametrizations:
            self._parametrizations = {
                key: remembered(value) for key, value in self._parametrizations.items()
            }
        if self._lazy_holders is not None or not self.are_places_unchanged():
            self._holders().finish()
        self._running = False
        self._written = self._find_written()
        if self._written:
            self._noted.note_versions()
        for copy in self._bytes:
            copy.finish()

    def are_places_unchanged(self) -> bool:
        """Return True if a known walk would read the same attributes and items as before."""
        surroundings = self._surroundings
        return (
            surroundings is not None
            and surroundings.known is not None
            and surroundings.known.is_unchanged()
        )

    def _holders(self) -> Holders:
        """Return the attributes and items that the call can change, as they were before it."""
        if self._lazy_holders is None:
            assert self._surroundings is not None and self._surroundings.known is not None
            self._surroundings.look()
            self._lazy_holders = Holders(self._surroundings, self._surroundings.known.contents)
            if not self._running:
                self._lazy_holders.finish_unchanged()
        return self._lazy_holders

    def _find_written(self) -> list[tuple[Tensor, int]]:
        """Return the parameters that were written since their versions were noted.

        Each comes with the noted version. Parameters with a copy are left out.
        """
        written = self._noted.written()
        if not written:
            return []
        parameters = self._holders().parameters
        by_id = {id(t := parameters[i]): (t, version) for i, version in written}
        copied = self._copied()
        return [pair for key, pair in by_id.items() if key not in copied]

    def _copied(self) -> set[int]:
        """Return the ids of the tensors that have a copy."""
        for copy in self._bytes:
            copy.settle(wait=True)
        return {id(copy.tensor) for copy in self._bytes if copy.tensor is not None}

    def check(self, region: str) -> None:
        """Raise if the forward has written a tensor that was not copied."""
        for copy in self._bytes:
            t = copy.lost()
            if t is not None:
                fail(
                    f"{region} itself modifies a tensor of shape {tuple(t.shape)} in place, and no "
                    "copy of it is kept for the recompute. It was not written before, and a region "
                    f"copies at most {BUDGET >> 20} MiB of such tensors. Return a new tensor "
                    "instead, or write outside of the region. From the next forward on the tensor "
                    "is copied."
                )

    def without_repeated_writes(self, region: str, checks: bool) -> Any:
        """Return a context manager under which a recompute does not write parameters again.

        Args:
            region: the name of the region, for errors.
            checks: whether to raise if the recompute would read other contents than the forward.

        Raises:
            RuntimeError: a parameter was written more than once, or again since the forward.
        """
        written = self._find_written() if self._running else self._written
        changed = [t for copy in self._bytes if (t := copy.changed()) is not None]
        if not written and not changed:
            return contextlib.nullcontext()
        for t, version in written:
            if checks and t._version != version + 1:
                fail_parameter(region, t)
        return RepeatedWrites(region, [t for t, _ in written], changed, checks)

    def modified(self) -> list[Tensor]:
        """Return the parameters that were modified in place since the forward, without a copy."""
        return [t for t, _ in self._find_written()]

    def exchanged(self) -> list[Tensor]:
        """Return the parameters and buffers that were replaced or removed since."""
        return [] if self.are_places_unchanged() else self._holders().exchanged()

    def restore(self, undo: Undo, unchanged: bool) -> None:
        """Restore the state from before the forward.

        Args:
            undo: a list, to which functions are appended that restore the present state.
            unchanged: the result of `are_places_unchanged`.
        """
        holders = None if unchanged else self._holders()
        if holders is not None:
            holders.restore_tensors(undo)
        for index, needed_grad in self._noted.frozen_or_not():
            t = self._holders().parameters[index]
            if is_leaf(t):
                undo.append(partial(t.requires_grad_, not needed_grad))
                t.requires_grad_(needed_grad)
        self._restore_parametrizations(undo)
        if holders is not None:
            holders.restore_contents(undo)
        for copy in self._bytes:
            copy.restore(undo, self._running)

    def _restore_parametrizations(self, undo: Undo) -> None:
        """Compute parametrized weights as often as in the forward.

        Inside `torch.nn.utils.parametrize.cached()`, only the first use computes the weight.
        """
        if self._parametrizations is not None or _parametrize._cache_enabled:
            undo.append(partial(_cache, _parametrize._cache_enabled, _parametrize._cache))
            cached = {key: value_of(kept) for key, kept in (self._parametrizations or {}).items()}
            _cache(int(self._parametrizations is not None), cached)


def _cache(enabled: int, values: dict[Any, Any]) -> None:
    _parametrize._cache_enabled, _parametrize._cache = enabled, values


def _bytes(surroundings: Surroundings) -> Iterator[Contents]:
    """Yield a `Contents` for each tensor that the region may write. Some have no copy."""
    seen: set[int] = set()
    unseen = surroundings.writes & UNSEEN != 0
    left = LARGE_BUDGET if unseen else BUDGET

    def contents(
        t: object, trusted: bool = False, summed: bool = unseen, aliased: bool = False
    ) -> Iterator[Contents]:
        nonlocal left
        if not isinstance(t, Tensor) or id(t) in seen:
            return
        seen.add(id(t))
        plain = type(t) in _COPIED or isinstance(t, FakeTensor)
        if not plain or t.layout is not torch.strided or t.is_quantized or t.is_inference():
            return
        if producer_of(t) is not None:  # the region that can recompute the tensor restores it
            return
        nbytes = t.nbytes
        known = len(_written) > 0 and t in _written and not isinstance(t, nn.Parameter)
        copied = nbytes <= SMALL or known
        if not copied and nbytes <= left:
            left -= nbytes
            copied = True
        yield Contents(t, trusted, copied, summed, aliased and t not in _written)

    for t, trusted in buffers_of(surroundings.modules):
        if is_lazy(t):
            yield Uninitialized(t)
        else:
            yield from contents(t, trusted)
    may_write = may_write_parameters(surroundings.writes)
    # A simulation predicts a later step, in which only parameters that are written are copied.
    aliased = _is_simulated() and not unseen
    for module in surroundings.modules:
        is_candidate = may_write or "max_norm" in module.__dict__  # an attribute of embeddings
        if is_candidate and _may_write_parameters(module, surroundings.writes):
            for t in named_tensors(module)[0].values():
                if not is_uninitialized(t):
                    yield from contents(t, aliased=aliased)
    captured = (
        t
        for container in (
            *surroundings.attributes,
            *surroundings.objects,
            *surroundings.argument_state,
        )
        for t in values_of(container)
    )
    for t in (*captured, *surroundings.tensors):
        if isinstance(t, Tensor) and not isinstance(t, nn.Parameter) and not t.requires_grad:
            yield from contents(t)


def _may_write_parameters(module: nn.Module, writes: int) -> bool:
    """Return True if the parameters of a module must be copied in this forward."""
    if writes & UNSEEN:
        return True
    may_write = module.__dict__.get("max_norm") is not None  # an embedding
    if not may_write and not may_write_parameters(writes):
        return False
    if module not in _looked_at:
        if not _is_simulated():
            _looked_at.add(module)
        return True
    return any(p in _written for p in module.parameters(recurse=False))


def _is_simulated() -> bool:
    """Return True if the ops of this thread run on fake tensors."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
