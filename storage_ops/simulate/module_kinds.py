"""Decides which calls of modules have the same effect on memory: equal modules and arguments."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import enum
import functools
import types
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from storage_ops.checkpoint.layers.config_policy import uncompiled
from storage_ops.foundation.functions import cells_of
from storage_ops.foundation.ops import Args, Kwargs
from storage_ops.foundation.values import (
    OBJECT,
    OF_EVERY_MODULE,
    cached_by_class,
    is_opaque,
    kind_of,
)
from storage_ops.simulate.plain_values import HIDDEN, Spot, plain_of
from storage_ops.simulate.ranks.fsdp import sharded_modules, sharded_parameters
from storage_ops.simulate.values.wrappers import is_wrapper

FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
SIMPLE = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout,
    torch.memory_format, enum.Enum, type, *FUNCTIONS,
)  # fmt: skip
_HOOKS = {
    "_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs",
}  # fmt: skip
_FLAGS = ("_forward_hooks_always_called", "_forward_hooks_with_kwargs",
          "_forward_pre_hooks_with_kwargs")  # fmt: skip
_COMPILED = "_compiled_call_impl"  # torch's attribute for the compiled form of a module
_COMPOSABLE = "__composable_api"  # torch's attribute of a module for fully_shard
_DEPTH = 6  # the most nested objects
_MANY = 2000  # the most values in one object
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_SIZE = 32  # bytes of an instance that only has a dictionary


class NotComparable(Exception):
    """An object cannot be compared, or does more than compute."""


class Comparison:
    """Builds equal objects for values with the same effect. Their `repr` is equal, too.

    Functions and opaque objects are equal only to themselves.
    """

    def of(self, value: object, depth: int = 0, spot: Spot | None = None) -> Hashable:
        """Return an object that represents a value in comparisons.

        Args:
            value: any value.
            depth: the depth of the value in the outermost one.
            spot: the place of the value, if it can be replaced there.

        Raises:
            NotComparable: the value cannot be compared.
        """
        if isinstance(value, FUNCTIONS):
            return self.opaque(value, depth)
        if isinstance(value, SIMPLE):
            return self.plain(value, spot)
        if depth > _DEPTH:
            raise NotComparable

        def inside(part: object, key: object = None) -> Hashable:
            is_writable = type(value) in (dict, list) and key is not None
            return self.of(part, depth + 1, (value, key) if is_writable else None)

        if isinstance(value, (list, tuple)):
            return (type(value), *(inside(part, key) for key, part in enumerate(value)))
        if isinstance(value, (set, frozenset)):
            return (type(value), *sorted(map(inside, value), key=repr))
        if isinstance(value, Mapping):
            return (type(value), *((inside(k), inside(v, k)) for k, v in value.items()))
        if isinstance(value, functools.partial):
            return ("partial", inside((value.func, value.args, value.keywords)))
        return self.instance(value, depth)

    def plain(self, value: object, spot: Spot | None) -> Hashable:
        """Return the representation of a value of one of the classes in `SIMPLE`."""
        return (type(value), value) if not isinstance(value, float) else ("float", repr(value))

    def instance(self, value: object, depth: int) -> Hashable:
        """Return the representation of an instance of another class."""
        if dataclasses.is_dataclass(value):
            names = [f.name for f in dataclasses.fields(value) if f.compare]
            return (type(value), *((n, self.of(getattr(value, n), depth + 1)) for n in names))
        return self.opaque(value, depth)

    def opaque(self, value: object, depth: int) -> Hashable:
        """Return the representation of a function or of an opaque object."""
        return ("the same object", id(value))


@dataclass
class _Seen:
    """The representation of an object, and the object itself, so that its id stays valid."""

    value: object
    key: Hashable
    values: list[object]
    spots: list[Spot]
    tensors: list[Tensor]


class _Attributes(Comparison):
    """Compares attributes of a module, except for numbers and strings that can be watched.

    Attributes:
        values, spots: the watched numbers and strings, and their places.
        tensors: the tensors, whose values are not compared.
    """

    def __init__(self, module: nn.Module, seen: dict[int, _Seen]) -> None:
        """Start without values. `seen` has representations of a model's objects, by id."""
        self.values: list[object] = []
        self.spots: list[Spot] = []
        self.tensors: list[Tensor] = []
        self._module, self._seen, self._count = module, seen, 0

    def of(self, value: object, depth: int = 0, spot: Spot | None = None) -> Hashable:
        self._count += 1
        if self._count > _MANY:
            raise NotComparable
        return super().of(value, depth, spot)

    def plain(self, value: object, spot: Spot | None) -> Hashable:
        value = plain_of(value)
        if spot is None or type(value) not in HIDDEN:
            return super().plain(value, spot)
        self.values.append(value)
        self.spots.append(spot)
        return "plain", type(value)

    def instance(self, value: object, depth: int) -> Hashable:
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            self.tensors.append(value)
            return like(value)
        if isinstance(value, types.MethodType):
            owner = value.__self__
            whose = "self" if owner is self._module else self.of(owner, depth + 1)
            return "method", self.of(value.__func__, depth + 1), whose
        cls: Any = type(value)
        if id(value) not in self._seen:
            inside = _Attributes(self._module, self._seen)
            key: Hashable
            try:
                if _is_of_python(cls):
                    key = cls, inside._of_dictionary(vars(value), depth + 1)
                else:
                    key = super(_Attributes, inside).instance(value, depth)
            except NotComparable:
                key, inside = self.opaque(value, depth), _Attributes(self._module, self._seen)
            self._seen[id(value)] = _Seen(value, key, inside.values, inside.spots, inside.tensors)
        seen = self._seen[id(value)]
        self.values += seen.values
        self.spots += seen.spots
        self.tensors += seen.tensors
        return seen.key

    def opaque(self, value: object, depth: int) -> Hashable:
        if not isinstance(value, types.FunctionType):
            return super().opaque(value, depth)
        enclosed = tuple(part for _, _, part in cells_of(value))
        own = (enclosed, value.__defaults__, value.__kwdefaults__, vars(value))
        before = len(self.values)
        try:
            return "function", id(value.__code__), self.of(own, depth + 1)
        except NotComparable:
            del self.values[before:], self.spots[before:]
            return super().opaque(value, depth)

    def _of_dictionary(self, attributes: dict[str, object], depth: int) -> Hashable:
        return tuple(
            (name, self.of(part, depth, (attributes, name)))
            for name, part in sorted(attributes.items())
        )


