"""If a device runs out of memory during a recompute, the next step works."""

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import storage_ops as so

from .devices import each_device, synchronize

WAYS = ["output_discard", "hook", "chain", "full", "selective", "mode output_discard"]


class Greedy(nn.Module):
    """A wide activation. While `wants` is set, it allocates more memory than exists."""

    wants = None  # on the class, because a recompute restores instance attributes

    def __init__(self, width=64):
        super().__init__()
        self.up = nn.Linear(width, 8 * width, bias=False)

    def forward(self, x):
        h = F.gelu(self.up(x))
        if self.wants:
            h = h + torch.empty(self.wants, dtype=torch.uint8, device=x.device)[0]
        return h.sin()


class Net(nn.Module):
    def __init__(self, way, width=64):
        super().__init__()
        self.way = way
        self.greedy, self.down = Greedy(width), nn.Linear(8 * width, width, bias=False)

    def forward(self, x):
        if self.way == "output_discard":
            return so.output_discard(self.greedy, self.down)(x)
        if self.way == "hook":
            ckpt = so.OutputDiscardCheckpoint()
            y = self.down(ckpt.checkpoint(self.greedy, x))
            ckpt.discard_output_and_register_recompute(y)
            return y
        if self.way == "chain":
            with so.OutputDiscardChain() as chain:
                return self.down(chain.checkpoint(torch.cos, chain.checkpoint(self.greedy, x)))
        return self.down(self.greedy(x))


def make(way, device):
    net = Net(way).to(device)
    layers = {"layer_classes": ["Greedy"]}
    if way == "full":
        so.apply_activation_checkpoint(net, {**layers, "mode": "full"})
    elif way == "selective":
        so.apply_activation_checkpoint(net, {**layers, "policy": "matmuls"})
    elif way == "mode output_discard":
        so.apply_activation_checkpoint(net, {**layers, "mode": "output_discard"})
    return net


def step(net, x, run_out=None):
    """Return the gradients of a step. Call `run_out()` between forward and backward."""
    loss = net(x).square().sum()
    if run_out is not None:
        run_out(net)
    return torch.autograd.grad(loss, (x, *net.parameters()))


def failing_step(net, x, run_out):
    """Return the error of a step as text, so that no tensor of the step stays alive."""
    try:
        step(net, x, run_out)
    except RuntimeError as error:
        return type(error).__name__, str(error)
    return None


def check(net, x, run_out, device, relieve=lambda: None):
    right = step(net, x)
    gc.collect()
    gc.disable()
    try:
        with so.memory.measure(device) as m:
            error = failing_step(net, x, run_out)
            # On a GPU, an autograd thread runs the backward. The error arrives before the thread
            # has released the graph. After another backward, it has.
            torch.zeros((), device=device, requires_grad=True).sum().backward()
    finally:
        gc.enable()
        Greedy.wants = None
        relieve()
    assert error is not None and "memory" in error[1], error
    assert m.kept_bytes == 0
    for _ in range(2):
        for ours, expected in zip(step(net, x), right, strict=True):
            assert torch.equal(ours, expected)
    return error


def want_too_much(net):
    Greedy.wants = 1 << 50


@each_device
@pytest.mark.parametrize("way", WAYS)
def test_after_the_error_memory_is_freed_and_the_next_step_works(device, way):
    net, x = make(way, device), torch.randn(256, 64, device=device, requires_grad=True)
    error = check(net, x, want_too_much, device)
    assert device == "cpu" or error[0] == "OutOfMemoryError"


@each_device
def test_a_retained_graph_can_be_used_again(path, device):
    net = make("output_discard", device)
    x = torch.randn(256, 64, device=device, requires_grad=True)
    leaves = (x, *net.parameters())
    right = step(net, x)
    y = net(x).square().sum()
    Greedy.wants = 1 << 50
    with pytest.raises(RuntimeError, match="memory"):
        torch.autograd.grad(y, leaves, retain_graph=True)
    Greedy.wants = None
    for retain in (True, False):
        gradients = torch.autograd.grad(y, leaves, retain_graph=retain)
        assert all(torch.equal(a, b) for a, b in zip(gradients, right, strict=True))


@pytest.mark.cuda
@pytest.mark.parametrize("way", WAYS)
def test_a_device_without_free_memory(way):
    # The wide activation has 64 MiB. All other tensors have at most 8 MiB, in segments of 20 MiB.
    net, x = make(way, "cuda"), torch.randn(1 << 15, 64, device="cuda", requires_grad=True)
    total = torch.cuda.mem_get_info()[1]

    def fill(net):
        # Leave room for one wide tensor: a gradient, or the first of two in the recompute.
        torch.cuda.empty_cache()
        room = torch.cuda.memory_reserved() + (112 << 20)
        torch.cuda.set_per_process_memory_fraction(room / total)

    def relieve():
        torch.cuda.set_per_process_memory_fraction(1.0)

    assert check(net, x, fill, "cuda", relieve)[0] == "OutOfMemoryError"
    synchronize("cuda")
