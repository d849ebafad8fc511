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
from collections.abc import Collection, Iterator
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
from storage_ops.checkpoint.state.code_writes import IN_PLACE, UNSEEN, WITHOUT_GRAD
from storage_ops.checkpoint.state.containers import MISSING, Undo, copy_of, has, put, set_item
from storage_ops.checkpoint.state.contents import (
    BUDGET,
    LARGE_BUDGET,
    SMALL,
    Contents,
    Uninitialized,
)
from storage_ops.checkpoint.state.contents import looked_at as _looked_at
from storage_ops.checkpoint.state.contents import written as _written
from storage_ops.checkpoint.state.parameters import noted
from storage_ops.checkpoint.state.places import (
    AllItems,
    Attributes,
    Items,
    Remembered,
    is_same,
    remembered,
    value_of,
)
from storage_ops.checkpoint.state.reachable import Surroundings
from storage_ops.checkpoint.state.repeated_writes import RepeatedWrites, fail_parameter
from storage_ops.foundation.walk import is_leaf, is_of_torch, values_in

_parametrize: Any = parametrize
_MANY = 4096  # items of a container beyond which it is data
_TO_PARAMETERS = IN_PLACE | WITHOUT_GRAD
_COPIED = (Tensor, nn.Parameter, nn.Buffer)


class Effects:
    """The state around one call that the call can change, as it is before the call."""

    def __init__(self, around: Surroundings) -> None:
        """Look, and copy what may be written; `finish` when the forward has run."""
        self._names = [(place, name, _named(value)) for place, name, value in around.names]
        self._contents = [(c, copy_of(c)) for c in around.given if len(c) <= _MANY]
        self._attributes = [Attributes(held, around.code) for held in around.attributes]
        self._attributes += [Attributes(held, None) for held in around.objects]
        self._items = list(_items(around))
        self._buffers: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._slots: list[tuple[dict[str, Any], str, Tensor]] = []
        self._parameters: list[Tensor] = []
        self._cached = dict(_parametrize._cache) if _parametrize._cache_enabled else None
        tensors = [_named_tensors(module) for module in around.modules]
        for parameters, buffers in tensors:
            for name, t in parameters.items():
                if t is not None and not _is_uninitialized(t):
                    self._slots.append((parameters, name, t))
                    self._parameters.append(t)
            if buffers:
                self._buffers.append((buffers, dict(buffers)))
                self._slots += [(buffers, n, b) for n, b in buffers.items() if b is not None]
        self._noted = noted(self._parameters)
        self._bytes = list(_bytes(around, tensors))
        self._written: list[tuple[Tensor, int]] = []  # parameters, and their versions before
        self._running = True

    def finish(self) -> None:
        """Let go of what the forward has left alone."""
        self._running = False
        if self._cached:
            self._cached = {key: remembered(value) for key, value in self._cached.items()}
        replaced = [value for attributes in self._attributes for value in attributes.finish()]
        if replaced:  # they may hold graphs of earlier steps
            self._items = [items for items in self._items if not items.is_of(replaced)]
        for items in self._items:
            items.finish()
        changes = [(held, _changed(before, held)) for held, before in self._buffers]
        self._buffers = [(held, changed) for held, changed in changes if changed]
        self._written = self._find_written()
        if self._written:
            self._noted.note_versions()
        for each in self._bytes:
            each.finish()

    def _find_written(self) -> list[tuple[Tensor, int]]:
        """Return the parameters written since their versions were noted, and these versions.

        Parameters of which there is a copy are left out.
        """
        moved = {id(t := self._parameters[at]): (t, v) for at, v in self._noted.written()}
        copied = self._copied() if moved else ()
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
        return [t for held, name, t in self._slots if held.get(name) is not t]

    def restore(self, undo: Undo) -> None:
        """Make all what it was before the forward; `undo` gets what puts back what is now."""
        for place, name, value in self._names:
            if not is_same(value, _value_of(place, name)):
                _set_name(place, name, value_of(value), undo)
        for held, name, t in self._slots:
            now = held.get(name)
            if now is t or now is None:
                continue
            # One in another layout was sharded or gathered, by code that looks after that.
            if getattr(now, "_spec", None) == getattr(t, "_spec", None):
                set_item(held, name, t, undo)
        for at, needed_grad in self._noted.frozen_or_not():
            t = self._parameters[at]
            if is_leaf(t):
                undo.append(partial(t.requires_grad_, not needed_grad))
                t.requires_grad_(needed_grad)
        self._restore_parametrizations(undo)
        for attributes in self._attributes:
            attributes.restore(undo, self._running)
        for items in self._items:
            items.restore(undo)
        for held, before in self._buffers:
            changed = _changed(before, held) if self._running else before
            for name, value in changed.items():
                set_item(held, name, value, undo)
        for container, contents in self._contents:
            if not has(container, contents):
                undo.append(partial(put, container, copy_of(container)))
                put(container, contents)
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


