"""The argument `divisor` divides the sum of the tokens' losses inside the op."""

import pytest
import torch

import storage_ops as so
from storage_ops.loss import reference


def problem(dtype, tokens=64, hidden=16, vocab=90):
    x, w = torch.randn(tokens, hidden).to(dtype), torch.randn(vocab, hidden).to(dtype)
    target = torch.randint(vocab, (tokens,))
    target[::5] = -100
    return [x.requires_grad_(), w.requires_grad_()], target


def gradients(loss, leaves):
    return torch.autograd.grad(loss, leaves)


KINDS = [int, float, torch.tensor, lambda n: torch.tensor(n, dtype=torch.float64)]


@pytest.mark.parametrize("kind", KINDS, ids=["int", "float", "tensor", "double"])
@pytest.mark.parametrize("options", [{}, {"z_loss": 0.1, "shift": 2}, {"returns": ("loss", "nll")}])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_loss_and_gradients(dtype, options, kind):
    leaves, target = problem(dtype)
    ours = so.linear_cross_entropy(*leaves, target, reduction="sum", divisor=kind(37), **options)
    double = [t.detach().double().requires_grad_() for t in leaves]
    right = reference.linear_cross_entropy(*double, target, reduction="sum", divisor=37, **options)
    ours, right = (v[0] if isinstance(v, tuple) else v for v in (ours, right))
    bound = {8: 1e-12, 4: 1e-5, 2: 5e-3}[dtype.itemsize]
    torch.testing.assert_close(ours.double(), right, rtol=bound, atol=bound)
    for got, want in zip(gradients(ours, leaves), gradients(right, double), strict=True):
        assert (got.double() - want).norm() <= bound * want.norm()


@pytest.mark.parametrize("plan", [None, "vocab-sliced", "token-chunked"])
def test_gradients_are_rounded_once(plan):
    """Logits are small, so that their rounding does not hide the rounding of the gradients."""
    leaves, target = problem(torch.bfloat16, 512, 8, 600)
    leaves = [t.detach().div_(30).requires_grad_() for t in leaves]
    chosen = plan and so.plan(512, 8, 600, "bf16", strategy=plan, device="cpu")
    n = 411.0  # not a power of two, so the division rounds
    inside = so.linear_cross_entropy(*leaves, target, reduction="sum", divisor=n, plan=chosen)
    after = so.linear_cross_entropy(*leaves, target, reduction="sum", plan=chosen) / n
    double = [t.detach().double().requires_grad_() for t in leaves]
    right = reference.linear_cross_entropy(*double, target, reduction="sum") / n
    exact = gradients(right, double)

    def error(loss):
        actual = gradients(loss, leaves)
        return sum((g.double() - e).norm() / e.norm() for g, e in zip(actual, exact, strict=True))

    assert error(inside) < 0.9 * error(after)


def test_a_divisor_of_zero_gives_no_gradient():
    leaves, target = problem(torch.float32)
    loss = so.linear_cross_entropy(*leaves, target, reduction="sum", divisor=torch.tensor(0))
    assert not loss.isfinite()
    assert all(not g.any() for g in gradients(loss, leaves))


def test_a_tensor_divisor_is_not_read_by_the_host():
    """In a trace, the divisor has no value, so reading it would be an error."""
    leaves, target = problem(torch.float32)

    def step(x, w, n):
        return so.linear_cross_entropy(x, w, target, reduction="sum", divisor=n * 2)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for n in (torch.tensor(5.0), torch.tensor(7.0)):
        ours, right = compiled(*leaves, n), step(*leaves, n)
        assert torch.equal(ours, right)
        assert all(map(torch.equal, gradients(ours, leaves), gradients(right, leaves)))
