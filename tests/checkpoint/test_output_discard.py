"""OutputDiscardCheckpoint gives the gradients of eager mode bit for bit, on every storage path."""

import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import storage_ops as so


def make():
    """Return two layers and an input that depend only on torch's seed."""
    return nn.Linear(16, 64), nn.Linear(64, 16), torch.randn(8, 16, requires_grad=True)


def gradients(loss, *tensors):
    return torch.autograd.grad(loss, tensors, allow_unused=True)


def discarded(producer, consumer, *args, **kwargs):
    """Run both with explicit calls. Return the result and the discarded output."""
    ckpt = so.OutputDiscardCheckpoint()
    h = ckpt.checkpoint(producer, *args, **kwargs)
    y = consumer(h)
    ckpt.discard_output_and_register_recompute(y)
    return y, h


def same_as_eager(producer, consumer, inputs, parameters=(), expect_discarded=True):
    """Compare eager and discarding runs from the same random state bit for bit."""
    results = []
    for way in ("eager", "discard", "composed"):
        torch.manual_seed(5)
        if way == "eager":
            y = consumer(producer(*inputs))
        elif way == "composed":
            y = so.output_discard(producer, consumer)(*inputs)
        else:
            y, h = discarded(producer, consumer, *inputs)
            assert so.is_discarded(h) == expect_discarded
        wanted = [t for t in (*inputs, *parameters) if t.requires_grad]
        results.append((y.detach().clone(), gradients(y.float().square().sum(), *wanted)))
        results[-1] += (torch.get_rng_state(),)
    for y, grads, rng in results[1:]:
        assert torch.equal(y, results[0][0]) and torch.equal(rng, results[0][2])
        for got, right in zip(grads, results[0][1], strict=True):
            assert (got is None and right is None) or torch.equal(got, right)


def test_mlp_with_dropout(path):
    up, down, x = make()
    producer = lambda x: F.dropout(F.gelu(up(x)), 0.3)  # noqa: E731
    same_as_eager(producer, down, (x,), (*up.parameters(), *down.parameters()))


def test_only_parameters_need_grad(path):
    up, down, x = make()
    same_as_eager(up, down, (x.detach(),), (*up.parameters(), *down.parameters()))


def test_frozen_parameters(path):
    up, down, x = make()
    up.requires_grad_(False)
    same_as_eager(up, down, (x,), tuple(down.parameters()))


@pytest.mark.parametrize("activation", [torch.sigmoid, torch.exp, torch.relu, torch.tanh])
def test_producer_that_saves_its_own_output(path, activation):
    _, _, x = make()
    same_as_eager(activation, lambda h: h * h, (x,))


def test_producer_that_saves_nothing(path):
    _, down, x = make()
    down = nn.Linear(16, 4)
    same_as_eager(lambda x: x + 1, down, (x,), tuple(down.parameters()))


def test_casting_region(path):
    _, _, x = make()
    weight = torch.randn(16, 4, dtype=torch.float64, requires_grad=True)
    same_as_eager(lambda x: x.double(), lambda h: h @ weight, (x,), (weight,))


def test_kwargs_pytrees_and_values_that_are_not_tensors(path):
    up, down, x = make()
    scale = torch.randn(64, requires_grad=True)

    def producer(batch, *, options, power):
        h = up(batch["x"][0]) * options["scale"]
        return {"h": h**power, "note": "kept", "pair": (h.sin(), 3)}

    def consumer(out):
        assert out["note"] == "kept" and out["pair"][1] == 3
        return down(out["h"]) + down(out["pair"][0])

    y = consumer(producer({"x": [x]}, options={"scale": scale}, power=2))
    right = gradients(y.sum(), x, scale, up.weight)
    y, out = discarded(producer, consumer, {"x": [x]}, options={"scale": scale}, power=2)
    assert so.is_discarded(out["h"]) and so.is_discarded(out["pair"][0])
    for got, expected in zip(gradients(y.sum(), x, scale, up.weight), right, strict=True):
        assert torch.equal(got, expected)


