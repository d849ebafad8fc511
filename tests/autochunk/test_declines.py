"""Graphs that are not chunked give the reason and the right results."""

import pytest
import torch
from torch.nn import functional as F

from storage_ops.autochunk import ChunkError, explain

from .losses import V, arguments, interpreted, logits


def cross_entropy(x, w, t):
    return F.cross_entropy(logits(x, w).flatten(0, 1), t.flatten())


def returned(x, w, t):
    z = logits(x, w)
    return F.cross_entropy(z.flatten(0, 1), t.flatten()), z.detach()


def mutated(x, w, t):
    x.mul_(2)
    return cross_entropy(x, w, t)


def no_tokens(x, w, t):
    return F.cross_entropy(logits(x, w)[:, 8:].flatten(0, 1), t[:, 8:].flatten(), reduction="sum")


def mixed(x, w, t):
    return logits(x, w).sort(0)[0].square().mean()


def unknown(x, w, t):
    return torch.special.i0(logits(x, w)).mean()


def small(x, w, t):
    return (x @ w[:8].t()).square().mean()


CASES = {
    returned: "is returned",
    mixed: "sort.default: mixes tokens",
    unknown: "no rule for aten.i0",
    no_tokens: "works on no tokens",
    small: "no matrix product is larger than its input",
}


def gradients(f, inputs, upstream):
    x, w, t = inputs
    w = w.detach().requires_grad_()
    leaf = x.detach().requires_grad_()
    out = f(leaf * 1, w, t)
    outs = [o for o in (out if isinstance(out, tuple) else (out,)) if o.requires_grad]
    total = sum((o * u).sum() for o, u in zip(outs, upstream, strict=False))
    return [out, *torch.autograd.grad(total, (leaf, w))]


@pytest.mark.parametrize("f", CASES, ids=lambda f: f.__name__)
def test_declined(f):
    torch._dynamo.reset()
    inputs, reports = arguments(), []
    upstream = [torch.rand(()), torch.rand(())]
    compiled = interpreted(f, strict=False, reports=reports)
    with pytest.warns(UserWarning, match="not chunked"):
        got = gradients(compiled, inputs, upstream)
    assert not reports[0].chunked and CASES[f] in reports[0].reason
    torch.testing.assert_close(got, gradients(f, inputs, upstream))


@pytest.mark.in_turn
def test_an_input_that_is_changed():
    torch._dynamo.reset()
    x, w, t = arguments()
    for leaf in (x.detach(), x * 1):
        report = explain(mutated, leaf.clone(), w, t, num_chunks=4)
        assert not report.chunked and "changed in place" in report.reason


def test_the_reason_names_the_line():
    torch._dynamo.reset()
    reports = []
    with pytest.warns(UserWarning, match="no rule for aten"):
        interpreted(unknown, strict=False, reports=reports)(*arguments())
    assert "torch.special.i0(logits(x, w)).mean()" in reports[0].reason
    assert "test_declines.py" in reports[0].reason


def test_strict_raises():
    torch._dynamo.reset()
    with pytest.raises(Exception, match="no rule for") as caught:
        interpreted(unknown)(*arguments())
    assert isinstance(getattr(caught.value, "inner_exception", caught.value), ChunkError)


def test_all_tokens_ignored():
    torch._dynamo.reset()
    x, w, t = arguments()
    t = torch.full_like(t, -100)
    loss = interpreted(cross_entropy)(x, w, t)
    grads = torch.autograd.grad(loss, (x, w))
    assert loss.isnan() and not any(g.any() for g in grads)


def test_a_large_upstream_gradient_passes_through():
    torch._dynamo.reset()
    x, w, t = arguments()
    loss, want = interpreted(cross_entropy)(x, w, t), cross_entropy(x, w, t)
    for factor in (1e4, -3.0):
        got = torch.autograd.grad(loss * factor, (x, w), retain_graph=True)
        torch.testing.assert_close(
            got, torch.autograd.grad(want * factor, (x, w), retain_graph=True), rtol=1e-4, atol=1e-3
        )


@pytest.mark.parametrize("frozen", ["input", "weight"])
def test_frozen(frozen):
    torch._dynamo.reset()
    x, w, t = arguments()
    (x if frozen == "input" else w).requires_grad_(False)
    left = [a for a in (x, w) if a.requires_grad]
    got = torch.autograd.grad(interpreted(cross_entropy)(x, w, t), left)
    torch.testing.assert_close(got, torch.autograd.grad(cross_entropy(x, w, t), left))


def test_a_target_out_of_range_raises():
    torch._dynamo.reset()
    x, w, t = arguments()
    with pytest.raises((RuntimeError, IndexError)):
        interpreted(cross_entropy)(x, w, t + V)
