"""Ops of bitsandbytes 0.50: memory that their kernels take besides the results.

8-bit products multiply columns with outliers in 16 bits. Which columns these are depends on values.
A simulation assumes that there are none.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from storage_ops.foundation.ops import Args, describe
from storage_ops.simulate.kernels.scratch import Scratch, See

# Every GPU multiplies this many rows with 4-bit weights without dequantizing the weight.
_FEW_ROWS = 4


def _gemm_4bit(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
    """Count the dequantized weight, and before it the dequantized maxima if they are quantized."""
    x, _, shape, maxima, block = args[:5]
    if x.numel() // x.shape[-1] <= _FEW_ROWS:
        see(out)
        return
    blocks = math.ceil(math.prod(shape) / block)
    # The dequantized maxima, and their sum with the offset.
    blocks_taken = [] if maxima.numel() == blocks else scratch.take_bytes(x, 4 * blocks)
    blocks_taken += [] if maxima.numel() == blocks else scratch.take_bytes(x, 4 * blocks)
    blocks_taken += scratch.take_bytes(x, math.prod(shape) * x.itemsize)
    see(out)
    scratch.give_back(blocks_taken)


def _quantized_rows(x: Tensor, threshold: float = 0.0) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return 8-bit rows, their maxima, and no columns with outliers."""
    rows = torch.empty_like(x, dtype=torch.int8)
    maxima = x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)
    return rows, maxima, x.new_empty(0, dtype=torch.int64) if threshold > 0 else None


def _rows_on_gpu(scratch: Scratch, args: Args, out: Any, see: See) -> None:
    rows, maxima, outliers = out
    see(maxima)
    see(rows)
    if outliers is not None:  # absolute values, and a mask of those above the threshold
        x = args[0]
        scratch.give_back(scratch.take(x) + scratch.take_bytes(x, x.numel()))
        see(outliers)


def _mixed_product(x: Tensor, rows: Tensor, weight: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    """Return the product, and no columns of the input with outliers."""
    return x.new_empty(*rows.shape[:-1], len(weight)), x.new_empty(0)


def _product_on_gpu(scratch: Scratch, args: Args, out: Any, see: See) -> None:
    """Count the sums of integers, and their float16 form if the input has another dtype."""
    product = out if isinstance(out, Tensor) else out[0]
    blocks = scratch.take_bytes(product, 4 * product.numel())
    if product.dtype != torch.float16:
        blocks += scratch.take_bytes(product, 2 * product.numel())
    see(product)
    scratch.give_back(blocks)


describe("bitsandbytes::gemm_4bit", scratch=_gemm_4bit)
describe("bitsandbytes::int8_vectorwise_quant", result=_quantized_rows, scratch_on_gpu=_rows_on_gpu)
describe(
    "bitsandbytes::int8_mixed_scaled_mm", result=_mixed_product, scratch_on_gpu=_product_on_gpu
)
describe("bitsandbytes::int8_scaled_mm", scratch_on_gpu=_product_on_gpu)
