"""What a function depends on besides its arguments: what it closes over, is bound to or names."""

from __future__ import annotations

import contextlib
import dis
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, ModuleType)
_DEEP = 4  # functions that call one another


@dataclass
class Surroundings:
    """What a call depends on, each once.

    Attributes:
        modules: that it reaches, with all in them.
        generators: that are reached, or are attributes of something that is.
        tensors: that are reached but not given; parameters and buffers of the modules.
        devices: of tensors, given or not, but the CPU.
    """

    modules: dict[nn.Module, None] = field(default_factory=dict)
    generators: dict[torch.Generator, None] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    devices: set[torch.device] = field(default_factory=set)

    @staticmethod
    def of(fn: Callable[..., Any], leaves: Iterable[Any]) -> Surroundings:
        """Those of a call of `fn` with these leaves of its arguments."""
        found = Surroundings()
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                found._add(leaf)
            elif not (leaf.is_cpu or leaf.is_meta):
                found.devices.add(leaf.device)
        for value in _reachable(fn):
            found._add(value)
        for module in found.modules:
            if not _is_of_torch(type(module)):  # saves most of the time that this takes
                found._add_generators(module)
            for tensors in (module._parameters, module._buffers):
                if tensors:
                    found.tensors += [t for t in tensors.values() if t is not None]
        return found

    def _add(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self.tensors.append(value)
            if not (value.is_cpu or value.is_meta):
                self.devices.add(value.device)
        elif isinstance(value, nn.Module):
            self.modules.update(dict.fromkeys(value.modules()))
        elif isinstance(value, torch.Generator):
            self.generators[value] = None
        else:
            self._add_generators(value)

    def _add_generators(self, holder: Any) -> None:
        for value in getattr(holder, "__dict__", {}).values():
            if type(value) is torch.Generator:
                self.generators[value] = None


def _reachable(fn: Callable[..., Any]) -> Iterator[Any]:
    """The objects that a call of `fn` may read without being given them.

    They are those in its closure, its defaults, the globals that its code names, and what it is
    bound to; for a module, also those of the forwards in it; and all this of functions among them.
    """
    seen: set[int] = set()
    stack: list[tuple[Any, int]] = [(fn, 0)]
    while stack:
        value, depth = stack.pop()
        if isinstance(value, _PLAIN) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, functools.partial):
            inside = (value.func, *value.args, *value.keywords.values())
            stack += [(v, depth) for v in inside]
        elif isinstance(value, MethodType):
            stack += [(value.__self__, depth), (value.__func__, depth)]
        elif isinstance(value, FunctionType):
            if depth < _DEEP and not _is_of_torch(value):
                stack += [(v, depth + 1) for v in _held(value)]
        else:
            yield value
            if isinstance(value, nn.Module):
                types = {type(m) for m in value.modules()}
                stack += [(t.forward, depth + 1) for t in types if not _is_of_torch(t)]


def _is_of_torch(value: Any) -> bool:
    return (value.__module__ or "").startswith("torch.")


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
    """The names of globals that code reads."""
    found = {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    return tuple(sorted(found))
