"""What a function depends on besides its arguments: what it closes over, is bound to or names."""

from __future__ import annotations

import collections
import dis
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from storage_ops.checkpoint import code_writes

_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, ModuleType)
MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict)
CONTAINERS = (list, set, collections.deque, *MAPPINGS)  # whose contents can change
_DEEP = 4  # functions that call one another, containers in containers
LONG = 256  # the items of a container of more are data
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
Name = tuple[Any, str, Any]  # a cell or the globals, the name in it, what a function finds there


@dataclass
class Surroundings:
    """What a call depends on, each once.

    Attributes:
        modules: that it reaches, with all in them.
        generators: that are reached, or are attributes of something that is.
        tensors: that are reached by themselves, and not given.
        devices: of tensors, given or not, but the CPU.
        names: variables of enclosing functions, and globals, that its code reads, with tensors and
            modules in them.
        attributes: those of modules and other objects that are reached and are not torch's own.
        given: those of objects that are given, and containers in them.
        writes: how code among all this may write tensors (`code_writes`).
    """

    modules: list[nn.Module] = field(default_factory=list)
    generators: dict[torch.Generator, None] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    devices: set[torch.device] = field(default_factory=set)
    names: list[Name] = field(default_factory=list)
    attributes: list[dict[str, Any]] = field(default_factory=list)
    given: list[Any] = field(default_factory=list)
    writes: int = 0

    @staticmethod
    def of(fn: Callable[..., Any], given: Iterable[Any], tensors: Iterable[Tensor]) -> Surroundings:
        """Those of a call of `fn` with what is given, in which there are these tensors."""
        found = Surroundings()
        for t in tensors:
            found._add_device(t)
        roots = [(fn, 0, False), *((value, 0, True) for value in given)]
        found._reach(roots, {id(t) for t in tensors})
        return found

    def _add_device(self, t: Tensor) -> None:
        if not (t.is_cpu or t.is_meta):
            self.devices.add(t.device)

    def _add_attributes(self, attributes: dict[str, Any], given: bool) -> list[Any]:
        """Note what an object has; return its containers and modules."""
        (self.given if given else self.attributes).append(attributes)
        inside = []
        for name, value in attributes.items():
            if type(value) is torch.Generator:
                self.generators[value] = None
            elif type(value) in CONTAINERS:
                if name not in _OF_EVERY_MODULE:
                    inside.append(value)
            elif isinstance(value, nn.Module):
                inside.append(value)
        return inside

    def _reach(self, stack: list[tuple[Any, int, bool]], seen: set[int]) -> None:
        """Note what calls of these may read, but for what was seen.

        That is: what is in the closure of a function, in its defaults, in the globals that its code
        names, and what it is bound to; the modules in a module; and all this of the functions among
        them, of the forward or __call__ of an object, and of what short containers hold.

        Args:
            stack: values, how far each is from the call, and whether it is given, by itself or as a
                part of an object or container that is.
            seen: the identities of values to pass over.
        """
        while stack:
            value, depth, given = stack.pop()
            if isinstance(value, _PLAIN) or id(value) in seen:
                continue
            seen.add(id(value))
            inside: list[Any] = []
            if isinstance(value, Tensor):
                self.tensors.append(value)
                self._add_device(value)
            elif isinstance(value, functools.partial):
                inside = [value.func, *value.args, *value.keywords.values()]
            elif isinstance(value, MethodType):
                inside = [value.__self__, value.__func__]
            elif isinstance(value, FunctionType):
                if not is_of_torch(value):
                    inside = self._inside_function(value)
                given = False
            elif isinstance(value, nn.Module):
                inside, given = self._inside_module(value, seen), False
            elif type(value) in CONTAINERS or isinstance(value, tuple):
                if given and type(value) in CONTAINERS:
                    self.given.append(value)
                if len(value) <= LONG:
                    inside = list(value.values() if type(value) in MAPPINGS else value)
            elif isinstance(value, torch.Generator):
                self.generators[value] = None
            else:
                cls: Any = type(value)
                attributes = _attributes(value)
                if attributes and not is_of_torch(cls):
                    inside = self._add_attributes(attributes, given)
                    self.writes |= code_writes.of_class(cls, True)
                inside += _calls(cls)
            if depth < _DEEP:
                stack += [(v, depth + 1, given) for v in inside]

    def _inside_module(self, root: nn.Module, seen: set[int]) -> list[Any]:
        inside: list[Any] = []
        types: dict[Any, None] = {}
        for module in root.modules():
            if module is root or id(module) not in seen:
                seen.add(id(module))
                self.modules.append(module)
                types[type(module)] = None
                if not is_of_torch(type(module)):
                    found = self._add_attributes(vars(module), False)
                    # A module that is an attribute but no part is the model around, mostly.
                    inside += [value for value in found if not isinstance(value, nn.Module)]
        for cls in types:
            inside += _calls(cls)
            self.writes |= code_writes.of_class(cls)
        return inside

    def _inside_function(self, fn: FunctionType) -> list[Any]:
        self.writes |= code_writes.of_code(fn.__code__)
        names = [*_cells(fn), *_globals(fn)]
        self.names += [n for n in names if isinstance(n[2], (Tensor, nn.Module))]
        defaults = (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values())
        return [value for _, _, value in names] + list(defaults)


def _attributes(value: Any) -> dict[str, Any]:
    """What an object has in its dictionary; not by asking for it, which may run code of its own."""
    try:
        found: dict[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found


def is_of_torch(value: Any) -> bool:
    """Whether a class or a function is defined by torch."""
    return (value.__module__ or "").startswith("torch.")


@functools.lru_cache(maxsize=4096)
def _calls(cls: Any) -> tuple[FunctionType, ...]:
    """What calls of an object of a class run in Python, but for what torch defines."""
    mine = [vars(c) for c in cls.__mro__ if not is_of_torch(c)]
    found = [c.get(name) for c in mine for name in ("forward", "__call__")]
    return tuple(f for f in found if isinstance(f, FunctionType))


def _cells(fn: FunctionType) -> Iterator[Name]:
    for cell in fn.__closure__ or ():
        try:
            yield cell, "cell_contents", cell.cell_contents
        except ValueError:  # a name that is not bound yet
            continue


def _globals(fn: FunctionType) -> Iterator[Name]:
    values = fn.__globals__
    for name in names_of_globals(fn.__code__):
        if name in values and not isinstance(values[name], (type, ModuleType)):
            yield values, name, values[name]


@functools.lru_cache(maxsize=4096)
def names_of_globals(code: CodeType) -> tuple[str, ...]:
    """The names of globals that code reads, and functions in it."""
    found = {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    for const in code.co_consts:
        if isinstance(const, CodeType):
            found.update(names_of_globals(const))
    return tuple(sorted(found))
