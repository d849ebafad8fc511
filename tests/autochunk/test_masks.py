"""Losses of tokens that a mask keeps, whose number is known only at run time."""

import pytest
import torch
from torch.nn import functional as F

import storage_ops
from storage_ops.autochunk import explain
from storage_ops.autochunk.backend import backend

from .losses import B, D, T, V, flat, interpreted, logits, run


def cross_entropy(x, w, t):
    mask = t.flatten() >= 0
    return F.cross_entropy(flat(x, w)[mask], t.flatten()[mask], reduction="sum")


def focal(x, w, t):
    mask = t >= 0
    p = torch.log_softmax(logits(x, w)[mask].float(), -1)
    p = p.gather(-1, t[mask][:, None])[:, 0]
    return -((1 - p.exp()) ** 2 * p).sum()


def weighted(x, w, t):
    """Scale the logits before the mask, and mask another tensor too."""
    mask = t >= 0
    z = (logits(x, w) / 0.7 + w[:, 0])[mask]
    losses = (
        torch.softmax(z, -1).square().sum(-1) * torch.linspace(0, 1, t.numel()).view(t.shape)[mask]
    )
    return losses.sum()


def shifted(x, w, t):
    mask = t[:, 1:] >= 0
    p = torch.log_softmax(logits(x, w)[:, :-1][mask], -1)
    return p.square().sum(-1).sqrt().sum()


def before(x, w, t):
    mask = t >= 0
    return torch.softmax(F.linear(x[mask], w), -1).square().sum()


LOSSES = [cross_entropy, focal, weighted, shifted, before]


def arguments(keep):
    t = torch.randint(V, (B, T)).where(torch.rand(B, T) < keep, -100)
    if keep == 0.5:
        t[0, :2] = torch.tensor([3, 5])
    return torch.randn(B, T, D), torch.randn(V, D) * 0.5, t


@pytest.fixture
def captured():
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_gradients(loss, captured):
    torch._dynamo.reset()
    reports = []
    compiled = interpreted(loss, reports=reports)
    for keep in (0.5, 0.9, 1.0, 0.0, 0.5):
        x, w, t = arguments(keep)
        exact = run(loss, x.double(), w.double(), t)
        for ours, want in zip(run(compiled, x, w, t), exact, strict=True):
            torch.testing.assert_close(ours, want.to(ours.dtype), rtol=1e-4, atol=1e-5)
    assert len(reports) == 1 and reports[0].chunked  # compiled once


@pytest.mark.slow
@pytest.mark.parametrize("loss", [cross_entropy, focal], ids=lambda f: f.__name__)
def test_the_graph_break_at_a_mask_is_named(loss):
    torch._dynamo.reset()
    with pytest.warns(UserWarning, match="capture_dynamic_output_shape_ops"):
        compiled = torch.compile(loss, backend=backend, options={"num_chunks": 4})
        got = run(compiled, *(inputs := arguments(0.5)))
    torch.testing.assert_close(got, run(loss, *inputs))


@pytest.mark.slow
def test_memory(captured):
    torch._dynamo.reset()
    n, hidden, classes = 512, 16, 4096
    x, w = torch.randn(1, n, hidden), torch.randn(classes, hidden) * 0.3
    x, w, t = x.requires_grad_(), w.requires_grad_(), torch.randint(-classes, classes, (1, n))
    compiled = torch.compile(focal, backend=backend, options={"num_chunks": 16, "strict": True})
    for _ in range(2):
        x.grad = w.grad = None
        with storage_ops.memory.measure() as m:
            compiled(x, w, t).backward()
    torch.testing.assert_close([x.grad, w.grad], list(run(focal, x, w, t)[1:]))
    assert m.peak_bytes <= 1.15 * (4 * n * classes / 16 + 4 * hidden * (n + classes))
    assert explain(focal, x, w, t, num_chunks=16).chunked
