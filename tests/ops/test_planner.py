import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import storage_ops as so
from storage_ops.ops import planner

SIZES = st.integers(1, 5000)


@settings(deadline=None)
@given(SIZES, SIZES, SIZES, st.sampled_from([2, 4, 8]), st.booleans(), st.booleans(), st.data())
def test_plans_keep_to_the_budget(tokens, hidden, vocab, itemsize, weight, bias, data):
    grads = (True, weight, bias)
    least = planner.scratch_bytes(1, tokens, hidden, vocab, itemsize, grads)
    most = planner.scratch_bytes(tokens, tokens, hidden, vocab, itemsize, grads)
    budget = data.draw(st.integers(least, max(2 * most, least)))
    plan = planner.plan(tokens, hidden, vocab, itemsize, grads=grads, memory_budget=budget)
    assert plan.peak_bytes <= budget
    assert (plan.num_chunks - 1) * plan.rows < tokens <= plan.num_chunks * plan.rows
    with pytest.raises(ValueError, match=f"expected at least {least}"):
        planner.plan(tokens, hidden, vocab, itemsize, grads=grads, memory_budget=least - 1)


def test_a_large_budget_needs_one_chunk_and_none_needs_few():
    assert planner.plan(64, 8, 100, 4, memory_budget=1 << 30).num_chunks == 1
    assert planner.plan(8192, 4096, 128256, 4).num_chunks in range(4, 9)
    assert planner.plan(0, 4, 5, 4).num_chunks == 0


def library_scratch(rows, x, w):
    """What the math library allocates inside the products of one chunk (16-bit ones only)."""
    x, w, logits = x.detach()[:rows], w.detach(), x.new_empty(rows, planner.padded(len(w)))
    logits = logits[:, : len(w)].detach().zero_()
    products = [(x, w.t(), logits), (logits, w, torch.empty_like(x))]
    for begin in range(0, len(w), planner.SLICE):
        part = logits[:, begin : begin + planner.SLICE].t()
        products.append((part, x, w.new_empty(len(part), x.shape[1])))
    peaks = []
    for left, right, out in products:
        with so.memory.measure() as m:
            torch.mm(left, right, out=out)
        peaks.append(m.peak_bytes)
    return max(peaks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunks", [2, 5])
@pytest.mark.parametrize("grads", [(True, True, True), (True, False, False), (False, True, False)])
def test_measured_peak_is_what_was_planned(dtype, chunks, grads):
    tokens, hidden, vocab = 640, 64, 4000
    x = torch.randn(tokens, hidden, dtype=dtype, requires_grad=grads[0])
    w = torch.randn(vocab, hidden, dtype=dtype, requires_grad=grads[1])
    b = torch.randn(vocab, dtype=dtype, requires_grad=grads[2])
    target = torch.randint(vocab, (tokens,))
    size = x.element_size()
    rows = -(-tokens // chunks)
    budget = planner.scratch_bytes(rows, tokens, hidden, vocab, size, grads)
    plan = planner.plan(tokens, hidden, vocab, size, grads=grads, memory_budget=budget)
    assert plan.num_chunks == chunks and plan.peak_bytes <= budget
    so.linear_cross_entropy(x, w, target, linear_bias=b, memory_budget=budget)
    with so.memory.measure() as m:
        loss = so.linear_cross_entropy(x, w, target, linear_bias=b, memory_budget=budget)
        loss.backward()
        del loss
    gradients = sum(t.nbytes for t, needs in zip((x, w, b), grads, strict=True) if needs)
    extra = m.peak_bytes - gradients
    allowed = budget + library_scratch(plan.rows, x, w)
    assert extra <= allowed, (extra, plan.peak_bytes, allowed)
    assert m.peak_bytes > 0.9 * plan.peak_bytes  # nor does the plan promise far too much
