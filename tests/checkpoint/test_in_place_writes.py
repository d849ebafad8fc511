"""Regions with embeddings with `max_norm`, and with caches that several layers write in place."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import storage_ops as so
from storage_ops import graph
from storage_ops.checkpoint.state import effects

from .test_effects import KINDS, pair

ROWS, WIDTH, NORM = 2000, 16, 7.3


def renormed(dtype=torch.float32):
    """Return a weight whose rows `max_norm` scales in two calls, because of rounding."""
    weight = (torch.randn(ROWS, WIDTH) * 10).to(dtype)
    once = torch.embedding_renorm_(weight.clone(), torch.arange(ROWS), NORM, 2.0)
    assert not torch.equal(once, torch.embedding_renorm_(once.clone(), torch.arange(ROWS), NORM, 2))
    return nn.Parameter(weight)


def numbers(x):
    """Compute row indices from the values of an input that requires grad."""
    return (x.detach().abs() * 1e5).long() % ROWS


class Embeds(nn.Module):
    def __init__(self, how="module", dtype=torch.float32):
        super().__init__()
        bag = how == "bag"
        self.table = (nn.EmbeddingBag if bag else nn.Embedding)(ROWS, WIDTH, max_norm=NORM)
        self.table.weight = renormed(dtype)
        self.linear, self.how = nn.Linear(WIDTH, 6, dtype=dtype), how

    def forward(self, x):
        ids = numbers(x)
        if self.how == "read before":
            x = x * self.table.weight[0, 0].detach().sin()
        if self.how == "function":
            y = F.embedding(ids, self.table.weight, max_norm=NORM).mean(1)
        else:
            y = self.table(ids)
            y = y if self.how == "bag" else y.mean(1)
        if self.how == "twice":
            y = y + self.table(ids.flip(1)).mean(1)
        if self.how == "tied":
            y = (y @ self.table.weight.T)[:, :WIDTH].tanh()
        return self.linear(y.sin()) * x.sum(1, keepdim=True).to(y.dtype)


def _trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def train(fn, model, inputs, retain=False):
    """Return the gradients of some steps of an optimizer, with one forward each."""
    optimizer, gradients = torch.optim.SGD(_trained(model), lr=0.1), []
    for x in inputs:
        optimizer.zero_grad()
        x = x.clone().requires_grad_()
        loss = fn(x).square().sum()
        if retain:
            loss.backward(retain_graph=True)
        loss.backward()
        gradients.append([x.grad.clone(), *(p.grad.clone() for p in _trained(model))])
        optimizer.step()
    return gradients


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["module", "bag", "function", "tied", "bfloat16"])
def test_an_embedding_with_max_norm_scales_its_rows_once(how, kind):
    dtype = torch.bfloat16 if how == "bfloat16" else torch.float32
    plain, plain_model, fn, model = pair(kind, lambda: Embeds(how, dtype))
    for module in (plain_model, model):
        module.head.to(dtype)
    inputs = [torch.randn(30, 4) for _ in range(3)]
    retain = kind != "reentrant"
    right, got = (train(*module, inputs, retain) for module in ((plain, plain_model), (fn, model)))
    for a, b in zip(got, right, strict=True):
        assert all(map(torch.equal, a, b))
    assert torch.equal(model.layer.table.weight, plain_model.layer.table.weight)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["twice", "read before", "again"])
@pytest.mark.parametrize("copied", [True, False])
def test_rows_that_changed_after_the_forward(monkeypatch, copied, how, kind):
    """The recompute uses a copy. Without a copy, there is an error."""
    if (kind, how) == ("reentrant", "again"):
        copied = False  # autograd counts the write of the other forward
    if not copied:
        monkeypatch.setattr(effects, "SMALL", 0)
        monkeypatch.setattr(effects, "BUDGET", 0)
    plain, plain_model, fn, model = pair(kind, lambda: Embeds(how))
    results, x = [], torch.randn(30, 4)
    for call, module in ((plain, plain_model), (fn, model)):
        inputs = x.clone().requires_grad_()
        y = call(inputs)
        if how == "again":
            call(inputs * 2)
        weight = module.layer.table.weight.detach().clone()
        if module is model and not copied:
            with pytest.raises(
                RuntimeError, match=r"Call it once in the region|was modified in pl"
            ):
                y.sum().backward()
            assert inputs.grad is None
        else:
            y.sum().backward()
            results.append([inputs.grad, *(p.grad for p in module.parameters()), weight])
        assert torch.equal(module.layer.table.weight, weight)
    assert torch._C._len_torch_dispatch_stack() == 0
    equal = partial(torch.allclose, atol=1e-6) if kind == "reentrant" else torch.equal
    assert not copied or all(map(equal, *results))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["clamp", "normalise", "momentum", "data", "exchange", "set"])
def test_a_parameter_that_the_forward_writes_is_written_once(how, kind):
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.slow = nn.Linear(4, 6), nn.Linear(4, 6).requires_grad_(False)

        def forward(self, x):
            y = F.linear(x, self.slow.weight.clone(), self.slow.bias)
            self.write()
            return torch.tanh(self.linear(x)) * self.slow(x) + y

        @torch.no_grad()
        def write(self):
            if how in ("clamp", "normalise"):
                w = self.linear.weight
                w.clamp_(-0.1, 0.1) if how == "clamp" else w.copy_(F.normalize(w, dim=0))
            for a, b in zip(self.linear.parameters(), self.slow.parameters(), strict=True):
                if how == "momentum":
                    b.mul_(0.5).add_(a, alpha=0.5)
                elif how == "data":
                    b.data.copy_(b * 0.5 + a * 0.5)
                elif how == "exchange":
                    b.data = b.data * 0.5 + a.data * 0.5
                elif how == "set":
                    b.set_(b * 0.5 + a * 0.5)

    plain, plain_model, fn, model = pair(kind, Writes)
    inputs = [torch.randn(5, 4) for _ in range(3)]
    right, got = train(plain, plain_model, inputs), train(fn, model, inputs)
    equal = partial(torch.allclose, atol=1e-6) if kind == "reentrant" else torch.equal
    for a, b in zip(got, right, strict=True):
        assert all(map(equal, a, b))
    assert all(map(torch.equal, model.parameters(), plain_model.parameters()))


def test_without_checks_rows_are_scaled_once():
    model = Embeds("twice")
    so.CheckpointWrapper(model, determinism_check="none")
    y = model(torch.randn(30, 4, requires_grad=True))
    weight = model.table.weight.detach().clone()
    y.sum().backward()
    assert torch.equal(model.table.weight, weight)


@pytest.mark.in_turn
@pytest.mark.parametrize("mode", ["full", "output_discard", "tile"])
@pytest.mark.parametrize("kind", ["compiled", "traced"])
def test_max_norm_in_a_graph(kind, mode):
    plain = nn.Sequential(nn.Sequential(Embeds("twice")), nn.Linear(6, 6))
    model, x = copy.deepcopy(plain), torch.randn(30, 4)
    if mode == "tile":
        model[0][0] = so.tile(model[0][0], 2)
    else:
        so.apply_activation_checkpoint(model, {"layer_names": ["0"], "mode": mode})

    def step(model, x):
        loss = model(x).square().sum()
        return torch.autograd.grad(loss, list(model.parameters()))

    right = step(plain, x)
    if kind == "traced":
        traced = graph.trace_step(partial(step, model), x)
        graph.remat(traced.gm)
        got = traced(x)
    else:
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        got = torch.autograd.grad(compiled(x).square().sum(), list(model.parameters()))
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
    for a, b in zip(got, right, strict=True):
        close(a, b)
    close(model[0][0].table.weight, plain[0][0].table.weight)


def test_max_norm_in_a_simulation():
    model = Embeds()
    weight = model.table.weight.detach().clone()
    peaks = []
    for checkpoints in (False, True):
        if checkpoints:
            so.CheckpointWrapper(model)

        def step(x):
            model(x).square().sum().backward()

        peaks.append(so.memory.estimate(step, torch.randn(30, 4)).peak_bytes)
    assert peaks[1] - peaks[0] <= 2 * weight.nbytes and torch.equal(model.table.weight, weight)


def test_tiles_scale_rows_more_than_once_which_is_an_error():
    model = so.tile(Embeds(), 2)
    y = model(torch.randn(30, 4))
    with pytest.raises(RuntimeError, match=r"Call it once in the region"):
        y.square().sum().backward()


def test_a_parameter_of_tiles_that_was_modified_is_an_error():
    model = so.tile(nn.Linear(4, 4), 2)
    y = model(torch.randn(30, 4))
    with torch.no_grad():
        model.weight.add_(1)
    with pytest.raises(RuntimeError, match="argument 'parameters' of Linear, or a tensor in it"):
        y.square().sum().backward()


class Cache:
    """Holds the keys of earlier tokens."""

    def __init__(self, keys):
        self.keys = [keys]


class Rolls(nn.Module):
    """Reads a copy of a cache, and writes its keys to the end of the cache."""

    def __init__(self):
        super().__init__()
        self.linear, self.key = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, cache):
        keys = cache.keys[0]
        all_keys = torch.cat([keys, self.key(x)])
        keys.copy_(all_keys[-len(keys) :].detach())
        return self.linear(x).tanh() * all_keys.mean(0).sin()


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Rolls() for _ in range(3))

    def forward(self, x, cache):
        for layer in self.layers:
            x = layer(x, cache)
        return x


@pytest.mark.parametrize("size", [7, 20000])
@pytest.mark.parametrize("mode", ["full", "selective", "output_discard", "reentrant"])
def test_a_rolling_cache_in_an_object(mode, size):
    plain = Layers()
    model, keys = copy.deepcopy(plain), torch.randn(size, 4)
    options = {"use_reentrant": True} if mode == "reentrant" else {"mode": mode}
    options |= {"policy": "matmuls"} if mode == "selective" else {}
    so.apply_activation_checkpoint(model, {"layer_classes": ["Rolls"], **options})
    results = []
    for module in (plain, model):
        x, cache = torch.ones(3, 4, requires_grad=True), Cache(keys.clone())
        y = module(x, cache)
        y.square().sum().backward()
        results.append([cache.keys[0], x.grad, *(p.grad for p in module.parameters())])
    equal = partial(torch.allclose, atol=1e-6) if mode == "reentrant" else torch.equal
    assert all(map(equal, *results))


@pytest.mark.parametrize("where", ["argument", "keyword", "list"])
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "chain"])
def test_a_cache_that_is_an_argument_is_an_error_that_names_it(kind, where):
    class Writes(nn.Linear):
        def forward(self, x, *extra):
            cache = extra[0] if where == "argument" else extra[0][-1]
            y = super().forward(x) * cache.mean()
            cache.mul_(2)
            return y

    _, _, fn, _ = pair(kind, lambda: Writes(4, 6))
    cache = torch.ones(3)
    y = fn(torch.randn(3, 4, requires_grad=True), cache if where == "argument" else [1, cache])
    with pytest.raises(RuntimeError, match=r"argument 1 of .*, or a tensor in it, was modified"):
        y.sum().backward()
    assert (cache == 2).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["attribute", "buffer", "unread"])
def test_a_large_tensor_that_was_written_after_the_forward_is_an_error_if_read(place, kind):
    class Reads(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y if place == "unread" else y * self.table.mean().sin()

    plain, plain_model, fn, model = pair(kind, lambda: Reads(4, 6))
    results = []
    for call, module in ((plain, plain_model), (fn, model)):
        table = torch.full((300, 300), 0.5)
        if place == "buffer":
            module.layer.register_buffer("table", table)
        else:
            module.layer.table = table
        x = torch.ones(3, 4, requires_grad=True)
        y = call(x)
        table.add_(1)
        if module is model and place != "unread":
            with pytest.raises(RuntimeError, match=r"a tensor of shape \(300, 300\) that .* uses"):
                y.sum().backward()
            return
        y.sum().backward()
        results.append(x.grad)
    torch.testing.assert_close(*results)