def test_outputs_that_need_no_grad_are_kept(path):
    up, down, x = make()

    def producer(x):
        h = up(x)
        return h, h.argmax(1)

    y, (h, index) = discarded(producer, lambda out: down(out[0])[out[1] % 8], x)
    assert so.is_discarded(h) and not so.is_discarded(index)
    y.sum().backward()
    assert x.grad is not None


def test_two_outputs_in_one_storage(path):
    up, _, x = make()
    producer = lambda x: up(x).chunk(2, dim=1)  # noqa: E731
    right = gradients((up(x)[:, :32] * up(x)[:, 32:]).square().sum(), x)
    y, pair = discarded(producer, lambda pair: pair[0] * pair[1], x)
    assert all(so.is_discarded(h) for h in pair)
    assert torch.allclose(gradients(y.square().sum(), x)[0], right[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "region",
    [
        lambda x, w: x.float(),
        lambda x, w: x.view(-1),
        lambda x, w: w.t(),
        lambda x, w: w,
        lambda x, w: x.detach(),
    ],
)
def test_an_output_that_the_region_did_not_create_is_not_freed(path, region):
    _, _, x = make()
    w = nn.Parameter(torch.randn(16, 16))
    inner = x * 1
    y, h = discarded(partial(region, w=w), lambda h: h * 2 + x.sum(), inner)
    assert not so.is_discarded(inner) and not so.is_discarded(w) and not so.is_discarded(h)
    y.sum().backward()


def test_a_tensor_from_outside_is_not_freed(path):
    _, _, x = make()
    outside = x * 3
    y, _ = discarded(lambda: outside[2:], lambda h: h * 2)
    assert not so.is_discarded(outside)
    y.sum().backward()
    assert torch.equal(x.grad[2:], torch.full((6, 16), 6.0))


def test_autocast(path):
    up, down, x = make()
    with torch.autocast("cpu", torch.bfloat16):
        y = down(F.gelu(up(x)))
    right = gradients(y.float().sum(), x, up.weight)
    with torch.autocast("cpu", torch.bfloat16):
        y, h = discarded(lambda x: F.gelu(up(x)), down, x)
    assert h.dtype == torch.bfloat16 and so.is_discarded(h)
    for got, expected in zip(gradients(y.float().sum(), x, up.weight), right, strict=True):
        assert torch.equal(got, expected)


def test_without_preserved_random_numbers_dropout_differs():
    _, down, x = make()
    producer = lambda x: F.dropout(x.repeat(1, 4), 0.5)  # noqa: E731
    ckpt = so.OutputDiscardCheckpoint(preserve_rng_state=False)
    y = down(ckpt.checkpoint(producer, x))
    ckpt.discard_output_and_register_recompute(y)
    state = torch.get_rng_state()
    y.sum().backward()
    assert not torch.equal(torch.get_rng_state(), state)


def test_autograd_grad_does_not_change_dot_grad(path):
    up, down, x = make()
    y, _ = discarded(up, down, x)
    gradients(y.sum(), x, up.weight)
    assert all(t.grad is None for t in (x, *up.parameters(), *down.parameters()))


def test_part_of_the_gradients(path):
    up, down, x = make()
    for wanted in (x, up.weight, down.weight):
        right = gradients(down(up(x)).square().sum(), wanted)[0]
        y, _ = discarded(up, down, x)
        assert torch.equal(gradients(y.square().sum(), wanted)[0], right)


def test_retain_graph_and_a_second_backward(path):
    up, down, x = make()
    y, _ = discarded(lambda x: F.dropout(F.gelu(up(x)), 0.5), down, x)
    loss = y.square().sum()
    first = torch.autograd.grad(loss, (x, up.weight), retain_graph=True)
    second = torch.autograd.grad(loss, (x, up.weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second"):
        torch.autograd.grad(loss, x)


def test_double_backward(path):
    _, _, x = make()
    x = x.double().detach().requires_grad_()

    def penalty(y):
        grad = torch.autograd.grad(y.sum(), x, create_graph=True)[0]
        return torch.autograd.grad(grad.square().sum(), x)[0]

    right = penalty(x.tanh().sin())
    y, _ = discarded(torch.tanh, torch.sin, x)
    assert torch.allclose(penalty(y), right, rtol=1e-12)


def test_hooks_fire_once_with_the_right_value(path):
    up, down, x = make()
    seen = []
    ckpt = so.OutputDiscardCheckpoint()
    h = ckpt.checkpoint(up, x)
    h.register_hook(lambda g: seen.append(g.clone()))
    y = down(h)
    ckpt.discard_output_and_register_recompute(y)
    y.sum().backward()
    torch.testing.assert_close(seen, [torch.ones(8, 16) @ down.weight])


def test_no_grad_and_inference_are_plain_calls(path):
    up, down, x = make()
    right = down(up(x)).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y, h = discarded(up, down, x)
            assert torch.equal(y, right) and not so.is_discarded(h)
            assert torch.equal(so.output_discard(up, down)(x), right)


def test_inside_torch_checkpoint_and_around_it(path):
    up, down, x = make()
    producer = lambda x: F.dropout(F.gelu(up(x)), 0.3)  # noqa: E731
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(3)
    right = gradients(down(producer(x)).square().sum(), x, up.weight, down.weight)
    block = so.output_discard(producer, down)
    inner = so.output_discard(lambda x: checkpoint(producer, x, use_reentrant=False), down)
    for way in (lambda x: checkpoint(block, x, use_reentrant=False), inner):
        torch.manual_seed(3)
        got = gradients(way(x).square().sum(), x, up.weight, down.weight)
        assert all(torch.equal(a, b) for a, b in zip(got, right, strict=True))


def test_an_enclosing_checkpoint_with_ops_after_the_discard(path):
    """The recompute of the enclosing checkpoint saves the consumer's tensors again."""
    from torch.utils.checkpoint import checkpoint

    up, down, x = make()
    producer = lambda x: F.dropout(F.gelu(up(x)), 0.3)  # noqa: E731
    block = so.output_discard(producer, down)
    module = so.OutputDiscardCheckpoint()

    def explicit(x):
        h = module.checkpoint(producer, x)
        y = down(h)
        module.discard_output_and_register_recompute(y)
        return y.sin()

    torch.manual_seed(3)
    right = gradients(down(producer(x)).sin().square().sum(), x, up.weight, down.weight)
    ways = [
        lambda x: checkpoint(lambda x: block(x).sin(), x, use_reentrant=False),
        lambda x: so.output_discard(block, torch.sin)(x),
        lambda x: checkpoint(explicit, x, use_reentrant=False),
        lambda x: checkpoint(explicit, x, use_reentrant=False),
    ]
    for way in ways:
        torch.manual_seed(3)
        got = gradients(way(x).square().sum(), x, up.weight, down.weight)
        assert all(torch.equal(a, b) for a, b in zip(got, right, strict=True))


def test_a_node_that_reads_its_saved_tensors_twice(path):
    class Multiply(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return a * b

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[1], grad * ctx.saved_tensors[0]

    calls = []
    _, _, x = make()
    w = torch.randn(16, requires_grad=True)
    right = gradients((x.exp() * w).sin().sum(), x, w)

    def producer(x):
        calls.append(1)
        return Multiply.apply(x.exp(), w)

    for _ in range(3):
        y, _ = discarded(producer, torch.sin, x)
        calls.clear()
        got = gradients(y.sum(), x, w)
        torch.testing.assert_close(got, right)
        assert len(calls) <= 2


def test_a_consumer_that_returns_its_input(path):
    up, down, x = make()
    right = gradients((down(up(x)).sum() + up(x).square().sum()), x)[0]
    y, h = so.output_discard(up, lambda h: (down(h), h.view(-1)))(x)
    assert not so.is_discarded(h)
    got = gradients(y.sum() + h.square().sum(), x)[0]
    assert torch.allclose(got, right, rtol=1e-4, atol=1e-5)
    eval_mode = so.OutputDiscard(up, nn.Identity())
    assert torch.equal(eval_mode(x), up(x))


def test_two_losses_that_need_no_retained_graph(path):
    _, _, x = make()
    y, _ = discarded(lambda x: x + 1, lambda h: h + h, x)
    y.sum().backward()
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 4.0))


def test_several_layers_and_interleaved_backwards(path):
    layers = [(nn.Linear(16, 64), nn.Linear(64, 16)) for _ in range(3)]
    inputs = [torch.randn(8, 16, requires_grad=True) for _ in range(2)]

    def plain(x):
        for up, down in layers:
            x = x + down(F.gelu(up(x)))
        return x

    def saving(x):
        for up, down in layers:
            x = x + so.output_discard(lambda x, up=up: F.gelu(up(x)), down)(x)
        return x

    right = [gradients(plain(x).square().sum(), x, layers[0][0].weight) for x in inputs]
    losses = [saving(x).square().sum() for x in inputs]
    for i in (1, 0):
        got = gradients(losses[i], inputs[i], layers[0][0].weight)
        assert all(torch.equal(a, b) for a, b in zip(got, right[i], strict=True))


def test_module(path):
    up, down, x = make()
    block = so.OutputDiscard(nn.Sequential(up, nn.GELU()), down)
    assert sorted(block.state_dict()) == [
        "consumer.bias", "consumer.weight", "producer.0.bias", "producer.0.weight",
    ]  # fmt: skip
    right = gradients(down(F.gelu(up(x))).sum(), x)[0]
    assert torch.equal(gradients(block(x).sum(), x)[0], right)


def test_memory_is_free_between_forward_and_backward(path):
    up, down = nn.Linear(64, 4096), nn.Linear(4096, 64)
    x = torch.randn(256, 64, requires_grad=True)
    wide = 256 * 4096 * 4
    with so.memory.measure() as m:
        y, _ = discarded(lambda x: F.gelu(up(x)), down, x)
    assert m.kept_bytes < 0.1 * wide
    with so.memory.measure() as m:
        plain = down(F.gelu(up(x)))
    assert m.kept_bytes > 2 * wide
    del plain
    y.sum().backward()


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, by):
        ctx.save_for_backward(by)
        return x * by

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0], None


