import functools
import math

import pytest
import torch
from torch.nn import functional as F

import storage_ops as so
from storage_ops.loss import reference
from storage_ops.loss.planning import planner
from storage_ops.loss.planning.problem import Problem
from storage_ops.loss.planning.schedule import TOKEN_CHUNKED, VOCAB_SLICED
from storage_ops.matmul.aten import Aten

# Relative errors in the Frobenius norm against float64. In 16 bits, logits, their gradients and the
# results are each rounded once.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
REDUCTIONS = ["mean", "sum", "none"]


def problem(tokens=37, hidden=24, vocab=101, dtype=torch.float32, bias=True, ignored=0.3):
    x = torch.randn(tokens, hidden, dtype=dtype)
    w = torch.randn(vocab, hidden, dtype=dtype)
    b = torch.randn(vocab, dtype=dtype) if bias else None
    target = torch.randint(vocab, (tokens,))
    target[torch.rand(tokens) < ignored] = -100
    return x, w, target, b


def run(function, x, w, target, b, upstream=None, **options):
    """Return loss and gradients of a function in the dtype of the arguments."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in (x, w, b)]
    loss = function(leaves[0], leaves[1], target, linear_bias=leaves[2], **options)
    upstream = torch.ones_like(loss) if upstream is None else upstream.to(loss.dtype)
    loss.backward(upstream)
    return loss.detach(), [t.grad for t in leaves if t is not None]


def exact(x, w, target, b, **options):
    double = [None if t is None else t.double() for t in (x, w, b)]
    return run(reference.linear_cross_entropy, double[0], double[1], target, double[2], **options)


def error(ours, expected):
    difference = (ours.double() - expected).norm()
    return (difference / expected.norm().clamp_min(1e-300)).item()


def smallest_budget(x, w, target, b, **options):
    with pytest.raises(ValueError, match="Expected at least") as complaint:
        run(so.linear_cross_entropy, x, w, target, b, memory_budget=0, **options)
    return int(str(complaint.value).split("at least ")[1].split()[0])


@pytest.mark.parametrize("budget", ["default", "smallest", "10 x smallest"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_loss_and_gradients_against_float64(dtype, reduction, bias, budget):
    x, w, target, b = problem(dtype=dtype, bias=bias)
    least = smallest_budget(x, w, target, b, reduction=reduction)
    memory_budget = {"default": None, "smallest": least, "10 x smallest": 10 * least}[budget]
    # Upstream gradients that do not underflow in float16.
    upstream = (torch.rand(len(target) if reduction == "none" else ()) + 0.5).double()
    loss, grads = run(so.linear_cross_entropy, x, w, target, b, upstream, reduction=reduction,
                      memory_budget=memory_budget)  # fmt: skip
    expected, expected_grads = exact(x, w, target, b, upstream=upstream, reduction=reduction)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert error(loss, expected) < TOLERANCE[dtype]
    for ours, right in zip(grads, expected_grads, strict=True):
        assert ours.dtype == dtype
        assert error(ours, right) < TOLERANCE[dtype]


@pytest.mark.parametrize("plan", ["token-chunked", "vocab-sliced", "partly kept"])
@pytest.mark.parametrize("chunks", [1, 8, 64, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_gradients_are_no_worse_than_those_of_the_unchunked_loss(dtype, chunks, plan):
    x, w, target, _ = problem(512, 64, 1003, dtype, bias=False)
    x, w = x * 0.5, w * 0.5
    strategy = VOCAB_SLICED if plan == "vocab-sliced" else TOKEN_CHUNKED
    rows, columns = {
        "token-chunked": (512 // chunks, 1003),
        "vocab-sliced": (512, max(64, 1003 // chunks)),
        "partly kept": (512 // chunks, 1003 * 2 // 5),
    }[plan]
    p = Problem(512, 64, 1003, Aten(2))
    forced = planner.make(planner.schedule(p, strategy, rows, columns))
    # A large upstream gradient, as from a loss scaler. In float16, a small one would underflow.
    options = {"upstream": torch.tensor(1024.0)}
    ours = run(so.linear_cross_entropy, x, w, target, None, plan=forced, **options)
    unchunked = run(reference.linear_cross_entropy, x, w, target, None, **options)
    right = exact(x, w, target, None, **options)
    # The unchunked loss may be exact by chance. The error must not grow with the number of chunks.
    assert error(ours[0], right[0]) <= max(error(unchunked[0], right[0]), 1e-4)
    for mine, theirs, true in zip(ours[1], unchunked[1], right[1], strict=True):
        assert error(mine, true) <= error(theirs, true)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_leading_dimensions_and_index_types(dtype):
    x, w, b = torch.randn(2, 3, 5, 8), torch.randn(11, 8), torch.randn(11)
    target = torch.randint(11, (2, 3, 5))
    for reduction in REDUCTIONS:
        loss, grads = run(so.linear_cross_entropy, x, w, target.to(dtype), b, reduction=reduction)
        right, right_grads = exact(x, w, target, b, reduction=reduction)
        assert loss.shape == right.shape and error(loss, right) < 2e-6
        assert all(error(a, e) < 2e-6 for a, e in zip(grads, right_grads, strict=True))


def test_a_single_token_without_leading_dimension():
    x, w = torch.randn(8), torch.randn(11, 8)
    loss = so.linear_cross_entropy(x, w, torch.tensor(3))
    torch.testing.assert_close(loss, F.cross_entropy(F.linear(x, w), torch.tensor(3)))


@pytest.mark.parametrize("bias", ["strided", "expanded"])
def test_strided_arguments(bias):
    x, w = torch.randn(24, 2, 37).permute(2, 1, 0)[:, 0], torch.randn(24, 101).t()
    target = torch.randint(101, (37, 3))[:, 1]
    b = torch.randn(202)[::2] if bias == "strided" else torch.randn(1).expand(101)
    direct = so.linear_cross_entropy(x, w, target, linear_bias=b)
    torch.testing.assert_close(direct, reference.linear_cross_entropy(x, w, target, linear_bias=b))
    loss, grads = run(so.linear_cross_entropy, x, w, target, b)
    right, right_grads = exact(x, w, target, b)
    assert error(loss, right) < 2e-6
    assert all(error(a, e) < 2e-6 for a, e in zip(grads, right_grads, strict=True))


@pytest.mark.parametrize("frozen", [(0,), (1,), (0, 1), (0, 1, 2)])
def test_frozen_arguments_get_no_gradient(frozen):
    x, w, target, b = problem()
    leaves = [t.requires_grad_(i not in frozen) for i, t in enumerate((x, w, b))]
    loss = so.linear_cross_entropy(x, w, target, linear_bias=b)
    assert loss.requires_grad == (len(frozen) < 3)
    if len(frozen) == 3:
        return
    loss.backward()
    _, right = exact(x, w, target, b)
    for i, (leaf, expected) in enumerate(zip(leaves, right, strict=True)):
        assert (leaf.grad is None) == (i in frozen)
        assert i in frozen or error(leaf.grad, expected) < 2e-6


def test_no_grad_gives_only_the_loss():
    x, w, target, b = problem()
    with torch.no_grad():
        loss = so.linear_cross_entropy(x.requires_grad_(), w, target, linear_bias=b)
    assert not loss.requires_grad
    assert error(loss, exact(x, w, target, b)[0]) < 2e-6


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_every_token_ignored(reduction):
    x, w, target, b = problem(ignored=2.0)
    loss, grads = run(so.linear_cross_entropy, x, w, target, b, reduction=reduction)
    assert torch.isnan(loss) if reduction == "mean" else not loss.any()
    assert all(torch.equal(g, torch.zeros_like(g)) for g in grads)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_tokens(reduction):
    x, w, target, b = problem(tokens=0)
    loss, grads = run(so.linear_cross_entropy, x, w, target, b, reduction=reduction)
    assert torch.isnan(loss) if reduction == "mean" else not loss.any()
    assert [g.shape for g in grads] == [x.shape, w.shape, b.shape]
    assert all(torch.equal(g, torch.zeros_like(g)) for g in grads)


def test_hidden_size_zero():
    x, w, target = torch.randn(3, 0), torch.randn(5, 0), torch.tensor([0, 1, 4])
    torch.testing.assert_close(so.linear_cross_entropy(x, w, target), torch.tensor(5.0).log())


def test_retaining_the_graph_does_not_round_the_upstream_gradient():
    x, w, target, _ = problem(dtype=torch.bfloat16)
    w.requires_grad_()
    results = []
    for retain in (False, True):
        loss = so.linear_cross_entropy(x, w, target) / 3
        results.append(torch.autograd.grad(loss, w, retain_graph=retain)[0])
    assert torch.equal(*results)


@pytest.mark.parametrize("tokens, vocab", [(1, 101), (37, 1), (1, 1), (5, 1025)])
def test_edge_shapes(tokens, vocab):
    x, w, target, b = problem(tokens=tokens, vocab=vocab, ignored=0)
    loss, grads = run(so.linear_cross_entropy, x, w, target, b, reduction="sum")
    right, right_grads = exact(x, w, target, b, reduction="sum")
    assert abs(loss - right) < 1e-5 + 2e-6 * abs(right)
    assert all(
        ((a - e).norm() < 1e-5 + 2e-6 * e.norm()) for a, e in zip(grads, right_grads, strict=True)
    )


def test_another_ignore_index_may_be_a_class():
    x, w, target, b = problem()
    target[target < 0] = 7
    loss, grads = run(so.linear_cross_entropy, x, w, target, b, ignore_index=7)
    right, right_grads = exact(x, w, target, b, ignore_index=7)
    assert error(loss, right) < 2e-6
    assert all(error(a, e) < 2e-6 for a, e in zip(grads, right_grads, strict=True))


def test_extreme_logits():
    x = torch.eye(4)
    w = torch.tensor([[1e4, 0, -1e4, 88], [-1e4, 0, 1e4, -88], [0, 0, 0, 0]]).float()
    target = torch.tensor([0, 1, 2, 2])
    loss, grads = run(so.linear_cross_entropy, x, w, target, None, reduction="none")
    right, right_grads = exact(x, w, target, None, reduction="none")
    assert torch.allclose(loss.double(), right, rtol=1e-6, atol=1e-6)
    assert all(
        torch.allclose(a.double(), e, atol=1e-6) for a, e in zip(grads, right_grads, strict=True)
    )


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_non_finite_logits_like_torch(value):
    x, target = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0])
    w = torch.tensor([[1.0, 2.0], [0.5, 1.0]])
    b = torch.tensor([value, 0.0])
    loss, grads = run(so.linear_cross_entropy, x, w, target, b, reduction="none")
    right, right_grads = exact(x, w, target, b, reduction="none")
    assert torch.equal(torch.isnan(loss), torch.isnan(right))
    assert torch.equal(torch.isinf(loss), torch.isinf(right))
    assert torch.equal(torch.isnan(grads[2]), torch.isnan(right_grads[2]))


def test_backward_twice_and_bit_equal_runs():
    x, w, target, b = problem(300, 16, 211)
    first = run(so.linear_cross_entropy, x, w, target, b, memory_budget=200_000)
    second = run(so.linear_cross_entropy, x, w, target, b, memory_budget=200_000)
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(p, q) for p, q in zip(first[1], second[1], strict=True))
    w.requires_grad_()
    loss = so.linear_cross_entropy(x, w, target)
    loss.backward(retain_graph=True)
    once = w.grad.clone()
    loss.backward()
    assert torch.equal(w.grad, 2 * once)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_upstream_gradient_scales_and_accumulates():
    x, w, target, _ = problem()
    w.requires_grad_()
    once = torch.autograd.grad(so.linear_cross_entropy(x, w, target), w)[0]
    loss = so.linear_cross_entropy(x, w, target)
    (3 * loss + loss * loss.detach()).backward()
    torch.testing.assert_close(w.grad, once * (3 + loss.detach()), rtol=1e-5, atol=1e-6)


def test_results_do_not_depend_on_uninitialised_memory(monkeypatch):
    """New memory is filled with nan, and the result stays the same."""
    x, w, target, b = problem()
    right = run(so.linear_cross_entropy, x, w, target, b)
    for owner, name in ((torch.Tensor, "new_empty"), (torch, "empty"), (torch, "empty_like")):
        plain = getattr(owner, name)

        def poisoned(*args, _plain=plain, **options):
            new = _plain(*args, **options)
            return new.fill_(float("nan")) if new.is_floating_point() else new.fill_(-7)

        monkeypatch.setattr(owner, name, poisoned)
    poisoned_result = run(so.linear_cross_entropy, x, w, target, b)
    assert torch.equal(right[0], poisoned_result[0])
    assert all(torch.equal(p, q) for p, q in zip(right[1], poisoned_result[1], strict=True))


@pytest.mark.parametrize("tokens", [0, 6])
@pytest.mark.parametrize("options", [
    {"returns": ("nll", "entropy")}, {"returns": ("lse",)}, {"returns": ("loss", "lse")},
    {"reduction": "none", "z_loss": 0.1}, {"reduction": "none", "label_smoothing": 0.1},
])  # fmt: skip
def test_no_valid_token_has_gradients_of_zero(options, tokens):
    x, w = torch.randn(tokens, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    out = so.linear_cross_entropy(x, w, torch.full((tokens,), -100), **options)
    total = sum(o.nansum() for o in (out if isinstance(out, tuple) else (out,)))
    for grad in torch.autograd.grad(total, (x, w)):
        assert not grad.any()


def test_an_ignored_token_is_not_correct():
    target = torch.tensor([-1, 3, -1, 2])
    x, w = torch.randn(4, 8), torch.randn(11, 8)
    correct = so.linear_cross_entropy(x, w, target, ignore_index=-1, returns=("correct",))
    assert torch.equal(correct, (x @ w.t()).argmax(1) == target)


def test_distributions_of_weight_zero_are_ignored():
    names = ("nll", "lse", "entropy", "argmax", "z_loss")
    x, w = torch.randn(6, 8, requires_grad=True), torch.randn(11, 8)
    q, kept = torch.softmax(torch.randn(6, 11), 1), torch.tensor([0.0, 1, 0, 0, 2, 1])
    call = functools.partial(so.linear_cross_entropy, linear_weight=w, z_loss=0.1)
    got = call(x, target=q, token_weight=kept, returns=names)
    alone = call(x[kept != 0], target=q[kept != 0], returns=names)
    for name, ours, want in zip(names, got, alone, strict=True):
        assert torch.equal(ours[kept == 0], torch.full((3,), -1 if name == "argmax" else 0))
        torch.testing.assert_close(ours[kept != 0], want)
    grads = [torch.autograd.grad(out[0].sum() + out[2].sum(), x)[0] for out in (got, alone)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shift", [False, True])
def test_a_mask_is_a_token_weight(reduction, shift):
    """As in `linear_kl_div`, False ignores a token."""
    x, w = torch.randn(2, 5, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    target, mask = torch.randint(11, (2, 5)), torch.rand(2, 5) < 0.6
    results = []
    for weight in (mask, mask.float()):
        loss = so.linear_cross_entropy(
            x, w, target, token_weight=weight, reduction=reduction, shift=shift
        )
        results.append((loss, *torch.autograd.grad(loss.sum(), (x, w))))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("broken", ["input", "target"])
def test_distributions_of_weight_zero_may_be_nan(reduction, shift, broken):
    """A nan in an ignored token reaches neither the loss nor a gradient."""
    x, w = torch.randn(2, 5, 8), torch.randn(11, 8, requires_grad=True)
    q = torch.softmax(torch.randn(2, 5, 11), -1)
    weight = None if shift else torch.tensor([1.0, 0, 2, 1, 1]).expand(2, 5)
    call = functools.partial(so.linear_cross_entropy, linear_weight=w, token_weight=weight)
    results = []
    for value in (1.0, math.nan):
        # With shift, the last input and the first target are not used.
        if broken == "input":
            x[:, 4 if shift else 1] = value
        else:
            q[:, 0 if shift else 1] = value
        hidden = x.clone().requires_grad_()
        loss = call(hidden, target=q, shift=shift, reduction=reduction)
        results.append((loss.detach(), *torch.autograd.grad(loss.sum(), (hidden, w))))
    assert bool(results[0][1].isfinite().all())
    for got, want in zip(results[1], results[0], strict=True):
        assert torch.equal(got, want)


def test_returning_the_z_loss_costs_nothing():
    """Its gradients are computed in the forward too, so the smallest budget is enough for both."""
    x, w = torch.randn(96, 32, requires_grad=True), torch.randn(700, 32, requires_grad=True)
    t = torch.randint(700, (96,))
    with pytest.raises(ValueError, match="Expected at least") as error:
        so.linear_cross_entropy(x, w, t, memory_budget=10)
    least = int(str(error.value).split("at least ")[1].split()[0])
    options = {"z_loss": 0.1, "memory_budget": least}
    loss, z_loss = so.linear_cross_entropy(x, w, t, returns=("loss", "z_loss"), **options)
    lse = torch.logsumexp(x.detach() @ w.detach().t(), 1)
    torch.testing.assert_close(z_loss, 0.1 * lse.square())
    assert not z_loss.requires_grad
    alone = so.linear_cross_entropy(x, w, t, **options)
    for got, want in zip(*(torch.autograd.grad(v, (x, w)) for v in (loss, alone)), strict=True):
        assert torch.equal(got, want)


def test_no_token_is_left_by_a_shift():
    x, w, t = torch.randn(3, 0, 8), torch.randn(11, 8), torch.zeros(3, 0).long()

    def call(x, w, t):
        return so.linear_cross_entropy(x, w, t, shift=True, reduction="none")

    assert call(x, w, t).shape == torch.compile(call, backend="eager")(x, w, t).shape == (3, 0)


def test_a_budget_as_text():
    x, w, t = torch.randn(6, 8), torch.randn(11, 8), torch.randint(11, (6,))
    loss = so.linear_cross_entropy(x, w, t, memory_budget="1 MiB")
    assert torch.equal(loss, so.linear_cross_entropy(x, w, t, memory_budget=1 << 20))
