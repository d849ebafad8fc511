"""`remat` repairs graphs in which make_fx recorded torch's own checkpoints."""

import contextlib
import warnings

import pytest
import torch
from torch import nn
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import storage_ops
from storage_ops import graph
from storage_ops.graph.recompute import rng
from storage_ops.graph.recompute.verify import verify_equal

from .models import count, selective

MM = torch.ops.aten.mm.default


def recompute_matmuls(ctx, op, *args, **kwargs):
    return CheckpointPolicy.PREFER_RECOMPUTE if op is MM else CheckpointPolicy.MUST_SAVE


def save_matmuls(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op is MM else CheckpointPolicy.PREFER_RECOMPUTE


def train(policy, layers, dropout):
    options = {} if policy is None else {"context_fn": selective(policy)}

    def region(x, w1, w2):
        return F.gelu(F.dropout(x @ w1, dropout)) @ w2

    def step(x, w1, w2):
        for _ in range(layers):
            x = checkpoint(region, x, w1, w2, use_reentrant=False, **options)
        loss = x.square().sum()
        return loss, *torch.autograd.grad(loss, (w1, w2))

    return step


def inputs():
    x = torch.randn(4, 8, dtype=torch.double)
    shapes = (8, 16), (16, 8)
    return x, *(torch.randn(s, dtype=torch.double, requires_grad=True) for s in shapes)


def repaired(step, args, with_meta=False, **options):
    with fx_traceback.preserve_node_meta() if with_meta else contextlib.nullcontext():
        gm = make_fx(step, **options)(*args)
    return gm, graph.remat(gm)


def tags_ops():
    """Return True if this torch tags the ops of a selective checkpoint that make_fx records."""
    gm = make_fx(train(save_matmuls, 1, 0.0))(*inputs())
    fx_traceback.current_meta.pop("recompute", None)
    return any("recompute" in node.meta for node in gm.graph.nodes)


TAGS = tags_ops()


@pytest.mark.skipif(not TAGS, reason="this torch does not tag the ops")
@pytest.mark.parametrize("with_meta", [False, True])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("policy", [recompute_matmuls, save_matmuls])
def test_selective_checkpoints_recompute(policy, layers, with_meta):
    step, args = train(policy, layers, 0.0), inputs()
    before, after = repaired(step, args, with_meta)
    plain = make_fx(train(None, layers, 0.0))(*args)
    kept = count(before, MM)
    assert count(after, MM) == (count(plain, MM) if policy is recompute_matmuls else kept)
    assert kept < count(plain, MM)
    assert all(map(torch.equal, after(*args), step(*args)))


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("mode", ["real", "symbolic"])
def test_the_recompute_of_a_plain_checkpoint_draws_the_numbers_of_its_forward(layers, mode):
    step, args = train(None, layers, 0.5), inputs()
    before, after = repaired(step, args, tracing_mode=mode)
    results = []
    for run in (step, after, before):
        torch.manual_seed(0)
        results.append((run(*args), torch.get_rng_state()))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    assert not torch.equal(results[2][1], results[0][1])  # make_fx alone is still wrong


@pytest.mark.parametrize("policy", [None, "matmuls"])
def test_wrappers_of_this_package_need_no_repair(policy):
    body = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(), nn.Linear(8, 8), nn.Dropout())
    block = storage_ops.CheckpointWrapper(body, policy=policy)
    weights = list(block.parameters())

    def step(x):
        return torch.autograd.grad(block(block(x)).square().sum(), weights)

    x = torch.randn(4, 8)
    gm = make_fx(step)(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        after = graph.remat(gm, verify=True)
    gelu = torch.ops.aten.gelu.default
    assert count(gm, gelu) == 2 and count(after, gelu) == 4
    results = []
    for run in (step, gm, after):
        torch.manual_seed(0)
        results.append((run(x), torch.get_rng_state()))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=0)


def test_random_numbers_of_two_forwards_are_not_mistaken_for_a_recompute():
    w = nn.Parameter(torch.randn(4, 4))

    def step(x):
        loss = sum(F.dropout(x @ w, 0.5).square().sum() for _ in range(2))
        return torch.autograd.grad(loss, w)

    x = torch.randn(3, 4)
    with pytest.warns(UserWarning, match="nothing is recomputed"):
        before, after = repaired(step, (x,))
    torch.manual_seed(0)
    expected = before(x)
    torch.manual_seed(0)
    assert torch.equal(after(x)[0], expected[0])


RANDOM = {
    "rand_like": lambda h: h * torch.rand_like(h),
    "dropout": lambda h: F.dropout(h, 0.4),
    "bernoulli_": lambda h: h * torch.empty_like(h).bernoulli_(0.4).div_(0.4),
    "attention": lambda h: F.scaled_dot_product_attention(*[h[None, None]] * 3, dropout_p=0.2),
}


