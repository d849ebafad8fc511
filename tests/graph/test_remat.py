"""Recomputation in traced steps: which ops run twice, their random numbers, and refusals."""

import functools

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import storage_ops
from storage_ops import graph
from storage_ops.foundation.regions import mark_of
from storage_ops.graph.recompute import rng

from .models import (
    GPT,
    MATMULS,
    MODES,
    batch,
    both,
    count,
    gpt_step,
    leaves,
    save_matmuls,
    selective,
)

aten = torch.ops.aten
MM = aten.mm.default


def recompute_matmuls(ctx, op, *args, **kwargs):
    return CheckpointPolicy.PREFER_RECOMPUTE if op is MM else CheckpointPolicy.MUST_SAVE


def mlp_step(context=None):
    options = {} if context is None else {"context_fn": context}

    def step(x, w1, w2):
        y = checkpoint(lambda x: F.gelu(x @ w1) @ w2, x, use_reentrant=False, **options)
        loss = y.square().sum()
        return loss.detach(), *torch.autograd.grad(loss, (w1, w2))

    return step


@pytest.mark.parametrize(
    "context, mms",
    [(None, 6), (selective(recompute_matmuls), 6), (selective([MM]), 5), (selective(), 5)],
)
def test_the_published_repro(context, mms):
    x = torch.randn(4, 8, dtype=torch.double)
    step = both(mlp_step(context), x, *leaves((8, 16), (16, 8)))
    assert count(step.gm, MM) == mms
    nodes = list(step.gm.graph.nodes)
    (backward,) = (n for n in nodes if n.target is aten.gelu_backward.default)
    products = [n for n in nodes if n.target is MM]
    read = backward.args[1]
    assert read.target is MM
    assert (read is products[0]) == (mms == 5)
    if mms == 6:  # the forward's copy has been freed before
        assert max(map(nodes.index, products[0].users)) < nodes.index(read)


@pytest.mark.parametrize("reentrant", [False, True])
def test_functions_of_torch_checkpoint(reentrant):
    def step(x, w):
        y = checkpoint(lambda x: F.dropout((x @ w).sin(), 0.3), x, use_reentrant=reentrant)
        return torch.autograd.grad(y.sum(), (x, w)) if not reentrant else y.sum().backward()

    x, w = leaves((3, 3), (3, 3))
    if not reentrant:
        both(step, x, w)
        return
    torch.manual_seed(0)
    step(x, w)
    grads, x.grad, w.grad = (x.grad, w.grad), None, None
    traced = graph.trace_step(step, x, w)
    torch.manual_seed(0)
    traced(x, w)
    assert torch.equal(x.grad, grads[0]) and torch.equal(w.grad, grads[1])


def test_marks_stay_inside_their_region():
    step = graph.trace_step(
        mlp_step(selective()), torch.randn(4, 8).double(), *leaves((8, 16), (16, 8))
    )
    before = step.gm.meta["storage_ops_before"]
    inside = [n.target for n in before.graph.nodes if mark_of(n).path]
    assert inside == [MM, aten.gelu.default, MM]
    saved = [mark_of(n).path[0].decision for n in before.graph.nodes if mark_of(n).path]
    assert saved[0] == saved[2] == CheckpointPolicy.MUST_SAVE
    assert saved[1] == CheckpointPolicy.PREFER_RECOMPUTE
    assert not any(graph.regions.KEY in n.meta for n in step.gm.graph.nodes)
    assert graph.remat(step.gm) is step.gm


