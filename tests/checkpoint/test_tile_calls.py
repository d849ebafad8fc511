"""Calls of tiled modules in every mode and from several threads, and the checks of first calls."""

import copy
import functools
import threading

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations, parametrize

import storage_ops
from storage_ops import memory
from storage_ops.checkpoint.layers import tile


class Counted(nn.Linear):
    tokens = 0

    def forward(self, x):
        # On the class, because a recompute restores the attributes of the module.
        Counted.tokens += x.shape[-2]
        return super().forward(x)


def test_the_forward_runs_twice_in_all():
    layer = Counted(16, 16)
    module = storage_ops.tile(nn.Sequential(layer, nn.SiLU(), nn.Linear(16, 16)), 4)
    x = torch.randn(2, 32, 16, requires_grad=True)
    module(x).sum().backward()
    Counted.tokens = 0
    module(x).sum().backward()
    assert Counted.tokens == 2 * 32
    calls = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    module(x).sum().backward()
    assert len(calls) == 8


def test_the_budget_is_evaluated_for_every_mode(monkeypatch):
    class Scaled(nn.Linear):
        def forward(self, x, how="plain", by=1.0):
            return super().forward(x) * by

    looked = []
    monkeypatch.setattr(tile, "_fewest", lambda *how: looked.append(how) or 2)
    module, x = storage_ops.tile(Scaled(16, 16), budget="10KiB"), torch.randn(2, 6, 16)
    changes = [
        lambda: module.requires_grad_(False),
        lambda: module.requires_grad_(True),
        lambda: module.eval(),
        lambda: x.requires_grad_(),
    ]
    for change in (*changes, lambda: None):
        change()
        module(x)
    module(x, "other")
    module(x, how="other")
    assert len(looked) == 6
    module(x, how="other")
    module(x)
    module(x, "plain", 1.0)
    module(x, "plain", 2.0)  # another number needs no new choice of tiles
    module.train()(x.detach())
    assert len(looked) == 7


def test_a_module_without_shapes_is_refused():
    for how in ({"budget": "1MiB"}, {"tiles": 2}):
        module = storage_ops.tile(nn.Sequential(nn.LazyLinear(16)), **how)
        with pytest.raises(RuntimeError, match="shapes are unknown before its first call"):
            module(torch.randn(2, 2, 16))


class Mean(nn.Module):
    def forward(self, x):
        return x + x.mean(-2, keepdim=True)


def test_calls_without_tokens_or_in_inference_mode_are_not_checked():
    x = torch.randn(2, 8, 16)
    for first in (torch.inference_mode(), torch.no_grad()):
        module = storage_ops.tile(nn.Sequential(nn.Linear(16, 16), Mean()), 2)
        with first:
            module(x[:0])
            if torch.is_inference_mode_enabled():
                module(x)
        with pytest.raises(ValueError, match="is not token-wise"):
            module(x)


@pytest.mark.parametrize("sparse", [False, True])
def test_ids_of_tokens(sparse):
    tables = [nn.Embedding(20, 8, sparse=sparse, dtype=torch.float64) for _ in range(2)]
    ids = torch.randint(20, (2, 7, 3))
    for table, run in zip(tables, (tables[0], storage_ops.tile(tables[1], 3, dim=1)), strict=True):
        table.load_state_dict(tables[0].state_dict())
        run(ids).square().sum().backward()
    right, got = (table.weight.grad.to_dense() for table in tables)
    torch.testing.assert_close(got, right)


class Flat(nn.Linear):
    def forward(self, x):
        return super().forward(x.view(-1, x.shape[-1])).view(*x.shape[:-1], -1)


@pytest.mark.parametrize("compiles", [False, True])
def test_a_module_that_needs_a_contiguous_input(compiles):
    x = torch.randn(2, 7, 16, dtype=torch.float64, requires_grad=True)
    plain = Flat(16, 8).double()
    tiled = storage_ops.tile(copy.deepcopy(plain), 3)
    run = torch.compile(tiled, backend="aot_eager") if compiles else tiled
    right, got = (
        torch.autograd.grad(call(x).square().sum(), (x, *module.parameters()))
        for call, module in ((plain, plain), (run, tiled))
    )
    torch.testing.assert_close(got, right)


