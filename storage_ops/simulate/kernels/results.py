"""Results of ops whose fake tensors are wrong or missing in torch.

A function here returns the result of an op for fake tensors, or NotImplemented if torch's own is
right for these arguments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from storage_ops.foundation.ops import describe


def _integers_counted(x: Tensor, bins: int = 100, *_: float) -> Tensor:
    """Return the bins of a histogram; torch's fake refuses integers, which GPUs count."""
    return NotImplemented if x.is_floating_point() else x.new_empty(bins)


def _given(*_: object, out: Tensor, **__: object) -> Tensor:
    """Return `out`: before torch 2.13 the fake of the op raises."""
    return out


def _nothing(*_: object, **__: object) -> None:
    """Return nothing: the op writes to its arguments, and tiles of a loss call it often."""


def _grouped_product(
    left: Tensor, right: Tensor, offsets: Tensor | None = None, *_: object, **__: object
) -> Tensor:
    """Return products of groups in rows, columns or matrices; torch's fake wants bfloat16."""
    if left.dtype == torch.bfloat16:
        return NotImplemented  # type: ignore[no-any-return]
    shape = (left.shape[-2], right.shape[-1])
    if left.dim() == right.dim() == 2 and offsets is not None:
        return left.new_empty((len(offsets), *shape))
    return left.new_empty((len(left), *shape) if left.dim() == right.dim() == 3 else shape)


describe("histc.default", result=_integers_counted)
describe("addmm.dtype_out", result=_given)
describe("_grouped_mm.default", result=_grouped_product)
describe(
    "storage_ops::_cross_entropy_rows storage_ops::_divergence_rows storage_ops::_product"
    " storage_ops::_scale storage_ops::_transposed_product",
    result=_nothing,
)
