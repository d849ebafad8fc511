"""Simulated peaks of convolutions that torch computes itself on a CPU are the measured ones."""

from functools import partial

import pytest
import torch
from torch import nn

from storage_ops.memory import simulate_step
from storage_ops.simulate.kernels.native_convolutions import native_kernel

from .cpu_peaks import check

LAYERS = {
    "slow_conv2d": (partial(nn.Conv2d, 8, 16, 3, padding=1), (24, 24)),
    "slow_conv2d of one dimension": (partial(nn.Conv1d, 8, 16, 5), (600,)),
    "slow_conv2d of one element": (partial(nn.Conv2d, 8, 16, 1), (24, 24)),
    "slow_conv3d": (partial(nn.Conv3d, 8, 16, 3, stride=2), (10, 10, 10)),
    "slow_conv3d of one element": (partial(nn.Conv3d, 8, 16, 1), (8, 8, 8)),
    "slow_conv_dilated2d": (partial(nn.Conv2d, 8, 16, 3, dilation=2), (24, 24)),
    "slow_conv_dilated3d": (partial(nn.Conv3d, 8, 16, 3, dilation=2), (9, 9, 9)),
    "slow_conv_transpose2d": (partial(nn.ConvTranspose2d, 8, 16, 3), (20, 20)),
    "slow_conv_transpose2d of one element": (partial(nn.ConvTranspose2d, 8, 16, 1), (20, 20)),
    "slow_conv_transpose3d": (partial(nn.ConvTranspose3d, 8, 16, 3, stride=2), (6, 6, 6)),
}


def is_native(layer, x):
    options = (
        layer.stride, layer.padding, layer.dilation, layer.transposed, layer.output_padding,
        layer.groups,
    )  # fmt: skip
    return native_kernel(x, layer.weight, options) is not None


def check_peaks(layer, x):
    """Check a result, and the gradients of its sum and of numbers that are not expanded."""
    wanted = [x.requires_grad_(), *layer.parameters()]
    gradient = torch.randn_like(layer(x))
    check(lambda: layer(x))
    check(lambda: torch.autograd.grad(layer(x).sum(), wanted))
    check(lambda: torch.autograd.grad(layer(x), wanted, gradient))


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize("name", LAYERS)
def test_float64(name, images, groups):
    make, sizes = LAYERS[name]
    layer, x = make(groups=groups).double(), torch.randn(images, 8, *sizes, dtype=torch.float64)
    assert is_native(layer, x)
    check_peaks(layer, x)


@pytest.mark.parametrize("name", LAYERS)
def test_one_small_image_in_float32(name):
    make, sizes = LAYERS[name]
    layer, x = make(), torch.randn(1, 8, *sizes)
    assert is_native(layer, x)
    check_peaks(layer, x)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("name", ["slow_conv2d", "slow_conv_dilated2d", "slow_conv_transpose2d"])
def test_channels_last(name, groups):
    make, sizes = LAYERS[name]
    layer, x = make(groups=groups).double(), torch.randn(2, 8, *sizes, dtype=torch.float64)
    x = x.to(memory_format=torch.channels_last)
    assert is_native(layer, x)
    check_peaks(layer, x)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="without oneDNN")
def test_large_images_in_float32_are_those_of_onednn():
    layer, x = nn.Conv3d(8, 16, 3), torch.randn(1, 8, 52, 52, 4)
    assert not is_native(layer, x)
    check(lambda: layer(x))


def test_a_model_on_the_meta_device():
    """The kernels are those of a CPU, whatever device holds the tensors."""
    peaks = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = nn.Sequential(nn.Conv3d(1, 8, 3), nn.ReLU(), nn.Conv3d(8, 8, 3))
            x = torch.empty(1, 1, 16, 16, 16)
            peaks.append(simulate_step(model, x, device="cpu").peak_bytes)
    assert peaks[0] == peaks[1] > 27 * 8 * 12**3 * 4  # the columns of the second convolution
