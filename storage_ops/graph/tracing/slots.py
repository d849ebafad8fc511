"""Finds the places of the tensors that a function closes over, to read them at each call."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from storage_ops.foundation.values import MODULE, OBJECT, PLAIN, TENSOR, attributes_of, is_opaque
from storage_ops.foundation.walk import GRADIENT, Visit, walk

_STATE = (Tensor, list, tuple, collections.deque, dict, type(None))


@dataclass
class Slot:
    """A place that contains a tensor.

    Attributes:
        name: the expression of the user's program for the place.
        read: returns the current value of the place.
        write: sets the value of the place. None if it cannot be set.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object] | None = None

    def value(self) -> Any:
        """Return the current value, in a call of the traced step.

        Raises:
            ValueError: the place does not exist any more.
        """
        try:
            return self.read()
        except (AttributeError, LookupError) as error:
            raise ValueError(
                f"traced step: {self.name} does not exist any more. Expected a tensor, as when "
                "traced. Trace the function again."
            ) from error


@dataclass
class Closure:
    """Values that a function can reach, by itself and from arguments that are not tensors.

    Attributes:
        slots: the first place of each tensor, by the tensor's id.
        again: tensors that are also in a second place, with that place.
        tensors: every tensor.
        modules: every module, with its name.
        optimizers: every optimizer.
        containers: every dict, list and namespace of an object, with its name.
        places: places that can be written and contain a tensor, a container of tensors or None,
            with their value.
    """

    slots: dict[int, Slot]
    again: list[tuple[Tensor, Slot]]
    tensors: list[Tensor]
    modules: list[tuple[str, nn.Module]]
    optimizers: list[Optimizer]
    containers: list[tuple[str, Any]]
    places: list[tuple[Slot, Any]]


def closure_of(roots: Iterable[tuple[str, Any]]) -> Closure:
    """Return all tensors, modules and containers that named values reach."""
    closure = Closure({}, [], [], [], [], [], [])
    for visit in walk(roots):
        value = visit.value
        if visit.kind == PLAIN and value is not None:
            continue
        slot = _slot_of(visit)
        if slot.write is not None and isinstance(value, _STATE):
            closure.places.append((slot, value))
        if visit.kind == TENSOR:
            if not visit.is_first:
                closure.again.append((value, slot))
                continue
            closure.slots[id(value)] = slot
            closure.tensors.append(value)
        elif visit.is_first and isinstance(value, nn.Module):
            closure.modules.append((slot.name, value))
        elif visit.is_first and isinstance(value, Optimizer):
            closure.optimizers.append(value)
        if visit.is_first and visit.kind != PLAIN:
            closure.containers += [(slot.name, content) for content in _contents_of(visit)]
    return closure


def _slot_of(visit: Visit) -> Slot:
    if visit.access is GRADIENT:
        assert visit.parent is not None
        return gradient_slot(_slot_of(visit.parent))
    return Slot(visit.name, visit.read, visit.write if visit.is_writable else None)


def _contents_of(visit: Visit) -> list[Any]:
    """Return a value that is a container, or the namespace of an object."""
    value = visit.value
    if isinstance(value, (dict, list, collections.deque)):
        return [value]
    if visit.kind == OBJECT and is_opaque(type(value)):
        return []
    attributes = attributes_of(value)
    return [attributes] if attributes or visit.kind in (MODULE, OBJECT) else []


def gradient_slot(of: Slot) -> Slot:
    """Return the slot of a leaf's gradient, for a trace that adds to it.

    If the gradient was dropped since the trace, the slot sets it to zeros.
    """

    def read() -> Tensor:
        parameter = of.read()
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grad: Tensor = parameter.grad
        return grad

    return Slot(f"{of.name}.grad", read)


def plain_parts(t: object, slot: Slot) -> Iterator[tuple[Tensor, Slot]]:
    """Yield a tensor, or the plain tensors inside a wrapper subclass, each with its slot."""
    if not isinstance(t, Tensor):  # a wrapper may have a mesh as an inner value
        return
    if not is_traceable_wrapper_subclass(t):
        yield t, slot
        return
    for name in t.__tensor_flatten__()[0]:
        inner = Slot(f"{slot.name}.{name}", lambda n=name: getattr(slot.read(), n))
        yield from plain_parts(getattr(t, name), inner)
