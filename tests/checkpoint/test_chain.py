"""Gradients are right in chains, nested regions, threads, and any order of forward and backward."""

import gc
import itertools
import threading
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import storage_ops as so

KINDS = [F.gelu, partial(F.dropout, p=0.4), torch.sin, lambda x: x.softmax(-1), lambda x: x * 2 + 1]


def make(depth=4):
    layers = nn.ModuleList(nn.Linear(8, 8).double() for _ in range(depth))
    return layers, torch.randn(3, 8, dtype=torch.float64, requires_grad=True)


def stages(layers):
    pairs = zip(layers, itertools.cycle(KINDS), strict=False)
    return [lambda x, layer=layer, kind=kind: kind(layer(x)) for layer, kind in pairs]


def plain(functions, x):
    for fn in functions:
        x = fn(x)
    return x.sigmoid()


def chained(functions, x):
    with so.OutputDiscardChain() as chain:
        for fn in functions:
            x = chain.checkpoint(fn, x)
        return x.sigmoid() + 0 * x.square()


def linked(functions, x):
    """Run single regions. Each consumes the output of the region before it, as its hook tensor."""
    before = None
    for fn in functions:
        ckpt = so.OutputDiscardCheckpoint()
        x = ckpt.checkpoint(fn, x)
        if before is not None:
            before.discard_output_and_register_recompute(x)
        before = ckpt
    y = x.sigmoid()
    before.discard_output_and_register_recompute(y)
    return y


def blocks(functions, x):
    before = None
    for fn in functions:
        ckpt = so.OutputDiscardCheckpoint()
        if before is None:
            x = ckpt.checkpoint(fn, x)
        else:
            with before.consumer():
                x = ckpt.checkpoint(fn, x)
            before.discard_output_and_register_recompute()
        before = ckpt
    with before.consumer():
        y = x.sigmoid()
    before.discard_output_and_register_recompute()
    return y


def gradients(way, functions, x, parameters):
    torch.manual_seed(11)
    y = way(functions, x)
    return torch.autograd.grad(y.square().sum(), (x, *parameters), allow_unused=True)


