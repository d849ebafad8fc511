"""Gradients of convolutions with wide kernels on a CPU, as in the patch embedding of a ViT."""

import pytest
import torch
from torch import nn

from storage_ops.memory import measure, simulate_step

mkldnn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="without oneDNN")


@mkldnn
@pytest.mark.parametrize(
    ("channels", "kernel", "stride"),
    [
        pytest.param(3, 16, 16, id="disjoint patches of 16"),
        pytest.param(3, 16, 8, id="overlapping patches"),
        pytest.param(1, 32, 32, id="one channel"),
        pytest.param(16, 16, 16, id="16 channels"),
        pytest.param(3, 8, 8, id="patches of 8"),
    ],
)
def test_simulated_and_measured_peaks_agree(channels, kernel, stride):
    model, x = nn.Conv2d(channels, 64, kernel, stride), torch.randn(4, channels, 96, 96)
    before = sum(p.nbytes for p in model.parameters()) + x.nbytes

    def loss(y):
        return y.square().mean()

    simulated = simulate_step(model, x, loss=loss).peak_bytes
    loss(model(x)).backward()
    model.zero_grad()
    with measure() as m:
        loss(model(x)).backward()
    assert simulated == pytest.approx(m.peak_bytes + before, rel=0.01)
