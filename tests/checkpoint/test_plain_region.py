"""Usual calls run and are recomputed in C++. They do what a region in Python does."""

import gc
import itertools
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import storage_ops as so
from storage_ops.checkpoint.region import plain_region
from storage_ops.checkpoint.saved.outputs import producers
from storage_ops.checkpoint.saved.ref_counts import RefCounts

from .blocks import in_threads
from .paths import both_paths, know_at_once, regions_in_python

path, made = both_paths(plain_region), regions_in_python()


@pytest.fixture(autouse=True)
def known(monkeypatch):
    know_at_once(monkeypatch)


class Mlp(nn.Module):
    def __init__(self, width=8, dropout=0.5):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = dropout

    def hidden(self, x, gate=None, *, flag=True, parts=()):
        assert flag is True
        h = F.silu(self.up(x)) * F.dropout(self.up(x), self.dropout)
        h = h if gate is None else h * gate
        for part in parts:
            h = h * part
        return h.exp()

    def forward(self, x, **kwargs):
        return self.down(self.hidden(x, **kwargs))


class Discarding(Mlp):
    def forward(self, x, **kwargs):
        return so.output_discard(self.hidden, self.down)(x, **kwargs)


def module(kind):
    if kind == "discarding":
        return Discarding()
    options = {"full": {}, "selective": {"ops_to_save": ["aten.addmm", "aten.exp"]}}[kind]
    return so.CheckpointWrapper(Mlp(), **options)


def gradients(module, x, call=None, **options):
    torch.manual_seed(1)
    y = (call or module)(x, **options).square().sum()
    return [*torch.autograd.grad(y, (x, *module.parameters())), torch.randn(2)]


KINDS = ["full", "selective", "discarding"]
ARGUMENTS = {
    "tensor": {},
    "none": {"gate": None, "flag": True},
    "by name": {"gate": torch.tensor(2.0)},
    "tuple": {"parts": (torch.tensor(2.0), torch.ones(16)), "gate": None},
    "list": {"parts": [torch.tensor(2.0)]},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS)
def test_gradients_and_random_numbers_are_those_of_plain_calls(path, made, kind, arguments):
    ours, plain = module(kind), Mlp()
    plain.load_state_dict(ours.state_dict())
    x = torch.randn(3, 8, requires_grad=True)
    for _ in range(2):
        assert all(
            map(torch.equal, gradients(ours, x, **arguments), gradients(plain, x, **arguments))
        )
    assert bool(made) == (path != "C++" or type(arguments.get("parts")) is list)
    assert not producers


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_backward(path, made, kind):
    ours, x = module(kind), torch.randn(3, 8, requires_grad=True)
    y = ours(x).sum()
    first = torch.autograd.grad(y, x, retain_graph=True)
    assert torch.equal(*first, *torch.autograd.grad(y, x))
    with pytest.raises(RuntimeError, match=r"second time|second backward pass"):
        torch.autograd.grad(y, x)
    assert not producers


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_gradients(path, kind):
    ours, plain = module(kind).double(), Mlp().double()
    plain.load_state_dict(ours.state_dict())
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    results = []
    for each in (ours, plain):
        torch.manual_seed(0)
        (grad,) = torch.autograd.grad(each(x).sin().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(grad.square().sum(), x)[0])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("kind", KINDS)
def test_the_graph_and_the_inputs_are_freed(path, kind):
    ours, refs = module(kind), []

    def call(backward):
        x = torch.randn(3, 8, requires_grad=True) * 2
        refs.append(weakref.ref(x))
        y = ours(x).sum()
        if backward:
            y.backward()

    for backward in (False, True):
        call(backward)
        assert refs[-1]() is None
    assert not producers


def test_memory_is_flat(path):
    modules = [module(kind) for kind in KINDS]
    x = torch.randn(3, 8, requires_grad=True)

    def blocks():
        for _ in range(40):
            for each in modules:
                each(x).sum().backward()
        gc.collect()
        return sys.getallocatedblocks()

    # Caches fill in the first steps. A leak would be one for each of 120 calls, in every interval.
    counts = [blocks() for _ in range(6)]
    assert min(after - before for before, after in itertools.pairwise(counts)) < 60


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["forward", "recompute"])
def test_an_error_leaves_nothing_behind(path, kind, where):
    ours, x = module(kind), torch.randn(3, 8, requires_grad=True)
    ours(x).sum().backward()
    right = gradients(ours, x)
    calls = {"forward": 0, "recompute": 1}[where]

    def fail(*args):
        nonlocal calls
        if calls == 0:
            raise KeyboardInterrupt
        calls -= 1
        return exp(*args)

    exp = torch.Tensor.exp
    hidden = type(ours).hidden
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "exp", fail)
        with pytest.raises(KeyboardInterrupt):
            ours(x).sum().backward()
    assert hidden is type(ours).hidden and torch.is_grad_enabled()
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    gc.collect()
    assert not producers
    assert all(map(torch.equal, gradients(ours, x), right))


