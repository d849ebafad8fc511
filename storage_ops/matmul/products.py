"""The matrix products of linear cross-entropy, into buffers that exist already."""

from __future__ import annotations

import contextlib
import functools

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.library import register_fake
from torch.utils._python_dispatch import _disable_current_modes

from storage_ops import _schemas
from storage_ops.loss import devices, tile_memory
from storage_ops.loss.tile_memory import SLICE
from storage_ops.storage import reference

for _name, _kernel in (
    ("_product", reference.product),
    ("_transposed_product", reference.transposed_product),
    ("_scale", reference.scale),
):
    _schemas.library.impl(_name, _kernel, "CompositeExplicitAutograd")
    register_fake(f"storage_ops::{_name}", lambda *args: None, lib=_schemas.library)


@functools.cache
def has_fast_products(dtype: torch.dtype, device: str) -> bool:
    """Whether products of this dtype are fast; 16-bit ones on a CPU may not be.

    There they are our own, where those exist: torch's pack their operands in as much memory as
    they like, up to several MB in AMX, whatever the budget.
    """
    if device != "cpu" or dtype.itemsize >= 4:
        return True
    if devices.has_amx() or packs(dtype, device):
        return rounds(dtype, device)
    name = "bf16" if dtype == torch.bfloat16 else "fp16"
    try:
        with _disable_current_modes():
            return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")())
    except (AttributeError, RuntimeError):
        return False


@functools.cache
def rates_of(device: torch.device) -> devices.Rates:
    """What plans for a device are made with. Of a GPU that is not known, an A100's ratios."""
    if device.type != "cuda":
        return devices.CPU
    return devices.of_gpu(torch.cuda.get_device_name(device)) or devices.GPUS["a100"]


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


@functools.cache
def packs(dtype: torch.dtype, device: str) -> bool:
    """Whether products with an fp32 result are our own, which copy operands into scratch memory.

    A CPU's 16-bit products round their result to 16 bits. Summed over many tiles, that would make
    gradients worse than those of the unchunked loss. In fp32, torch's products are Intel's, which
    are not at their best on processors of others.
    """
    if device != "cpu" or dtype == torch.float64:
        return False
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key("storage_ops::_product", "CPU")
    if not has_kernel or not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return False
    return dtype != torch.float32 or _is_of_amd()


@functools.cache
def rounds(dtype: torch.dtype, device: str) -> bool:
    """Whether products with a result in 16 bits are our own too."""
    if dtype != torch.bfloat16 or not packs(dtype, device):
        return False
    with _disable_current_modes():  # the processor is asked, not a mode of fake tensors
        one = torch.zeros(1, 1, dtype=dtype)
        scratch = torch.empty(tile_memory.packed_slots(1, 1, 1, 1))
        try:
            torch.ops.storage_ops._product(one, one, one.clone(), scratch, False)
        except RuntimeError:  # there is no instruction for it
            return False
    return True


