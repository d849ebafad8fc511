"""Values that come from assumptions, or from the op alone: masks, choices, finite numbers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from storage_ops.foundation.op_names import Overload
from storage_ops.foundation.ops import Args, Kwargs
from storage_ops.simulate.values.assume import name_of

# Ops that return indices along a dimension, with the position of that argument.
CHOICES = {
    "topk": 2,
    "argmax": 1,
    "argmin": 1,
    "max": 1,
    "min": 1,
    "sort": 1,
    "median": 1,
    "mode": 1,
    "kthvalue": 2,
    "multinomial": None,
}


def of_finite_numbers(func: Overload, args: Args) -> bool | None:
    """Return a condition's value for all finite numbers. None if it depends on the number."""
    name = name_of(func)
    if name in ("isnan", "isinf"):
        return False
    if name not in ("eq", "ne") or len(args) < 2:
        return None
    left, right = args[:2]
    is_inf = isinstance(right, (int, float)) and math.isinf(right)
    if left is right or is_inf:
        return (name == "eq") is not is_inf
    return None


def some_true(shape: torch.Size, count: int) -> Tensor:
    """Return a mask with `count` True elements, in an order that matches no regular pattern."""
    numel = shape.numel()
    value = torch.zeros(numel, dtype=torch.bool)
    if count in (0, numel):
        return value.fill_(count > 0).view(shape)
    order = torch.randperm(numel, generator=torch.Generator().manual_seed(0))
    value[order[:count]] = True
    return value.view(shape)


def along(name: str, args: Args, kwargs: Kwargs) -> int | None:
    """Return the dimension along which an op chooses. None means all dimensions."""
    position = CHOICES[name]
    if position is None:
        return -1
    missing = None if name.startswith("arg") else -1
    dim: int | None = kwargs.get("dim", args[position] if len(args) > position else missing)
    return dim


def choices(dim: int | None, among: torch.Size, shape: torch.Size, count: int) -> Tensor:
    """Return indices of which `count` are 0, or an even share if that is more. The others are even.

    Indices in a row are different, as in topk.
    """
    options = among.numel() if dim is None else among[dim]
    # The dimension with the choices of a row, unless there is one choice for each row.
    along = dim if dim is not None and len(shape) == len(among) else None
    moved = list(shape)
    if along is not None:
        moved.append(moved.pop(along))
    position = torch.arange(shape.numel())
    if count * options <= shape.numel() or options == 1:
        value = position % options
    else:
        total = shape.numel()
        # At most one in each row.
        count = min(count, total // (moved[-1] if along is not None else 1))
        fullest = (position + 1) * count // total > position * count // total
        value = ((~fullest).cumsum(0) - 1) % (options - 1) + 1
        value[fullest] = 0
    value = value.view(moved)
    return value if along is None else value.movedim(-1, along)
