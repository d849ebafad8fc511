"""Calls of ops that the kernels of a policy find in C++ as a Python mode does."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import storage_ops as so
from storage_ops.checkpoint.selective import native

from .paths import both_paths

path = both_paths(native)

PRODUCTS = {
    "addmm": lambda x, w: torch.addmm(x[0], x, w),
    "mm": torch.mm,
    "baddbmm": lambda x, w: torch.baddbmm(x, x[None], w[None])[0],
    "bmm": lambda x, w: torch.bmm(x[None], w[None])[0],
    "matmul": torch.matmul,
    "linear": lambda x, w: F.linear(x, w, x[0]),
}


class Product(nn.Module):
    def __init__(self, product):
        super().__init__()
        self.weight, self.product = nn.Parameter(torch.randn(4, 4)), product

    def forward(self, x):
        return self.product(x.exp(), self.weight).cumsum(0).tanh()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_saved_under_autocast(path, name, autocast):
    plain = Product(PRODUCTS[name])
    ours = Product(PRODUCTS[name])
    ours.load_state_dict(plain.state_dict())
    so.CheckpointWrapper(ours, policy="matmuls")
    for _ in range(4):
        x = torch.randn(4, 4, requires_grad=True)
        with (
            warnings.catch_warnings(),
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        ):
            warnings.simplefilter("error")  # a policy that saves nothing warns
            y, right = ours(x).sum(), plain(x).sum()
        got = torch.autograd.grad(y, (x, ours.weight))
        assert all(map(torch.equal, got, torch.autograd.grad(right, (x, plain.weight))))


class Interrupts:
    """A key of a dictionary that stands for an interrupt while Python compares it."""

    def __hash__(self):
        return hash(native.ORIGIN)

    def __eq__(self, other):
        raise KeyboardInterrupt


def test_an_interrupt_stays_one(path):
    layer = so.CheckpointWrapper(nn.Linear(4, 4), ops_to_save=["aten.addmm"])
    x = torch.randn(2, 4, requires_grad=True)
    vars(x)[Interrupts()] = None
    with pytest.raises(KeyboardInterrupt):
        layer(x)
    vars(x).clear()
    layer(x).sum().backward()
