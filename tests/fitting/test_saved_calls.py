"""Which results of a layer a selective checkpoint of a plan may save."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import storage_ops
from storage_ops.fitting.actions import Action
from storage_ops.fitting.step import OpTimes
from storage_ops.loss.planning.devices import named

PRODUCTS = "aten::mm", "aten::addmm", "aten::bmm"


def logged(fn, *args):
    """Return the ops of a call."""
    times = OpTimes(named("cpu"))
    with times, times.logging():
        fn(*args)
    return times.ops


def saveable(fn, *args):
    """Return whether the result of each product may be saved."""
    return [op.saveable for op in logged(fn, *args) if op.call[0] in PRODUCTS]


def test_in_place_changes_are_tracked_by_storage():
    """An address is not enough, because an earlier tensor may have had it."""

    def run(x):
        for _ in range(20):
            x.mm(x)
            torch.empty(64, 64).add_(1)
        x.mm(x).add_(1)

    assert saveable(run, torch.randn(64, 64)) == [True] * 20 + [False]


class Mixer(nn.Module):
    """Linear layers over tokens, so that their input is not contiguous, and over channels."""

    def __init__(self):
        super().__init__()
        self.tokens, self.channels = nn.Linear(32, 32), nn.Linear(64, 64)

    def forward(self, x):
        x = x + self.tokens(x.transpose(1, 2)).transpose(1, 2).sin()
        return x + self.channels(x).sin()


class Masked(nn.Module):
    """Attention without a fused kernel, because of the dropout on a CPU."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (12, 16)).transpose(1, 2).chunk(3, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        return self.out(y.transpose(1, 2).flatten(2))


class ByHand(nn.Module):
    """Adds a bias to a product out of place."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)
        self.bias = nn.Parameter(torch.zeros(64))

    def forward(self, x):
        return (x @ self.weight + self.bias).sin()


LAYERS = {Mixer: [False, True], Masked: [True, False, True, True], ByHand: [True]}


@pytest.mark.parametrize("kind", LAYERS)
def test_products_to_which_torch_adds_in_place_are_not_saved(kind):
    """torch adds in place inside of its functions, but only where no mode is active."""
    layer, x = kind(), torch.randn(4, 32, 64, requires_grad=True)
    assert saveable(layer, x) == LAYERS[kind]
    ops = logged(layer, x)
    calls = tuple(op.call for op in ops if op.saveable and op.call[0] in PRODUCTS)
    torch.manual_seed(0)
    right = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    Action("selective", calls).apply(layer)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a saved result that the layer modifies
        got = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    assert all(map(torch.equal, got, right))


def test_calls_have_the_numbers_of_a_run_without_modes():
    """The sum inside of attention is one in place there, and would shift the numbers of sums."""
    ops = logged(lambda x: Masked()(x) + torch.ones(64), torch.randn(4, 32, 64))
    sums = [op for op in ops if op.call[0] == "aten::add.Tensor"]
    assert len(sums) == 2 and not any(op.saveable for op in sums)


def test_ops_without_tensors_are_not_saved():
    ops = logged(lambda: torch.rand(64, 64).sin())
    assert [(op.call[0], op.saveable) for op in ops] == [
        ("aten::rand", False), ("aten::sin", True),
    ]  # fmt: skip


def test_plans_of_such_layers_run_without_warnings():
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Masked() for _ in range(4))), torch.randn(16, 32, 64)
    high = storage_ops.fit(model, x, "1GiB", loss=torch.sum).peak_bytes
    plan = storage_ops.fit(model, x, int(0.7 * high), loss=torch.sum, actions=["selective"])
    assert any("recompute all but" in row.action for row in plan.rows)
    plan.apply()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            model(x).sum().backward()
