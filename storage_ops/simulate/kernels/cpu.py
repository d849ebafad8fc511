"""What kernels of the CPU take only while they run, where that is as large as their tensors.

oneDNN convolves copies of its operands that lie in blocks of channels, the last one filled up, and
copies the result back. With Arm's Compute Library it multiplies a copy of a weight of float32.
Observed with torch 2.13 by allocation events, on AVX2, AVX-512 and an emulated aarch64. Not counted
is what products of 16 bits copy on Arm, and convolutions of 16 bits on AVX2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from storage_ops.foundation.ledger import Block
from storage_ops.foundation.ops import Args, describe
from storage_ops.matmul import aten
from storage_ops.simulate.kernels.fake_tensor_gaps import is_dense
from storage_ops.simulate.kernels.scratch import Gradients, Scratch, See

# Channels of a block. With AVX2 a vector has eight numbers of 32 bits.
_CHANNELS = 8 if torch.backends.cpu.get_cpu_capability() == "AVX2" else 16
_FEW_CHANNELS = 8  # an input of fewer is read as it is
_WIDEST = 14  # kernels that are wider are matrix products, with copies for each thread


def _take_blocked(scratch: Scratch, *images: Tensor, times: int = 1) -> list[Block]:
    """Take copies of images as oneDNN has them, in blocks of channels."""
    found = []
    for t in images:
        channels = -(-t.shape[1] // _CHANNELS) * _CHANNELS
        found += scratch.take_bytes(t, t[:, :1].numel() * channels * t.itemsize * times)
    return found


def _product(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
    if aten.has_arm_library() and _is_packed(*args[-2:]):
        see(out)
        classes, hidden = args[-1].shape[1], args[-1].shape[0]
        scratch.use(args[-1], aten.packed_bytes(classes, hidden))


def _is_packed(left: Tensor, right: Tensor) -> bool:
    """Whether Arm's library copies the right operand of a product, as of x @ w.T."""
    return left.dtype == torch.float32 and left.stride(1) == 1 and right.stride(0) == 1


def _is_blocked(weight: Tensor, strides: Sequence[int]) -> bool:
    """Whether oneDNN convolves; one thread multiplies matrices where the kernel is one element."""
    several = torch.get_num_threads() > 1 or max(strides) > 1
    return several or weight[0, 0].numel() > 1 or weight.dtype != torch.float32


def _is_product(args: Args) -> bool:
    """Whether the gradient of a weight, as of the patches of a ViT, is a product of columns."""
    weight, transposed, groups = args[2], args[7], args[9]
    plain = weight.dim() == 4 and weight.dtype == torch.float32
    return plain and not transposed and groups == 1 and weight.shape[-1] > _WIDEST


def _convolution(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
    x, weight, transposed = args[0], args[1], args[6]
    if not _is_blocked(weight, args[3]):
        again = scratch.take(out) if transposed else []
        see(out)
        scratch.give_back(again)
        return
    operands = _take_blocked(scratch, *([x] if x.shape[1] >= _FEW_CHANNELS else []))
    operands += scratch.take(weight)
    result = _take_blocked(scratch, out)
    again = scratch.take(out) if transposed else []
    scratch.give_back(operands)
    see(out)
    scratch.give_back(again + result)


def _convolution_backward(scratch: Scratch, args: Args, out: Gradients, see: See) -> None:
    grad, x, weight, strides = args[0], args[1], args[2], args[4]
    of_x, of_weight, of_bias = out
    # Such as that of a mean over an image, which is one number for all of it.
    dense = (
        []
        if is_dense(grad.shape, grad.stride())
        else scratch.take_bytes(grad, grad.numel() * grad.itemsize)
    )
    if not _is_blocked(weight, strides):
        for t in [t for t in out if t is not None]:
            see(t)
        scratch.give_back(dense)
        return
    if of_x is not None:
        operands = _take_blocked(scratch, grad) + scratch.take(weight)
        result = _take_blocked(scratch, x)
        scratch.give_back(operands)
        again = scratch.take(x) if max(strides) > 1 and not args[7] else []
        see(of_x)
        scratch.give_back(again + result)
    if of_weight is not None and _is_product(args):
        result = scratch.take(weight)
        columns = weight[0].nbytes * grad[0, 0].numel()
        sums = torch.get_num_threads() * (4 * weight.nbytes + columns)
        scratch.use(weight, sums)
        see(of_weight)
        scratch.give_back(result)
    elif of_weight is not None:
        operands = _take_blocked(scratch, grad, *([x] if x.shape[1] >= _FEW_CHANNELS else []))
        result = scratch.take(weight)
        if weight.itemsize == 2:  # sums are in float32, and each thread turns an image of both
            turned = (x[:1], grad[:1]) if weight[0, 0].numel() > 1 else ()
            sums = scratch.take(weight, times=2)
            sums += _take_blocked(scratch, *turned, times=torch.get_num_threads())
            scratch.give_back(sums)
        scratch.give_back(operands)
        see(of_weight)
        scratch.give_back(result)
    if of_bias is not None:
        see(of_bias)
    scratch.give_back(dense)


def _ctc_backward(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
    """The backward variables of CTC are as large as the forward ones."""
    see(out)
    log_alpha: Tensor = args[6]
    scratch.use(log_alpha, log_alpha.nbytes)


describe("_ctc_loss_backward", scratch_on_cpu=_ctc_backward, scratch_on_gpu=_ctc_backward)
describe("mm addmm", scratch_on_cpu=_product)
describe("convolution.default", scratch_on_cpu=_convolution)
describe("convolution_backward.default", scratch_on_cpu=_convolution_backward)