def test_parameters_that_functional_call_computes():
    plain = nn.Sequential(nn.Linear(16, 8), nn.Tanh()).double()
    tiled = storage_ops.tile(copy.deepcopy(plain), 3)
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    for module in (plain, tiled):
        doubled = {name: 2 * p for name, p in module.named_parameters()}
        torch.func.functional_call(module, doubled, x).square().sum().backward()
    for p, q in zip(plain.parameters(), tiled.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_a_module_that_modifies_its_input_is_refused():
    hidden = torch.randn(2, 7, 16, requires_grad=True) * 1
    before = hidden.clone()
    for module in (nn.ReLU(inplace=True), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(16, 8))):
        with pytest.raises(RuntimeError, match="modifies its input in place"):
            storage_ops.tile(module, 3)(hidden)
    assert torch.equal(hidden, before)


def test_an_output_without_a_gradient_has_none():
    class Choice(nn.Linear):
        def forward(self, x):
            return super().forward(x).argmax(-1, keepdim=True)

    class Fixed(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                return super().forward(x)

    x = torch.randn(2, 8, 16, requires_grad=True)
    for plain in (Choice(16, 16), Fixed(16, 16)):
        right = plain(x)
        got = storage_ops.tile(plain, 2)(x)
        assert torch.equal(got, right) and not got.requires_grad


def test_two_threads_may_call_one_tiled_module():
    class Slow(nn.Linear):
        first = None

        def forward(self, x):
            is_other = self.first is not None and threading.current_thread() is not self.first
            if is_other and not inside.is_set():
                inside.set()
                done.wait(0.5)
            elif self.first is not None and not is_other:
                inside.wait(0.1)  # without a lock, the other thread would enter here
            return super().forward(x)

    inside, done = threading.Event(), threading.Event()
    module = storage_ops.tile(Slow(8, 8), 2)
    weight, x = module.weight, torch.randn(2, 6, 8)
    module(x)

    def call():
        module(x).sum().backward()
        done.set()

    threads = [threading.Thread(target=call) for _ in range(2)]
    module.first = threads[0]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert module.weight is weight
    torch.testing.assert_close(weight.grad, 2 * x.sum((0, 1)).expand(8, 8))


def test_cached_parametrizations_have_their_gradients():
    linear = parametrizations.weight_norm(nn.Linear(8, 16))
    plain = nn.Sequential(linear, nn.GELU(), nn.Linear(16, 8)).double()
    tiled = storage_ops.tile(copy.deepcopy(plain), 4)
    x = torch.randn(2, 12, 8, dtype=torch.float64)
    for module in (plain, tiled):
        with parametrize.cached():
            module(x).square().sum().backward(retain_graph=True)
            if module is tiled:
                memory.estimate(module, x)
            module(x).square().sum().backward()
    for ours, theirs in zip(tiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-10)


@functools.lru_cache
def scale_of(width):
    return torch.full((width,), 0.5)


class Scaled(torch.nn.Sequential):
    def forward(self, x):
        return super().forward(x) * scale_of(x.shape[-1])


@pytest.mark.in_turn
def test_a_budget_leaves_no_fake_tensors_in_caches():
    scale_of.cache_clear()
    x, layers = torch.randn(2, 64, 16), (torch.nn.Linear(16, 64), torch.nn.Linear(64, 16))
    tiled = storage_ops.tile(Scaled(*layers), budget="64KiB")
    torch.testing.assert_close(tiled(x), Scaled(*layers)(x))
    assert type(scale_of(16)) is torch.Tensor


class Called(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.layer, self.fn = nn.Linear(4, 4).double(), fn

    def forward(self, x):
        return self.fn(self.layer(x))


def after_errors(h):
    for other in (torch.ones(3, 4).double(), torch.ones(4, 3)):
        try:
            h = torch.mm(h, other).exp()
        except RuntimeError:
            h = h.sin()
    try:
        h = torch.addmm(torch.ones(2, 2).double(), h, torch.ones(4, 4).double())
    except RuntimeError:
        h = h.cos()
    return h


def jagged(h):
    offsets = torch.tensor([0, 1, h.shape[0]])
    return torch.nested.nested_tensor_from_jagged(h, offsets).sin().values()


@pytest.mark.parametrize("fn", [after_errors, jagged])
def test_ops_that_raise_and_ops_behind_a_product(fn):
    module, x = Called(fn), torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    wanted = (x, *module.parameters())
    right = torch.autograd.grad(module(x).square().sum(), wanted)
    storage_ops.tile(module, 2, dim=0)
    torch.testing.assert_close(torch.autograd.grad(module(x).square().sum(), wanted), right)


def test_transforms_that_tiles_refuse():
    inner = storage_ops.tile(Called(lambda h: torch.func.grad(lambda h: h.sin().sum())(h)), 2)
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"Called calls a transform of torch.func"):
        inner(x)
    module = storage_ops.tile(Called(torch.sin), 2, dim=0)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="tiles have no forward-mode"):
        module(forward_ad.make_dual(x, x.detach()))