@cached_by_class
def _is_of_python(cls: type) -> bool:
    """Return True if an instance's dictionary is its whole state."""
    if cls in _NAMESPACES:
        return True
    return (
        kind_of(cls) == OBJECT
        and not is_opaque(cls)
        and cls.__basicsize__ <= _SIZE
        and cls.__dictoffset__ != 0
        and all("__module__" in vars(c) and "__slots__" not in vars(c) for c in cls.__mro__[:-1])
    )


@dataclass(eq=False)
class ModuleKind:
    """The representation of a module in comparisons.

    Attributes:
        group: the modules that differ from it only in numbers and strings.
        values, spots: numbers and strings of the module and its submodules, and their places.
        tensors: the tensors of the module and its submodules.
        can_be_replayed: whether only the module's caller uses its results: no parameter has a hook
            or is also in another module.
    """

    group: Group
    values: list[object]
    spots: list[Spot]
    tensors: list[Tensor]
    can_be_replayed: bool


class Group:
    """Modules that are equal except for numbers and strings.

    Attributes:
        members: the kinds of the modules.
        is_by_value: whether these numbers and strings must be equal for layers to share results,
            because a layer used one in a way that has no answer for other values.
        reads_tensors: whether the values of their tensors must be equal for that, too, because the
            code of a layer read values of tensors.
    """

    def __init__(self) -> None:
        self.members: list[ModuleKind] = []
        self.is_by_value = self.reads_tensors = False

    @functools.cached_property
    def differing(self) -> list[int]:
        """Return the positions of values that differ between members."""
        values_at = zip(*(kind.values for kind in self.members), strict=True)
        return [i for i, values in enumerate(values_at) if any(v != values[0] for v in values)]

    @property
    def watched(self) -> list[int]:
        """Return the positions of values that are watched while a layer runs."""
        return [] if self.is_by_value else self.differing


