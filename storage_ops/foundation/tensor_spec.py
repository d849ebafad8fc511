"""Describes a tensor by shape, strides, dtype and device, so that another can take its place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorSpec:
    """A strided tensor without its bytes and its history."""

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
        """Create an uninitialised tensor with this spec. It requires no gradient yet."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
