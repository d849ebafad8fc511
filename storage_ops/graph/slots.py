"""Where a function finds the tensors it closes over, to read them again at each call."""

from __future__ import annotations

import collections
import functools
import operator
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, torch.dtype)
_SEQUENCES = (list, tuple, collections.deque)
_STATE = (Tensor, *_SEQUENCES, dict, type(None))
_MODULE = frozenset(vars(nn.Module()))  # its own attributes
_MAX_DEPTH = 12


@dataclass
class Slot:
    """A place that holds a tensor.

    Attributes:
        name: the place in words of the user's program.
        read: returns what the place holds now.
        write: puts something there; None where nothing can be put.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object] | None = None


@dataclass
class Closure:
    """What a function can reach: by itself, and from arguments that are no tensors.

    Attributes:
        slots: by the id of a tensor, where it was found first.
        again: tensors that were found again elsewhere, with that place.
        tensors: every tensor.
        modules: every module, with its name.
        optimizers: every optimizer.
        containers: every dict, list and namespace of an object, with its name.
        places: those that can be written, with what they hold, if that is a tensor, a container of
            some or None.
    """

    slots: dict[int, Slot]
    again: list[tuple[Tensor, Slot]]
    tensors: list[Tensor]
    modules: list[tuple[str, nn.Module]]
    optimizers: list[Optimizer]
    containers: list[tuple[str, Any]]
    places: list[tuple[Slot, Any]]


def closure_of(roots: Iterable[tuple[str, Any]]) -> Closure:
    """Every tensor, module and container that named values reach by names, attributes and items."""
    found = Closure({}, [], [], [], [], [], [])
    seen: set[int] = set()

    def visit(name: str, value: Any, slot: Slot, depth: int) -> None:
        if isinstance(value, Tensor):
            if id(value) in found.slots:
                found.again.append((value, slot))
            else:
                found.slots[id(value)] = slot
                found.tensors.append(value)
                if value.is_leaf and value.grad is not None:
                    grad = gradient_slot(slot)
                    visit(grad.name, value.grad, grad, depth + 1)
                if vars(value) and not is_traceable_wrapper_subclass(value):
                    children(name, value, slot, depth)
            return
        if id(value) in seen or depth > _MAX_DEPTH or _is_opaque(value):
            return
        seen.add(id(value))
        if isinstance(value, nn.Module):
            found.modules.append((name, value))
        elif isinstance(value, Optimizer):
            found.optimizers.append(value)
        children(name, value, slot, depth)

    def children(name: str, value: Any, slot: Slot, depth: int) -> None:
        if isinstance(value, (dict, list, collections.deque)):
            found.containers.append((name, value))
        elif hasattr(value, "__dict__"):
            found.containers.append((name, vars(value)))
        for child_name, child, child_slot in _children(name, value, slot.read, package):
            if child_slot.write is not None and isinstance(child, _STATE):
                found.places.append((child_slot, child))
            visit(child_name, child, child_slot, depth + 1)

    for root_name, root in roots:
        package = _package(root)
        visit(root_name, root, _constant(root_name, root), 0)
    return found


def gradient_slot(of: Slot) -> Slot:
    """The gradient of a leaf; zeros where it was dropped since the trace, which adds to it."""

    def read() -> Tensor:
        parameter = of.read()
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grad: Tensor = parameter.grad
        return grad

    return Slot(f"{of.name}.grad", read)


def _package(value: Any) -> str:
    return str(getattr(value, "__module__", "")).partition(".")[0]


def _is_opaque(value: Any) -> bool:
    """Whether nothing a user would train is looked for inside a value."""
    if isinstance(value, (nn.Module, Optimizer, LRScheduler, dict, *_SEQUENCES)):
        return False
    return isinstance(value, _LEAVES) or _package(type(value)) == "torch"


def _children(
    name: str, value: Any, read: Callable[[], Any], package: str
) -> Iterator[tuple[str, Any, Slot]]:
    """What a value holds, each with its name and the slot to read it from."""
    if isinstance(value, types.FunctionType):
        for place, child in enumerate(value.__closure__ or ()):
            try:
                content = child.cell_contents
            except ValueError:  # not bound yet
                continue
            label = value.__code__.co_freevars[place]
            read_cell = functools.partial(getattr, child, "cell_contents")
            write_cell = functools.partial(setattr, child, "cell_contents")
            yield label, content, Slot(label, read_cell, write_cell)
        # Names of other packages' functions lead everywhere, and not to what a user trains.
        for label in _global_names(value.__code__) if _package(value) == package else ():
            if label in value.__globals__:
                scope = value.__globals__
                content = scope[label]
                read_name = functools.partial(scope.__getitem__, label)
                write_name = functools.partial(scope.__setitem__, label)
                yield label, content, Slot(label, read_name, write_name)
        for place, content in enumerate(value.__defaults__ or ()):
            label = f"{name}.__defaults__[{place}]"
            yield label, content, _item(label, lambda: read().__defaults__, place)
        for label, content in (value.__kwdefaults__ or {}).items():
            yield label, content, _item(label, lambda: read().__kwdefaults__, label)
    elif isinstance(value, types.MethodType):
        yield name, value.__func__, Slot(name, lambda: read().__func__)
        yield "self", value.__self__, Slot("self", lambda: read().__self__)
    elif isinstance(value, functools.partial):
        parts = {"func": value.func, "args": value.args, "keywords": value.keywords}
        for label, content in parts.items():
            yield f"{name}.{label}", content, _attribute(f"{name}.{label}", read, label, False)
    elif isinstance(value, dict):
        for key, content in list(value.items()):
            label = f"{name}[{key!r}]" if isinstance(key, (str, int)) else f"{name}[...]"
            yield label, content, _item(label, read, key, True)
    elif isinstance(value, _SEQUENCES):
        for place, content in enumerate(value):
            label = f"{name}[{place}]"
            yield label, content, _item(label, read, place, not isinstance(value, tuple))
    elif isinstance(value, nn.Module):
        for part in ("_parameters", "_buffers", "_modules"):
            for key, content in getattr(value, part).items():
                label = f"{name}.{key}"
                holder = _attribute(label, read, part)
                yield label, content, _item(label, holder.read, key, True)
        for key, content in list(vars(value).items()):
            if key not in _MODULE:
                yield f"{name}.{key}", content, _attribute(f"{name}.{key}", read, key)
    else:
        if callable(value) and hasattr(value, "__dict__"):
            call = type(value).__call__
            yield name, call, Slot(name, lambda: call)
        for key, content in _attributes(value):
            yield f"{name}.{key}", content, _attribute(f"{name}.{key}", read, key)


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """What an object holds, in a namespace or in slots."""
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        for key, descriptor in vars(kind).items():
            if isinstance(descriptor, types.MemberDescriptorType) and hasattr(value, key):
                found[key] = getattr(value, key)
    return list(found.items())


def _constant(label: str, value: Any) -> Slot:
    return Slot(label, lambda: value)


def _attribute(label: str, read: Callable[[], Any], key: str, writable: bool = True) -> Slot:
    write = (lambda new: setattr(read(), key, new)) if writable else None
    return Slot(label, lambda: getattr(read(), key), write)


def _item(label: str, read: Callable[[], Any], key: Any, writable: bool = False) -> Slot:
    write = (lambda new: operator.setitem(read(), key, new)) if writable else None
    return Slot(label, lambda: read()[key], write)


def _global_names(code: types.CodeType) -> list[str]:
    """Names a function may look up in its globals, with those of the functions inside it."""
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _global_names(constant)
    return names


def plain_parts(t: Any, slot: Slot) -> Iterator[tuple[Tensor, Slot]]:
    """A tensor, or the plain tensors inside a wrapper subclass, each with its slot."""
    if not isinstance(t, Tensor):  # a wrapper may hold a mesh among its parts
        return
    if not is_traceable_wrapper_subclass(t):
        yield t, slot
        return
    for name in t.__tensor_flatten__()[0]:
        inner = Slot(f"{slot.name}.{name}", lambda n=name: getattr(slot.read(), n))
        yield from plain_parts(getattr(t, name), inner)
