"""Dynamo is on while eager code runs after a graph break. It does not compile code of regions."""

import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

import storage_ops as so
from storage_ops.checkpoint.region import plain_region

from .paths import both_paths, know_at_once

path = both_paths(plain_region)

OPTIONS = {
    "full": {},
    "selective": {"ops_to_save": ["aten.addmm"]},
    "policy in Python": {"policy": lambda ctx, op, *args, **kwargs: True},
    "checksum": {"determinism_check": "checksum"},
}


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


def checkpointed(kind):
    """Return a network with a checkpointed module, that module, and the same network without."""
    ours, plain = Mlp(), nn.Sequential(Mlp(), nn.Tanh())
    plain[0].load_state_dict(ours.state_dict())
    if kind == "discarding":
        return so.OutputDiscard(ours, nn.Tanh()), ours, plain
    return nn.Sequential(so.CheckpointWrapper(ours, **OPTIONS[kind]), nn.Tanh()), ours, plain


@pytest.fixture(autouse=True)
def no_warning(monkeypatch):
    """Expect no warning of Dynamo, which warns of functions that it cannot compile."""
    know_at_once(monkeypatch)
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert not [str(each.message) for each in caught if "Dynamo" in str(each.message)]


@pytest.mark.in_turn
@pytest.mark.parametrize("kind", [*OPTIONS, "discarding"])
def test_a_backward_in_compiled_code(path, kind):
    net, ours, plain = checkpointed(kind)
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(lambda y: (2 * y).sum().backward(), backend=counter)
    for _ in range(2):
        x = torch.randn(3, 8, requires_grad=True)
        want = torch.autograd.grad((2 * plain(x)).sum(), (x, *plain.parameters()))
        for p in ours.parameters():
            p.grad = None
        step(net(x))
        assert all(map(torch.equal, want, (t.grad for t in (x, *ours.parameters()))))
    assert counter.frame_count == 1


@pytest.mark.in_turn
@pytest.mark.parametrize("kind", [*OPTIONS, "discarding"])
def test_a_module_that_dynamo_leaves_to_eager_code(path, kind):
    net, ours, plain = checkpointed(kind)
    # Before torch 2.14, Dynamo skips the code of torch's own modules.
    ours.down.compile(backend="aot_eager")
    for _ in range(2):
        x = torch.randn(3, 8, requires_grad=True)
        want = torch.autograd.grad(plain(x).sum(), (x, *plain.parameters()))
        got = torch.autograd.grad(net(x).sum(), (x, *ours.parameters()))
        assert all(map(torch.equal, want, got))
