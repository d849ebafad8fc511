"""Simulated peaks of layers whose inputs and gradients are not contiguous, on a CPU."""

import pytest
import torch
from torch import nn

from storage_ops.memory import estimate

from .cpu_peaks import check
from .operand_cases import last


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_peaks_of_products_with_expanded_gradients(dtype):
    """BLAS needs contiguous rows or columns. torch copies other matrices."""
    layer = nn.Linear(256, 256, dtype=dtype)
    x = torch.randn(512, 256, dtype=dtype, requires_grad=True)
    check(lambda: torch.autograd.grad(layer(x).mean(), [x, *layer.parameters()]), 0.001)
    check(lambda: torch.autograd.grad(layer(x).mean(0).sum(), [x, *layer.parameters()]), 0.001)
    check(lambda: x.detach()[:, ::2] @ x.detach()[::4, ::2].t(), 0.001)


def test_peaks_of_products_with_a_dtype_of_the_result():
    """The dtype follows the factors, of which the right one is copied."""
    x = torch.empty(64, 64, dtype=torch.bfloat16, device="meta")
    right = torch.empty(64, 128, dtype=torch.bfloat16, device="meta")

    def product(x, right):
        return torch.mm(x, right[:, ::2], out_dtype=torch.float32)

    e = estimate(product, x, right)
    assert e.peak_bytes - e.input_bytes == 64 * 64 * 4 + right.nbytes // 2


STRIDED = {
    "a sequence": (lambda: nn.Conv1d(32, 64, 3, padding=1), (16, 256, 32)),
    "steps of a sequence": (lambda: nn.Conv1d(32, 64, 1), (16, 256, 32)),
    "steps of few sequences": (lambda: nn.Conv1d(32, 64, 1), (4, 1024, 32)),
    "an image": (lambda: nn.Conv2d(32, 64, 3, padding=1), (16, 16, 16, 32)),
    "channels": (lambda: nn.Conv2d(32, 32, 3, padding=1, groups=32), (16, 16, 16, 32)),
    "an image to be enlarged": (lambda: nn.ConvTranspose2d(32, 64, 2, 2), (16, 16, 16, 32)),
}  # fmt: skip


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="without oneDNN")
@pytest.mark.parametrize("name", STRIDED)
def test_peaks_of_convolutions_of_transposed_inputs(name):
    """Models of audio transpose a sequence before a convolution, which copies it."""
    make, shape = STRIDED[name]
    layer, x = make(), torch.randn(shape).transpose(1, -1).requires_grad_()
    dy = torch.ones_like(layer(x).detach(), memory_format=torch.contiguous_format)
    with torch.no_grad():
        check(lambda: layer(x))
    check(lambda: torch.autograd.grad(layer(x), [x, *layer.parameters()], dy))


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="without oneDNN")
def test_peaks_of_transposed_convolutions_with_channels_last():
    """oneDNN reads and writes images in this format. Copies of the weight are small."""
    layer, x = nn.ConvTranspose2d(16, 32, 2, 2), last(torch.randn(32, 16, 32, 32))
    with torch.no_grad():
        check(lambda: layer(x))
    dy = last(torch.ones_like(layer(x).detach()))
    check(lambda: torch.autograd.grad(layer(x.requires_grad_()), [x, *layer.parameters()], dy))
