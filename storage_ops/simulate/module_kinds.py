"""Which calls of modules do the same to memory: alike modules, with alike arguments."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from storage_ops.simulate.ranks.fsdp import sharded_modules, sharded_parameters

FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
SIMPLE = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout,
    torch.memory_format, enum.Enum, type, *FUNCTIONS,
)  # fmt: skip
_HOOKS = {
    "_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs",
}  # fmt: skip
_OWN = {"_parameters", "_buffers", "_modules"}
_COMPOSABLE = "__composable_api"  # what torch keeps of fully_shard in the module
_DEPTH = 6  # of objects in objects


class Unlike(Exception):
    """Something that cannot be compared, or that may do more than computing."""


class LayerNumber:
    """What stands for the number of a layer while a call is recorded: whoever looks at it fails."""

    def _fail(self, *args: Any) -> Any:
        raise Unlike

    __eq__ = __ne__ = __hash__ = __bool__ = __str__ = __repr__ = __format__ = _fail


class Kinds:
    """Numbers for the modules of a model: the same for modules that are built alike.

    Attributes:
        of: by the id of a module, its number. Missing are modules that have hooks, whose
            parameters have hooks or belong to others too, or that cannot be compared.
        counts: how many modules have a number.
        places: by the id of a module, its attributes that are its number among its siblings.
        sharded: by the id of a module of FSDP2, the numbers of FSDP's hooks. It has a number for
            what it does below them, and what it is in has none.
    """

    def __init__(self, model: nn.Module) -> None:
        self.of: dict[int, int] = {}
        self.counts: Counter[int] = Counter()
        self.places: dict[int, list[str]] = {}
        self._numbers: dict[Hashable, int] = {}
        self.sharded = sharded_modules(model)
        self._gathered = sharded_parameters(model)
        self._uses = Counter(id(p) for m in model.modules() for p in m._parameters.values())
        self._place_names = _place_names(model)
        self._visit(model, ())

    def _visit(self, module: nn.Module, places: tuple[int, ...]) -> int | None:
        """Number a module and those in it; `places` are its ancestors' numbers in their lists."""
        children: list[Any] = []
        for name, child in module.named_children():
            inside = (*places, int(name)) if name.isdecimal() else places
            children.append((None if name.isdecimal() else name, self._visit(child, inside)))
        try:
            own = self._own(module, places)
        except Unlike:
            return None
        if any(number is None for _, number in children):
            return None
        key = (type(module), own, tuple(children))
        number = self._numbers.setdefault(key, len(self._numbers))
        self.of[id(module)] = number
        self.counts[number] += 1
        return None if id(module) in self.sharded else number

    def is_hooked(self, module: nn.Module) -> bool:
        """Return True if somebody hooks a module or one in it, perhaps since it got its number."""
        return any(map(self._has_hooks, module.modules()))

    def _has_hooks(self, module: nn.Module) -> bool:
        known = self.sharded.get(id(module), set())
        return any(set(found) - known for name in _HOOKS if (found := vars(module).get(name)))

    def _own(self, module: nn.Module, places: tuple[int, ...]) -> Hashable:
        if self._has_hooks(module):
            raise Unlike
        key: list[Hashable] = []
        for name, value in sorted(vars(module).items()):
            if name in _OWN or "state_dict" in name or name.startswith(_COMPOSABLE):
                continue
            if name in _HOOKS:
                continue
            if (type(module), name) in self._place_names and value in places:
                self.places.setdefault(id(module), []).append(name)
                key.append((name, "place", places.index(value)))
            else:
                key.append((name, comparable(value)))
        for name, p in module._parameters.items():
            if p is not None and (
                p._backward_hooks
                or getattr(p, "_post_accumulate_grad_hooks", None)
                or self._uses[id(p)] > 1
            ):
                raise Unlike
            gathered = self._gathered.get(id(p))
            key.append((name, None if p is None else gathered or like(p)))
        for name, b in module._buffers.items():
            key.append((name, None if b is None else like(b)))
        return tuple(key)


def _place_names(model: nn.Module) -> set[tuple[type, str]]:
    """Classes and their attributes that are, in each module in a list, its number in that list."""
    values: dict[tuple[type, str], list[tuple[int, bool]]] = {}
    for path, module in model.named_modules():
        places = {int(part) for part in path.split(".") if part.isdecimal()}
        for name, value in vars(module).items():
            if places and type(value) is int:
                values.setdefault((type(module), name), []).append((value, value in places))
    return {
        key
        for key, found in values.items()
        if all(is_place for _, is_place in found) and len({value for value, _ in found}) > 1
    }


def like(t: Tensor) -> Hashable:
    """What of a tensor decides over memory."""
    if t.layout != torch.strided:
        raise Unlike
    nbytes = t.untyped_storage().nbytes()
    return (
        type(t), t.shape, t.stride(), t.storage_offset(), t.dtype, t.device, t.requires_grad, nbytes
    )  # fmt: skip


def identity(value: Any, depth: int) -> Hashable:
    """What tells a value from all others that are there."""
    return ("the same object", id(value))


def comparable(
    value: Any, depth: int = 0, opaque: Callable[[Any, int], Hashable] = identity
) -> Hashable:
    """Something equal for values that do the same; its `repr` is equal as well.

    Args:
        value: anything.
        depth: of it in the value that was asked for.
        opaque: what stands for functions and for objects that are not looked into.

    Raises:
        Unlike: the value cannot be compared.
    """
    inside = functools.partial(comparable, depth=depth + 1, opaque=opaque)
    if isinstance(value, FUNCTIONS):
        return opaque(value, depth)
    if isinstance(value, SIMPLE):
        return (type(value), value) if not isinstance(value, float) else ("float", repr(value))
    if depth > _DEPTH:
        raise Unlike
    if isinstance(value, (list, tuple)):
        return (type(value), *map(inside, value))
    if isinstance(value, (set, frozenset)):
        return (type(value), *sorted(map(inside, value), key=repr))
    if isinstance(value, Mapping):
        return (type(value), *((inside(k), inside(v)) for k, v in value.items()))
    if dataclasses.is_dataclass(value):
        fields = tuple((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        return (type(value), inside(fields))
    if isinstance(value, functools.partial):
        return ("partial", inside((value.func, value.args, value.keywords)))
    return opaque(value, depth)


def arguments_key(args: Any, kwargs: Any) -> tuple[Hashable, list[Tensor]]:
    """What of a call's arguments decides over memory, and the tensors among them.

    Raises:
        Unlike: an argument may be changed by the call, or cannot be compared.
    """
    leaves, form = tree_flatten((args, kwargs))
    tensors: list[Tensor] = []
    key: list[Hashable] = []
    storages: dict[int, int] = {}
    for leaf in leaves:
        if isinstance(leaf, nn.Parameter):
            raise Unlike
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
            storage = leaf.untyped_storage()._cdata if leaf.layout == torch.strided else 0
            # The values of numbers that are not floating-point may decide over sizes.
            whose = storages.setdefault(storage, len(storages)) if leaf.is_floating_point() else (
                "values of", storage
            )  # fmt: skip
            version = leaf._version if not leaf.is_floating_point() else 0
            first = next(k for k, t in enumerate(tensors) if t is leaf)  # modules ask `k is v`
            key.append((like(leaf), whose, version, first))
        elif isinstance(leaf, SIMPLE):
            key.append(comparable(leaf))
        else:
            raise Unlike
    return (tuple(key), str(form)), tensors
