"""Logits and biases in float32 for 16-bit arguments."""

import pytest
import torch
from torch.nn import functional as F

import storage_ops as so
from storage_ops.loss import reference
from storage_ops.loss.planning import cost

from .test_planner import plans, smallest  # noqa: F401

NARROW = [torch.bfloat16, torch.float16]
KEYS = [None, "vocab-sliced 40 64", "vocab-sliced 7 200", "token-chunked 13 200",
        "token-chunked 40 100", "token-chunked 16 70", "vocab-sliced 5 64 0 1 1",
        "token-chunked 12 64 0 1 1"]  # fmt: skip


class Forced:
    def __init__(self, key):
        self.key = key


def problem(dtype, tokens=40, hidden=11, vocab=200, bias=None):
    x, w = torch.randn(tokens, hidden), torch.randn(vocab, hidden) / hidden**0.5
    target = torch.randint(vocab, (tokens,))
    target[::7] = -100
    leaves = [x.to(dtype), w.to(dtype), *([torch.randn(vocab).to(bias)] if bias else [])]
    return [t.requires_grad_() for t in leaves], target


def in_double(leaves):
    return [t.detach().double().requires_grad_() for t in leaves]


def errors(got, right):
    return [((g.double() - e).norm() / e.norm()).item() for g, e in zip(got, right, strict=True)]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("bias", [None, torch.float32, "own"])
@pytest.mark.parametrize("dtype", NARROW)
def test_logits_are_not_rounded(dtype, bias, key):
    leaves, target = problem(dtype, bias=dtype if bias == "own" else bias)
    plan, double = key and Forced(key), in_double(leaves)
    names = ("nll", "lse", "entropy")

    def run(function, leaves, **options):
        x, w, *b = leaves
        return function(x, w, target, linear_bias=b[0] if b else None, **options)

    options = {"softcap": 5.0, "logit_scale": 1.3}
    right = run(reference.linear_cross_entropy, double, returns=names, **options)
    options |= {"logits_dtype": torch.float32, "plan": plan}
    ours = run(so.linear_cross_entropy, leaves, returns=names, **options)
    assert max(errors(ours, right)) < 2e-6
    rounded = run(
        so.linear_cross_entropy, leaves, returns=names, **{**options, "logits_dtype": None}
    )
    assert max(errors(rounded, right)) > (2e-5 if dtype == torch.bfloat16 else 5e-6)
    for reduction in ("mean", "none"):
        got = torch.autograd.grad(
            run(so.linear_cross_entropy, leaves, reduction=reduction, **options).sum(), leaves
        )
        loss = run(reference.linear_cross_entropy, double, reduction=reduction,
                   softcap=5.0, logit_scale=1.3).sum()  # fmt: skip
        expected = torch.autograd.grad(loss, double)
        assert [g.dtype for g in got] == [t.dtype for t in leaves]
        relative = errors(got, expected)
        assert max(relative[:2]) < (6e-3 if dtype == torch.bfloat16 else 2e-3)
        # The bias gradient is summed before the gradients of logits are rounded.
        assert not relative[2:] or relative[2] < (1e-5 if bias == torch.float32 else 4e-3)


@pytest.mark.parametrize("dtype", NARROW)
def test_the_gradient_of_a_bias_is_summed_in_fp32_at_any_budget(dtype):
    leaves, target = problem(dtype, 512, 16, 1000, dtype)
    leaves[1].detach().div_(4)
    double = in_double(leaves)
    exact = torch.autograd.grad(F.cross_entropy(F.linear(*double), target), double)[2]
    eager = torch.autograd.grad(F.cross_entropy(F.linear(*leaves), target), leaves)[2]
    x, w, b = leaves
    # In float16, small gradients of a mean underflow in eager mode. The package scales them.
    (bound,) = errors([eager], [exact])
    for budget in (smallest(x, w, target, linear_bias=b), "512 KiB", "2 MiB", None):
        loss = so.linear_cross_entropy(x, w, target, linear_bias=b, memory_budget=budget)
        assert errors(torch.autograd.grad(loss, [b]), [exact])[0] <= 1.05 * bound