class Kinds:
    """Decides which modules are equal.

    Attributes:
        of: the kind of a module by its id. Modules that cannot be compared are missing.
        sharded: the numbers of FSDP's hooks by the id of an FSDP2 module. The part below these
            hooks can be replayed, but modules around it cannot.
    """

    def __init__(self, *roots: nn.Module) -> None:
        self.of: dict[int, ModuleKind] = {}
        self._groups: dict[Hashable, Group] = {}
        self._seen: dict[int, _Seen] = {}
        self.sharded: dict[int, set[int]] = {}
        self._gathered: dict[int, Hashable] = {}
        self._uses: Counter[int] = Counter()
        self._visited: set[int] = set()
        # The representations of parameters that FSDP gathers, by the id of the module and the name.
        self._of_shards: dict[tuple[int, str], Hashable] = {}
        for root in roots:
            self.sharded |= sharded_modules(root)
            self._gathered |= sharded_parameters(root)
        for module in dict.fromkeys(m for root in roots for m in root.modules()):
            self._uses.update(map(id, module._parameters.values()))
        for root in roots:
            self._visit(root)
        for kind in self.of.values():
            kind.group.members.append(kind)

    def is_current(self, module: nn.Module) -> bool:
        """Return True if a module is still as it was when its kind was found.

        Code of a model may change its layers during a step, or objects that they share.
        """
        now = copy.copy(self)
        now.of, now._seen, now._visited = {}, {}, set()
        known, found = self.of[id(module)], now._visit(module)
        if found is None or found.group is not known.group or found.values != known.values:
            return False
        pairs = zip(found.tensors, known.tensors, strict=True)
        return all(one is other for one, other in pairs)

    def _visit(self, module: nn.Module) -> ModuleKind | None:
        """Find the kinds of a module and of its submodules."""
        if id(module) in self._visited:
            return self.of.get(id(module))
        self._visited.add(id(module))
        within = uncompiled(module)
        if within is not module:
            return self._visit(within)
        names, children = [], []
        for name, child in module.named_children():
            names.append(None if name.isdecimal() else name)
            children.append(self._visit(child))
        try:
            own = _Attributes(module, self._seen)
            key, is_alone = self._own(module, own)
        except NotComparable:
            return None
        known = [child for child in children if child is not None]
        if len(known) < len(children):
            return None
        groups = [child.group for child in known]
        whole = (type(module), key, tuple(zip(names, groups, strict=True)))
        group = self._groups.setdefault(whole, Group())
        values, spots, tensors = own.values, own.spots, own.tensors
        direct = (*module._parameters.items(), *module._buffers.items())
        shards = self._of_shards
        tensors += [t for n, t in direct if t is not None and (id(module), n) not in shards]
        for part in known:
            values, spots = values + part.values, spots + part.spots
            tensors = tensors + part.tensors
            is_alone = is_alone and part.can_be_replayed
        inside = (m for child in module.children() for m in child.modules())
        is_alone = is_alone and not any(id(m) in self.sharded for m in inside)
        kind = ModuleKind(group, values, spots, tensors, is_alone)
        self.of[id(module)] = kind
        return kind

    def kind_of(self, module: nn.Module) -> ModuleKind:
        """Return the kind of a module: a unique one if it cannot be compared."""
        if id(module) not in self.of:
            kind = ModuleKind(Group(), [], [], [], False)
            kind.group.members.append(kind)
            self.of[id(module)] = kind
        return self.of[id(module)]

    def is_hooked(self, module: nn.Module) -> bool:
        """Return True if a module or a submodule has hooks now, even if they were added later."""
        return any(
            number not in self.sharded.get(id(m), ())
            for m in module.modules()
            for name in _HOOKS
            for number in vars(m).get(name) or ()
        )

    def _own(self, module: nn.Module, attributes: _Attributes) -> tuple[Hashable, bool]:
        """Return the representation of a module alone, and whether it can be replayed."""
        key: list[Hashable] = [module.training, *self._hooks(module, attributes)]
        is_alone = True
        for name, value in sorted(vars(module).items()):
            if name in OF_EVERY_MODULE or name.startswith(_COMPOSABLE):
                continue
            if name == _COMPILED:
                key.append((name, value is not None))
                continue
            key.append((name, attributes.of(value, 0, (vars(module), name))))
        for name, p in module._parameters.items():
            if p is None:
                key.append((name, None))
                continue
            if (id(module), name) in self._of_shards:  # it may be gathered now
                key.append(self._of_shards[id(module), name])
                continue
            hooks = [
                *(p._backward_hooks or {}).values(),
                *(getattr(p, "_post_accumulate_grad_hooks", None) or {}).values(),
            ]
            shared = id(p) if self._uses[id(p)] > 1 else None
            is_alone = is_alone and not hooks and shared is None
            seen = tuple(map(attributes.of, hooks))
            gathered = self._gathered.get(id(p))
            key.append((name, gathered or like(p), seen, shared))
            if gathered is not None:
                self._of_shards[id(module), name] = key[-1]
        for name, b in module._buffers.items():
            key.append((name, None if b is None else like(b)))
        return tuple(key), is_alone

    def _hooks(self, module: nn.Module, attributes: _Attributes) -> Iterator[Hashable]:
        known = self.sharded.get(id(module), set())
        flags = [vars(module).get(name) or {} for name in _FLAGS]
        for name in sorted(_HOOKS.difference(_FLAGS)):
            for number, hook in (vars(module).get(name) or {}).items():
                if number not in known:
                    yield name, attributes.of(hook), *(number in flag for flag in flags)


