"""Copies of images and weights in oneDNN's convolutions on a CPU.

oneDNN stores the channels of an image in blocks and pads the last block. It computes a transposed
convolution as the gradient of an untransposed one. So `_Call` describes both, with the *inner*
image as the input of the untransposed one. Observed with torch 2.13 by allocation events and
`ONEDNN_VERBOSE=1`, on AVX2 and AVX-512:

| computed | images |
|---|---|
| result | in blocks; inner images with fewer channels than a block are not copied |
| gradient of the inner image | in blocks; in channels_last with strides |
| gradient of the weight | in blocks; in smaller ones for an inner image with few channels |

Images of small groups are not copied, except for results, which torch copies from oneDNN's memory.

Float32 images in channels_last format are read and written without a copy, if the convolution is
not transposed. Their weights are copied to that format, and from it into blocks. torch copies a
gradient whose format is not that of the image. Gradients of some weights use a matrix product of
columns for contiguous images, and wide blocks for channels_last (AVX-512 only):

* weights of groups that are small or dilated
* weights of one channel each that are dilated, wider than three elements or than their padding
  allows, or larger than the image
* on AVX2, weights that are dilated or higher than the image, and those of volumes with padding

The buffers of a single thread do not count. `native_convolutions.py` has the convolutions that
torch computes itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from storage_ops.foundation.ledger import Block
from storage_ops.foundation.ops import Args, describe
from storage_ops.quantities import next_multiple
from storage_ops.simulate.kernels.fake_tensor_gaps import memory_format_of
from storage_ops.simulate.kernels.native_convolutions import native_kernel
from storage_ops.simulate.kernels.scratch import Gradients, Scratch, See

_IS_AVX2 = torch.backends.cpu.get_cpu_capability() == "AVX2"
# Channels of a block. An AVX2 vector has eight float32 numbers.
_CHANNELS = 8 if _IS_AVX2 else 16
_SMALL = 8  # channels of a block that is smaller than an AVX-512 vector
_SMALLEST = 8 if _IS_AVX2 else 4  # smallest block for a group of channels
# With up to this many channels, the gradient of a weight reads the image without a copy.
_COLORS = 3
_AS_IT_IS, _DENSE = 0, 1  # blocks of images without a copy, and of copies without padding
_WIDEST_OF_CHANNEL = 3  # widest kernels of one channel for which oneDNN has special code
_WIDEST = 14  # wider kernels become matrix products, with copies for each thread


class _Blocks(NamedTuple):
    """The block sizes in the copies of a convolution's operands, in channels.

    Attributes:
        inner: for the image that an untransposed convolution reads.
        outer: for the image that an untransposed convolution writes.
        weight: for the weight, along the outer and the inner channels.
    """

    inner: int
    outer: int
    weight: tuple[int, int]


class _Call(NamedTuple):
    """A convolution. The weight's second dimension has the inner channels, even if transposed."""

    weight: Tensor
    strides: Sequence[int]
    groups: int

    @property
    def is_of_channels(self) -> bool:
        """Return True if each channel is convolved separately."""
        outer, inner = self.weight.shape[0] // self.groups, self.weight.shape[1]
        return self.groups > 1 and outer == inner == 1

    @property
    def is_channels_last(self) -> bool:
        """Return True if the gradient of the inner image is computed with channels last."""
        return self.groups == 1 and max(self.strides) > 1

    def of_result(self) -> _Blocks:
        """Return the blocks for the convolution itself."""
        if self.groups > 1:
            blocks = self._of_groups(_SMALLEST)
            return blocks._replace(outer=max(blocks.outer, _DENSE))
        if self._is_pointwise() or self.weight.shape[1] >= _CHANNELS:
            return _all(_CHANNELS)
        return _Blocks(_AS_IT_IS, _CHANNELS, (_CHANNELS, 1))

    def of_gradient(self) -> _Blocks:
        """Return the blocks for the gradient of the inner image."""
        if self.groups > 1:
            blocks = self._of_groups(_SMALLEST)
            return blocks._replace(inner=max(blocks.inner, _DENSE))
        if self.is_channels_last:
            return _Blocks(_DENSE, _DENSE, (1, _CHANNELS))
        return _all(_CHANNELS)

    def of_weight(self, transposed: bool) -> _Blocks:
        """Return the blocks for the gradient of the weight."""
        if self.groups > 1:
            return self._of_groups(_SMALL, transposed)
        channels = self.weight.shape[1]
        if self._is_pointwise() or channels >= _CHANNELS:
            return _all(_CHANNELS)
        return _all(_SMALL) if channels > _COLORS else _Blocks(0, _CHANNELS, (_CHANNELS, 1))

    def _is_pointwise(self) -> bool:
        return self.weight[0, 0].numel() == 1

    def _of_groups(self, smallest: int, is_product: bool = False) -> _Blocks:
        """Return the blocks for groups, which are as large as the channels of a group allow."""
        outer, inner = self.weight.shape[0] // self.groups, self.weight.shape[1]
        if self.is_of_channels and not is_product:
            return _Blocks(_CHANNELS, _CHANNELS, (_CHANNELS, 1))
        whole = outer % smallest == inner % smallest == 0
        return _all(_DENSE if whole else _AS_IT_IS)


