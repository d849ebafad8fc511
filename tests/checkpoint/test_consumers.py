"""Consumers of any kind are found by the tensors they saved. Uncovered ones are errors."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import storage_ops as so
from storage_ops.checkpoint.saved.outputs import producers


class Stash(torch.autograd.Function):
    """Keeps its input as an attribute of its context, where no saved-tensor hook sees it."""

    @staticmethod
    def forward(ctx, h, view):
        ctx.stashed = h.view(-1) if view else h
        return h * h

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.stashed.view_as(grad) * grad, None


def identity_pack(h):
    with saved_tensors_hooks(lambda t: t, lambda t: t):
        return h * h


def offload(h):
    with save_on_cpu():
        return (h * h).sin()


DOWN = nn.Linear(8, 5)
OTHER = torch.randn(6, 4, 8, requires_grad=True)
COMPILED = torch.compile(lambda h: (h * h).sin() + DOWN(h).sum(), backend="aot_eager")
CONSUMERS = {
    "linear 3-D": DOWN,
    "reshape": lambda h: h.reshape(-1).square(),
    "halves": lambda h: h[..., :4] * h[..., 4:],
    "detached": lambda h: h.detach() * OTHER,
    "detached and not": lambda h: h.detach() * OTHER + h.sin(),
    "no save": lambda h: h + h,
    "transposed": lambda h: h.transpose(0, 1) @ OTHER.transpose(0, 1).mT,
    "checkpoint": lambda h: checkpoint(lambda h: h.sin() * h, h, use_reentrant=False),
    "reentrant": lambda h: checkpoint(lambda h: h.sin() * h, h, use_reentrant=True),
    "stash": lambda h: Stash.apply(h, False),
    "stashed view": lambda h: Stash.apply(h, True),
    "inner pack": identity_pack,
    "inner offload": offload,
    "compiled": COMPILED,
    "several outputs": lambda h: (h.sin(), DOWN(h), h.square().sum()),
    "one more region": so.output_discard(torch.sin, torch.square),
}

# These consumers refer to the output other than by saved tensors, so the output is kept. On a CPU,
# offloading returns the same tensor.
HOLDING = ("stash", "stashed view", "inner pack", "inner offload")


def loss_of(outputs):
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return sum((y * torch.arange(y.numel(), dtype=y.dtype).view_as(y).cos()).sum() for y in outputs)


def gradients(outputs, x):
    wanted = (x, OTHER, *DOWN.parameters())
    OTHER.grad = x.grad = None
    DOWN.zero_grad()
    loss_of(outputs).backward()
    return [t.grad for t in wanted]


def same(got, right):
    for a, b in zip(got, right, strict=True):
        assert (a is None and b is None) or torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def by_block(producer, consumer, x):
    ckpt = so.OutputDiscardCheckpoint()
    h = ckpt.checkpoint(producer, x)
    with ckpt.consumer():
        y = consumer(h)
    ckpt.discard_output_and_register_recompute()
    assert so.is_discarded(h) != any(consumer is CONSUMERS[name] for name in HOLDING)
    return y


WAYS = {
    "block": by_block,
    "composed": lambda producer, consumer, x: so.output_discard(producer, consumer)(x),
    "module": lambda producer, consumer, x: so.OutputDiscard(producer, consumer)(x),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CONSUMERS)
def test_every_kind_of_consumer(path, name, way):
    consumer, x = CONSUMERS[name], torch.randn(6, 4, 8, requires_grad=True)
    right = gradients(consumer(F.gelu(x)), x)
    same(gradients(WAYS[way](F.gelu, consumer, x), x), right)


@pytest.mark.parametrize("name", ["linear 3-D", "halves", "stash", "no save"])
def test_autograd_grad_and_two_backwards(path, name):
    consumer, x = CONSUMERS[name], torch.randn(6, 4, 8, requires_grad=True)
    right = torch.autograd.grad(loss_of(consumer(x.sin())), x)
    loss = loss_of(by_block(torch.sin, consumer, x))
    same(torch.autograd.grad(loss, x, retain_graph=True), right)
    same(torch.autograd.grad(loss, x), right)


@pytest.mark.parametrize(
    "around", [save_on_cpu, lambda: saved_tensors_hooks(lambda t: t, lambda t: t)]
)
def test_outer_hooks_get_all_saved_tensors_but_the_output(path, around):
    x = torch.randn(6, 4, 8, requires_grad=True)
    right = gradients(DOWN(F.gelu(x)).sin(), x)
    with around():
        y = by_block(F.gelu, lambda h: DOWN(h).sin(), x)
    same(gradients(y, x), right)


def test_an_offloading_hook_does_not_see_the_output():
    seen = []
    x = torch.randn(6, 4, 8, requires_grad=True)

    def pack(t):
        seen.append(t.shape)
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        by_block(lambda x: x.repeat(1, 1, 3), lambda h: h[..., :8] * OTHER, x)
    assert seen == [x.shape, OTHER.shape]  # the region's input and the consumer's other operand


def test_several_blocks_and_several_roots(path):
    x = torch.randn(6, 4, 8, requires_grad=True)
    right = gradients((x.exp().sin(), DOWN(x.exp())), x)
    ckpt = so.OutputDiscardCheckpoint()
    h = ckpt.checkpoint(torch.exp, x)
    with ckpt.consumer():
        first = h.sin()
    with ckpt.consumer():
        second = DOWN(h)
    ckpt.discard_output_and_register_recompute()
    same(gradients((first, second), x), right)
    x.grad = None
    loss_of(by_block(torch.exp, torch.sin, x)).backward()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_roots_one_after_the_other(path, order):
    x = torch.randn(6, 4, 8, requires_grad=True)
    right = gradients((x.exp().sin(), DOWN(x.exp())), x)
    roots = by_block(torch.exp, lambda h: (h.sin(), DOWN(h)), x)
    x.grad = OTHER.grad = None
    DOWN.zero_grad()
    losses = [loss_of(root) for root in roots]
    losses[order[0]].backward(retain_graph=True)
    losses[order[1]].backward()
    same([x.grad, OTHER.grad, *(p.grad for p in DOWN.parameters())], right)


@pytest.mark.parametrize(
    ("use", "node"),
    [
        (lambda h: h * h, "MulBackward0"),
        (lambda h: h.view(-1).square(), "PowBackward0|ViewBackward0"),
        (lambda h: F.linear(h, torch.ones(3, 8)).sum() + h.sin().sum(), "SinBackward0"),
        (lambda h: h[1:].detach() * OTHER[1:], "something"),
    ],
)
def test_a_consumer_outside_of_the_blocks_is_named_and_nothing_is_freed(use, node):
    x = torch.randn(6, 4, 8, requires_grad=True)
    ckpt = so.OutputDiscardCheckpoint()
    h = ckpt.checkpoint(torch.exp, x)
    outside = use(h)
    with ckpt.consumer():
        y = h.sin()
    with pytest.raises(
        RuntimeError, match=f"output 0 of .*exp.* saved by .*({node}).*Nothing was freed"
    ):
        ckpt.discard_output_and_register_recompute(y)
    assert not so.is_discarded(h)
    (y.sum() + outside.sum()).backward()
    right = torch.autograd.grad(x.exp().sin().sum() + use(x.exp()).sum(), x)
    assert torch.allclose(x.grad, right[0], rtol=1e-4, atol=1e-5)


def test_references_of_the_caller_do_not_prevent_freeing():
    """Views, aliases and containers that only Python variables refer to are freed too."""
    x = torch.randn(6, 4, 8, requires_grad=True)
    ckpt = so.OutputDiscardCheckpoint()
    h = ckpt.checkpoint(torch.exp, x)
    kept = [h, h.detach(), h[2], h.view(-1), h.mT]
    total = h.sum()  # reads the output but does not save it
    with ckpt.consumer():
        y = h.sin()
        inside = h.flatten()
    ckpt.discard_output_and_register_recompute()
    assert all(so.is_discarded(t) for t in (*kept, inside))
    (y.sum() + total).backward()
    assert torch.allclose(x.grad, x.exp().cos() * x.exp() + x.exp(), rtol=1e-4, atol=1e-5)


def test_a_saved_tensor_that_is_modified_in_place_is_an_error():
    """The block compares versions, because torch does not for tensors that a hook packed."""
    x = torch.randn(6, requires_grad=True)
    other = torch.randn(6)
    ckpt = so.OutputDiscardCheckpoint()
    h = ckpt.checkpoint(torch.exp, x)
    with ckpt.consumer():
        y = h * other
    ckpt.discard_output_and_register_recompute()
    other.add_(1)
    with pytest.raises(RuntimeError, match="consumer has saved was modified in place"):
        y.sum().backward()


def test_the_output_modified_in_place_by_its_consumer(path):
    x = torch.randn(6, 8, requires_grad=True)
    ckpt = so.OutputDiscardCheckpoint()
    h = ckpt.checkpoint(lambda x: x * 2, x)
    with ckpt.consumer():
        y = h.relu_() * 3
    with pytest.raises(RuntimeError, match="modified in place after the region"):
        ckpt.discard_output_and_register_recompute()
    assert not so.is_discarded(h)
    y.sum().backward()
    assert torch.equal(x.grad, 6.0 * (x > 0))


def test_no_tensor_and_no_block_is_an_error():
    ckpt = so.OutputDiscardCheckpoint()
    h = ckpt.checkpoint(torch.sin, torch.randn(3, requires_grad=True))
    with pytest.raises(RuntimeError, match="no consumer ran in `with consumer"):
        ckpt.discard_output_and_register_recompute()
    assert not so.is_discarded(h)


def test_an_exception_in_the_consumer_leaves_nothing_behind(path):
    x = torch.randn(6, requires_grad=True)
    ckpt = so.OutputDiscardCheckpoint()

    def fails(h):
        raise KeyError("no")

    h = ckpt.checkpoint(torch.exp, x)
    with pytest.raises(KeyError), ckpt.consumer():
        fails(h.sin())
    with pytest.raises(KeyError):
        so.output_discard(torch.exp, fails)(x)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    with ckpt.consumer():
        y = h.sin()
    ckpt.discard_output_and_register_recompute()
    y.sum().backward()
    torch.testing.assert_close(x.grad, x.exp().cos() * x.exp())


def test_a_block_costs_no_walk_over_all_objects(monkeypatch):
    """The slow search is only for consumers outside of the blocks."""
    monkeypatch.setattr(gc, "get_objects", lambda: pytest.fail("looked at every object"))
    x = torch.randn(6, 4, 8, requires_grad=True)
    for consumer in CONSUMERS.values():
        for way in WAYS.values():
            gradients(way(F.gelu, consumer, x), x)
    same([so.output_discard(torch.sin, lambda h: h)(x)], [x.sin()])


def test_a_leaf_that_shares_the_output_storage():
    """Models that differentiate by their own activations create such leaves."""
    x = torch.randn(6, 4, 8, requires_grad=True)
    ckpt = so.OutputDiscardCheckpoint()
    h = ckpt.checkpoint(torch.exp, x)
    with ckpt.consumer():
        leaf = h.detach().requires_grad_()
        y = leaf.sin()
    ckpt.discard_output_and_register_recompute()
    assert so.is_discarded(h) and so.is_discarded(leaf)
    y.sum().backward()
    assert torch.equal(leaf.grad, x.exp().cos()) and x.grad is None


class Result:
    def __init__(self, **values):
        vars(self).update(values)


KEPT = {}
KEEP = {
    "attribute": lambda h: (h.sin(), Result(h=h)),
    "view in an object": lambda h: Result(y=h.sin(), inner=[{"h": h[1:]}]),
    "dictionary": lambda h: {"y": h.sin(), "h": h},
    "elsewhere": lambda h: (h.sin(), KEPT.update(h=h.detach())),
    "numpy": lambda h: (h.sin(), torch.from_numpy(h.detach().numpy())),
}


@pytest.mark.parametrize("name", KEEP)
def test_an_output_that_a_consumer_keeps_can_be_read(path, name):
    x = torch.randn(6, 4, 8, requires_grad=True)
    kept = []
    tensors(so.output_discard(torch.exp, KEEP[name])(x), kept)
    tensors(KEPT, kept)
    assert len(kept) == 2 and not any(map(so.is_discarded, kept))
    sum(t.sum() for t in kept if t.requires_grad).backward()
    right = []
    tensors(KEEP[name](x.exp()), right)
    assert torch.equal(x.grad, torch.autograd.grad(sum(t.sum() for t in right), x)[0])
    KEPT.clear()


GIVEN = {
    "returned": lambda d: d.update(y=d["h"].sin()) or d,
    "in another": lambda d: {"y": d["h"].sin(), "all": [d]},
    "elsewhere": lambda d: (d["h"].sin(), KEPT.update(d=d))[:1],
    "without it": lambda d: (d["h"].sin(), d.pop("h")),
}


@pytest.mark.parametrize("name", GIVEN)
def test_an_output_in_a_container_that_a_consumer_keeps(path, name):
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    kept = []
    tensors(so.output_discard(lambda x: {"h": x.exp()}, GIVEN[name])(x), kept)
    tensors(KEPT, kept)
    KEPT.clear()
    assert len(kept) == 2 and not any(map(so.is_discarded, kept))
    sum(t.sum() for t in kept).backward()
    h = x.detach().exp()
    torch.testing.assert_close(x.grad, h * h.cos() + h)


def with_blocks(producer, consumer, x):
    ckpt = so.OutputDiscardCheckpoint()
    output = ckpt.checkpoint(producer, x)
    with ckpt.consumer():
        y = consumer(output)
    ckpt.discard_output_and_register_recompute()
    return y


def with_chain(producer, consumer, x):
    with so.OutputDiscardChain() as chain:
        output = chain.checkpoint(producer, x)
        return consumer(output)


HOLDER = nn.Module()
STORES = {
    "attribute": lambda d: setattr(HOLDER, "d", d),
    "list": lambda d: KEPT.update(d=[d]),
    "closure": lambda d: KEPT.update(d=(lambda: d).__closure__[0]),
    "an inner one": lambda d: KEPT.update(d=d["inner"]),
    "an inner one that it takes out": lambda d: KEPT.update(d=d.pop("inner")),
    "what it takes out": lambda d: KEPT.update(d=d["inner"].pop()),
}


@pytest.mark.parametrize("run", [with_blocks, with_chain])
@pytest.mark.parametrize("name", STORES)
def test_a_container_that_a_consumer_stores(path, name, run):
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)

    def consumer(d):
        y = d["inner"][0].sin()
        STORES[name](d)
        return y

    y = run(lambda x: {"inner": [x.exp()]}, consumer, x)
    stored = KEPT.pop("d") if KEPT else vars(HOLDER).pop("d")
    while not isinstance(stored, torch.Tensor):
        if hasattr(stored, "cell_contents"):
            stored = stored.cell_contents
        stored = stored["inner"] if isinstance(stored, dict) else stored[0]
    assert not so.is_discarded(stored)
    (y + stored).sum().backward()
    h = x.detach().exp()
    torch.testing.assert_close(x.grad, h * h.cos() + h)


@pytest.mark.parametrize("returned", [lambda h: {"h": h}, lambda h: (h, 1), lambda h: [(h,)]])
def test_a_container_of_variables_is_freed(path, returned):
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    outer = {}

    def consumer(d):
        outer["before"] = d
        while not isinstance(d, torch.Tensor):
            d = next(iter(d.values())) if isinstance(d, dict) else d[0]
        del outer["before"]
        return d.sin()

    ckpt, chain = so.OutputDiscardCheckpoint(), so.OutputDiscardChain()
    first = ckpt.checkpoint(lambda x: returned(x.exp()), x)
    with ckpt.consumer():
        same = first
        y = consumer(same)
    ckpt.discard_output_and_register_recompute()
    with chain:
        second = chain.checkpoint(lambda x: returned(x.exp()), x)
        if isinstance(second, tuple):
            second, _ = second
        y = y + consumer(second)
    for container in (first, second):
        collected = []
        tensors(container, collected)
        assert so.is_discarded(collected[0])
    y.sum().backward()
    h = x.detach().exp()
    torch.testing.assert_close(x.grad, 2 * h * h.cos())


def test_a_container_without_references_is_freed(path):
    x, inside = torch.randn(6, 4, dtype=torch.float64, requires_grad=True), []

    def consumer(d):
        inside.append(weakref.ref(d["h"]))
        return d["h"].sin()

    y = so.output_discard(lambda x: {"h": x.exp()}, consumer)(x)
    region = next(r for m in producers.values() if (r := m()) is not None)
    assert inside[0]() is None and region.outputs.discarded
    y.sum().backward()
    torch.testing.assert_close(x.grad, x.detach().exp() * x.detach().exp().cos())


def test_saved_tensors_that_may_be_modified(path):
    w, x = torch.randn(4, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
    producer = lambda x: (x @ w).exp().mul_(2).sin()  # noqa: E731

    class Layer(nn.Module):
        def forward(self, x):
            return producer(x) @ w

    for run in (so.output_discard(producer, lambda h: h @ w), so.CheckpointWrapper(Layer())):
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            right = torch.autograd.grad((producer(x) @ w).sum(), (x, w))
            got = torch.autograd.grad(run(x).sum(), (x, w))
        assert all(map(torch.equal, got, right))


def tensors(value, collected):
    """Append the tensors in containers and objects to `collected`."""
    if isinstance(value, torch.Tensor):
        collected.append(value)
    elif value is not None and not isinstance(value, int):
        value = value if isinstance(value, (list, tuple, dict)) else vars(value)
        for item in value.values() if isinstance(value, dict) else value:
            tensors(item, collected)


def test_inspecting_local_variables_does_not_change_them():
    """The frame keeps no tensor that a variable no longer names, and `locals()` stays the same."""
    x = torch.randn(6, 4, 8, requires_grad=True)
    mine = locals()

    def step():
        ckpt = so.OutputDiscardCheckpoint()
        h = ckpt.checkpoint(torch.exp, x)
        with ckpt.consumer():
            inside = h.flatten()
            y = inside.sin()
        ckpt.discard_output_and_register_recompute()
        assert so.is_discarded(h)
        ref = weakref.ref(inside)
        del inside
        assert ref() is None
        return y

    step().sum().backward()
    assert mine["x"] is x


def test_references_are_counted_right_while_dynamo_inspects_every_call():
    """Dynamo continues to do so after some errors. Arguments then have one more reference."""
    torch._dynamo.reset()
    before = torch._C._dynamo.eval_frame.set_eval_frame(False)
    try:
        test_references_of_the_caller_do_not_prevent_freeing()
        test_a_leaf_that_shares_the_output_storage()
        layer, x = nn.Linear(4, 4).requires_grad_(False), torch.randn(3, 4)
        ckpt = so.OutputDiscardCheckpoint()
        h = ckpt.checkpoint(lambda x: layer(x).view(-1), x)
        with ckpt.consumer():
            y = h * 2
        ckpt.discard_output_and_register_recompute(y)
        assert so.is_discarded(h)
    finally:
        torch._C._dynamo.eval_frame.set_eval_frame(before)
