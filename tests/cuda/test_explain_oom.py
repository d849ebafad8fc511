"""explain_oom reports the owners of the memory for errors of the real allocator."""

import pytest
import torch
from torch import nn

from storage_ops.memory import explain_oom, limit

from .devices import each_device

MIB = 1 << 20


@each_device
@pytest.mark.parametrize("steps", [1, 2])
def test_the_report_names_the_owners(device, steps):
    """The last step does not fit, and the report names the owners of the memory."""
    width = 512 if device == "cpu" else 1024
    wide = 4 * width
    layers = [
        nn.Sequential(nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width)) for _ in "ab"
    ]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    # On a GPU, the input must be large compared to the workspace of cuBLAS.
    x = torch.randn(1024 if device == "cpu" else 16384, width, device=device)

    def step():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(steps - 1):
        step()
    most = (43 if steps == 1 else 73) if device == "cpu" else (900 if steps == 1 else 1100)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory") as raised, \
            limit(most * MIB, device), explain_oom(device) as report:  # fmt: skip
        step()
    assert type(raised.value) is torch.OutOfMemoryError
    owners = report.by_owner
    assert sum(owners.values()) == report.in_use_bytes
    assert report.attributed_share >= 0.95
    weights = sum(n for owner, n in owners.items() if owner.startswith("parameters of"))
    assert weights == pytest.approx(sum(p.nbytes for p in model.parameters()), rel=0.01)
    assert ("optimizer state of AdamW" in owners) is (steps == 2)
    del raised
    optimizer.zero_grad()
    step()