@pytest.mark.parametrize("context", [None, selective()])
def test_chunked_loss_then_the_backward_of_the_model(context):
    """There are three backward passes, each with its own region."""
    options = {"use_reentrant": False, **({} if context is None else {"context_fn": context})}
    x = torch.randn(8, 4, dtype=torch.double)
    w, head = leaves((4, 4), (4, 5))

    def body(x):
        return F.dropout((x @ w).tanh(), 0.2) @ w

    def loss(h):
        return F.dropout(h @ head, 0.1).logsumexp(-1).sum()

    def step(x):
        h = checkpoint(body, x, **options)
        inner = h.detach().requires_grad_()
        total, d_head = 0, 0
        for chunk in inner.chunk(2):
            part = checkpoint(loss, chunk, **options)
            d_chunk, d = torch.autograd.grad(part, (inner, head))
            inner.grad = d_chunk if inner.grad is None else inner.grad + d_chunk
            total, d_head = total + part.detach(), d_head + d
        return total, d_head, *torch.autograd.grad(h, w, inner.grad)

    traced = both(step, x)
    extra = 0 if context is not None else 3
    assert count(traced.gm, MM) == 4 + 2 * 2 + 3 + extra


@pytest.mark.in_turn
def test_two_micro_batches_in_one_trace():
    models = []
    data = [batch(size=2), batch(size=2)]
    for traced in (False, True):
        torch.manual_seed(0)
        model = GPT(layers=2, mode="full").double()

        def step(data, model=model):
            for tokens, targets in data:
                (model(tokens, targets) / 2).backward()

        step = graph.trace_step(step, data) if traced else step
        torch.manual_seed(1)
        step(data)
        models.append(([p.grad for p in model.parameters()], torch.get_rng_state()))
    torch.testing.assert_close(models[1], models[0], rtol=0, atol=0)


def test_nested_regions():
    w1, w2, w3 = leaves((4, 4), (4, 4), (4, 4))

    def layer(x, w):
        return F.dropout((x @ w).sin() @ w, 0.2)

    def outer(x):
        for w in (w1, w2, w3):
            x = checkpoint(layer, x, w, use_reentrant=False).cos()
        return x

    def step(x):
        y = checkpoint(outer, x, use_reentrant=False)
        return torch.autograd.grad(y.square().sum(), (w1, w2, w3))

    both(step, torch.randn(3, 4, dtype=torch.double))


def test_a_backward_pass_inside_a_region():
    w = leaves((4, 4))[0]

    def energy(x):
        x = x.detach().requires_grad_()
        e = checkpoint(lambda x: (x @ w).sin().sum(), x, use_reentrant=False)
        (force,) = torch.autograd.grad(e, x, create_graph=True)
        return force.square().sum() + e

    def step(x):
        loss = graph.regions.mark(energy, (x,))
        return torch.autograd.grad(loss, w)

    x = torch.randn(3, 4, dtype=torch.double)
    assert torch.equal(graph.trace_step(step, x)(x)[0], step(x)[0])


@pytest.mark.parametrize("layers", [1, 3])
def test_output_discard_becomes_a_region_whose_output_is_recomputed(layers):
    ws = leaves(*[(4, 16), (16, 4)] * layers)
    calls = []

    def up(x, w):
        calls.append(1)
        return F.dropout(F.gelu(x @ w), 0.1).view(-1, 16)

    def step(x):
        for w, v in zip(ws[::2], ws[1::2], strict=True):
            x = x + storage_ops.output_discard(up, lambda h, v=v: h @ v)(x, w)
        return torch.autograd.grad(x.square().sum(), ws)

    x = torch.randn(512, 4, dtype=torch.double)
    traced = both(step, x)
    assert len(calls) == 2 * layers + layers  # twice in eager mode, once in the trace
    plain = graph.trace_step(
        lambda x: torch.autograd.grad(
            functools.reduce(
                lambda x, i: x + F.dropout(F.gelu(x @ ws[i]), 0.1) @ ws[i + 1],
                range(0, 2 * layers, 2), x,
            ).square().sum(), ws,
        ), x,
    )  # fmt: skip
    assert count(traced.gm, aten.gelu.default) == 2 * layers
    # With one layer, the backward begins just after the forward has freed the output.
    assert layers == 1 or traced.peak.peak_bytes < plain.peak.peak_bytes


