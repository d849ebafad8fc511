"""Losses take as many passes over the tokens as they need, with any upstream gradients."""

import pytest
import torch
from torch.nn import functional as F

import storage_ops
from storage_ops.autochunk import explain
from storage_ops.autochunk.backend import backend

from .losses import arguments, flat, interpreted, largest_fifth, log_probs, logits


def per_token(x, w, t):
    return F.cross_entropy(flat(x, w), t.flatten(), reduction="none")


def per_sequence(x, w, t):
    return log_probs(x, w, t).sum(-1)


def with_z_loss(x, w, t):
    z = flat(x, w)
    return F.cross_entropy(z, t.flatten()), 1e-4 * torch.logsumexp(z, -1).square().mean()


def twice(x, w, t):
    loss = torch.softmax(logits(x, w), -1).square().mean()
    return loss, loss * 2


def logged(x, w, t):
    loss, z_loss = with_z_loss(x, w, t)
    return loss, z_loss.detach()


def tokens_and_their_mean(x, w, t):
    p = log_probs(x, w, t)
    return p, p.exp().mean(), p.detach().sum()


def top_entropy(x, w, t):
    """Return GRPO for the fifth of the tokens with the largest entropy."""
    p = torch.log_softmax(logits(x, w).float(), -1)
    entropy = -(p.exp() * p).sum(-1).detach()
    mask = largest_fifth(entropy)
    now = p.gather(-1, t.clamp(min=0)[..., None])[..., 0]
    ratio = (now - now.detach() - 0.05).exp()
    advantage = torch.linspace(-1, 1, len(x))[:, None]
    gains = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return -(gains * mask).sum() / mask.sum()


def normalised(x, w, t):
    """Return three sums over all tokens. Each needs the result of the sum before it."""
    z = flat(x, w)
    for _ in range(3):
        z = z / z.exp().mean().sqrt()
    return torch.logsumexp(z, -1).mean()


def halves(x, w, t):
    """Return losses of two ranges of tokens, each with its own upstream gradient."""
    first, second = flat(x, w).chunk(2)
    return torch.logsumexp(first, -1).mean(), torch.softmax(second, -1).square().mean()


def range_with_two(x, w, t):
    z = flat(x, w)
    return torch.logsumexp(z[:8], -1).mean(), torch.softmax(z, -1).square().sum(-1).mean()


FORMED = {
    per_token: 2, per_sequence: 2, with_z_loss: 2, twice: 2, logged: 2, tokens_and_their_mean: 2,
    top_entropy: 2, normalised: 7,
}  # fmt: skip


def with_upstream(f, x, w, t, upstream):
    """Return results and gradients, with random upstream gradients for each result."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    out = f(x * 1, w, t)
    outs = out if isinstance(out, tuple) else (out,)
    draw = torch.Generator().manual_seed(upstream)
    weights = [torch.rand(o.shape, generator=draw) for o in outs]
    total = sum((o * u).sum() for o, u in zip(outs, weights, strict=True) if o.requires_grad)
    return [*(o.detach() for o in outs), *torch.autograd.grad(total, (x, w))]


RANGES = {halves: 1, range_with_two: 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("f", "dynamic"),
    [*((f, dynamic) for f in FORMED for dynamic in (False, True)), *((f, False) for f in RANGES)],
    ids=lambda x: x.__name__ if callable(x) else "dynamic" if x else "static",
)
def test_gradients(f, dynamic):
    torch._dynamo.reset()
    x, w, t = arguments()
    reports = []
    compiled = interpreted(f, dynamic=dynamic, reports=reports)
    for seed in (1, 2):  # the second run reuses the code with other upstream gradients
        exact = with_upstream(f, x.double(), w.double(), t, seed)
        got = with_upstream(compiled, x, w, t, seed)
        for ours, want in zip(got, exact, strict=True):
            torch.testing.assert_close(ours, want.to(ours.dtype), rtol=1e-4, atol=1e-6)
    # Logged values need no gradient. With dynamic sizes, this is detected and one pass is enough.
    passes = 1 if f is logged and dynamic else {**FORMED, **RANGES}[f]
    assert reports[0].num_chunks >= 4 and reports[0].num_passes == passes


def test_one_of_several_results_has_a_gradient():
    torch._dynamo.reset()
    x, w, t = arguments()
    got = torch.autograd.grad(interpreted(with_z_loss)(x, w, t)[1], (x, w))
    torch.testing.assert_close(got, torch.autograd.grad(with_z_loss(x, w, t)[1], (x, w)))


@pytest.mark.in_turn
@pytest.mark.parametrize("f", [with_z_loss, per_token], ids=lambda f: f.__name__)
def test_fp16_gradients_carry_the_upstream_scale(f):
    """A loss scale of 2^10 prevents underflow of gradients, as in eager code."""
    torch._dynamo.reset()
    x, w, t = arguments(torch.float16)
    exact = with_upstream(f, x.double(), w.double(), t, 1)
    for ours, want in zip(with_upstream(interpreted(f), x, w, t, 1), exact, strict=True):
        assert (ours.double() - want).norm() <= 2e-2 * want.norm() + 1e-4


@pytest.mark.slow
def test_memory():
    """Neither the forward nor the backward holds more than a chunk of the logits."""
    torch._dynamo.reset()
    n, hidden, classes = 512, 16, 4096
    x, w = torch.randn(n, hidden, requires_grad=True), torch.randn(classes, hidden)
    w, t = (w * 0.3).requires_grad_(), torch.randint(classes, (n,))

    def with_z_loss(x, w, t):
        z = F.linear(x, w)
        return F.cross_entropy(z, t), torch.logsumexp(z, -1).square().mean()

    compiled = torch.compile(with_z_loss, backend=backend, options={"num_chunks": 16})
    for _ in range(2):
        x.grad = w.grad = None
        with storage_ops.memory.measure() as m:
            sum(compiled(x, w, t)).backward()
    size = 4 * n * classes
    assert m.peak_bytes <= 1.1 * (size / 16 + 4 * hidden * (n + classes))
    report = explain(with_z_loss, x, w, t, num_chunks=16)
    assert report.num_passes == 2 and report.num_chunks >= 16
    assert f"{report.num_chunks} chunks, logits formed 2 times" in str(report)


def total(x, w, t):
    return logits(x, w).sum()


def weighed(x, w, t):
    return (logits(x, w) * torch.linspace(0, 1, w.shape[0])).mean()


@pytest.mark.parametrize("f", [total, weighed], ids=lambda f: f.__name__)
def test_an_upstream_gradient_that_is_expanded_over_the_logits(f):
    """The factors of the backward's products are not computed by a product."""
    torch._dynamo.reset()
    x, w, t = arguments()
    reports, ops = [], []
    got = with_upstream(interpreted(f, reports=reports, ops=ops), x, w, t, 1)
    exact = with_upstream(f, x.double(), w.double(), t, 1)
    for ours, want in zip(got, exact, strict=True):
        torch.testing.assert_close(ours, want.to(ours.dtype), rtol=1e-4, atol=1e-5)
    assert ops.count("storage_ops._chunked_span.default") == 2 and reports[0].chunked
