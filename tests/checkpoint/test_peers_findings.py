"""Faults that the tests of other checkpoints and torch's op database revealed."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import storage_ops


def _leave_sevens() -> None:
    """Fill free memory with sevens, so that a new tensor that is never written is noticed."""
    for _ in range(3):
        junk = [torch.full((64,), 7.0) for _ in range(64)]
        del junk


class Layer(nn.Module):
    """Wraps a function as a module."""

    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        """Call the function."""
        return self.fn(x)


def _gradient(module: nn.Module, seed: int) -> Tensor:
    torch.manual_seed(seed)
    x = torch.randn(64, requires_grad=True)
    _leave_sevens()
    y = module(x)
    _leave_sevens()
    (first,) = torch.autograd.grad((y * y).sum(), x, retain_graph=True)
    _leave_sevens()
    (second,) = torch.autograd.grad((y * y).sum(), x)
    assert torch.equal(first, second)
    return first


noisy = functools.partial(F.rrelu, lower=0.2, upper=0.9, training=True)

LAYERS = {
    "alone": noisy,
    "last": lambda x: noisy(x.sin()),
    "before an op that saves nothing": lambda x: noisy(x.sin()).clone(),
    "before an op that saves": lambda x: noisy(x.sin()).exp(),
    "twice": lambda x: noisy(noisy(x)),
    "in place": lambda x: F.rrelu_(x.sin(), 0.2, 0.9, training=True),
}


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_an_op_that_writes_to_its_saved_tensor_runs_to_its_end(name: str, early_stop: bool) -> None:
    fn, seed = LAYERS[name], int(torch.randint(1 << 30, ()))
    expected = _gradient(Layer(fn), seed)
    wrapped = storage_ops.CheckpointWrapper(Layer(fn), early_stop=early_stop)
    assert torch.equal(_gradient(wrapped, seed), expected)
    outer = storage_ops.CheckpointWrapper(nn.Sequential(wrapped), early_stop=early_stop)
    assert torch.equal(_gradient(outer, seed), expected)


def test_an_op_that_writes_to_its_saved_tensor_in_a_selective_checkpoint() -> None:
    fn, seed = LAYERS["last"], int(torch.randint(1 << 30, ()))
    expected = _gradient(Layer(fn), seed)
    wrapped = storage_ops.CheckpointWrapper(Layer(fn), ops_to_save=["aten.sin"])
    assert torch.equal(_gradient(wrapped, seed), expected)


def test_a_backward_in_a_region_right_after_an_op_that_writes_is_an_error() -> None:
    def fn(x: Tensor) -> Tensor:
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(noisy(x).sum(), x)
        return x * gradient

    wrapped = storage_ops.CheckpointWrapper(Layer(fn))
    with pytest.raises(RuntimeError, match="right after torch"):
        wrapped(torch.randn(8, requires_grad=True))