def like(t: Tensor) -> Hashable:
    """Return the properties of a tensor that determine its memory use.

    Raises:
        NotComparable: the layout is not strided.
    """
    if is_wrapper(t):
        names, context = t.__tensor_flatten__()  # type: ignore[attr-defined]
        # In some versions of torch the mesh is an inner tensor.
        values = [getattr(t, name) for name in names]
        parts = tuple(like(v) if isinstance(v, Tensor) else Comparison().of(v) for v in values)
        return type(t), t.shape, t.dtype, t.requires_grad, parts, Comparison().of(context)
    if t.layout != torch.strided:
        raise NotComparable
    nbytes = t.untyped_storage().nbytes()
    return (
        type(t), t.shape, t.stride(), t.storage_offset(), t.dtype, t.device, t.requires_grad, nbytes
    )  # fmt: skip


def arguments_key(
    args: Args, kwargs: Kwargs, values_of: Callable[[Tensor], Hashable]
) -> tuple[Hashable, list[Tensor]]:
    """Return the properties of a call's arguments that affect memory, and their tensors.

    Args:
        args, kwargs: the arguments.
        values_of: returns what identifies the values of a tensor if they may determine sizes.

    Raises:
        NotComparable: an argument may be changed by the call, or cannot be compared.
    """
    leaves, form = tree_flatten((args, kwargs))
    tensors: list[Tensor] = []
    key: list[Hashable] = []
    storages: dict[int, int] = {}
    for leaf in leaves:
        if isinstance(leaf, nn.Parameter):
            raise NotComparable
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
            storage = leaf.untyped_storage()._cdata if leaf.layout == torch.strided else 0
            whose = storages.setdefault(storage, len(storages))
            first = next(k for k, t in enumerate(tensors) if t is leaf)  # modules test `k is v`
            key.append((like(leaf), whose, first, values_of(leaf)))
        elif isinstance(leaf, SIMPLE):
            key.append(Comparison().of(leaf))
        else:
            raise NotComparable
    return (tuple(key), str(form)), tensors