@pytest.mark.parametrize("kind", KINDS)
def test_two_threads(path, kind):
    ours, plain = module(kind), Mlp()
    plain.load_state_dict(ours.state_dict())
    ours.dropout = plain.dropout = 0.0
    x = torch.randn(3, 8)
    right = torch.autograd.grad(plain(x).sum(), plain.up.weight)[0]
    results = []

    def train():
        for _ in range(20):
            results.append(torch.autograd.grad(ours(x).sum(), ours.up.weight)[0])

    in_threads(train, 2)
    assert len(results) == 40 and all(torch.equal(each, right) for each in results)


@pytest.mark.parametrize("kind", KINDS)
def test_threads_that_run_a_backward_of_the_same_graph(path, kind):
    ours, x = nn.Sequential(module(kind), nn.Sigmoid(), module(kind)), torch.randn(3, 8)
    ours[0].dropout = ours[2].dropout = 0.0  # threads share the random numbers of the process
    y, wrong = ours(x).sum(), []
    weight = next(ours.parameters())
    right = torch.autograd.grad(y, weight, retain_graph=True)[0]

    def work():
        for _ in range(30):
            grad = torch.autograd.grad(y, weight, retain_graph=True)[0]
            if not torch.equal(grad, right):
                wrong.append(grad)

    in_threads(work, 3)
    assert not wrong


