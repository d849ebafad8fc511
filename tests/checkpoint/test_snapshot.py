"""The state around a call, noted in C++, is restored as by Python when something has changed."""

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import storage_ops as so
from storage_ops.checkpoint.region.region import Region
from storage_ops.checkpoint.state import snapshot
from storage_ops.checkpoint.state.execution import ExecutionState
from storage_ops.checkpoint.state.snapshot import Snapshot

from .paths import both_paths

path = both_paths(snapshot)
CALLS = 4  # after which a walk is known


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.scale = nn.Linear(6, 6), nn.Dropout(0.5), 2.0

    def forward(self, x):
        h = self.drop(self.first(x).sin())
        return F.gelu(h * self.scale).exp()


@pytest.fixture
def block():
    block = so.CheckpointWrapper(Block())
    for _ in range(CALLS):
        block(torch.randn(3, 6)).sum().backward()
    block.zero_grad()
    return block


@pytest.fixture
def states(monkeypatch):
    """Return a list that gets the state of each region."""
    states, plain = [], Region.forward

    def forward(self, *args):
        states.append(self._state)
        return plain(self, *args)

    monkeypatch.setattr(Region, "forward", forward)
    return states


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Ops(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def other_attention():
    plain = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = functools.partial(plain, scale=0.5)
    try:
        yield
    finally:
        F.scaled_dot_product_attention = plain


AROUND = {
    "nothing": contextlib.nullcontext,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default dtype": default_dtype,
    "no flash attention": lambda: nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH),
    "function mode": Functions,
    "dispatch mode": Ops,
    "no checkpoints": so.disable_checkpointing,
    "attention": other_attention,
}


def gradients(model, forward_in, backward_in, retain=False):
    """Return the gradients of a step whose parts run in context managers, and random numbers."""
    torch.manual_seed(0)
    x = torch.randn(3, 6, requires_grad=True)
    with forward_in():
        y = model(x).float().sum()
    torch.manual_seed(1)
    inputs = (x, *model.parameters())
    with backward_in():
        grads = torch.autograd.grad(y, inputs, retain_graph=retain)
        if retain:
            again = torch.autograd.grad(y, inputs)
            assert all(map(torch.equal, grads, again))
    return [*grads, torch.randn(3)]


@pytest.mark.parametrize("where", AROUND)
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_settings_of_the_forward_are_those_of_the_recompute(path, block, states, where, part):
    plain = Block()
    plain.load_state_dict(block.state_dict())
    nothing = contextlib.nullcontext
    around = (AROUND[where], nothing) if part == "forward" else (nothing, AROUND[where])
    right = gradients(plain, *around)
    got = gradients(block, *around, retain=part == "backward")
    assert all(map(torch.equal, got, right))
    if where == "nothing":
        kinds = {"C++": [], "parts": [Snapshot], "Python": [ExecutionState]}
        assert list(map(type, states)) == kinds[path]


def freezes(block):
    block.first.weight.requires_grad_(False)


def changes_an_attribute(block):
    block.scale = 3.0


def evaluates(block):
    block.eval()


def replaces_a_parameter(block):
    block.first.bias = nn.Parameter(torch.ones(6))


@pytest.mark.parametrize("change", [freezes, changes_an_attribute, evaluates, replaces_a_parameter])
def test_a_change_after_the_forward_does_not_reach_the_recompute(path, block, change):
    x = torch.randn(3, 6, requires_grad=True)
    inputs = (x, block.first.bias)
    torch.manual_seed(0)
    right = torch.autograd.grad(block(x).sum(), inputs)
    torch.manual_seed(0)
    y = block(x).sum()
    change(block)
    after = {**vars(block), **vars(block.first)}
    assert all(map(torch.equal, torch.autograd.grad(y, inputs), right))
    assert all(after[name] is value for name, value in {**vars(block), **vars(block.first)}.items())
    assert block.first.weight.requires_grad == (change is not freezes)


def test_a_written_parameter_is_named(path, block):
    y = block(torch.randn(3, 6)).sum()
    with torch.no_grad():
        block.first.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified in place between forward"):
        y.backward()


REGISTERED = []


def test_a_registered_generator_is_repeated(path):
    generator = torch.Generator()

    class Draws(nn.Module):
        def forward(self, x):
            return (x * torch.rand(3, generator=REGISTERED[0])).sin().exp()

    REGISTERED[:] = [generator]
    layer = so.CheckpointWrapper(Draws())
    handle = so.register_rng_tracker(generator)
    for _ in range(CALLS):
        x = torch.randn(3, requires_grad=True)
        generator.manual_seed(2)
        got = torch.autograd.grad(layer(x).sum(), x)[0]
        generator.manual_seed(2)
        assert torch.equal(got, torch.autograd.grad(Draws()(x).sum(), x)[0])
    handle.remove()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_in_the_recompute_puts_the_state_back(path, error):
    class Fails(nn.Module):
        fails = False

        def forward(self, x):
            x = F.dropout(x.sin(), 0.5)
            if type(self).fails:
                raise error
            return x.exp()

    layer = so.CheckpointWrapper(Fails())
    for _ in range(CALLS):
        layer(torch.randn(3, requires_grad=True)).sum().backward()
    y = layer(torch.randn(3, requires_grad=True)).sum()
    state = torch.get_rng_state()
    Fails.fails = True
    with pytest.raises(error):
        y.backward()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()
    Fails.fails = False
    y = layer(x := torch.randn(3, requires_grad=True)).sum()
    y.backward()
    assert x.grad is not None


def test_an_argument_that_was_written_is_named(path, block):
    x = torch.randn(3, 6)
    y = block(x).sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match=r"argument 0 of Block, .* modified in place"):
        y.backward()


def test_an_argument_that_needs_a_gradient_only_later(path, block):
    x = torch.randn(3, 6)
    torch.manual_seed(0)
    y = block(x).sum()
    right = torch.autograd.grad(y, tuple(block.parameters()), retain_graph=True)
    x.requires_grad_()
    got = torch.autograd.grad(y, tuple(block.parameters()))
    assert all(map(torch.equal, got, right))
    assert x.requires_grad and x.grad is None