def _all(channels: int) -> _Blocks:
    return _Blocks(channels, channels, (channels, channels))


def _take_image(scratch: Scratch, image: Tensor, block: int) -> list[Block]:
    if block == _AS_IT_IS or (block == _DENSE and image.shape[1] == 1):
        return []
    channels = next_multiple(image.shape[1], block)
    return scratch.take_bytes(image, image[:, :1].numel() * channels * image.itemsize)


def _take_weight(scratch: Scratch, weight: Tensor, blocks: tuple[int, int]) -> list[Block]:
    outer, inner = blocks
    if outer == _AS_IT_IS:
        return []
    channels = next_multiple(weight.shape[0], outer) * next_multiple(weight.shape[1], inner)
    return scratch.take_bytes(weight, weight[0, 0].numel() * channels * weight.itemsize)


def _is_product(args: Args) -> bool:
    """Return True if the gradient of a weight is a product of columns, as for a ViT's patches."""
    weight: Tensor = args[2]
    strides, dilation, transposed, groups = args[4], *args[6:8], args[9]
    if weight.dtype != torch.float32 or transposed:
        return False
    call = _Call(weight, strides, groups)
    if call.is_of_channels and weight.dim() <= 4:
        return not _has_own_code(args)
    if _IS_AVX2 and _is_product_on_avx2(args):
        return True
    if weight.dim() > 4:
        return False
    whole = groups == 1 or call.of_weight(transposed).outer != _AS_IT_IS
    return not whole or weight.shape[-1] > _WIDEST or (groups > 1 and max(dilation) > 1)


def _is_product_on_avx2(args: Args) -> bool:
    x, weight, padding, dilation = *args[1:3], *args[5:7]
    if weight.dim() == 4 and weight.shape[2] > x.shape[2]:
        return True
    return bool(max(dilation) > 1 or (weight.dim() > 4 and padding[0] > 0))


