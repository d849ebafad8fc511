"""Copies that CPU kernels make of their operands, as large as the operands.

Observed by allocation events with torch 2.13.

* An op of single elements computes in one dtype. Operands of another dtype are copied first, and
  the result of an op in place is written back from a copy.
* A sum in another dtype than that of its operand adds up a copy of the operand.
* A softmax reads contiguous copies of its operands, and so does a reduced `nll_loss`.
* Gathering and scattering 16-bit numbers work on float32.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from storage_ops.foundation.ops import Args, describe
from storage_ops.simulate.kernels.scratch import Kernel, Scratch, See, of_contiguous

_LOW = (torch.bfloat16, torch.float16)


def _promoted(first: int) -> Kernel:
    """Return the kernel of an op of single elements whose operands begin at argument `first`."""

    def kernel(scratch: Scratch, args: Args, out: Any, see: See) -> None:
        given = [t for t in args[first:] if isinstance(t, Tensor) and t.dim()]
        dtypes = {t.dtype for t in given}
        if not isinstance(out, Tensor) or not dtypes or dtypes == {out.dtype}:
            return
        dtype = functools.reduce(torch.promote_types, dtypes)
        if out.dtype.is_floating_point and not dtype.is_complex:
            dtype = torch.promote_types(dtype, out.dtype)
        copies = [t for t in given if t.dtype != dtype]
        if out is args[0] and out.dtype != dtype:
            copies.append(out)
        taken = [b for t in copies for b in scratch.take_bytes(t, t.numel() * dtype.itemsize)]
        see(out)
        scratch.give_back(taken)

    return kernel


def _masked(scratch: Scratch, args: Args, out: Any, see: See) -> None:
    """Read the mask as it is, not in the dtype of the result."""
    see(out)


def _summed(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
    x: Tensor = args[0]
    see(out)
    if x.dtype != out.dtype and not x.is_complex():
        scratch.use(x, x.numel() * out.itemsize)


def _gather(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
    see(out)
    if out.dtype in _LOW:
        scratch.use(out, 4 * out.numel())


def _scatter_reduce(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
    source, reduction = args[3], args[4]
    see(out)
    wide = 4 * out.numel() if out.dtype in _LOW else 0
    if reduction == "mean":  # a one for each element, how many there are, and where there is none
        scratch.use(out, source.nbytes + out.nbytes + max(wide, out.numel()))
    elif wide:
        scratch.use(out, wide)


def _kthvalue(scratch: Scratch, args: Args, out: tuple[Tensor, Tensor], see: See) -> None:
    """Select in a copy of all numbers and of their indices."""
    for result in out:
        see(result)
    scratch.use(args[0], args[0].numel() * (args[0].itemsize + out[1].itemsize))


def _matrix_exp(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
    """Take powers and sums of a Taylor polynomial of the degree that usual matrices need."""
    see(out)
    scratch.use(out, 10 * out.nbytes)


def _renorm(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
    see(out)
    if out.dtype in _LOW:
        scratch.use(out, 4 * out.numel())


def _euclidean_distance(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
    """Multiply both sides with their norms and ones as two more columns."""
    left, right = args[:2]
    rows = [math.prod(t.shape[:-1]) * t.itemsize for t in (left, right)]
    taken = scratch.take_bytes(left, 2 * sum(rows))
    doubled = scratch.take(left)
    taken += scratch.take_bytes(left, left.nbytes + 2 * rows[0])
    scratch.give_back(doubled)
    taken += scratch.take_bytes(right, right.nbytes + 2 * rows[1])
    see(out)
    scratch.give_back(taken)


def _complex_to_real(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
    """Compute a complex result first."""
    see(out)
    if args[0].is_complex():
        scratch.use(args[0], args[0].numel() * args[0].itemsize)


def _nll_loss(scratch: Scratch, args: Args, out: tuple[Tensor, Tensor], see: See) -> None:
    reduction = args[3]
    of_contiguous(*([0] if reduction else []))(scratch, args, out, see)


def _roll(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
    """Roll one dimension after the other, each into a new tensor."""
    dims = args[2] if len(args) > 2 else []
    taken = scratch.take(*[out] * (len(dims) - 1)) if dims else scratch.contiguous(args[0])
    see(out)
    scratch.give_back(taken)


describe("tag::pointwise", scratch_on_cpu=_promoted(0))
describe("where", scratch_on_cpu=_promoted(1))
describe("masked_fill masked_fill_ masked_scatter masked_scatter_", scratch_on_cpu=_masked)
describe("abs angle", scratch_on_cpu=_complex_to_real)
describe(
    "sum nansum mean prod linalg_vector_norm cumsum cumprod",
    scratch_on_cpu=_summed,
)
describe("gather", scratch_on_cpu=_gather)
describe("scatter scatter_ scatter_add scatter_add_", scratch_on_cpu=_gather)
describe("scatter_reduce scatter_reduce_", scratch_on_cpu=_scatter_reduce)
describe("kthvalue", scratch_on_cpu=_kthvalue)
describe("linalg_matrix_exp", scratch_on_cpu=_matrix_exp)
describe("renorm", scratch_on_cpu=_renorm)
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
