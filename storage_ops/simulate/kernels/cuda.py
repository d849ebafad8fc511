"""Temporary memory that large GPU kernels allocate while they run (workspaces and partial sums).

Sizes were observed by allocation events on an H200 with torch 2.11. They are exact for attention
and reductions. For convolutions they assume the algorithm that cuDNN usually selects. For
few-channel images, and for some float32 shapes, it selects another one. Its memory without TF32
does not count.

cuBLAS keeps a workspace for each thread that has multiplied matrices. A step has two such threads,
the caller's and autograd's. torch allocates 32 MiB for each on a Hopper or Blackwell, and
2 x 4 MiB + 8 x 16 KiB on others (aten/src/ATen/cuda/CublasHandlePool.cpp), unless
CUBLAS_WORKSPACE_CONFIG says otherwise. Workspaces of the first step exist in all later ones.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format

from storage_ops.foundation.ledger import Block, Ledger
from storage_ops.foundation.ops import Args, describe
from storage_ops.loss.planning.devices import GPUS, key_of, threads_of
from storage_ops.quantities import next_multiple
from storage_ops.simulate.kernels.scratch import Gradients, Kernel, Scratch, See, factors_of

_PARTIAL = 8 << 20  # bytes of the partial sums of a weight's gradient
_PARTS = 13  # the number of partial sums
_FEW_ROWS = 3072  # up to this many indices, an embedding's gradient is summed without sorting
_BLOCK, _WARP = 512, 32  # threads
_HOPPER = 32 << 20
_OTHER = 2 * (4 << 20) + 8 * (16 << 10)
_HOPPERS = ("h100", "h200", "gh200", "b200", "gb200", "b300", "gb300", "rtx5090")
_OF_NAMES = {name: _HOPPER if name in _HOPPERS else _OTHER for name in GPUS}
THREADS = 2


def _attention(rows: int, rows_of_wide: int, width: int) -> Kernel:
    """Return the kernel of an attention backward that pads queries to `rows` and heads to `width`.

    Blocks of keys add to a float32 gradient of the queries, which has one more number per query.
    Heads with shared keys have separate gradients of the keys at first.
    """

    def kernel(scratch: Scratch, args: Args, out: tuple[Tensor, ...], see: See) -> None:
        for gradient in out[:3]:
            see(gradient)
        q, k, v = args[1:4]
        batch, heads, tokens, size = q.shape
        tokens = next_multiple(tokens, rows if size <= 64 else rows_of_wide)
        nbytes = 4 * batch * heads * tokens * (next_multiple(size, width) + 1)
        if heads > k.shape[1]:
            nbytes += (k.nbytes + v.nbytes) // k.shape[1] * heads
        scratch.use(q, nbytes)

    return kernel


def _softmax_backward(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
    see(out)
    # The product of the gradient and the output.
    product = scratch.take_bytes(args[0], args[0].numel() * args[0].itemsize)
    scratch.give_back(product + scratch.contiguous(*args[:2]))


def _embedding_backward(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
    """Count the float32 sums of up to ten indices of a row, and of whole rows."""
    see(out)
    copies = scratch.contiguous(args[0])
    indices = args[1].numel()
    if indices > _FEW_ROWS:
        scratch.use(out, 4 * out.shape[1] * (indices // 10 + min(indices, len(out))))
    scratch.give_back(copies)


def _product(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
    see(out)
    scratch.give_back(scratch.for_blas(*factors_of(args)))


def _reduction(numbers: int) -> Kernel:
    """Return the kernel of an op with `numbers` 32-bit numbers for each result."""

    def kernel(scratch: Scratch, args: Args, out: Tensor | tuple[Tensor, ...], see: See) -> None:
        results = out if isinstance(out, tuple) else (out,)
        for result in results:
            see(result)
        if len(args) > 1 and args[1]:
            scratch.use(results[0], numbers * _bytes_of_sum(args[0], args[1]))

    return kernel


def _bytes_of_sum(t: Tensor, dims: list[int]) -> int:
    """Return the temporary bytes of a sum over rows, such as a bias's gradient: partial sums.

    Work is divided as in torch's aten/src/ATen/native/cuda/Reduce.cuh.
    """
    order = [d for d in sorted(range(t.dim()), key=t.stride) if t.shape[d] > 1]
    reduced = {d % t.dim() for d in dims} if order else set()
    if not t.numel() or not order or order[0] in reduced or t.itemsize > 4:
        return 0
    width = 1  # the number of contiguous elements that are not reduced
    for d in order:
        if d in reduced or t.stride(d) != width:
            break
        width *= t.shape[d]
    rows = math.prod(t.shape[d] for d in reduced)
    outputs = t.numel() // rows
    of_thread = next(n for n in (4, 2, 1) if width % n == 0)  # outputs per thread
    across, most = _power_of_two(width // of_thread), _BLOCK // of_thread
    down = min(_power_of_two(rows), most // min(across, _WARP))
    across = min(across, most // down)
    rows_per_thread = -(-rows // down)
    if rows_per_thread < 256:
        return 0
    columns = across * of_thread
    blocks = threads_of(t.device) // (across * down)  # blocks that run at a time
    beside = -(-outputs // columns)
    if beside > blocks:
        return 0
    parts = max(min(-(-blocks // beside), -(-rows_per_thread // 16)), -(-rows_per_thread // 256))
    return 4 * outputs * parts * columns if parts > 1 else 0


def _power_of_two(size: int) -> int:
    return 1 << (min(size, _BLOCK).bit_length() - 1)


def _convolution(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
    see(out)
    scratch.use(out, _bytes_of_convolution(args[0], args[1], out, args[8]))


def _convolution_backward(scratch: Scratch, args: Args, out: Gradients, see: See) -> None:
    grad, x, weight = args[:3]
    of_x, of_weight, of_bias = out
    copies = _bytes_of_convolution(x, weight, grad, args[9])
    if of_x is not None:
        see(of_x)
        scratch.use(grad, copies)
    if of_weight is not None:
        see(of_weight)
        scratch.use(grad, copies + _bytes_of_partial_sums(x, weight, args[9]))
    if of_bias is not None:
        see(of_bias)
        scratch.use(of_bias, _bytes_of_sum(grad, [0, *range(2, grad.dim())]))


def _bytes_of_convolution(x: Tensor, weight: Tensor, y: Tensor, groups: int) -> int:
    """Return the bytes of copies for cuDNN's fast kernels: channels_last, padded to 16 bytes."""
    if not _is_for_cudnn(x, weight, groups):
        return 0
    last = _has_channels_last(x) or _has_channels_last(weight)
    if x.dtype == torch.float32 and not _has_tf32():
        return x.nbytes + weight.nbytes + y.nbytes if last else 0
    if not last and weight[0, 0].numel() == 1 and x.shape[2:] == y.shape[2:]:
        return 0  # a matrix product
    copies = x.nbytes if last and not _has_channels_last(x) else 0
    for t, dims in ((x, [1]), (weight, [0, 1]), (y, [1])):
        filled = t.nbytes
        for d in dims if groups == 1 else []:
            filled = filled // t.shape[d] * next_multiple(t.shape[d], 16 // t.itemsize)
        if not last or filled > t.nbytes:
            copies += filled
    return copies


