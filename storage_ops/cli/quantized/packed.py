"""Frozen linear layers whose weights are integers packed into int32, as GPTQ and AWQ store them.

Sizes are those of checkpoints of both methods. The memory of forward and backward is that of
GPTQModel 5 in training, which transformers 5 uses for both.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from storage_ops.cli.quantized.layers import QuantizedLinear, frozen

_WORD = 32  # bits of an element with packed integers


class PackedLinear(QuantizedLinear):
    """A layer with packed integers, and a scale and a zero for each group of inputs and output.

    Attributes:
        groups: the number of groups of inputs.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        rows, columns, bits = self.out_features, self.in_features, self.scheme.bits
        size = columns if self.scheme.group < 1 else self.scheme.group
        self.groups = math.ceil(columns / size)
        self.weight = frozen(self._packed_shape(), torch.int32)
        self.qzeros = frozen((self.groups, rows * bits // _WORD), torch.int32)
        self.scales = frozen((self.groups, rows), torch.float16)

    def _packed_shape(self) -> tuple[int, int]:
        raise NotImplementedError

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return a weight of `dtype`, with inputs first. A fused kernel creates it in float16."""
        shape = self.in_features, self.out_features
        return torch.empty(shape, dtype=torch.float16, device=self.weight.device).to(dtype)


class GptqLinear(PackedLinear):
    """A layer of GPTQ, packed along its inputs. Autograd keeps the weight for the backward."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.g_idx = frozen((self.in_features,), torch.int32)  # the group of each input

    def _packed_shape(self) -> tuple[int, int]:
        return self.in_features * self.scheme.bits // _WORD, self.out_features

    def forward(self, x: Tensor) -> Tensor:
        """Return the product by torch's own ops, whose backward multiplies by the kept weight."""
        rows = x.reshape(-1, x.shape[-1])
        output = torch.matmul(rows, self.dequantized(x.dtype)).reshape(*x.shape[:-1], -1)
        return output if self.bias is None else output.add_(self.bias)


class AwqLinear(PackedLinear):
    """A layer of AWQ, packed along its outputs. Products and their inputs are in float16."""

    def _packed_shape(self) -> tuple[int, int]:
        return self.in_features, self.out_features * self.scheme.bits // _WORD

    def forward(self, x: Tensor) -> Tensor:
        """Return the product, in the dtype of `x`."""
        output: Tensor = _AwqProduct.apply(x.half(), self)  # type: ignore[no-untyped-call]
        return output.to(x.dtype)


class _AwqProduct(torch.autograd.Function):
    """A product that keeps its input, and dequantizes the weight in forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: AwqLinear) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        output = torch.matmul(x, layer.dequantized(x.dtype))
        return output if layer.bias is None else output + layer.bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        weight = ctx.layer.dequantized(gradient.dtype).t()
        # The kernel multiplies each sequence of a batch by its own copy of the weight.
        copies = weight.unsqueeze(0).repeat(len(gradient), 1, 1)
        return torch.bmm(gradient, copies), None