@pytest.mark.in_turn
@pytest.mark.parametrize("sizes", [(600, 64, 16001), (250, 300, 32001)])
@pytest.mark.parametrize("share", [1.0, 0.25, 1 / 16])
@pytest.mark.parametrize("dtype", NARROW)
def test_budget_and_plan_include_float32_logits(dtype, share, sizes, plans):  # noqa: F811
    tokens, hidden, vocab = sizes
    (x, w), target = problem(dtype, tokens, hidden, vocab)
    target = target.clamp(0)
    options = {"logits_dtype": torch.float32}
    budget = max(int(tokens * vocab * 4 * share), smallest(x, w, target, **options))
    with so.memory.measure() as m:
        so.linear_cross_entropy(x, w, target, memory_budget=budget, **options).backward()
    returned = x.grad.nbytes + w.grad.nbytes
    assert m.peak_bytes - returned <= budget
    predicted = max(plan.peak_bytes for plan in plans)
    assert m.peak_bytes - returned <= predicted
    if so.info()["row_kernel"] != "plain torch":
        reserved = (1 << 20) * torch.get_num_threads()
        assert m.peak_bytes - returned >= 0.95 * predicted - reserved - cost.PLAIN


@pytest.mark.parametrize("dtype", NARROW)
def test_the_gradient_of_distributions_keeps_to_the_budget(dtype):
    (x, w), _ = problem(dtype, 300, 64, 6001)
    q = torch.randn(300, 6001).softmax(1).to(dtype).requires_grad_()
    budget = 4 << 20
    with so.memory.measure() as m:
        loss = so.linear_cross_entropy(x, w, q, memory_budget=budget)
        grads = torch.autograd.grad(loss, [x, w, q])
    assert m.peak_bytes - sum(g.nbytes for g in grads) <= budget


def test_plan_prints_the_cost_of_float32_logits(capsys):
    asked = [
        so.plan(8192, 4096, 128256, memory_budget="1 GiB", device="h200", logits_dtype=dtype)
        for dtype in (None, "bf16", torch.bfloat16, "fp32", torch.float32)
    ]
    assert asked[0] == asked[1] == asked[2] and asked[3] == asked[4]
    assert asked[3].seconds > asked[0].seconds
    assert asked[3].rows * asked[3].columns < asked[0].rows * asked[0].columns
    with pytest.raises(ValueError, match=r"`logits_dtype` is 'fp16'\. Expected None, bfloat16 or"):
        so.plan(8, 8, 8, logits_dtype="fp16", device="h200")
    assert capsys.readouterr().out


def test_autocast_keeps_logits_in_float32():
    x, w = torch.randn(40, 64, requires_grad=True), torch.randn(300, 64, requires_grad=True)
    target = torch.randint(300, (40,))
    with torch.autocast("cpu", torch.bfloat16):
        lse = so.linear_cross_entropy(
            x, w, target, logits_dtype=torch.float32, returns=("lse",)
        )  # fmt: skip
    right = (x.bfloat16().double() @ w.bfloat16().double().t()).logsumexp(1)
    assert max(errors([lse], [right])) < 1e-6
    lse.sum().backward()
    assert x.grad.dtype == w.grad.dtype == torch.float32


def test_wrong_dtypes():
    (x, w), target = problem(torch.bfloat16)
    with pytest.raises(ValueError, match=r"`logits_dtype` is torch.float64. Expected one of"):
        so.linear_cross_entropy(x, w, target, logits_dtype=torch.float64)
    with pytest.raises(TypeError, match=r"`linear_bias` is torch.float16. Expected"):
        so.linear_cross_entropy(x, w, target, linear_bias=torch.zeros(200).half())