@pytest.mark.parametrize("name", RANDOM)
def test_verify_compares_with_the_numbers_of_eager_mode(name, monkeypatch):
    """The graph as recorded draws other numbers, so `verify` does not compare with it."""
    w = torch.randn(6, 6, dtype=torch.double, requires_grad=True)

    def step(x):
        for _ in range(2):
            x = checkpoint(lambda x: RANDOM[name](x @ w).squeeze(), x, use_reentrant=False)
        loss = x.square().sum()
        return loss.detach(), torch.rand(2), *torch.autograd.grad(loss, w)

    x = torch.randn(6, 6, dtype=torch.double)
    gm = make_fx(step)(x)
    after = graph.remat(gm, verify=True)
    assert graph.remat(after, verify=True) is after
    torch.manual_seed(0)
    expected = step(x), torch.get_rng_state()
    torch.manual_seed(0)
    torch.testing.assert_close((after(x), torch.get_rng_state()), expected, rtol=0, atol=0)
    monkeypatch.setattr(rng, "replay", lambda *args: None)
    with pytest.raises(RuntimeError, match=r"differs by"):
        graph.remat(gm, verify=True)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_random_numbers_after_the_gradients_are_not_mistaken_for_a_recompute(checkpointed):
    w = torch.randn(4, 4, requires_grad=True)

    def body(x):
        return F.dropout(x, 0.5) @ w

    def step(x):
        y = checkpoint(body, x, use_reentrant=False) if checkpointed else body(x)
        grads = torch.autograd.grad(y.square().sum(), w)
        return *grads, F.dropout(x, 0.5).mean()

    x = torch.randn(3, 4)
    known = contextlib.nullcontext()
    with known if checkpointed else pytest.warns(UserWarning, match="nothing is recomputed"):
        after = graph.remat(make_fx(step)(x), verify=True)
    torch.manual_seed(0)
    expected = step(x)
    torch.manual_seed(0)
    torch.testing.assert_close(after(x), expected, rtol=0, atol=0)


def test_verify_distinguishes_nan_from_zero():
    gm, other = (
        make_fx(fn)(torch.ones(2)) for fn in (torch.zeros_like, lambda x: x.mul(torch.nan))
    )
    verify_equal(other, other)
    with pytest.raises(RuntimeError, match="output 0 differs"):
        verify_equal(gm, other)


def test_a_graph_that_cannot_be_repaired_causes_a_warning():
    def step(x, w):
        x = checkpoint(lambda x: F.dropout(x, 0.5) * F.dropout(x, 0.5) @ w, x, use_reentrant=False)
        return torch.autograd.grad(x.sum(), w)

    args = torch.randn(3, 3), torch.randn(3, 3, requires_grad=True)
    with pytest.warns(UserWarning, match=r"may recompute random numbers.*trace_step"):
        _, after = repaired(step, args)
    with pytest.raises(RuntimeError, match=r"cannot verify .* whose random numbers bernoulli_"):
        graph.remat(after, verify=True)
    torch.manual_seed(0)
    (expected,) = step(*args)
    torch.manual_seed(0)
    assert torch.equal(graph.trace_step(step, *args)(*args)[0], expected)


def test_a_graph_without_checkpoints_is_returned_with_one_warning():
    gm = make_fx(lambda x: (x.sin(),))(torch.randn(3))
    with pytest.warns(UserWarning, match=r"nothing is recomputed.*trace_step"):
        after = graph.remat(gm)
    bare = torch.fx.symbolic_trace(lambda x: x + 1)
    for fn, message in ((graph.remat, "of the input x has no 'val'"), (graph.schedule, "no node")):
        with pytest.raises(ValueError, match=message):
            fn(bare)
    for fn in (graph.remat, graph.schedule, graph.capturable):
        with pytest.raises(TypeError, match=r"`gm` is a Linear. Expected a torch\.fx\.GraphMod"):
            fn(nn.Linear(2, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert graph.remat(after, verify=True) is after
        graph.trace_step(torch.sin, torch.randn(3))


def test_a_trace_by_make_fx_does_not_affect_the_next_compile():
    step, args = train(save_matmuls, 1, 0.0), inputs()
    expected = step(*args)
    options = {"backend": "aot_eager", "fullgraph": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gm = make_fx(step)(*args)
        graph.remat(gm)
        assert "recompute" not in fx_traceback.current_meta
        make_fx(step)(*args)
        graph.trace_step(step, *args)
    assert "recompute" not in fx_traceback.current_meta
    compiled = torch.compile(
        lambda x, w1, w2: checkpoint(
            lambda x: F.gelu(x @ w1) @ w2, x, use_reentrant=False,
            context_fn=selective(save_matmuls),
        ).square().sum(), **options,
    )  # fmt: skip
    loss = compiled(*args)
    torch.testing.assert_close(loss, expected[0])
    torch.testing.assert_close(torch.autograd.grad(loss, args[1:]), expected[1:])
    torch._dynamo.reset()