def _named(value: Any) -> Any:
    is_output = isinstance(value, Tensor) and producer_of(value) is not None
    return Remembered(value) if is_output else value


def _is_uninitialized(t: Tensor | None) -> bool:
    """Return True for a parameter without a shape."""
    # The class is looked at first: isinstance asks a Parameter's metaclass, which takes long.
    return type(t) is not nn.Parameter and isinstance(t, nn.UninitializedParameter)


_NamedTensors = tuple[dict[str, Any], dict[str, Any]]


def _named_tensors(module: nn.Module) -> _NamedTensors:
    """Return the parameters and the buffers of a module itself.

    They are copies where the module is TorchScript's, which exchanges none.
    """
    parameters, buffers = module._parameters, module._buffers
    if isinstance(parameters, dict):
        return parameters, buffers
    return dict(parameters.items()), dict(buffers.items())


def _items(around: Surroundings) -> Iterator[Items]:
    """Yield the items of containers, all of those that are in attributes."""
    if not around.containers:
        return
    holders = (*around.attributes, *around.objects)
    state = {id(value) for held in holders for value in held.values()}
    for container in around.containers:  # an outer one comes before those in it
        if id(container) in state:
            state.update(map(id, _values(container)))
            yield AllItems(container)
        elif Items.may_be_replaced(container):
            yield Items(container)


def _bytes(around: Surroundings, tensors: list[_NamedTensors]) -> Iterator[Contents]:
    """Yield the contents of tensors that the region may write, copied or not.

    Args:
        around: the surroundings of the region.
        tensors: the parameters and the buffers of each module of it.
    """
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
    may_write = unseen or around.writes & _TO_PARAMETERS == _TO_PARAMETERS
    for module, (parameters, _) in zip(around.modules, tensors, strict=True):
        asks = may_write or "max_norm" in module.__dict__  # of an embedding
        if asks and _may_write_parameters(module, around.writes):
            for t in parameters.values():
                if not _is_uninitialized(t):
                    yield from contents(t)
    captured = (
        t for held in (*around.attributes, *around.objects, *around.given) for t in _values(held)
    )
    for t in (*captured, *around.tensors):
        if isinstance(t, Tensor) and not isinstance(t, nn.Parameter) and not t.requires_grad:
            yield from contents(t)


def _may_write_parameters(module: nn.Module, writes: int) -> bool:
    """Return True if the parameters of a module have to be copied in this forward."""
    if writes & UNSEEN:
        return True
    may_write = module.__dict__.get("max_norm") is not None  # an embedding
    if not may_write and writes & _TO_PARAMETERS != _TO_PARAMETERS:
        return False
    if module not in _looked_at:
        _looked_at.add(module)
        return True
    return any(p in _written for p in module.parameters(recurse=False))


def _values(held: Collection[Any]) -> Any:
    """Return the values of a mapping, or the items of another container; none if there are many."""
    if len(held) > _MANY:
        return ()
    return values_in(held)


def _changed(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return the earlier values of names of buffers whose value is another now.

    A name that had none is there with `MISSING`.
    """
    if has(now, before):
        return {}
    changed = {}
    for name in {**before, **now}:
        then, value = before.get(name, MISSING), now.get(name, MISSING)
        if then is not value:
            changed[name] = then
    return changed


def _set_name(place: object, name: str, value: object, undo: Undo) -> None:
    if isinstance(place, dict):
        set_item(place, name, value, undo)
        return
    now = _value_of(place, name)
    if now is not value:
        undo.append(lambda: _set_name(place, name, now, []))
        if value is MISSING:
            delattr(place, name)
        else:
            setattr(place, name, value)


def _value_of(place: object, name: str) -> Any:
    if isinstance(place, dict):
        return place.get(name, MISSING)
    try:
        return getattr(place, name)
    except ValueError:  # a cell that nothing is bound to
        return MISSING
