"""Copies that CPU kernels make of their operands.

Observed by allocation events with torch 2.13.

* An elementwise op computes in one dtype. Operands of another dtype are copied first. The result of
  an in-place op is copied back.
* A sum whose dtype differs from the operand's adds up a copy of the operand. So does a mean of
  16-bit numbers, in float32.
* A softmax reads contiguous copies of its operands, and so does a reduced `nll_loss`.
* Gathering and scattering of 16-bit numbers use float32 copies.
* `all` and `any` read booleans. `sort` creates the indices of a row's elements.
* MKL transforms rows that are adjacent in memory. Other inputs are copied.
* LAPACK computes a QR factorization in place of one of the results, and Q in blocks of columns.
  Several threads need a copy of a block.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from storage_ops.foundation.ledger import Block
from storage_ops.foundation.ops import Args, describe
from storage_ops.simulate.kernels.fake_tensor_gaps import count_losses
from storage_ops.simulate.kernels.scratch import Kernel, Scratch, See, of_contiguous, see_all

_LOW = (torch.bfloat16, torch.float16)


def _promoted(first: int) -> Kernel:
    """Return the kernel of an elementwise op whose operands begin at argument `first`."""

    def kernel(scratch: Scratch, args: Args, out: Any, see: See) -> None:
        tensors = [t for t in args[first:] if isinstance(t, Tensor) and t.dim()]
        dtypes = {t.dtype for t in tensors}
        if not isinstance(out, Tensor) or not dtypes or dtypes == {out.dtype}:
            return
        dtype = functools.reduce(torch.promote_types, dtypes)
        if out.dtype.is_floating_point and not dtype.is_complex:
            dtype = torch.promote_types(dtype, out.dtype)
        copies = [t for t in tensors if t.dtype != dtype]
        if out is args[0] and out.dtype != dtype:
            copies.append(out)
        taken = [b for t in copies for b in scratch.take_bytes(t, t.numel() * dtype.itemsize)]
        see(out)
        scratch.give_back(taken)

    return kernel


def _masked(scratch: Scratch, args: Args, out: Any, see: See) -> None:
    """Do not convert the mask to the dtype of the result."""
    see(out)


def _summed(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
    x: Tensor = args[0]
    see(out)
    if x.dtype != out.dtype and not x.is_complex():
        scratch.use(x, x.numel() * out.itemsize)


def _mean(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
    """Add up a float32 copy of 16-bit numbers."""
    _summed(scratch, args, out, see)
    if args[0].dtype == out.dtype and out.dtype in _LOW:
        scratch.use(args[0], 4 * args[0].numel())


def _mean_of_losses(at: int, count: int) -> Kernel:
    """Return the kernel of the mean of 16-bit losses, which makes a float32 copy.

    Args:
        at: the position of the reduction among the arguments.
        count: how many tensors of the size of all losses exist then, besides those of other rows of
            the table.
    """

    def kernel(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
        see(out)
        if out.dtype in _LOW and (len(args) <= at or args[at] == 1):
            scratch.use(out, count_losses(args) * (count * out.itemsize + 4))

    return kernel


def _in_float32(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
    see(out)
    if out.dtype in _LOW:
        scratch.use(out, 4 * out.numel())


def _scatter_reduce(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
    source, reduction = args[3], args[4]
    see(out)
    wide = 4 * out.numel() if out.dtype in _LOW else 0
    if reduction == "mean":  # a one for each element, their counts, and a mask of empty places
        scratch.use(out, source.nbytes + out.nbytes + max(wide, out.numel()))
    elif wide:
        scratch.use(out, wide)


def _kthvalue(scratch: Scratch, args: Args, out: tuple[Tensor, Tensor], see: See) -> None:
    """Select in a copy of all numbers and their indices."""
    see_all(out, see)
    scratch.use(args[0], args[0].numel() * (args[0].itemsize + out[1].itemsize))


def _sort(scratch: Scratch, args: Args, out: tuple[Tensor, Tensor], see: See) -> None:
    """Copy the indices of a row to all rows."""
    see_all(out, see)
    x, dim = args[0], args[1] if len(args) > 1 else -1  # `stable` has its own, by keyword
    if x.dim():
        scratch.use(x, x.shape[dim] * out[1].itemsize)


def _unique(scratch: Scratch, args: Args, out: tuple[Tensor, ...], see: See) -> None:
    """Sort a copy with its indices. Counts are differences of positions."""
    x, counts = args[0], out[2]
    blocks = scratch.take(x) + scratch.take_bytes(x, x.numel() * counts.itemsize)
    scratch.use(x, x.numel() * counts.itemsize)
    see_all(out, see)
    scratch.give_back(blocks + scratch.take(counts))


def _unique_consecutive(scratch: Scratch, args: Args, out: tuple[Tensor, ...], see: See) -> None:
    """Count a result of one dimension as large as the input: it is the start of a buffer."""
    x, values = args[0], out[0]
    if values.dim() == 1:
        whole = scratch.ledger.block(values, x.nbytes, scratch.name)
        scratch.ledger.see_as(values, whole)
    see_all(out, see)


def _as_booleans(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
    see(out)
    if args[0].dtype not in (torch.bool, torch.uint8):
        scratch.use(args[0], args[0].numel())


def _count_nonzero(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
    """Add up booleans along dimensions. `sum` makes a copy for that."""
    x = args[0]
    if len(args) == 1 or args[1] is None:
        return see(out)
    mask = scratch.take_bytes(x, x.numel())
    see(out)
    scratch.use(x, x.numel() * out.itemsize)
    scratch.give_back(mask)
    return None


def _median(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
    see(out)
    scratch.use(args[0], args[0].nbytes)


class _Rows:
    """The dimensions of a tensor that a Fourier transform does not transform."""

    def __init__(self, sizes: Sequence[int], strides: Sequence[int], dims: Sequence[int]) -> None:
        self.sizes, self.strides = sizes, strides
        self.dims = [dim % len(sizes) for dim in dims]
        self.others = [dim for dim in range(len(sizes)) if dim not in self.dims]
        self.others.sort(key=lambda dim: strides[dim], reverse=True)

    def are_copied(self) -> bool:
        """Return True if rows are not adjacent in memory, so that they are copied."""
        pairs = itertools.pairwise([dim for dim in self.others if self.sizes[dim] > 1])
        return any(self.strides[a] != self.strides[b] * self.sizes[b] for a, b in pairs)

    def transformed(self, dim: int) -> _Rows:
        """Return the rows for a transform of `dim` in a result whose rows are adjacent.

        The result has the sizes of the input.
        """
        strides, step = list(self.strides), 1
        for number in reversed(self.others + self.dims):
            strides[number], step = step, step * self.sizes[number]
        return _Rows(self.sizes, strides, [dim])


def _fft(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
    x, dims = args[:2]
    see(out)
    if torch.backends.mkl.is_available() and _Rows(x.shape, x.stride(), dims).are_copied():
        scratch.use(x, x.nbytes)


def _fft_to_real(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
    """Transform all dimensions except the last into a complex tensor first."""
    x, (*first, last) = args[:2]
    has_mkl, between = torch.backends.mkl.is_available(), list[Block]()
    rows = _Rows(x.shape, x.stride(), first or [last])
    if first and has_mkl:
        between = scratch.take(x)
        if rows.are_copied():
            scratch.use(x, x.nbytes)
        rows = rows.transformed(last)
    see(out)
    if has_mkl and rows.are_copied():
        scratch.use(x, x.nbytes)
    scratch.give_back(between)


def _group_norm_backward(scratch: Scratch, args: Args, out: Any, see: See) -> None:
    """Add up two numbers for each channel of an image."""
    for result in out:
        if result is not None:
            see(result)
    images, channels = args[5:7]
    scratch.use(args[0], 2 * images * channels * 4)


def _matrix_exp(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
    """Allocate powers and sums of a Taylor polynomial, of the degree for typical matrices."""
    see(out)
    scratch.use(out, 10 * out.nbytes)


def _columns_at_once(rows: int, columns: int, is_complex: bool) -> int:
    """Return how many columns of Q MKL computes at a time, as observed."""
    if is_complex:
        return 32
    if rows > 1 << 13:
        return 16 if columns <= 24 else 32
    numbers = rows * columns
    several = 128 if numbers >= 3 << 19 else 64 if numbers > 15 << 14 else 32
    return 16 if columns <= 64 else several


def _q(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
    """Compute Q from the vectors of a QR factorization."""
    see(out)
    rows, columns = out.shape[-2:]
    work = columns if torch.get_num_threads() == 1 else rows + 2 * columns
    at_once = _columns_at_once(rows, columns, out.is_complex())
    scratch.use(out, at_once * work * out.itemsize)


def _qr(scratch: Scratch, args: Args, out: tuple[Tensor, Tensor], see: See) -> None:
    """Factor the matrix in place of Q or R, or in a copy if neither is a result."""
    x, (q, r) = args[0], out
    see(r)
    copies = scratch.take(x) if not q.numel() and x.shape != r.shape else []
    scratch.use(x, 17 * x.shape[-1] * x.itemsize)  # blocks of 16 rows
    if q.numel():
        _q(scratch, args, q, see)
    else:
        see(q)
    scratch.give_back(copies)


def _euclidean_distance(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
    """Extend both operands by two columns, their norms and ones, and multiply them."""
    left, right = args[:2]
    rows = [math.prod(t.shape[:-1]) * t.itemsize for t in (left, right)]
    blocks = scratch.take_bytes(left, 2 * sum(rows))
    doubled = scratch.take(left)
    blocks += scratch.take_bytes(left, left.nbytes + 2 * rows[0])
    scratch.give_back(doubled)
    blocks += scratch.take_bytes(right, right.nbytes + 2 * rows[1])
    see(out)
    scratch.give_back(blocks)


def _complex_to_real(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
    """Compute a complex result first."""
    see(out)
    if args[0].is_complex():
        scratch.use(args[0], args[0].numel() * args[0].itemsize)


def _nll_loss(scratch: Scratch, args: Args, out: tuple[Tensor, Tensor], see: See) -> None:
    reduction = args[3]
    of_contiguous(*([0] if reduction else []))(scratch, args, out, see)


def _roll(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
    """Roll one dimension at a time, each into a new tensor."""
    dims = args[2] if len(args) > 2 else []
    taken = scratch.take(*[out] * (len(dims) - 1)) if dims else scratch.contiguous(args[0])
    see(out)
    scratch.give_back(taken)


describe("tag::pointwise", scratch_on_cpu=_promoted(0))
describe("where", scratch_on_cpu=_promoted(1))
describe("masked_fill masked_fill_ masked_scatter masked_scatter_", scratch_on_cpu=_masked)
describe("abs angle", scratch_on_cpu=_complex_to_real)
describe(
    "sum nansum prod linalg_vector_norm cumsum cumprod",
    scratch_on_cpu=_summed,
)
describe("mean", scratch_on_cpu=_mean)
describe(
    "mse_loss.default smooth_l1_loss.default huber_loss.default",
    scratch_on_cpu=_mean_of_losses(2, 1),
)
describe("soft_margin_loss.default", scratch_on_cpu=_mean_of_losses(2, 0))
describe("binary_cross_entropy.default", scratch_on_cpu=_mean_of_losses(3, 0))
describe("binary_cross_entropy_with_logits.default", scratch_on_cpu=_mean_of_losses(4, 2))
describe("gather scatter scatter_ scatter_add scatter_add_ renorm", scratch_on_cpu=_in_float32)
describe("scatter_reduce scatter_reduce_", scratch_on_cpu=_scatter_reduce)
describe("kthvalue", scratch_on_cpu=_kthvalue)
describe("linalg_matrix_exp", scratch_on_cpu=_matrix_exp)
describe("sort", scratch_on_cpu=_sort)
describe("_unique2", scratch_on_cpu=_unique)
describe("unique_consecutive", scratch_on_cpu=_unique_consecutive)
describe("all any", scratch_on_cpu=_as_booleans)
describe("count_nonzero", scratch_on_cpu=_count_nonzero)
describe("median.default nanmedian.default", scratch_on_cpu=_median)
describe("_fft_r2c _fft_c2c", scratch_on_cpu=_fft)
describe("_fft_c2r", scratch_on_cpu=_fft_to_real)
describe("native_group_norm_backward", scratch_on_cpu=_group_norm_backward)
describe("linalg_householder_product", scratch_on_cpu=_q)
describe("linalg_qr", scratch_on_cpu=_qr)
describe("_euclidean_dist", scratch_on_cpu=_euclidean_distance)
describe("_softmax _log_softmax", scratch_on_cpu=of_contiguous(0), scratch_on_gpu=of_contiguous(0))
describe("_softmax_backward_data", scratch_on_cpu=of_contiguous(0, 1))
describe(
    "_log_softmax_backward_data",
    scratch_on_cpu=of_contiguous(0, 1), scratch_on_gpu=of_contiguous(0, 1),
)  # fmt: skip
describe("nll_loss_forward", scratch_on_cpu=_nll_loss, scratch_on_gpu=of_contiguous(0))
describe("nll_loss2d_forward", scratch_on_cpu=_nll_loss, scratch_on_gpu=_nll_loss)
describe("roll", scratch_on_cpu=_roll)