def _has_own_code(args: Args) -> bool:
    """Return True if oneDNN has code for the gradient of kernels of one channel, as in `args`."""
    x, weight, strides, padding, dilation = *args[1:3], *args[4:7]
    kernel = weight.shape[2:]
    sizes = zip(kernel, padding, strict=False)  # one number of padding can be for all dimensions
    narrow = all(n <= _WIDEST_OF_CHANNEL and p <= n // 2 for n, p in sizes)
    rows = kernel[0] + -padding[0] % strides[0]
    return narrow and max(dilation) == 1 and (len(kernel) == 1 or x.shape[2] >= rows)


def _is_channels_last(image: Tensor, weight: Tensor) -> bool:
    """Return True if torch passes an image to oneDNN in channels_last format."""
    formats = (memory_format_of(image), memory_format_of(weight))
    return weight.dtype == torch.float32 and torch.channels_last in formats


def _take_weight_twice(scratch: Scratch, call: _Call, blocks: tuple[int, int]) -> list[Block]:
    """Record copies of the weight in blocks and, unless it has this format, in channels_last."""
    weight, blocks = call.weight, (1, 1) if call.groups > 1 else blocks
    is_last = weight.is_contiguous(memory_format=torch.channels_last)
    blocks = (_CHANNELS, 1) if call.is_of_channels else blocks
    return ([] if is_last else scratch.take(weight)) + _take_weight(scratch, weight, blocks)


def _take_gradient_of_last(scratch: Scratch, call: _Call, args: Args) -> list[Block]:
    """Record the gradient of a weight of channels_last images, in blocks and in plain format."""
    weight = call.weight
    if call.groups == 1:
        blocks = call.of_weight(False).weight
        return scratch.take(weight) + _take_weight_twice(scratch, call, blocks)
    result = scratch.take(weight)
    if call.is_of_channels and _has_own_code(args):
        return result + _take_weight_twice(scratch, call, (_CHANNELS, 1))
    outer, inner = (
        next_multiple(n, _CHANNELS) for n in (len(weight) // call.groups, weight.shape[1])
    )
    filled = call.groups * outer * inner * weight[0, 0].nbytes
    copied = [] if call.is_of_channels else scratch.take(weight)
    return result + copied + scratch.take_bytes(weight, filled)


def _convolution(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
    x, weight = args[:2]
    if native := native_kernel(x, weight, args[3:9]):
        native.compute(scratch, x, out, see)
        return
    is_last = _is_channels_last(x, weight)
    dense = scratch.contiguous(x, memory_format=_format(is_last))
    _convolution_of_dense(scratch, args, out, see)
    scratch.give_back(dense)


def _format(is_last: bool) -> torch.memory_format:
    return torch.channels_last if is_last else torch.contiguous_format


def _convolution_of_dense(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
    x, weight, strides, transposed, groups = args[0], args[1], args[3], args[6], args[8]
    call = _Call(weight, strides, groups)
    if _is_channels_last(x, weight):
        operands = _take_weight_twice(scratch, call, (_CHANNELS, 1))
        see(out)
        scratch.give_back(operands)
        return
    blocks = call.of_gradient() if transposed else call.of_result()
    read, written = blocks[:2] if not transposed else blocks[1::-1]
    operands = _take_image(scratch, x, read) + _take_weight(scratch, weight, blocks.weight)
    result = _take_image(scratch, out, written)
    if transposed and args[2] is not None and not call.is_channels_last:
        operands += _take_image(scratch, out, written)  # the bias is added later
    scratch.give_back(operands)
    copies = scratch.take(out) if transposed and call.is_channels_last else []
    see(out)
    scratch.give_back(copies + result)


def _convolution_backward(scratch: Scratch, args: Args, out: Gradients, see: See) -> None:
    grad, x, weight, strides, transposed, groups = *args[:3], args[4], args[7], args[9]
    if native := native_kernel(x, weight, args[4:10]):
        native.differentiate(scratch, grad, x, out, see)
        return
    of_x, of_weight, of_bias = out
    is_last = _is_channels_last(x, weight)
    # For example the gradient of a mean over an image, which is one expanded number.
    dense = scratch.contiguous(grad, x, memory_format=_format(is_last))
    call = _Call(weight, strides, groups)
    if of_x is not None and is_last:
        operands = _take_weight_twice(scratch, call, (1, _CHANNELS))
        see(of_x)
        scratch.give_back(operands)
    elif of_x is not None:
        blocks = call.of_result() if transposed else call.of_gradient()
        written, read = blocks[:2] if not transposed else blocks[1::-1]
        operands = _take_image(scratch, grad, read) + _take_weight(scratch, weight, blocks.weight)
        result = _take_image(scratch, x, written)
        scratch.give_back(operands)
        layout_copies = scratch.take(x) if call.is_channels_last and not transposed else []
        see(of_x)
        scratch.give_back(layout_copies + result)
    if of_weight is not None and is_last:
        copies = _take_gradient_of_last(scratch, call, args)
        see(of_weight)
        scratch.give_back(copies)
    elif of_weight is not None and _is_product(args):
        result = scratch.take(weight)
        positions = grad[0, 0, 0] if weight.dim() > 4 else grad[0, 0]  # of one plane of a volume
        columns = weight[0].nbytes * positions.numel()
        sums = torch.get_num_threads() * (4 * weight.nbytes + columns)
        scratch.use(weight, sums)
        see(of_weight)
        scratch.give_back(result)
    elif of_weight is not None:
        blocks = call.of_weight(transposed)
        inner, outer = (grad, x) if transposed else (x, grad)
        operands = _take_image(scratch, outer, blocks.outer)
        operands += _take_image(scratch, inner, blocks.inner)
        result = _take_weight(scratch, weight, blocks.weight)
        # Sums are in float32, and each thread transposes one image of both operands.
        if weight.itemsize == 2:
            turned = (x[:1], grad[:1]) if weight[0, 0].numel() > 1 else ()
            sums = scratch.take(weight, times=2)
            for image in turned * torch.get_num_threads():
                sums += _take_image(scratch, image, _CHANNELS)
            scratch.give_back(sums)
        scratch.give_back(operands)
        see(of_weight)
        scratch.give_back(result)
    if of_bias is not None:
        see(of_bias)
    scratch.give_back(dense)


describe("convolution.default", scratch_on_cpu=_convolution)
describe("convolution_backward.default", scratch_on_cpu=_convolution_backward)
