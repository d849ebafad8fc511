"""What a function depends on besides its arguments: what it closes over, is bound to or names."""

from __future__ import annotations

import contextlib
import dis
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, ModuleType)
_DEEP = 4  # functions that call one another
_LONG = 256  # a container of more is data


@dataclass
class Surroundings:
    """What a call depends on, each once.

    Attributes:
        modules: that it reaches, with all in them.
        generators: that are reached, or are attributes of something that is.
        tensors: that are reached by themselves, and not given.
        devices: of tensors, given or not, but the CPU.
    """

    modules: list[nn.Module] = field(default_factory=list)
    generators: dict[torch.Generator, None] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    devices: set[torch.device] = field(default_factory=set)

    @staticmethod
    def of(fn: Callable[..., Any], leaves: Iterable[Any]) -> Surroundings:
        """Those of a call of `fn` with these leaves of its arguments."""
        found, given = Surroundings(), []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                found._add_device(leaf)
            else:
                given.append(leaf)
        for value in _reachable([fn, *given]):
            if isinstance(value, Tensor):
                found.tensors.append(value)
                found._add_device(value)
            elif isinstance(value, torch.Generator):
                found.generators[value] = None
            elif isinstance(value, nn.Module):
                found.modules.append(value)
                if not _is_of_torch(type(value)):  # saves most of the time that this takes
                    found._add_generators(value)
            else:
                found._add_generators(value)
        return found

    def _add_device(self, t: Tensor) -> None:
        if not (t.is_cpu or t.is_meta):
            self.devices.add(t.device)

    def _add_generators(self, holder: Any) -> None:
        for value in _attributes(holder).values():
            if type(value) is torch.Generator:
                self.generators[value] = None


def _reachable(roots: list[Any]) -> Iterator[Any]:
    """The objects that calls of these may read without being given them.

    They are those in the closure of a function, in its defaults, in the globals that its code
    names, and what it is bound to; the modules in a module; and all this of the functions among
    them, of the forward or __call__ of an object, and of what short lists, tuples and dictionaries
    hold.
    """
    seen: set[int] = set()
    stack = [(value, 0) for value in roots]
    while stack:
        value, depth = stack.pop()
        if isinstance(value, _PLAIN) or id(value) in seen:
            continue
        seen.add(id(value))
        inside: Iterable[Any] = ()
        if isinstance(value, functools.partial):
            inside = (value.func, *value.args, *value.keywords.values())
        elif isinstance(value, MethodType):
            inside = (value.__self__, value.__func__)
        elif isinstance(value, FunctionType):
            inside = _held(value) if not _is_of_torch(value) else ()
        elif isinstance(value, (list, tuple)) or type(value) is dict:
            inside = value.values() if isinstance(value, dict) else value
            inside = inside if len(value) <= _LONG else ()
        elif isinstance(value, nn.Module):
            types: dict[type, None] = {}
            for module in value.modules():
                if module is value or id(module) not in seen:
                    seen.add(id(module))
                    types[type(module)] = None
                    yield module
            inside = itertools.chain.from_iterable(map(_calls, types))
        else:
            yield value
            inside = _calls(type(value))
        if depth < _DEEP:
            stack += [(v, depth + 1) for v in inside]


def _attributes(value: Any) -> dict[str, Any]:
    """What an object has in its dictionary; not by asking for it, which may run code of its own."""
    try:
        found: dict[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found


def _is_of_torch(value: Any) -> bool:
    return (value.__module__ or "").startswith("torch.")


def _calls(cls: type) -> list[FunctionType]:
    """What calls of an object of a class run in Python, but for what torch defines."""
    mine = [vars(c) for c in cls.__mro__ if not _is_of_torch(c)]
    found = [c.get(name) for c in mine for name in ("forward", "__call__")]
    return [f for f in found if isinstance(f, FunctionType)]


def _held(fn: FunctionType) -> Iterator[Any]:
    for cell in fn.__closure__ or ():
        with contextlib.suppress(ValueError):  # a name that is not bound yet
            yield cell.cell_contents
    yield from fn.__defaults__ or ()
    yield from (fn.__kwdefaults__ or {}).values()
    for name in _globals(fn.__code__):
        if name in fn.__globals__:
            yield fn.__globals__[name]


@functools.lru_cache(maxsize=4096)
def _globals(code: CodeType) -> tuple[str, ...]:
    """The names of globals that code reads, and functions in it."""
    found = {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    for const in code.co_consts:
        if isinstance(const, CodeType):
            found.update(_globals(const))
    return tuple(sorted(found))
