"""Random graphs of producers, consumers, views and dropout have the gradients of eager mode."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import storage_ops as so

OPS = [
    torch.sin,
    torch.exp,
    torch.sigmoid,
    lambda t: t.softmax(-1),
    lambda t: F.dropout(t, 0.3),
    lambda t: t * t.mean(),
    lambda t: t.flip(0),
    lambda t: t.reshape(-1).view_as(t),
    lambda t: t.t().contiguous().t(),
    lambda t: t + 1,
    lambda t: t.clone().mul_(2).cos_(),
    lambda t: F.gelu(t),
]
VIEWS = [lambda t: t, lambda t: t[1:], lambda t: t.t(), lambda t: t.chunk(2, 1)[1], torch.detach]
ENDS = [torch.square, lambda t: t * t, torch.tanh, lambda t: t @ t.mT, lambda t: t + t, torch.sum]
functions = st.lists(st.integers(0, len(OPS) - 1), min_size=1, max_size=4)
uses = st.lists(
    st.tuples(st.integers(0, len(VIEWS) - 1), st.integers(0, len(ENDS) - 1)), min_size=1, max_size=3
)
# A region: its ops, the views and ops of its consumers, and the API that runs it.
regions = st.tuples(functions, uses, st.sampled_from(["block", "composed", "hook", "wrapped"]))


def compose(indices):
    def run(t):
        for i in indices:
            t = OPS[i](t)
        return t

    return run


def consume(pairs, h):
    return sum(ENDS[end](VIEWS[view](h)).square().mean() for view, end in pairs)


def step(plan, w, discards):
    """Return the sum of all consumers' results. Each region reads the result of the one before."""
    x, total = w, w.sum() * 0
    for ops, pairs, way in plan:
        producer, consumer = compose(ops), lambda h, pairs=pairs: consume(pairs, h)
        if not discards:
            part = consumer(producer(x))
        elif way == "composed":
            part = so.output_discard(producer, consumer)(x)
        elif way == "wrapped":
            block = so.output_discard(producer, consumer)
            part = checkpoint(block, x, use_reentrant=False)
        else:
            ckpt = so.OutputDiscardCheckpoint(determinism_check="checksum")
            h = ckpt.checkpoint(producer, x)
            if way == "block":
                with ckpt.consumer():
                    part = consumer(h)
                ckpt.discard_output_and_register_recompute()
            else:
                part = consumer(h)
                if part.requires_grad:
                    ckpt.discard_output_and_register_recompute(part)
                else:
                    ckpt.clear()
            del h
        total = total + part
        x = w * (1 + part)
    return total


@settings(max_examples=100)
@given(plan=st.lists(regions, min_size=1, max_size=3), seed=st.integers(0, 1 << 30))
def test_random_graphs(plan, seed):
    results = []
    for discards in (False, True):
        torch.manual_seed(seed)
        w = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
        total = step(plan, w, discards)
        total.backward()
        results.append((total.detach(), w.grad, torch.get_rng_state()))
    (a, grad_a, rng_a), (b, grad_b, rng_b) = results
    torch.testing.assert_close(a, b, rtol=1e-9, atol=0, equal_nan=True)
    torch.testing.assert_close(grad_a, grad_b, rtol=1e-8, atol=1e-10, equal_nan=True)
    assert torch.equal(rng_a, rng_b)
