"""Frozen linear layers with quantized weights, with the memory use of the libraries' layers.

Sizes are those of bitsandbytes from 0.43 to 0.50 and of transformers 5. Kernels for few rows need
no dequantized weight. They serve the generation of tokens and are not simulated.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from storage_ops.cli.quantized.schemes import Scheme

_BLOCK = 64  # elements of a 4-bit weight with a common maximum
_NESTED = 256  # maxima with a common maximum, if they are quantized


def frozen(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    """Return a parameter on the meta device that is not trained."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)


class QuantizedLinear(nn.Linear):
    """A linear layer with a frozen and quantized weight, from `convert.linear_of`.

    PEFT treats it as a linear layer.

    Attributes:
        scheme: how the weight is stored.
        weight_dtype: dtype of the original weight and of the dequantized one.
        copies_output: whether the output is copied, as PEFT does on 4-bit layers.
    """

    weight: nn.Parameter

    def __init__(
        self, rows: int, columns: int, bias: nn.Parameter | None, dtype: torch.dtype, scheme: Scheme
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = columns, rows
        self.scheme, self.weight_dtype, self.copies_output = scheme, dtype, False
        self.register_parameter("bias", bias)
        self.requires_grad_(False)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return a weight of `dtype`, after allocating the memory of dequantizing."""
        raise NotImplementedError

    def product(self, x: Tensor) -> Tensor:
        """Return the product of the forward, outside of autograd."""
        raise NotImplementedError

    def kept(self, x: Tensor) -> Tensor | None:
        """Return the tensor that the layer keeps from its input until the backward."""
        return None

    def forward(self, x: Tensor) -> Tensor:
        """Return the product with the weight, as a new tensor."""
        output: Tensor = _Product.apply(x, self)  # type: ignore[no-untyped-call]
        return output.clone() if self.copies_output else output


class _Product(torch.autograd.Function):
    """A product that dequantizes its weight, and again for the gradient of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer, ctx.kept, ctx.dtype = layer, layer.kept(x), x.dtype
        return layer.product(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.matmul(gradient.to(ctx.dtype), ctx.layer.dequantized(ctx.dtype)), None


class Linear4bit(QuantizedLinear):
    """Like `bitsandbytes.nn.Linear4bit`: 4 bits per element, and a maximum for every 64."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        elements = self.in_features * self.out_features
        storage = self.scheme.storage
        self.weight = frozen(((elements + 1) // (2 * storage.itemsize), 1), storage)
        maxima = math.ceil(elements / _BLOCK)
        self.code = frozen((16,), torch.float32)
        if not self.scheme.name.endswith("-double"):
            self.absmax = frozen((maxima,), torch.float32)
            return
        self.absmax = frozen((maxima,), torch.uint8)
        self.nested_absmax = frozen((math.ceil(maxima / _NESTED),), torch.float32)
        self.nested_code = frozen((256,), torch.float32)
        self.offset = frozen((), torch.float32)

    def product(self, x: Tensor) -> Tensor:
        """Return the product of the forward, during which the dequantized maxima are in memory."""
        maxima = self.absmax.to(torch.float32)
        shifted = maxima if self.absmax.dtype == torch.float32 else maxima + self.offset
        output = F.linear(x, self._unpacked(x.dtype), self._bias(x.dtype))
        del maxima, shifted
        return output

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return a weight of `dtype`, after dequantizing the maxima."""
        maxima = self.absmax.to(torch.float32)
        weight = self._unpacked(dtype)
        del maxima
        return weight

    def _unpacked(self, dtype: torch.dtype) -> Tensor:
        shape, device = (self.out_features, self.in_features), self.weight.device
        return torch.empty(shape, dtype=self.weight_dtype, device=device).to(dtype)

    def _bias(self, dtype: torch.dtype) -> Tensor | None:
        return None if self.bias is None else self.bias.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product, computed in the scheme's dtype and returned in that of `x`."""
        return super().forward(x.to(self.scheme.compute)).to(x.dtype)


class Linear8bit(QuantizedLinear):
    """Like `bitsandbytes.nn.Linear8bitLt`: 8 bits per element, and a maximum for each row.

    Input columns with outliers are not simulated, because their number depends on values.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.weight = frozen((self.out_features, self.in_features), torch.int8)
        self.SCB = frozen((self.out_features,), torch.float32)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return a weight of `dtype`, scaled in place."""
        return self.weight.to(dtype).mul_(self.SCB.unsqueeze(1).mul(1 / 127))

    def product(self, x: Tensor) -> Tensor:
        """Return the product of integers, first 32-bit, then float16, then in the dtype of `x`."""
        quantized = self._rows(x.reshape(-1, x.shape[-1]).to(torch.float16))
        sums = torch.empty(len(quantized[0]), self.out_features, dtype=torch.int32, device=x.device)
        scaled = torch.empty_like(sums, dtype=torch.float16)
        if self.bias is not None and self.bias.dtype != torch.float16:
            scaled.add_(self.bias)
        return scaled.to(x.dtype).reshape(*x.shape[:-1], self.out_features)

    def _rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input in 8 bits, with a maximum for each row."""
        quantized = torch.empty_like(x, dtype=torch.int8)
        maxima = torch.empty(len(x), dtype=torch.float32, device=x.device)
        if self.scheme.outliers > 0:
            torch.ge(x.abs(), self.scheme.outliers)
        return quantized, maxima

    def kept(self, x: Tensor) -> Tensor:
        """Return the input, which bitsandbytes keeps even for a frozen weight."""
        return x


class Linear8bitFloat(QuantizedLinear):
    """Like transformers' fine-grained fp8: 8 bits per element, and a scale for each block."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        rows, columns = self.out_features, self.in_features
        self.weight = frozen((rows, columns), torch.float8_e4m3fn)
        self.weight_scale_inv = frozen(scales_of((rows, columns), self.scheme), self.scheme.scale)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return a weight of `dtype`, scaled in place by scales that are repeated for each row."""
        return scaled(self.weight, self.weight_scale_inv, self.scheme, dtype)

    def product(self, x: Tensor) -> Tensor:
        """Return the product of the weight and an input that is quantized for it."""
        quantized = torch.empty_like(x, dtype=self.weight.dtype)
        groups = math.ceil(x.shape[-1] / 128)
        scales = torch.empty(*x.shape[:-1], groups, dtype=torch.float32, device=x.device)
        output = torch.empty(*x.shape[:-1], self.out_features, dtype=x.dtype, device=x.device)
        del quantized, scales
        return output if self.bias is None else output.add_(self.bias)


def scales_of(shape: tuple[int, ...], scheme: Scheme) -> tuple[int, ...]:
    """Return the shape of a weight's scales. Its last dimensions are rows and columns."""
    if scheme.block is None:
        return ()
    blocks = (math.ceil(n / block) for n, block in zip(shape[-2:], scheme.block, strict=True))
    return *shape[:-2], *blocks


def scaled(weight: Tensor, scales: Tensor, scheme: Scheme, dtype: torch.dtype) -> Tensor:
    """Return an fp8 weight times the scales of its blocks."""
    scales, weight = scales.to(dtype), weight.to(dtype)
    if scheme.block is None:
        return weight.mul_(scales)
    scales = torch.empty(
        *scales.shape[:-2], scales.shape[-2] * scheme.block[0], scales.shape[-1],
        dtype=dtype, device=weight.device,
    )  # fmt: skip
    return weight
