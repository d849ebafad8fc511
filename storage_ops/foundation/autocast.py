"""Which dtype `torch.autocast` casts to where the caller stands. Compiled code may call it."""

from __future__ import annotations

import torch
from torch import Tensor

_DEVICE_TYPES = "cpu", "cuda"


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype of a device type's autocast, or None if autocast is off."""
    # torch has no autocast for the meta device, and asking raises an error.
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def cast_argument(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an argument in autocast's dtype, or unchanged if it is float64 or of integers."""
    return t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t


def autocast_dtypes() -> tuple[tuple[str, torch.dtype], ...]:
    """Return the device types whose autocast is on, of CPU and GPU, with their dtypes."""
    named = ((device_type, autocast_dtype(device_type)) for device_type in _DEVICE_TYPES)
    return tuple((device_type, dtype) for device_type, dtype in named if dtype is not None)
