"""Describes a tensor by shape, strides, dtype and device, to create another like it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorSpec:
    """The shape, strides, dtype and device of a strided tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    needs_grad: bool

    @staticmethod
    def of(t: Tensor) -> TensorSpec:
        """Describe a strided tensor."""
        return TensorSpec(tuple(t.shape), t.stride(), t.dtype, t.device, t.requires_grad)

    def make(self) -> Tensor:
        """Create an uninitialised tensor with this spec. Its `requires_grad` is False."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