def test_marked_regions_under_make_fx():
    w, v = leaves((4, 16), (16, 4))
    ckpt = storage_ops.OutputDiscardCheckpoint()

    def step(x):
        h = ckpt.checkpoint(lambda x: F.dropout((x @ w).sin(), 0.5), x)
        y = h @ v
        ckpt.discard_output_and_register_recompute(y)
        return torch.autograd.grad(y.square().sum(), (w, v))

    x = torch.randn(3, 4, dtype=torch.double)
    gm = make_fx(step)(x)
    assert count(gm, aten.sin.default) == 1
    second = graph.remat(gm, verify=True)
    assert count(second, aten.sin.default) == 2 and count(gm, aten.sin.default) == 1
    torch.manual_seed(0)
    eager = step(x)
    torch.manual_seed(0)
    assert all(map(torch.equal, second(x), eager))


def test_effects_happen_once():
    with torch.library._scoped_library("storage_ops_test", "FRAGMENT") as library:
        library.define("log(Tensor x) -> ()")
        seen = []
        library.impl("log", lambda x: seen.append(x.sum()), "CPU")
        library.impl("log", lambda x: None, "Meta")

        def step(x):
            def region(x):
                h = x.sin()
                torch.ops.storage_ops_test.log(h.detach())
                return h.cos()

            return torch.autograd.grad(checkpoint(region, x, use_reentrant=False).sum(), x)

        (x,) = leaves((3,))
        traced = graph.trace_step(step, x)
        assert seen == []
        result = traced(x)
        assert len(seen) == 1
        assert torch.equal(result[0], step(x)[0])


@pytest.mark.parametrize("must", [False, True])
def test_communication_is_repeated_only_if_the_policy_requires_it(fake_group, must):
    from torch.distributed import _functional_collectives as collectives

    # The op has the second name in torch before 2.13.
    names = ("all_gather_single_autograd", "all_gather_tensor_autograd")
    all_gather = next(getattr(collectives, n) for n in names if hasattr(collectives, n))
    gather = torch.ops._c10d_functional.all_gather_into_tensor.default

    def policy(ctx, op, *args, **kwargs):
        if must and op is gather:
            return CheckpointPolicy.MUST_RECOMPUTE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def step(x, w):
        def region(x):
            return all_gather((x @ w).sin(), 0, fake_group).exp() @ w

        y = checkpoint(region, x, use_reentrant=False, context_fn=selective(policy))
        return torch.autograd.grad(y.sum(), (x, w))

    traced = graph.trace_step(step, *leaves((4, 4), (4, 4)))
    waits = torch.ops._c10d_functional.wait_tensor.default
    assert count(traced.gm, gather) == 1 + must
    assert count(traced.gm, waits) == 2 + must  # including the gradient's


def test_policies_see_the_arguments_and_the_order_of_ops():
    seen = []

    def policy(ctx, op, *args, **kwargs):
        assert not ctx.is_recompute
        if op is MM:
            seen.append(tuple(args[1].shape))
            return CheckpointPolicy.MUST_SAVE if len(seen) % 2 else CheckpointPolicy.MUST_RECOMPUTE
        return False

    x = torch.randn(4, 8, dtype=torch.double)
    ws = leaves((8, 16), (16, 8), (8, 16), (16, 8))

    def step(x, **options):
        def region(x):
            for w in ws:
                x = (x @ w).sin()
            return x

        y = checkpoint(region, x, use_reentrant=False, **options)
        return torch.autograd.grad(y.sum(), ws)

    traced = graph.trace_step(lambda x: step(x, context_fn=selective(policy)), x)
    assert seen == [tuple(w.shape) for w in ws]
    assert count(traced.gm, MM) == 4 + 7 + 2
    assert all(map(torch.equal, traced(x), step(x)))
    with pytest.raises(TypeError, match="policy of a checkpointed region returned 'save'"):
        graph.trace_step(
            lambda x: checkpoint(
                torch.sin, x, use_reentrant=False, context_fn=selective(lambda *a, **k: "save")
            ).sum(),
            x.requires_grad_(),
        )


def test_verify_detects_a_recompute_with_new_random_numbers(monkeypatch):
    monkeypatch.setattr(rng, "replay", lambda *args: None)

    def step(x):
        y = checkpoint(lambda x: F.dropout(x.sin(), 0.5).exp(), x, use_reentrant=False)
        return torch.autograd.grad(y.sum(), x)

    traced = graph.trace_step(step, *leaves((64,)))
    with pytest.raises(RuntimeError, match="output 0 differs by"):
        graph.remat(traced.gm, verify=True)


