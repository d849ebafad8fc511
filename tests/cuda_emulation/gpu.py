"""Run the loss on CPU tensors as on a GPU: its kernels, products, plans and choices."""

import contextlib
import ctypes
import functools
import warnings

import numpy as np
import pytest
import torch

from storage_ops import _autograd, matmul
from storage_ops.loss import op as loss_autograd
from storage_ops.loss import row_function
from storage_ops.loss.engine import sums
from storage_ops.loss.engine import tokens as loss_rows
from storage_ops.loss.planning import devices
from storage_ops.matmul import aten as products


def in_place(t: torch.Tensor) -> np.ndarray:
    """Return the elements of `t`, bfloat16 as bits. Torch cannot resize it after `t.numpy()`."""
    kind = np.dtype(str(t.dtype).removeprefix("torch.").replace("bfloat16", "uint16"))
    last = sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
    memory = (ctypes.c_byte * ((last + 1) * kind.itemsize if t.numel() else 0)).from_address(
        t.data_ptr()
    )
    return np.ndarray(t.shape, kind, memory, strides=[s * kind.itemsize for s in t.stride()])


def numbers(t: torch.Tensor) -> np.ndarray:
    """Return the values of a matrix in the dtype of its products' sums, without a new tensor."""
    if t.dtype == torch.bfloat16:
        wide = in_place(t).astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    wide = np.float64 if t.dtype == torch.float64 else np.float32
    return in_place(t).astype(wide, copy=False)


def write(values: np.ndarray, out: torch.Tensor) -> torch.Tensor:
    """Round values into a matrix, without a new tensor."""
    if out.dtype == torch.bfloat16:
        bits = np.ascontiguousarray(values).view(np.uint32)
        rounded = bits >> 16
        rounded &= 1  # ties round to even
        rounded += bits
        rounded += 0x7FFF
        rounded >>= 16
        rounded[np.isnan(values)] = 0x7FC0
        in_place(out)[...] = rounded
    else:
        in_place(out)[...] = values
    return out


def mm_wide(left, right, out_dtype, *, out):
    assert out.dtype == out_dtype and left.dtype == right.dtype != out_dtype
    return write(numbers(left) @ numbers(right), out)


def mm_new(left, right, out_dtype):
    out = left.new_empty(len(left), right.shape[1], dtype=out_dtype)
    return mm_wide(left, right, out_dtype, out=out)


def addmm_wide(self, left, right, out_dtype, *, beta=1, alpha=1, out):
    assert out.dtype == out_dtype == self.dtype and left.dtype == right.dtype != out_dtype
    assert beta == alpha == 1 and self.data_ptr() == out.data_ptr()
    return write(numbers(self) + numbers(left) @ numbers(right), out)


def addmm_of_an_older_torch(self, *args, **kwargs):
    raise RuntimeError("self and mat2 must have the same dtype")


def bias_gradient(dz, out):
    """Sum a bias gradient without a copy, because a GPU converts elements as it reads them."""
    in_place(out)[...] += numbers(dz).sum(0)


class Products:
    """Replaces `torch` in products. As on a GPU, 16-bit products use no memory of torch."""

    def __getattr__(self, name):
        return getattr(torch, name)

    @staticmethod
    def mm(left, right, *, out=None):
        if out is None or out.element_size() > 2:
            return torch.mm(left, right) if out is None else torch.mm(left, right, out=out)
        return write(numbers(left.detach()) @ numbers(right.detach()), out)

    @staticmethod
    def addmm(self, left, right, *, out):
        if out.element_size() > 2:
            return torch.addmm(self, left, right, out=out)
        return write(numbers(self) + numbers(left.detach()) @ numbers(right.detach()), out)


@contextlib.contextmanager
def pretended(ops, adds_wide: bool):
    """Let the loss treat CPU tensors as tensors of an H100, with `ops` as its kernels.

    Args:
        ops: the object that has the kernels.
        adds_wide: True if torch can add a product of 16-bit matrices to a wider matrix.
    """

    kernels = {
        "mm.dtype_out": mm_wide,
        "mm.dtype": mm_new,
        "addmm.dtype_out": addmm_wide if adds_wide else addmm_of_an_older_torch,
    }
    with (
        pytest.MonkeyPatch.context() as patch,
        devices.standing_for(devices.GPUS["h100"]),
        torch.library._scoped_library("aten", "IMPL") as aten,
    ):
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            for name, kernel in kernels.items():
                aten.impl(name, kernel, "CPU")
        # Tests also use the products of a CPU.
        on_gpu = functools.cache(lambda dtype, *rest: products.Aten(dtype.itemsize, cuda=True))
        patch.setattr(matmul, "of", on_gpu)
        patch.setattr(products, "_adds_wide", {})
        patch.setattr(products, "torch", Products())
        patch.setattr(sums, "bias_gradient", bias_gradient)
        patch.setattr(loss_rows, "may_count", lambda target: False)
        patch.setattr(row_function, "_OPS", ops)
        patch.setattr(loss_autograd, "_OPS", ops)
        patch.setattr(_autograd, "_OPS", ops)
        yield
