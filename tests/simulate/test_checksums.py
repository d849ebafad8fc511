"""Simulations of regions that compare checksums of saved tensors."""

import pytest
import torch
from torch import nn

import storage_ops as so

from .cpu_peaks import check

TOKENS, WIDTH, WIDER = 512, 128, 2304  # TOKENS x WIDER are more elements than are hashed at a time


def checkpointed(mode, device=None):
    layers = (
        nn.Sequential(nn.Linear(WIDTH, WIDER), nn.GELU(), nn.Linear(WIDER, WIDTH)) for _ in range(2)
    )
    with torch.device(device or "cpu"):
        model = nn.Sequential(*layers)
    policy = "matmuls" if mode == "selective" else None
    config = {"layer_names": ["0", "1"], "mode": mode, "policy": policy}
    return so.apply_activation_checkpoint(model, config | {"determinism_check": "checksum"})


@pytest.mark.parametrize("mode", ["full", "selective", "output_discard"])
def test_a_simulation_has_the_memory_of_checksums(mode):
    model, x = checkpointed(mode), torch.randn(TOKENS, WIDTH, requires_grad=True)

    def run():
        model(x).square().sum().backward()
        model.zero_grad()
        x.grad = None

    run()
    check(run, rel=0.01)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_simulation_needs_no_values(device):
    model, x = checkpointed("full", device), torch.randn(TOKENS, WIDTH, device=device)
    estimate = so.memory.estimate(lambda x: model(x).sum().backward(), x)
    report = so.memory.will_it_fit(model, x, device="h100", optimizer=None)
    assert estimate.peak_bytes > 0
    assert report.fits
