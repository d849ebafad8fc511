"""The matrix products of linear cross-entropy, by ATen, into buffers that exist already."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from storage_ops.ops import rates
from storage_ops.ops.planner import SLICE


@functools.cache
def has_fast_products(dtype: torch.dtype, device: str) -> bool:
    """Whether ATen multiplies matrices of this dtype fast; 16-bit ones on a CPU it may not."""
    if device != "cpu" or dtype.itemsize >= 4:
        return True
    name = "bf16" if dtype == torch.bfloat16 else "fp16"
    try:
        return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")())
    except (AttributeError, RuntimeError):
        return False


@functools.cache
def rates_of(device: torch.device) -> rates.Rates:
    """What plans for a device are made with. Of a GPU that is not known, an A100's ratios."""
    if device.type != "cuda":
        return rates.CPU
    return rates.of_gpu(torch.cuda.get_device_name(device)) or rates.GPUS["a100"]


def upcasts(t: Tensor) -> bool:
    """Whether products of this tensor are formed in fp32, a slice of the weight at a time."""
    return not has_fast_products(t.dtype, t.device.type)


def takes(t: Tensor) -> bool:
    """Whether a matrix product reads this matrix in place, without a copy of it."""
    rows, columns = t.shape
    (outer, inner) = t.stride()
    if rows <= 1 or columns <= 1:
        return t.is_contiguous()
    return (inner == 1 and outer >= columns) or (outer == 1 and inner >= rows)


def _widens(dz: Tensor, out: Tensor) -> bool:
    """Whether a product is formed in fp32 from operands that are cast slice by slice.

    A CPU's 16-bit products round their result to 16 bits. Summed over many tiles, that would make
    gradients worse than those of the unchunked loss.
    """
    return upcasts(dz) or (out.dtype != dz.dtype and not dz.is_cuda)


@functools.cache
def _adds_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch adds a 16-bit product to a wider matrix; not all that multiply do."""
    left, out = torch.zeros(16, 16, dtype=dtype, device=device), torch.zeros(16, 16, device=device)
    try:
        torch.ops.aten.addmm.dtype_out(out, left, left, out.dtype, out=out)
    except RuntimeError:
        return False
    return True


def _multiply(left: Tensor, right: Tensor, out: Tensor, add: bool) -> None:
    """out = left @ right, or out += it; on a GPU `out` may be wider than the operands."""
    if out.dtype != left.dtype:
        if not add:
            torch.ops.aten.mm.dtype_out(left, right, out.dtype, out=out)
        elif _adds_wide(out.device, left.dtype):
            torch.ops.aten.addmm.dtype_out(out, left, right, out.dtype, out=out)
        else:
            for begin in range(0, len(out), SLICE):
                rows = slice(begin, begin + SLICE)
                out[rows] += torch.ops.aten.mm.dtype(left[rows], right, out.dtype)
    elif add:
        torch.addmm(out, left, right, out=out)
    else:
        torch.mm(left, right, out=out)


def logits(x: Tensor, w: Tensor, out: Tensor) -> None:
    """out (rows, columns) = x (rows, D) @ w (columns, D).T."""
    if not upcasts(x):
        torch.mm(x, w.t(), out=out)
        return
    wide = x.float()
    for begin in range(0, len(w), SLICE):
        columns = slice(begin, begin + SLICE)
        out[:, columns] = wide @ w[columns].float().t()


def input_gradient(dz: Tensor, w: Tensor, out: Tensor, add: bool) -> None:
    """out (rows, D) = dz (rows, columns) @ w (columns, D), or += it."""
    if not _widens(dz, out):
        _multiply(dz, w, out, add)
        return
    wide = out
    if out.dtype != torch.float32:
        wide = out.float() if add else out.new_empty(out.shape, dtype=torch.float32)
    for begin in range(0, len(w), SLICE):
        columns = slice(begin, begin + SLICE)
        _multiply(dz[:, columns].float(), w[columns].float(), wide, add or begin > 0)
    if wide is not out:
        out.copy_(wide)


def weight_gradient(dz: Tensor, x: Tensor, out: Tensor, add: bool) -> None:
    """out (columns, D) = dz (rows, columns).T @ x (rows, D), or += it."""
    if not _widens(dz, out):
        _multiply(dz.t(), x, out, add)
        return
    wide = x.float()
    for begin in range(0, len(out), SLICE):
        columns = slice(begin, begin + SLICE)
        part = dz[:, columns].float().t()
        if out.dtype == torch.float32:
            _multiply(part, wide, out[columns], add)
        elif add:
            out[columns] += part @ wide
        else:
            out[columns] = part @ wide
        del part  # or two of them are alive at a time
