"""Dynamo is on while eager code runs after a graph break. It does not compile code of regions."""

import copy
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


class Breaks(Mlp):
    def __init__(self):
        super().__init__()
        self.calls = nn.Buffer(torch.zeros(()))

    def forward(self, x):
        h = self.up(x)
        torch._dynamo.graph_break()
        self.calls.add_(1)
        return self.down(F.gelu(h) * self.calls)


def train(call, net, xs):
    """Return the gradients of a network and its buffers after a step for each input."""
    gradients = [torch.autograd.grad(call(x).sum(), (x, *net.parameters())) for x in xs]
    return *(t for each in gradients for t in each), *net.buffers()


@pytest.mark.in_turn
@pytest.mark.parametrize("kind", ["full", "selective", "output_discard", "tile"])
def test_a_layer_whose_graph_breaks(path, kind):
    plain = nn.Sequential(Breaks(), Breaks())
    ours = copy.deepcopy(plain)
    if kind == "tile":
        for layer in ours:
            so.tile(layer, tiles=1)
    else:
        options = OPTIONS.get(kind, {"mode": kind})
        so.apply_activation_checkpoint(ours, {"layer_classes": ["Breaks"], **options})
    xs = [torch.randn(3, 8, requires_grad=True) for _ in range(2)]
    got = train(torch.compile(ours, backend="aot_eager"), ours, xs)
    assert all(map(torch.equal, got, train(plain, plain, xs)))


def discarding(kind, producer, consumer, x):
    if kind == "composed":
        return so.output_discard(producer, consumer)(x)
    if kind == "chain":
        with so.OutputDiscardChain() as chain:
            return consumer(chain.checkpoint(producer, x))
    region = so.OutputDiscardCheckpoint()
    hidden = region.checkpoint(producer, x)
    if kind == "hook tensor":
        y = consumer(hidden)
        region.discard_output_and_register_recompute(y)
    else:
        with region.consumer():
            y = consumer(hidden)
        region.discard_output_and_register_recompute()
    return y


@pytest.mark.in_turn
@pytest.mark.parametrize("kind", ["composed", "chain", "hook tensor", "consumer"])
def test_a_producer_whose_graph_breaks(path, kind):
    plain = nn.Sequential(Breaks(), Mlp())
    ours = copy.deepcopy(plain)
    xs = [torch.randn(3, 8, requires_grad=True) for _ in range(2)]
    call = torch.compile(lambda x: discarding(kind, *ours, x), backend="aot_eager")
    assert all(map(torch.equal, train(call, ours, xs), train(plain, plain, xs)))


@pytest.mark.in_turn
def test_a_layer_that_dynamo_cannot_compile(path):
    plain = nn.Sequential(nn.LSTM(8, 8))
    ours = so.apply_activation_checkpoint(copy.deepcopy(plain), {"layer_classes": ["LSTM"]})
    xs = [torch.randn(3, 8, requires_grad=True) for _ in range(2)]
    got = train(torch.compile(lambda x: ours(x)[0], backend="aot_eager"), ours, xs)
    assert all(map(torch.equal, got, train(lambda x: plain(x)[0], plain, xs)))