def test_verify_accepts_a_graph_with_inputs_in_a_dict():
    inputs = {"a": torch.randn(3), "b": torch.randn(3)}
    gm = make_fx(lambda p: (p["a"].sin() * p["b"],))(inputs)
    with pytest.warns(UserWarning, match="does not say what was checkpointed"):
        second = graph.remat(gm, verify=True)
    torch.testing.assert_close(second(inputs), gm(inputs))


def test_buffers_of_a_region_that_runs_twice():
    """Under gradient accumulation, statistics are the same as without checkpoints."""
    x, models = torch.randn(6, 4), []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.GELU(), nn.Linear(4, 4))

        def step(x, model=model, checkpointed=checkpointed):
            for part in x.chunk(2):
                h = checkpoint(model, part, use_reentrant=False) if checkpointed else model(part)
                h.square().sum().backward()

        (graph.trace_step(step, x) if checkpointed else step)(x)
        models.append(model)
    plain, traced = models
    torch.testing.assert_close(plain.state_dict(), traced.state_dict())
    for p, q in zip(plain.parameters(), traced.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_a_chain_and_the_contexts_of_output_discard():
    w = leaves((4, 4), (4, 4), (4, 4))

    def step(x, **options):
        with storage_ops.OutputDiscardChain(**options) as chain:
            h = chain.checkpoint(lambda x: F.dropout((x @ w[0]).sin(), 0.2), x)
            h = chain.checkpoint(lambda h: (h @ w[1]).exp(), h)
            y = h @ w[2]
        return torch.autograd.grad(y.sum(), w)

    x = torch.randn(3, 4, dtype=torch.double)
    assert count(both(step, x).gm, MM) == 3 + 5 + 2
    saving = functools.partial(step, context_fn=selective([MM]))
    assert count(graph.trace_step(saving, x).gm, MM) == 3 + 5


@pytest.mark.in_turn
@pytest.mark.parametrize("mode", MODES)
def test_a_compiled_trace_and_a_later_compile(mode):
    model = GPT(layers=1, mode=mode, dropout=0.0).double()
    data = batch()
    traced = graph.trace_step(gpt_step(model), *data)
    loss = traced(*data)
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    traced.gm = torch.compile(traced.gm, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(traced(*data), loss)
    torch.testing.assert_close([p.grad for p in model.parameters()], grads)
    if mode == "output_discard":
        return
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    model.zero_grad()
    compiled(*data).backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], grads)
    torch._dynamo.reset()


def test_modules_with_other_checkpoints_do_not_change():
    before = torch.utils.checkpoint.CheckpointFunction
    with pytest.raises(ZeroDivisionError):
        graph.trace_step(lambda x: 1 / 0, torch.ones(1))
    assert torch.utils.checkpoint.CheckpointFunction is before
    assert save_matmuls(None, MATMULS[0]) == CheckpointPolicy.MUST_SAVE
    layer = nn.Linear(2, 2)
    checkpoint(layer, torch.ones(2), use_reentrant=False).sum().backward()
    assert layer.weight.grad is not None


def test_a_backward_in_a_thread_with_its_own_sequence_numbers(monkeypatch):
    """On a GPU, the backward runs in a thread that has created no autograd node before."""
    real = torch.autograd._get_sequence_nr

    def number():
        return real() if torch._C._current_graph_task_id() == -1 else 0

    monkeypatch.setattr(torch.autograd, "_get_sequence_nr", number)
    x, w = leaves((8, 8), (8, 8))

    def train(x, w):
        y = checkpoint(lambda x: (x @ w).sin().exp(), x, use_reentrant=False)
        return torch.autograd.grad(y.sum(), (x, w))

    step = graph.trace_step(train, x, w)
    assert count(step.gm, MM) == 4  # one product runs twice, and two are in the backward
    for got, right in zip(step(x, w), train(x, w), strict=True):
        torch.testing.assert_close(got, right)