@functools.cache
def has_row_kernel(device: str) -> bool:
    """Whether the row kernel is native on a kind of device, not plain torch."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(device)
    return key is not None and has_kernel("storage_ops::_cross_entropy_rows", key)


def traits(dtype: torch.dtype, device: str) -> dict[str, bool]:
    """What a plan has to know of the kernels here: fields of `plan_memory.Problem`."""
    return {
        "upcast": not has_fast_products(dtype, device),
        "packs": packs(dtype, device),
        "rounds": rounds(dtype, device),
        "plain": not has_row_kernel(device),
        "cuda": device == "cuda",
    }


def _is_of_amd() -> bool:
    return "AuthenticAMD" in devices.processor()


def _widens(dz: Tensor, out: Tensor) -> bool:
    """Whether a product is formed in fp32 from 16-bit operands on a CPU."""
    return upcasts(dz) or (out.dtype != dz.dtype and not dz.is_cuda)


def _pack(
    left: Tensor,
    right: Tensor,
    out: Tensor,
    add: bool,
    direct: bool = True,
    spent: Tensor | None = None,
    threads: int | None = None,
) -> None:
    """out = left @ right, or out += it, by the package's own product.

    Args:
        direct: there is little scratch for copies of `left`, which has whole rows as a rule.
        spent: left.T, if it may be overwritten.
        threads: there is scratch for so many, not for all. No more compute than it is enough for.
    """
    (m, k), n = left.shape, right.shape[1]
    rounded, threads = out.dtype != torch.float32, threads or torch.get_num_threads()
    height, slots = tile_memory.piece(m, n, k, threads, rounded, direct)
    scratch = torch.empty(slots, dtype=torch.float32)
    if spent is not None and height >= m:
        torch.ops.storage_ops._transposed_product(out, spent, right, scratch, add)
        return
    for begin in range(0, m, height or 1):
        rows = slice(begin, begin + height)
        torch.ops.storage_ops._product(out[rows], left[rows], right, scratch, add)


_adds_wide: dict[tuple[torch.device, torch.dtype, bool], bool] = {}


def adds_wide(out: Tensor, dtype: torch.dtype) -> bool:
    """Whether this torch adds 16-bit products to a matrix like `out`, and rounds neither.

    Not all that multiply do. It is tried when it is asked first, but not while a graph is captured:
    there nobody may look at a result.
    """
    key = (out.device, dtype, out.is_meta or isinstance(out, FakeTensor))
    if key not in _adds_wide:
        if out.is_cuda and not key[-1] and torch.cuda.is_current_stream_capturing():
            return False
        _adds_wide[key] = _try_to_add(*key)
    return _adds_wide[key]


def _try_to_add(device: torch.device, dtype: torch.dtype, fake: bool) -> bool:
    with contextlib.nullcontext() if fake else _disable_current_modes():
        # Neither the matrix, nor the product, nor their sum fits into 16 bits.
        parts = [
            torch.full((16, n), v, dtype=dtype, device=device) for n, v in ((1, 1), (15, 2**-6))
        ]
        left = torch.cat(parts, 1)
        out = torch.full((16, 16), 1 + 2.0**-16, device=device)
        total = out + (1 + 15 * 2.0**-12)
        try:
            torch.ops.aten.addmm.dtype_out(out, left, left.t(), out.dtype, out=out)
        except (RuntimeError, TypeError):  # the latter of fake ones, before torch 2.13
            return False
        return fake or torch.equal(out, total)


def multiply(
    left: Tensor,
    right: Tensor,
    out: Tensor,
    add: bool,
    direct: bool = False,
    threads: int | None = None,
) -> None:
    """out = left @ right, or out += it. `out` may be wider on a GPU, and where `packs` says so.

    Args:
        direct: if the product is our own, there is little scratch for copies of `left`.
        threads: there is scratch for so many, not for all.
    """
    # Of a few rows, a copy of the right operand costs more than it gains.
    few = left.dtype == out.dtype and len(left) < tile_memory.ROWS
    if out.dtype == torch.float32 and packs(left.dtype, left.device.type) and not few:
        _pack(left, right, out, add, direct, threads=threads)
    elif out.dtype != left.dtype:
        if not add:
            torch.ops.aten.mm.dtype_out(left, right, out.dtype, out=out)
        elif adds_wide(out, left.dtype):
            torch.ops.aten.addmm.dtype_out(out, left, right, out.dtype, out=out)
        else:
            for begin in range(0, len(out), SLICE):
                rows = slice(begin, begin + SLICE)
                out[rows] += torch.ops.aten.mm.dtype(left[rows], right, out.dtype)
    elif out.shape[1] == 1 and not out.is_contiguous():
        # In bf16 torch 2.10 writes only the first element of a column whose elements lie apart.
        column = torch.mm(left, right)
        out.copy_(out + column if add else column)
    elif add:
        torch.addmm(out, left, right, out=out)
    else:
        torch.mm(left, right, out=out)


def logits(x: Tensor, w: Tensor, out: Tensor, threads: int | None = None) -> None:
    """out (rows, columns) = x (rows, D) @ w (columns, D).T."""
    if rounds(x.dtype, x.device.type):
        _pack(x, w.t(), out, False, threads=threads)
    elif not upcasts(x):
        multiply(x, w.t(), out, False, True, threads)
    else:
        packed = packs(x.dtype, x.device.type)
        wide = x if packed else x.float()
        for begin in range(0, len(w), SLICE):
            columns = slice(begin, begin + SLICE)
            part = w[columns] if packed else w[columns].float()
            piece = x.new_empty(len(x), len(part), dtype=torch.float32)
            multiply(wide, part.t(), piece, False, True, threads)
            out[:, columns] = piece
            del part, piece  # or two of them are alive at a time


def bias_gradient(dz: Tensor, out: Tensor) -> None:
    """out (columns) += the sum of dz (rows, columns) over its rows, in the dtype of `out`."""
    if dz.dtype == out.dtype or dz.is_cuda:  # a GPU widens what it reads, a CPU makes a copy first
        out += dz.sum(0, dtype=out.dtype)
        return
    step = tile_memory.plain_rows(*dz.shape)
    for begin in range(0, len(dz), step):
        out += dz[begin : begin + step].to(out.dtype).sum(0)


def input_gradient(
    dz: Tensor, w: Tensor, out: Tensor, add: bool, threads: int | None = None
) -> None:
    """out (rows, D) = dz (rows, columns) @ w (columns, D), or += it."""
    if out.dtype == dz.dtype and rounds(dz.dtype, dz.device.type):
        _pack(dz, w, out, add, threads=threads)
        return
    if not _widens(dz, out):
        multiply(dz, w, out, add, True, threads)
        return
    wide = out
    if out.dtype != torch.float32:
        wide = out.float() if add else out.new_empty(out.shape, dtype=torch.float32)
    if packs(dz.dtype, dz.device.type):
        multiply(dz, w, wide, add, True, threads)
    else:
        for begin in range(0, len(w), SLICE):
            columns = slice(begin, begin + SLICE)
            multiply(dz[:, columns].float(), w[columns].float(), wide, add or begin > 0)
    if wide is not out:
        out.copy_(wide)


def weight_gradient(
    dz: Tensor, x: Tensor, out: Tensor, add: bool, threads: int | None = None
) -> None:
    """out (columns, D) = dz (rows, columns).T @ x (rows, D), or += it; dz may be overwritten."""
    packed = packs(dz.dtype, dz.device.type)
    if out.dtype == dz.dtype and rounds(dz.dtype, dz.device.type):
        _pack(dz.t(), x, out, add, False, dz, threads)
        return
    if not _widens(dz, out) or (packed and out.dtype == torch.float32):
        multiply(dz.t(), x, out, add, threads=threads)
        return
    wide = x if packed else x.float()
    for begin in range(0, len(out), SLICE):
        columns = slice(begin, begin + SLICE)
        part = dz[:, columns] if packed else dz[:, columns].float()
        piece = out[columns]
        if out.dtype == torch.float32:
            multiply(part.t(), wide, piece, add, threads=threads)
        else:
            product = piece.new_empty(piece.shape, dtype=torch.float32)
            multiply(part.t(), wide, product, False, threads=threads)
            out[columns] = product.add_(piece) if add else product
            del product  # or two of them are alive at a time
        del part  # as well
