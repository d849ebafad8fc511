"""Copies that kernels make of operands that are not contiguous.

Expanded gradients of means, slices of the gradient of `cat`, and transposed inputs are such
operands. Kernels of images copy to the memory format of an image, which may be channels_last.

Observed on a CPU by allocation events with torch 2.13. Rows for a GPU follow torch's code in
aten/src/ATen/native/cuda. Copies of matrices are in `cpu.py` and `cuda.py`, and copies of images in
convolutions in `cpu_convolutions.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from storage_ops.foundation.ops import Args, describe
from storage_ops.simulate.kernels.fake_tensor_gaps import memory_format_of
from storage_ops.simulate.kernels.scratch import Scratch, See, of_contiguous, see_all

# Up to this sum of an enlarged image's height and width, a CPU reads and writes channels_last.
_SMALL_IMAGE = 128


def _image(scratch: Scratch, args: Args, out: Any, see: See) -> None:
    """Read an image in its memory format."""
    see_all(out, see)
    copies = scratch.contiguous(args[0], memory_format=memory_format_of(args[0]))
    scratch.give_back(copies)


def _gradient_of_image(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
    """Compute the gradient of an image in the memory format of the gradient of the result.

    The indices of maxima are read in this format, too.
    """
    grad, image = args[0], args[1] if isinstance(args[1], Tensor) else out
    memory_format = memory_format_of(grad)
    indices = [t for t in args[2:] if isinstance(t, Tensor)]
    see(out)
    copies = scratch.contiguous(grad, *indices, memory_format=memory_format)
    if memory_format_of(image) != memory_format:
        copies += scratch.take(out)
    scratch.give_back(copies)


def _enlarged(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
    """Enlarge small images in channels_last format."""
    see(out)
    if sum(out.shape[2:]) <= _SMALL_IMAGE:
        copies = scratch.contiguous(args[0], out, memory_format=torch.channels_last)
        scratch.give_back(copies)


describe("native_layer_norm", scratch_on_cpu=of_contiguous(0), scratch_on_gpu=of_contiguous(0))
describe(
    "native_layer_norm_backward",
    scratch_on_cpu=of_contiguous(0, 1), scratch_on_gpu=of_contiguous(0, 1),
)  # fmt: skip
describe(
    "log_sigmoid_forward embedding_dense_backward col2im grid_sampler_2d_backward"
    " upsample_bicubic2d_backward",
    scratch_on_cpu=of_contiguous(0),
)
describe(
    "max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d"
    " max_pool3d_with_indices avg_pool3d pixel_shuffle pixel_unshuffle channel_shuffle"
    " reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d",
    scratch_on_cpu=_image,
)
describe(
    "max_pool2d_with_indices_backward avg_pool2d_backward _adaptive_avg_pool2d_backward"
    " upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward"
    " _upsample_nearest_exact2d_backward upsample_linear1d_backward upsample_bilinear2d_backward"
    " reflection_pad1d_backward reflection_pad2d_backward replication_pad1d_backward"
    " replication_pad2d_backward",
    scratch_on_cpu=_gradient_of_image,
)
describe(
    "upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d", scratch_on_cpu=_enlarged
)