@pytest.mark.parametrize("inner", KINDS)
@pytest.mark.parametrize("outer", KINDS)
def test_regions_inside_of_regions(path, outer, inner):
    class Nested(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.first, self.block = nn.Linear(8, 8), block

        def forward(self, x):
            return self.block(self.first(x)).sigmoid() + x

    block = module(inner)
    plain = Nested(Mlp())
    if outer == "discarding":
        ours = nn.Sequential(so.OutputDiscard(Nested(block), nn.Sigmoid()))
        plain = nn.Sequential(nn.Sequential(plain, nn.Sigmoid()))
        plain.load_state_dict(
            dict(zip(plain.state_dict(), ours.state_dict().values(), strict=True))
        )
    else:
        options = {} if outer == "full" else {"ops_to_save": ["aten.sigmoid"]}
        ours = so.CheckpointWrapper(Nested(block), **options)
        plain.load_state_dict(ours.state_dict())
    x = torch.randn(3, 8, requires_grad=True)
    for _ in range(2):
        for mine, right in zip(gradients(ours, x), gradients(plain, x), strict=True):
            torch.testing.assert_close(mine, right)
    assert not producers


class Keeps(nn.Linear):
    """A consumer that keeps its input."""

    def forward(self, x):
        self.kept = x
        return super().forward(x)


class Views(nn.Linear):
    def forward(self, x):
        return super().forward(x.view(-1, 16)).view(3, 8)


class Clones(nn.Linear):
    """A consumer with a region of its own, which reads the output."""

    def forward(self, x):
        return super().forward(so.OutputDiscard(nn.Sigmoid(), nn.Sigmoid())(x))


class Twice(nn.Linear):
    def forward(self, x):
        return super().forward(x.sin() * x.cos() + x)


@pytest.mark.parametrize("consumer", [Keeps, Views, Clones, Twice, nn.Linear])
def test_consumers(path, made, consumer):
    ours, plain = Mlp(), Mlp()
    ours.down, plain.down = consumer(16, 8), consumer(16, 8)
    plain.load_state_dict(ours.state_dict())
    call = so.output_discard(ours.hidden, ours.down)
    x = torch.randn(3, 8, requires_grad=True)
    assert all(map(torch.equal, gradients(ours, x, call), gradients(plain, x)))
    if consumer is Keeps:
        assert not so.is_discarded(ours.down.kept)
    assert bool(made) == (path != "C++" or consumer in (Keeps, Clones))
    assert not producers


class Modifies(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        x.detach().mul_(2)
        return y


def test_a_consumer_that_modifies_the_output_is_an_error(path):
    ours = Mlp()
    ours.down = Modifies(16, 8)
    x = torch.randn(3, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"output 0 of .*hidden was modified in place"):
        so.output_discard(ours.hidden, ours.down)(x)
    gc.collect()
    assert not producers


def test_a_saved_tensor_of_a_consumer_that_is_modified_is_an_error(path):
    x = torch.randn(3, 8, requires_grad=True)
    factor = torch.ones(8)
    ours = Mlp()
    y = so.output_discard(ours.hidden, nn.Sequential(ours.down, _Times(factor)))(x)
    factor.add_(1)
    with pytest.raises(RuntimeError, match=r"tensor of shape \(8,\) that a consumer has saved"):
        y.sum().backward()


class _Times(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.register_buffer("factor", factor)

    def forward(self, x):
        return x * self.factor


class Outputs(Mlp):
    """Outputs that are not usual ones."""

    def view(self, x):
        return self.up(x).view(3, 2, 8).exp().view(3, 16)

    def own_input(self, x):
        return x

    def kept(self, x):
        self.cache = self.hidden(x)
        return self.cache

    def frozen(self, x):
        return self.hidden(x).detach()


@pytest.mark.parametrize("kind", ["view", "own_input", "kept", "frozen"])
def test_outputs_that_are_not_usual(path, kind):
    ours = Outputs()
    fn, x = getattr(ours, kind), torch.randn(3, 8, requires_grad=True)
    down = nn.Linear(8 if kind == "own_input" else 16, 8)
    results = []
    for call in (so.output_discard(fn, down), lambda x: down(fn(x))):
        torch.manual_seed(0)
        y = call(x).square().sum()
        results.append(torch.autograd.grad(y, [x, down.weight], allow_unused=True))
    for mine, right in zip(*results, strict=True):
        assert (mine is None and right is None) or torch.equal(mine, right)
    if kind == "kept":
        assert not so.is_discarded(ours.cache)
    gc.collect()
    assert not producers


KEPT = {}
KEEPERS = {
    "itself": lambda h: KEPT.update(h=h),
    "detached": lambda h: KEPT.update(h=h.detach()),
    "view": lambda h: KEPT.update(h=h[1:]),
    "detached after a look at the storage": lambda h: KEPT.update(
        address=h.untyped_storage().data_ptr(), h=h.detach()
    ),
    "address": lambda h: KEPT.update(address=h.untyped_storage().data_ptr()),
}


@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize("keeps", KEEPERS)
def test_an_output_that_a_consumer_keeps_is_not_freed(path, keeps, saves):
    ours, x = Outputs(), torch.randn(3, 8, requires_grad=True)

    def consumer(h):
        KEEPERS[keeps](h)
        return h.sin() if saves else h + 1

    y = so.output_discard(ours.hidden, consumer)(x)
    kept = KEPT.pop("h", None)
    assert kept is None or not so.is_discarded(kept)
    y.sum().backward()
    assert torch.isfinite(x.grad).all()


def test_first_counts_are_those_of_an_output():
    """`RefCounts` of a tensor with one name whose storage one other tensor shares."""
    output = torch.randn(3, requires_grad=True) * 2
    handle = output.detach()
    key = output.untyped_storage()._cdata
    assert RefCounts.counted(key, weakref.ref(output)) == plain_region._FIRST
    assert handle.shape == (3,)


def test_state_that_changes_before_the_recompute(path, made):
    ours, plain = module("full"), Mlp()
    plain.load_state_dict(ours.state_dict())
    x = torch.randn(3, 8, requires_grad=True)
    results = []
    for each in (ours, plain):
        torch.manual_seed(0)
        y = each(x).sum()
        with torch.autocast("cpu", torch.bfloat16):
            results.append(torch.autograd.grad(y, x)[0])
    assert torch.equal(*results) and len(made) == 1


def test_a_modified_parameter_is_an_error(path):
    ours, x = module("full"), torch.randn(3, 8, requires_grad=True)
    y = ours(x).sum()
    with torch.no_grad():
        ours.up.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified"):
        y.backward()


class Counts(Mlp):
    """Saves more tensors each time."""

    calls = 0

    def forward(self, x):
        type(self).calls += 1
        for _ in range(type(self).calls):
            x = x.sin()
        return super().forward(x)


def test_a_recompute_that_differs_is_an_error(path):
    ours, x = so.CheckpointWrapper(Counts()), torch.randn(3, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"Counts saves"):
        ours(x).sum().backward()
