"""Saved-tensor hooks of regions in C++ act, and other users of torch's engine see its own."""

import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

import storage_ops as so
from storage_ops.checkpoint.saved import saved_tensors

from .blocks import Calls, in_threads
from .paths import both_paths

path = both_paths(saved_tensors)


def region(fn):
    return so.CheckpointWrapper(Calls(fn))


def gradient(fn, x):
    return torch.autograd.grad(fn(x).sum(), x)[0]


def many(x):
    for _ in range(1000):
        x = x.sin()
    return x


def test_saved_tensors_take_no_python_objects(path):
    x = torch.randn(2, requires_grad=True)
    call = region(many)
    gradient(call, x)
    before = sys.getallocatedblocks()
    y = call(x)
    added = sys.getallocatedblocks() - before
    # Python's hooks have a number for each tensor. Python shares the numbers below 257.
    assert (added > 700) == (path == "Python"), added
    y.sum().backward()
    assert torch.equal(x.grad, gradient(many, x))


def test_hooks_inside_of_a_region_get_their_tensors(path):
    packed = []

    def with_hooks(x):
        x = x.sin()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
            x = x.cos()
        return x.exp()

    x = torch.randn(3, requires_grad=True)
    right = gradient(with_hooks, x)
    assert len(packed) == 1
    packed.clear()
    y = region(with_hooks)(x)
    assert len(packed) == 1
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], right)
    assert len(packed) == 2
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_an_error_inside_of_a_region_leaves_no_hooks(path):
    def fails(x):
        x.sin()
        raise KeyError("expected")

    x = torch.randn(3, requires_grad=True)
    with pytest.raises(KeyError, match="expected"):
        region(fails)(x)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    y = x.sin()
    assert y.grad_fn._saved_self is not None
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], x.cos())


def test_anomaly_mode_knows_where_nodes_of_a_region_were_made(path):
    nodes = []

    def notes(x):
        y = x.sin()
        nodes.append(y.grad_fn)
        return y.exp()

    x = torch.randn(3, requires_grad=True)
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        region(notes)(x).sum().backward()
    assert all("in notes" in "".join(node.metadata["traceback_"]) for node in nodes)
    assert len(nodes) == 2


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_backward_that_cpp_code_starts_inside_of_a_region(path):
    @torch.jit.script
    def inner(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        grad = torch.autograd.grad([x.sin().exp().sum()], [x])[0]
        assert grad is not None
        return grad

    def calls(x):
        return (x.exp() * inner(x)).sin()

    x = torch.randn(3, requires_grad=True)
    assert torch.equal(gradient(region(calls), x), gradient(calls, x))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_recompute_that_stops_inside_of_torchscript(path):
    @torch.jit.script
    def inner(x: torch.Tensor) -> torch.Tensor:
        return x.sin().exp()

    x = torch.randn(3, requires_grad=True)
    right = gradient(lambda x: inner(x.cos()), x)
    assert torch.equal(gradient(region(lambda x: inner(x.cos())), x), right)


def test_threads_that_run_a_backward_through_the_same_regions(path):
    x = torch.randn(64, requires_grad=True)
    call = nn.Sequential(*(region(lambda x: x.sin().exp().cos()) for _ in range(4)))
    right = gradient(lambda x: call(x), x)
    y, wrong = call(x).sum(), []

    def work():
        for _ in range(20):
            grad = torch.autograd.grad(y, x, retain_graph=True)[0]
            if not torch.equal(grad, right):
                wrong.append(grad)

    in_threads(work, 4)
    assert not wrong


def test_threads_without_a_region_are_not_affected(path):
    inside, checked, nodes = threading.Event(), threading.Event(), []

    def waits(x):
        inside.set()
        assert checked.wait(20)
        return x.sin()

    def work():
        assert inside.wait(20)
        nodes.append(torch.randn(3, requires_grad=True).sin())
        checked.set()

    thread = threading.Thread(target=work)
    thread.start()
    x = torch.randn(3, requires_grad=True)
    assert torch.equal(gradient(region(waits), x), x.cos())
    thread.join()
    (y,) = nodes
    assert y.grad_fn._raw_saved_self is not None and torch.isfinite(y.grad_fn._saved_self).all()


def test_views_of_parameters_of_other_classes(path):
    class Mine(nn.Parameter):
        pass

    weight = Mine(torch.randn(3, 3))

    def product(x):
        return (x @ weight.as_subclass(torch.Tensor).t()).sin()

    x = torch.randn(2, 3, requires_grad=True)
    assert torch.equal(gradient(region(product), x), gradient(product, x))


FORKS = """
import os, torch, storage_ops
torch.set_num_threads(1)
layer = storage_ops.CheckpointWrapper(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh()))
x = torch.randn(2, 3, requires_grad=True)
y = layer(x)
child = os.fork()
if child == 0:
    y = layer(x)
    y.sum().backward()
    grad, x.grad = x.grad, None
    with storage_ops.disable_checkpointing():
        layer(x).sum().backward()
    os._exit(0 if torch.equal(grad, x.grad) else 1)
assert os.waitpid(child, 0)[1] == 0
y.sum().backward()
"""


def test_a_process_forked_after_a_forward_can_run_backward():
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKS], check=True, timeout=120)
