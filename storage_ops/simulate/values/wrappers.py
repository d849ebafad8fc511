"""Tensor subclasses that wrap plain tensors, and that torch.compile decomposes.

Examples are DTensors, the states of 8-bit optimizers, quantized weights of torchao, and nested
tensors. A wrapper's own class decomposes it. The ops that it calls on the inner tensors come back
to the simulation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

_PLAIN = (FakeTensor, Tensor, nn.Parameter)


def is_wrapper_type(kind: type) -> bool:
    """Return True if a class decomposes its tensors itself."""
    return kind not in _PLAIN and hasattr(kind, "__tensor_flatten__")


def is_wrapper(t: object) -> bool:
    """Return True if a tensor's own class decomposes it."""
    return is_wrapper_type(type(t))


def inside(t: Any) -> list[Tensor]:
    """Return the plain tensors in a wrapper. A plain tensor is returned itself."""
    if not is_wrapper(t):
        return [t]
    names, _ = t.__tensor_flatten__()
    # In some versions of torch, one part of a DTensor is its mesh.
    parts = [part for name in names if isinstance(part := getattr(t, name), Tensor)]
    return [plain for part in parts for plain in inside(part)]


def rewrapped(t: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a similar wrapper around changed tensors. A plain tensor is changed itself."""
    if not is_wrapper(t):
        return change(t)
    names, context = t.__tensor_flatten__()
    parts = {name: getattr(t, name) for name in names}
    for name, part in parts.items():
        if isinstance(part, Tensor):
            parts[name] = rewrapped(part, change)
    return type(t).__tensor_unflatten__(parts, context, t.shape, t.stride())
