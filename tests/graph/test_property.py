"""Random small models, policies and dropouts: eager, traced and compiled gradients."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import storage_ops
from storage_ops import graph

from .models import selective

WIDTH = 4
OPS = {
    "linear": lambda i: nn.Linear(WIDTH, WIDTH).double(),
    "norm": lambda i: nn.LayerNorm(WIDTH).double(),
    "gelu": lambda i: nn.GELU(),
    "relu_": lambda i: InPlace(),
    "dropout": lambda i: nn.Dropout(0.1 * (i % 4)),
    "dropout_t": lambda i: Transposed(nn.Dropout(0.3)),
    "attention": lambda i: Attention(0.25 * (i % 2)),
    "softmax": lambda i: nn.Softmax(-1),
}
REGIONS = ("none", "full", "selective", "output_discard", "nested")
NAMES = ("mm", "addmm", "gelu", "native_layer_norm", "bernoulli_", "mul", "bmm", "relu_", "div_")


class Transposed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.transpose(0, 1)).transpose(0, 1)


class InPlace(nn.Module):
    def forward(self, x):
        h = x * 2
        h[..., 1].mul_(0.5)
        return h.relu_()


class Attention(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.dropout = dropout

    def forward(self, x):
        return F.scaled_dot_product_attention(
            x, x, x, dropout_p=self.dropout if self.training else 0
        )


def policy(saved):
    def decide(ctx, op, *args, **kwargs):
        if op.overloadpacket.__name__ in saved:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return decide


def checkpointed(block, x, region, saved):
    if region == "full":
        return checkpoint(block, x, use_reentrant=False)
    if region == "selective":
        context = selective(policy(saved))
        return checkpoint(block, x, use_reentrant=False, context_fn=context)
    if region == "output_discard":
        return storage_ops.output_discard(block, torch.sin)(x)
    if region == "nested":
        inner = lambda x: checkpoint(block, x, use_reentrant=False).cos()  # noqa: E731
        return checkpoint(inner, x, use_reentrant=False)
    return block(x)


blocks = st.lists(
    st.tuples(
        st.lists(st.sampled_from(sorted(OPS)), min_size=1, max_size=5),
        st.sampled_from(REGIONS),
        st.sets(st.sampled_from(NAMES)),
    ),
    min_size=1,
    max_size=4,
)


def build(plan, seed):
    torch.manual_seed(seed)
    body = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH).double(), *(OPS[op](i) for i, op in enumerate(ops)))
        for ops, _, _ in plan
    ]
    model = nn.ModuleList(body)

    def step(x):
        for block, (_, region, saved) in zip(model, plan, strict=True):
            x = x + checkpointed(block, x, region, saved)
        loss = F.dropout(x, 0.1).square().sum()
        loss.backward()
        return loss.detach()

    return model, step


def run(plan, seed, change):
    model, step = build(plan, seed)
    x = torch.randn(2, 3, WIDTH, dtype=torch.double)
    step = change(step, x)
    torch.manual_seed(seed + 1)
    loss = step(x)
    return loss, [p.grad for p in model.parameters()], torch.get_rng_state()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan=blocks, seed=st.integers(0, 2**31))
def test_eager_and_traced_agree_bit_for_bit(plan, seed):
    def traced(step, x):
        traced = graph.trace_step(step, x)
        graph.remat(traced.gm, verify=True)
        return traced

    # Eager selective checkpointing refuses in-place ops on what it saves; the numbers are the same.
    plain = [(ops, "full" if r == "selective" else r, saved) for ops, r, saved in plan]
    eager = run(plain, seed, lambda step, x: step)
    torch.testing.assert_close(run(plan, seed, traced), eager, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan=blocks, seed=st.integers(0, 2**31))
def test_compiled_agrees_where_it_draws_no_numbers(plan, seed):
    """Compiled dropout draws other numbers, and in-place ops are not compiled under a policy."""
    quiet = [
        (
            [op for op in ops if "dropout" not in op and op not in ("attention", "relu_")],
            region,
            saved,
        )
        for ops, region, saved in plan
        if region not in ("output_discard", "nested")
    ]
    quiet = quiet or [(["gelu"], "full", set())]
    results = []
    for compiled in (False, True):
        model, _ = build(quiet, seed)

        def forward(x, model=model):
            for block, (_, region, saved) in zip(model, quiet, strict=True):
                x = x + checkpointed(block, x, region, saved)
            return x.square().sum()

        if compiled:
            forward = torch.compile(forward, backend="aot_eager")

        def step(x, forward=forward):
            loss = forward(x)
            loss.backward()
            return loss.detach()

        x = torch.randn(2, 3, WIDTH, dtype=torch.double)
        step = step if compiled else graph.trace_step(step, x)
        results.append((step(x), [p.grad for p in model.parameters()]))
    torch.testing.assert_close(results[0], results[1])
    torch._dynamo.reset()
