"""Regions of functions that are created for each call: lambdas, closures, methods, partials."""

import functools
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import storage_ops as so
from storage_ops.checkpoint.region import plain_region
from storage_ops.checkpoint.state import known_walks

from .paths import both_paths

path = both_paths(known_walks)
CALLS = 5  # more than a walk needs to become known


def repeated(fn):
    @functools.wraps(fn)
    def twice(x):
        return fn(fn(x))

    return twice


class Block(nn.Module):
    """Its producer is a new function in each call, which `kind` chooses."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.other, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.kind, self.scale, self.discards = kind, 2.0, True

    def forward(self, x):
        producer = getattr(self, self.kind)()
        if not self.discards:
            return x + self.last(producer(x))
        return x + so.output_discard(producer, self.last)(x)

    def of_self(self):
        return lambda x: F.dropout(self.layer(x), 0.3) * self.scale

    def of_a_module(self):
        layer, scale = self.layer, self.scale
        return lambda x: layer(x).sin() * scale

    def of_nothing(self):
        return lambda x: x.sin().exp()

    def of_functions(self):
        def inner(x):
            return self.layer(x) * self.scale

        def outer(x):
            return inner(x).tanh()

        return lambda x: outer(inner(x))

    def of_itself(self):
        def down(x, n=2):
            return down(self.layer(x), n - 1) if n else x.sin() * self.scale

        return down

    def of_a_method(self):
        call, scale = self.layer.forward, self.scale
        return lambda x: call(x).sin() * scale

    def of_a_partial(self):
        call = functools.partial(F.linear, weight=self.layer.weight.detach())
        return lambda x: call(x).sin() * self.scale

    def of_defaults(self):
        return lambda x, layer=self.layer, scale=self.scale: layer(x).sin() * scale

    def of_keywords(self):
        def call(x, *, layer=self.layer, scale=self.scale):
            return layer(x).sin() * scale

        return call

    def of_a_variable_of_two(self):
        layer = self.layer

        def inner(x):
            return layer(x).sin() * self.scale

        return lambda x: layer(inner(x))

    def of_a_decorator(self):
        return repeated(lambda x: self.layer(x).sin() * self.scale)

    def a_partial(self):
        return functools.partial(lambda k, x: self.layer(x).sin() * k, self.scale)


KINDS = [name for name in vars(Block) if name.startswith(("of_", "a_"))]
STAYS_IN_PYTHON = {"of_a_partial"}  # a tensor that is no parameter


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def gradients(block, x, discards, between=lambda: None):
    torch.manual_seed(2)
    block.discards = discards
    leaf = x.detach().requires_grad_()
    leaves = [leaf, *block.parameters()]
    y = block(leaf)
    between()
    grads = torch.autograd.grad(y.square().sum(), leaves, allow_unused=True)
    return [y.detach(), *grads]


def same(a, b):
    return (a is None and b is None) or torch.equal(a, b)


def check(block, x, between=lambda: None):
    right = gradients(block, x, discards=False)
    got = gradients(block, x, True, between)
    assert all(map(same, got, right))


@pytest.fixture
def regions(monkeypatch):
    """Return a list with the library's object for each call, or None."""
    made, create = [], plain_region.plain_region

    def plain(*args, **kwargs):
        made.append(create(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr("storage_ops.checkpoint.discard.output_discard.plain_region", plain)
    return made


def test_the_library_runs_new_functions_of_the_same_code(path, kind, regions):
    blocks, x = [Block(kind) for _ in range(3)], torch.randn(3, 4)
    for _ in range(CALLS):
        for block in blocks:
            check(block, x)
    assert len(regions) == 3 * CALLS
    in_c = [region is not None for region in regions[-3:]]
    assert in_c == [path == "C++" and kind not in STAYS_IN_PYTHON] * 3


@pytest.mark.parametrize(
    "producer",
    [torch.sin, F.gelu, functools.partial(torch.mul, other=2.0), F.silu],
    ids=["sin", "gelu", "partial", "silu"],
)
def test_the_library_runs_functions_of_torch(path, producer, regions):
    last, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    run = so.output_discard(producer, last)
    for _ in range(CALLS):
        right = torch.autograd.grad(last(producer(x)).square().sum(), (x, last.weight))
        got = torch.autograd.grad(run(x).square().sum(), (x, last.weight))
        assert all(map(torch.equal, got, right))
    assert (regions[-1] is not None) == (path == "C++")


def test_a_method_of_a_tensor_stays_in_python(path, regions):
    last, gate = nn.Linear(4, 4), torch.rand(4)
    x = torch.randn(4, requires_grad=True)
    for _ in range(CALLS):
        (right,) = torch.autograd.grad(last(gate * x).sum(), x)
        (got,) = torch.autograd.grad(so.output_discard(gate.mul, last)(x).sum(), x)
        assert torch.equal(got, right)
    assert regions[-1] is None


def a_number(block):
    block.scale = 3.0


def a_weight(block):
    block.layer.weight = nn.Parameter(torch.ones(4, 4))


def a_module(block):
    block.layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh())


def another_class(block):
    block.scale = nn.Parameter(torch.full((4,), 0.5))


def a_tensor(block):
    block.scale = torch.full((4,), 0.5)


@pytest.mark.parametrize("change", [a_number, a_weight, a_module, another_class, a_tensor])
def test_what_they_read_may_be_another(path, kind, change):
    block, x = Block(kind), torch.randn(3, 4)
    for _ in range(CALLS):
        check(block, x)
    if kind in ("of_a_method", "of_a_partial") and change is a_module:
        block.layer = nn.Linear(4, 4)
    else:
        change(block)
    for _ in range(CALLS):
        check(block, x)


def test_a_weight_that_is_set_after_the_forward_does_not_reach_the_recompute(path, kind):
    block, x = Block(kind), torch.randn(3, 4)
    for _ in range(CALLS):
        check(block, x)
    check(block, x, functools.partial(a_weight, block))
    assert (block.layer.weight == 1).all()


def test_a_loop_variable_is_that_of_the_forward(path):
    layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
    consumers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def run(x, discards):
        for layer, consumer in zip(layers, consumers, strict=True):
            producer = lambda x: layer(x).sin()  # noqa: B023, E731
            x = so.output_discard(producer, consumer)(x) if discards else consumer(producer(x))
        return x

    x = torch.randn(2, 4)
    for _ in range(CALLS):
        results = []
        for discards in (False, True):
            leaf = x.clone().requires_grad_()
            loss = run(leaf, discards).square().sum()
            results.append(torch.autograd.grad(loss, [leaf, *layers.parameters()]))
        assert all(map(torch.equal, *results))


def test_variables_of_the_forward_come_back_for_the_recompute_only(path):
    """The variable has its present value again after the recompute."""
    layer, other, last = (nn.Linear(4, 4) for _ in range(3))
    x = torch.randn(2, 4, requires_grad=True)
    (right,) = torch.autograd.grad(last(layer(x).sin()).sum(), x)
    for _ in range(CALLS):
        module = layer
        y = so.output_discard(lambda x: module(x).sin(), last)(x)  # noqa: B023
        module = other
        (got,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(got, right) and module is other


def test_they_and_what_they_reach_are_freed(path, kind):
    block, x = Block(kind), torch.randn(3, 4)
    for _ in range(CALLS):
        check(block, x)
    known = len(known_walks._known)
    for _ in range(20):
        check(block, x)
    assert len(known_walks._known) - known < 10
    references = weakref.ref(block), weakref.ref(block.layer.weight)
    del block
    gc.collect()
    assert [ref() for ref in references] == [None, None]
