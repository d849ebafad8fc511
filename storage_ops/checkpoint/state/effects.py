"""Undo the effects of a region besides its result for its recompute, and put them back after it.

Three kinds of places are looked after, wherever a region reaches them:

- bytes: buffers, parameters that its code can write, and other tensors without a gradient that are
  attributes, also of objects that are given, or captured (`contents`);
- names: the parameters, buffers and attributes of modules, attributes of objects, and the contents
  of containers in these. They include tensors in other lists and mappings (`places`), and tensors
  and modules in variables that its code reads;
- all that objects have that are given as arguments, such as a cache of keys and values, and the
  contents of lists, dictionaries, sets and deques in them. (Containers that are given themselves
  are made anew for the recompute.)

A recompute finds in them what the forward found, and when it ends they hold what they held when it
began. So the effects of a forward on them happen once, however often it is recomputed. A value that
is exchanged between forward and backward is used as the forward had it. Examples are
`functional_call`, the variable of a loop, and a tensor that a hypernetwork sets on a layer.

Names and contents cost references. Bytes have to be copied before it is known whether they will be
written. A write to bytes that were not copied cannot be repeated, and the recompute says so. Only
an embedding with `max_norm` may write its weight without a copy: the recompute leaves the write out
(`repeated_writes`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.jit import ScriptModule
from torch.nn.modules.batchnorm import _NormBase
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
    named_tensors,
    values_of,
)
from storage_ops.checkpoint.state.parameters import noted
from storage_ops.checkpoint.state.places import remembered, value_of
from storage_ops.checkpoint.state.reachable import Surroundings
from storage_ops.checkpoint.state.repeated_writes import RepeatedWrites, fail_parameter
from storage_ops.foundation.walk import is_leaf, is_of_torch

_parametrize: Any = parametrize
_COPIED = (Tensor, nn.Parameter, nn.Buffer)


class Effects:
    """The state around one call that the call can change, as it is before the call."""

    def __init__(self, around: Surroundings) -> None:
        """Look, and copy what may be written; `finish` when the forward has run."""
        # Of a walk that is not known, the surroundings hold what the forward may let go.
        self._around = None if around.known is None else around
        self._held: Holders | None = None  # of a known walk only where something has changed
        self._cached = dict(_parametrize._cache) if _parametrize._cache_enabled else None
        known = around.known
        if known is None:
            self._held = Holders(around)
            self._noted = noted(self._held.parameters)
            self._bytes = list(_bytes(around))
        else:
            self._noted = known.noted()
            self._bytes = []
            if known.has_bytes:
                around.look()
                self._bytes = list(_bytes(around))
        self._written: list[tuple[Tensor, int]] = []  # parameters, and their versions before
        self._running = True

    def finish(self) -> None:
        """Let go of what the forward has left alone."""
        if self._cached:
            self._cached = {key: remembered(value) for key, value in self._cached.items()}
        if self._held is not None or not self.are_places_unchanged():
            self._holders().finish()
        self._running = False
        self._written = self._find_written()
        if self._written:
            self._noted.note_versions()
        for each in self._bytes:
            each.finish()

    def are_places_unchanged(self) -> bool:
        """Return True if all attributes and items that a known walk has read are what they were."""
        around = self._around
        return around is not None and around.known is not None and around.known.is_unchanged()

    def _holders(self) -> Holders:
        """Return what is held around the call, as before it."""
        if self._held is None:
            assert self._around is not None and self._around.known is not None
            self._around.look()
            self._held = Holders(self._around, self._around.known.contents)
            if not self._running:
                self._held.finish_unchanged()
        return self._held

    def _find_written(self) -> list[tuple[Tensor, int]]:
        """Return the parameters written since their versions were noted, and these versions.

        Parameters of which there is a copy are left out.
        """
        written = self._noted.written()
        if not written:
            return []
        parameters = self._holders().parameters
        moved = {id(t := parameters[at]): (t, v) for at, v in written}
        copied = self._copied()
        return [(t, v) for key, (t, v) in moved.items() if key not in copied]

    def _copied(self) -> set[int]:
        """Return the identities of the tensors of which there is a copy."""
        for each in self._bytes:
            each.settle(wait=True)
        return {id(each.tensor) for each in self._bytes if each.tensor is not None}

    def check(self, region: str) -> None:
        """Raise if the forward has written what was not copied."""
        for each in self._bytes:
            t = each.lost()
            if t is not None:
                fail(
                    f"{region} itself modifies a tensor of shape {tuple(t.shape)} in place, and no "
                    "copy of it is kept for the recompute. It was not written before, and a region "
                    f"copies at most {BUDGET >> 20} MiB of such tensors. Return a new tensor "
                    "instead, or write outside of the region. From the next forward on the tensor "
                    "is copied."
                )

    def without_repeated_writes(self, region: str, checks: bool) -> Any:
        """Return a context manager under which a recompute writes no parameter again.

        Args:
            region: its name in errors.
            checks: whether to raise where the recompute would read other contents.

        Raises:
            RuntimeError: a parameter was written more than once, or again since the forward.
        """
        moved = self._find_written() if self._running else self._written
        changed = [t for each in self._bytes if (t := each.changed()) is not None]
        if not moved and not changed:
            return contextlib.nullcontext()
        for t, version in moved:
            if checks and t._version != version + 1:
                fail_parameter(region, t)
        return RepeatedWrites(region, [t for t, _ in moved], changed, checks)

    def modified(self) -> list[Tensor]:
        """Return the parameters that were modified in place since the forward and not restored."""
        return [t for t, _ in self._find_written()]

    def exchanged(self) -> list[Tensor]:
        """Return the parameters and buffers that are not in their places any more."""
        return [] if self.are_places_unchanged() else self._holders().exchanged()

    def restore(self, undo: Undo, unchanged: bool) -> None:
        """Make all what it was before the forward; `undo` gets what puts back what is now.

        Args:
            undo: a list of functions.
            unchanged: the result of `are_places_unchanged`.
        """
        held = None if unchanged else self._holders()
        if held is not None:
            held.restore_tensors(undo)
        for at, needed_grad in self._noted.frozen_or_not():
            t = self._holders().parameters[at]
            if is_leaf(t):
                undo.append(partial(t.requires_grad_, not needed_grad))
                t.requires_grad_(needed_grad)
        self._restore_parametrizations(undo)
        if held is not None:
            held.restore_contents(undo)
        for each in self._bytes:
            each.restore(undo, self._running)

    def _restore_parametrizations(self, undo: Undo) -> None:
        """Compute parametrized weights as often as in the forward.

        In `torch.nn.utils.parametrize.cached()` the first use computes a weight for all.
        """
        if self._cached is not None or _parametrize._cache_enabled:
            undo.append(partial(_cache, _parametrize._cache_enabled, _parametrize._cache))
            cached = {key: value_of(kept) for key, kept in (self._cached or {}).items()}
            _cache(int(self._cached is not None), cached)


def _cache(enabled: int, values: dict[Any, Any]) -> None:
    _parametrize._cache_enabled, _parametrize._cache = enabled, values


def _bytes(around: Surroundings) -> Iterator[Contents]:
    """Yield the contents of tensors that the region may write, copied or not."""
    tensors = [named_tensors(module) for module in around.modules]
    seen: set[int] = set()
    unseen = around.writes & UNSEEN != 0
    left = LARGE_BUDGET if unseen else BUDGET

    def contents(t: object, trusted: bool = False, summed: bool = unseen) -> Iterator[Contents]:
        nonlocal left
        if not isinstance(t, Tensor) or id(t) in seen:
            return
        seen.add(id(t))
        plain = type(t) in _COPIED or isinstance(t, FakeTensor)
        if not plain or t.layout is not torch.strided or t.is_quantized or t.is_inference():
            return
        if producer_of(t) is not None:  # what a region can make again it restores itself
            return
        nbytes = t.nbytes
        known = len(_written) > 0 and t in _written and not isinstance(t, nn.Parameter)
        copied = nbytes <= SMALL or known
        if not copied and nbytes <= left:
            left -= nbytes
            copied = True
        yield Contents(t, trusted, copied, summed)

    for module, (_, buffers) in zip(around.modules, tensors, strict=True):
        if buffers:
            own = not is_of_torch(type(module)) or isinstance(module, (_NormBase, ScriptModule))
            for t in buffers.values():
                if is_lazy(t):
                    yield Uninitialized(t)
                elif t is not None and not t.requires_grad:
                    yield from contents(t, not own)
    may_write = may_write_parameters(around.writes)
    for module, (parameters, _) in zip(around.modules, tensors, strict=True):
        asks = may_write or "max_norm" in module.__dict__  # of an embedding
        if asks and _may_write_parameters(module, around.writes):
            for t in parameters.values():
                if not is_uninitialized(t):
                    yield from contents(t)
    captured = (
        t for held in (*around.attributes, *around.objects, *around.given) for t in values_of(held)
    )
    for t in (*captured, *around.tensors):
        if isinstance(t, Tensor) and not isinstance(t, nn.Parameter) and not t.requires_grad:
            yield from contents(t)


def _may_write_parameters(module: nn.Module, writes: int) -> bool:
    """Return True if the parameters of a module have to be copied in this forward."""
    if writes & UNSEEN:
        return True
    may_write = module.__dict__.get("max_norm") is not None  # an embedding
    if not may_write and not may_write_parameters(writes):
        return False
    if module not in _looked_at:
        _looked_at.add(module)
        return True
    return any(p in _written for p in module.parameters(recurse=False))
