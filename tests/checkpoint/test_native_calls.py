"""Calls of ops that the kernels of a policy find in C++ as a Python mode does."""

import warnings
from functools import partial

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


class Writes(nn.Module):
    def __init__(self, split):
        super().__init__()
        self.weight, self.split = nn.Parameter(torch.randn(4, 4)), split

    def forward(self, x):
        parts = self.split(x.exp() @ self.weight)
        parts[0].mul_(2)
        return torch.cat(parts).sin()


class Foreach(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        y = x @ self.weight
        torch._foreach_mul_([y], 2.0)
        return y.exp()


class Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(4, 4)

    def forward(self, x):
        return self.cell(x)[0].sin()


SPLITS = {
    "split": lambda y: torch.unsafe_split(y, 2),
    "sizes": lambda y: torch.unsafe_split_with_sizes(y, (1, 3)),
    "chunk": lambda y: torch.unsafe_chunk(y, 2),
}
WRITERS = {
    **{name: partial(Writes, split) for name, split in SPLITS.items()},
    "foreach": Foreach,
    "GRU": Hidden,
}


@pytest.mark.parametrize("kind", WRITERS)
def test_writes_to_saved_results_that_show_in_no_version(path, kind):
    plain, ours = WRITERS[kind](), WRITERS[kind]()
    ours.load_state_dict(plain.state_dict())
    so.CheckpointWrapper(ours, policy="matmuls")
    for _ in range(4):
        x = torch.randn(4, 4, requires_grad=True)
        with pytest.warns(UserWarning, match="modifies in place"):
            got = torch.autograd.grad(ours(x).sum(), (x, *ours.parameters()))
        want = torch.autograd.grad(plain(x).sum(), (x, *plain.parameters()))
        assert all(map(torch.equal, got, want))


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


def through_data(t):
    t.data.mul_(2)


class Writes(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.weight, self.write, self.writes = nn.Parameter(torch.eye(4)), write, True

    def forward(self, x):
        y = x @ self.weight
        if self.writes:
            self.write(y)
        return y.sin()


@pytest.mark.parametrize("begins", [0, 4], ids=["from the first call", "later"])
def test_a_write_through_data_to_a_saved_result_is_seen(path, begins):
    """From the second call on, Python follows the policy of code that may write in this way."""
    plain, x = Writes(through_data), torch.randn(2, 4, requires_grad=True)
    model = so.CheckpointWrapper(Writes(through_data), policy="matmuls")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in range(8):
            plain.writes = model.writes = call >= begins
            (right,) = torch.autograd.grad(plain(x).sum(), x)
            (got,) = torch.autograd.grad(model(x).sum(), x)
            assert torch.equal(got, right)