def test_a_saved_view_without_grad_does_not_keep_the_graph_of_its_base(path):
    x = torch.randn(1 << 16, requires_grad=True)

    def producer(x):
        h = x.tanh().exp().sin()
        with torch.no_grad():
            view = h.view(-1)  # has no autograd node, unlike its base
        return Scaled.apply(h.cos(), view).sin()

    for step in (producer, so.output_discard(producer, torch.square)):
        for _ in range(2):
            x.grad = None
            with so.memory.measure() as m:
                step(x).sum().backward()
            assert m.kept_bytes <= x.nbytes, step


def test_nothing_is_alive_after_backward_without_the_garbage_collector(path):
    up, down, x = make()
    gc.collect()
    gc.disable()
    try:
        ckpt = so.OutputDiscardCheckpoint()
        h = ckpt.checkpoint(lambda x: F.gelu(up(x)), x)
        y = down(h)
        ckpt.discard_output_and_register_recompute(y)
        refs = [weakref.ref(t) for t in (ckpt, h, h.untyped_storage())]
        y.sum().backward()
        del ckpt, h, y
        assert [ref() for ref in refs] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.in_turn
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_torch_compile_keeps_no_wide_tensor(backend):
    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    up, down, x = make()

    def step(x):
        ckpt = so.OutputDiscardCheckpoint()
        y = down(ckpt.checkpoint(lambda x: F.gelu(up(x)), x))
        ckpt.discard_output_and_register_recompute(y)
        return y + so.output_discard(up, down)(y)

    right = gradients(step(x).sum(), x)[0]
    got = gradients(torch.compile(step, fullgraph=True, backend=backend)(x).sum(), x)[0]
    assert torch.allclose(got, right, rtol=1e-4, atol=1e-5)

    saved = []

    def inspect(graph, inputs):
        output = next(node for node in graph.graph.nodes if node.op == "output")
        saved.extend(tuple(node.meta["val"].shape) for node in output.args[0] if node is not None)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(step, fullgraph=True, backend=aot_autograd(fw_compiler=inspect))(x)
    assert saved and (8, 64) not in saved and (64, 8) not in saved, saved