def same(got, right):
    for a, b in zip(got, right, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("way", [chained, linked, blocks])
def test_regions_that_feed_one_another(path, way):
    layers, x = make()
    functions, parameters = stages(layers), list(layers.parameters())
    right = gradients(plain, functions, x, parameters)
    same(gradients(way, functions, x, parameters), right)


def test_a_chain_recomputes_in_forward_order_and_frees_outputs_early(path):
    order, layers, x = [], *make(3)

    def stage(number):
        def run(x):
            order.append(number)
            return layers[number](x).sin()

        return run

    with so.OutputDiscardChain() as chain:
        a = chain.checkpoint(stage(0), x)
        b = chain.checkpoint(stage(1), a)
        c = chain.checkpoint(stage(2), b)
        y = c.sin().cos()
    assert [so.is_discarded(t) for t in (a, b, c)] == [True] * 3 and order == [0, 1, 2]
    # The output of a later region is freed before the backward reaches an earlier region.
    storages = [weakref.ref(t.untyped_storage()) for t in (a, b, c)]
    alive = []
    x.register_hook(lambda grad: alive.extend(ref() is not None for ref in storages))
    del a, b, c
    y.sum().backward()
    assert order == [0, 1, 2, 0, 1, 2]
    assert alive == [False] * 3


def test_a_chain_keeps_outputs_that_no_node_saved_and_frees_them_on_request(path):
    layers, x = make(2)
    with so.OutputDiscardChain() as chain:
        a = chain.checkpoint(layers[0], x)
        b = chain.checkpoint(layers[1], a)
        chain.discard_output_and_register_recompute()
        assert so.is_discarded(a) and not so.is_discarded(b)
        last = b + 1
    assert not so.is_discarded(b)
    right = torch.autograd.grad((layers[1](layers[0](x)) + 1).square().sum(), x)
    same(torch.autograd.grad(last.square().sum(), x), right)


def test_a_chain_without_grad_is_plain_calls_and_use_outside_its_block_is_an_error():
    layers, x = make(2)
    with torch.no_grad():
        assert torch.equal(chained(layers, x), chained(layers, x))
    with pytest.raises(RuntimeError, match="outside of its with block"):
        so.OutputDiscardChain().checkpoint(torch.sin, x)
    with pytest.raises(ValueError, match="`determinism_check` is 'no'"):
        so.OutputDiscardChain(determinism_check="no")


def test_an_exception_in_a_chain_leaves_nothing_behind():
    layers, x = make(2)
    with pytest.raises(KeyError), so.OutputDiscardChain() as chain:
        a = chain.checkpoint(layers[0], x)
        raise KeyError("no")
    assert not so.is_discarded(a)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    a.sum().backward()


WRAPPERS = {
    "checkpoint": lambda fn: lambda x: checkpoint(fn, x, use_reentrant=False),
    "reentrant": lambda fn: lambda x: checkpoint(fn, x, use_reentrant=True),
    "region": lambda fn: so.output_discard(fn, torch.sin),
    "consumer": lambda fn: so.output_discard(torch.sin, fn),
    "chain": lambda fn: lambda x: chained([fn], x),
}


@pytest.mark.parametrize("outer", WRAPPERS)
@pytest.mark.parametrize("inner", WRAPPERS)
def test_every_wrapper_inside_of_every_other(path, outer, inner):
    layers, x = make(2)
    parameters = list(layers.parameters())

    def core(x):
        return so.output_discard(lambda x: F.dropout(layers[0](x), 0.3).exp(), layers[1])(x)

    def bare(x):
        return layers[1](F.dropout(layers[0](x), 0.3).exp())

    def plainly(name):
        if name in ("checkpoint", "reentrant"):
            return lambda fn: fn
        return {
            "region": lambda fn: lambda x: fn(x).sin(),
            "consumer": lambda fn: lambda x: fn(x.sin()),
            "chain": lambda fn: lambda x: plain([fn], x),
        }[name]

    results = []
    for wrap, fn in ((plainly, bare), (WRAPPERS.get, core)):
        torch.manual_seed(2)
        x.grad = None
        layers.zero_grad()
        wrap(outer)(wrap(inner)(fn))(x).square().sum().backward()
        results.append([x.grad, *(p.grad.clone() for p in parameters)])
    same(*results)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_several_forwards_before_the_backwards(path, order):
    layers, _ = make()
    functions, parameters = stages(layers), list(layers.parameters())
    inputs = [torch.randn(3, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    results = []
    for way in (plain, chained):
        torch.manual_seed(1)
        losses = [way(functions, x).square().sum() for x in inputs]
        gradients_of = {i: torch.autograd.grad(losses[i], (inputs[i], *parameters)) for i in order}
        results.append([g for i in range(3) for g in gradients_of[i]])
    same(*results)


def test_two_threads(path):
    """Two threads run forward and backward of one model at the same time."""
    layers, _ = make()
    functions = [partial(lambda layer, x: layer(x).sin(), layer) for layer in layers]
    inputs = [torch.randn(3, 8, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    right = [torch.autograd.grad(plain(functions, x).sum(), x)[0] for x in inputs]
    got, errors = [None, None], []

    def work(i):
        try:
            for _ in range(20):
                got[i] = torch.autograd.grad(blocks(functions, inputs[i]).sum(), inputs[i])[0]
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    same(got, right)


def test_one_graph_backward_from_another_thread(path):
    layers, x = make()
    functions = stages(layers)
    right = gradients(plain, functions, x, ())
    torch.manual_seed(11)
    loss = chained(functions, x).square().sum()
    got = []
    thread = threading.Thread(target=lambda: got.extend(torch.autograd.grad(loss, x)))
    thread.start()
    thread.join(60)
    same(got, right)


def test_inputs_are_freed_with_the_last_node_of_a_region(path):
    """If they stayed until the backward ends, a deep model would hold the inputs of all layers."""
    layers, x = make(2)
    alive = []
    start = x * 1
    start.register_hook(lambda grad: alive.append(ref() is not None))
    middle = layers[0](start)
    y = so.output_discard(lambda x: layers[1](x).sin(), torch.exp)(middle)
    ref = weakref.ref(middle.untyped_storage())
    del middle
    y.sum().backward()
    assert alive == [False]


@pytest.mark.parametrize("way", [chained, linked, blocks])
def test_nothing_is_alive_after_backward_without_the_garbage_collector(path, way):
    layers, x = make()
    functions = [lambda x, layer=layer: refs.append(weakref.ref(layer(x))) or layer(x).sin()
                 for layer in layers]  # fmt: skip
    refs = []
    gc.collect()
    gc.disable()
    try:
        y = way(functions, x)
        references = [weakref.ref(y)]
        from storage_ops.checkpoint.region import region

        regions = len(region.producers)
        assert regions >= len(layers)
        y.sum().backward()
        del y
        assert [ref() for ref in references] == [None] and len(region.producers) == 0
        assert not any(type(o) is region.Region for o in gc.get_objects())
    finally:
        gc.enable()


def test_in_torch_func_a_region_is_a_plain_call():
    layers, x = make(2)
    block = so.output_discard(lambda x: layers[0](x).sin(), layers[1])
    right = torch.autograd.grad(layers[1](layers[0](x).sin()).sum(), x)[0]
    same([torch.func.grad(lambda x: block(x).sum())(x.detach())], [right])
    same([torch.func.vmap(torch.func.grad(lambda x: block(x).sum()))(x.detach())], [right])
