"""Columns of torch's own convolutions on a CPU, which run where oneDNN does not.

torch computes convolutions itself in float64, in 16 bits on processors that lack them, and in
float32 for few small images. It writes the elements under each position of the kernel into a
column, and multiplies the columns by the weight. They take as many times the bytes of the image as
the kernel has elements. Observed with torch 2.13 by allocation events:

| kernel of torch | result | gradient of the image | gradient of the weight |
|---|---|---|---|
| slow_conv2d | of all images | none | of all images |
| slow_conv3d | of all images | of all images | of all images |
| slow_conv_dilated2d, 3d | of one image | of one image | of one image |
| slow_conv_transpose2d | of all images | of one image | of one image |
| slow_conv_transpose3d | of one image | of one image | of one image |

A kernel of one element reads the image instead of columns. It needs columns only if they are
products, which are added up into an image. Groups are computed one after another, except by
slow_conv3d, and their results are concatenated.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from storage_ops.foundation.ledger import Block
from storage_ops.simulate.kernels.scratch import Gradients, Scratch, See, see_all

_Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]
_NONE, _ONE, _ALL = range(3)  # images that have columns at a time


class _Columns(NamedTuple):
    """For how many images a kernel of torch has columns at a time, for each tensor it computes."""

    result: int
    image: int
    weight: int


_KERNELS = {
    "Slow2d": _Columns(_ALL, _NONE, _ALL),
    "Slow3d": _Columns(_ALL, _ALL, _ALL),
    "SlowDilated2d": _Columns(_ONE, _ONE, _ONE),
    "SlowDilated3d": _Columns(_ONE, _ONE, _ONE),
    "SlowTranspose2d": _Columns(_ALL, _ONE, _ONE),
    "SlowTranspose3d": _Columns(_ONE, _ONE, _ONE),
}


class NativeKernel:
    """A convolution that torch computes itself.

    Attributes:
        columns: for how many images there are columns.
        memory_format: the format in which the kernel reads images and weights.
    """

    def __init__(
        self, name: str, weight: Tensor, options: Sequence[Any], memory_format: torch.memory_format
    ) -> None:
        strides, padding, _, self._is_transposed, _, groups = options
        self.columns, self.memory_format = _KERNELS[name], memory_format
        # Groups whose columns exist at a time, and groups that are computed one after another.
        self._at_once: int = groups if name == "Slow3d" else 1
        self._groups: int = groups // self._at_once
        self._is_transposed_3d = name == "SlowTranspose3d"
        self._weight = weight
        is_pointwise = weight[0, 0].numel() == max(strides) == 1 and max(padding) == 0
        self._reads_image = is_pointwise and self._at_once == 1

    def compute(self, scratch: Scratch, x: Tensor, out: Tensor, see: See) -> None:
        """Record the memory of the convolution itself."""
        copy = x.nbytes // self._groups if self._is_transposed_3d else 0
        columns = self._bytes_of_columns(self.columns.result, x, out, self._is_transposed)
        self._record(scratch, [x], [(out, max(copy, columns))], see)

    def differentiate(
        self, scratch: Scratch, grad: Tensor, x: Tensor, out: Gradients, see: See
    ) -> None:
        """Record the memory of the gradients `out` of a convolution of `x`."""
        of_x, of_weight, of_bias = out
        of_images = self._bytes_of_columns(self.columns.image, x, grad, not self._is_transposed)
        of_weights = self._bytes_of_columns(self.columns.weight, x, grad, False)
        # Numbers of 16 bits are summed as float32.
        is_converted = of_bias is not None and grad.itemsize == 2 and len(grad) > 1
        sums = grad.numel() * 4 // self._groups if is_converted else 0
        of_weights += sums if self._is_transposed_3d else 0  # summed while the columns exist
        computed = ((of_x, of_images), (of_bias, sums), (of_weight, of_weights))
        self._record(scratch, [grad, x], [(t, n) for t, n in computed if t is not None], see)

    def _bytes_of_columns(self, images: int, x: Tensor, y: Tensor, are_products: bool) -> int:
        """Return the bytes of columns for _NONE, _ONE or _ALL images, `x` before and `y` after."""
        if self._reads_image and not are_products:
            return 0
        count = {_NONE: 0, _ONE: 1, _ALL: len(x)}[images] * self._at_once
        positions = (x if self._is_transposed else y)[0, 0].numel()
        return count * self._weight[0].numel() * positions * x.itemsize

    def _record(
        self, scratch: Scratch, images: list[Tensor], computed: list[tuple[Tensor, int]], see: See
    ) -> None:
        """Record results, each with the bytes of its columns. The last image is the input."""
        whole = images if self._groups == 1 else images[-1:]
        dense = scratch.contiguous(*whole, self._weight, memory_format=self.memory_format)
        if self._groups == 1:
            for result, columns in computed:
                see(result)
                scratch.use(result, columns)
        else:  # in the last group there are the results of all groups
            results = scratch.take(*(result for result, _ in computed))
            parts = [b for t in images for b in self._take_part(scratch, t)]
            for result, columns in computed:
                scratch.use(result, columns)
            scratch.give_back(parts)
            see_all((result for result, _ in computed), see)
            scratch.give_back(results)
        scratch.give_back(dense)

    def _take_part(self, scratch: Scratch, image: Tensor) -> list[Block]:
        """Allocate a copy of the part of an image that one group reads, unless it is contiguous."""
        is_last = self.memory_format != torch.contiguous_format
        if len(image) == 1 and not is_last and image.is_contiguous():
            return []
        return scratch.take_bytes(image, image.numel() * image.itemsize // self._groups)


def native_kernel(x: Tensor, weight: Tensor, options: Sequence[Any]) -> NativeKernel | None:
    """Return the kernel of torch for a convolution, or None if oneDNN computes it.

    Args:
        x, weight: tensors of any device. The answer is for a CPU.
        options: the arguments of `aten.convolution` after the bias.
    """
    settings = torch.get_num_threads(), torch.backends.mkldnn.enabled
    layouts = ((t.shape, t.stride(), t.dtype) for t in (x, weight))
    hashable = (tuple(each) if isinstance(each, list) else each for each in options)
    name, memory_format = _selected(*layouts, tuple(hashable), settings)
    return NativeKernel(name, weight, options, memory_format) if name in _KERNELS else None


@functools.lru_cache(maxsize=1024)
def _selected(
    x: _Layout, weight: _Layout, options: tuple[Any, ...], _settings: tuple[int, bool]
) -> tuple[str, torch.memory_format]:
    """Return torch's choice for a convolution on a CPU, and the format of its tensors.

    The choice depends on settings of torch, too.
    """
    with FakeTensorMode():
        tensors = [
            torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
            for shape, stride, dtype in (x, weight)
        ]
        backend = torch._C._select_conv_backend(*tensors, None, *options, bias_sizes=None)
        if len(x[0]) <= 3:
            return backend.name, torch.contiguous_format
        determine: Any = torch._C._conv_determine_backend_memory_format  # its stub has no arguments
        return backend.name, determine(*tensors, backend)