def _has_tf32() -> bool:
    """Return True if float32 convolutions may use TF32, by torch's new settings.

    Reading the older `allow_tf32` raises an error if a new setting is in use.
    """
    cudnn: Any = torch.backends.cudnn
    settings = cudnn.conv, cudnn, torch.backends
    said = (setting.fp32_precision for setting in settings)
    return next((how for how in said if how != "none"), "none") == "tf32"


def _is_for_cudnn(x: Tensor, weight: Tensor, groups: int) -> bool:
    """Return True if a convolution uses cuDNN's fast kernels. Depthwise ones take any layout."""
    is_depthwise = groups > 1 and weight.shape[1] == 1
    by_cudnn = torch.backends.cudnn.enabled and x.dtype != torch.float64
    return by_cudnn and not is_depthwise and x.numel() > 0 and weight.numel() > 0


def _has_channels_last(t: Tensor) -> bool:
    return t.dim() in (4, 5) and suggest_memory_format(t) != torch.contiguous_format


def _bytes_of_partial_sums(x: Tensor, weight: Tensor, groups: int) -> int:
    sums = 4 * weight.numel()
    in_parts = _is_for_cudnn(x, weight, groups) and sums <= _PARTIAL
    return min(_PARTS * sums, _PARTIAL) if in_parts else 0


def workspace_bytes(device: str | torch.device | None, model: nn.Module) -> int:
    """Return the workspace bytes of one thread on a simulated device, or 0 if the GPU is unknown.

    Args:
        device: "cpu" or a GPU. None: the device of the model's parameters.
        model: the model.
    """
    name = key_of(device)
    if name in _OF_NAMES:
        return _OF_NAMES[name]
    if device is None:
        kinds = {p.device for p in model.parameters() if p.device.type == "cuda"}
        device = next(iter(kinds), None)
    here = torch.device("cpu" if device is None else key_of(device))
    if here.type != "cuda" or not torch.cuda.is_available():
        return 0
    return _HOPPER if torch.cuda.get_device_capability(here)[0] in (9, 10, 12) else _OTHER


def keep_workspaces(ledger: Ledger, nbytes: int, threads: int = THREADS) -> list[Block]:
    """Record the workspaces of `threads` threads that multiply matrices, from the start."""
    blocks = [
        Block(nbytes, (nbytes,), torch.uint8, "cuBLAS", asked=nbytes)
        for _ in range(threads)
        if nbytes
    ]
    ledger.inputs += blocks
    return blocks


describe(
    "_scaled_dot_product_flash_attention_backward.default",
    scratch_on_gpu=_attention(128, 128, 32),
)
describe(
    "_scaled_dot_product_efficient_attention_backward.default",
    scratch_on_gpu=_attention(64, 128, 64),
)
describe(
    "_scaled_dot_product_cudnn_attention_backward.default",
    scratch_on_gpu=_attention(1, 1, 1),
)
describe("_softmax_backward_data.default", scratch_on_gpu=_softmax_backward)
describe("embedding_dense_backward.default", scratch_on_gpu=_embedding_backward)
describe("mm addmm bmm baddbmm", scratch_on_gpu=_product)
describe("sum.dim_IntList mean.dim", scratch_on_gpu=_reduction(1))
# Count, count as a float, mean and sum of squares.
describe("std.correction var.correction var_mean.correction", scratch_on_gpu=_reduction(4))
describe("convolution.default", scratch_on_gpu=_convolution)
describe("convolution_backward.default", scratch_on_gpu=_convolution_backward)
