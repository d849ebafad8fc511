"""Losses are chunked although metrics of all logits are logged, or logits are written."""

import pytest
import torch
from torch.nn import functional as F

from .losses import V, arguments, flat, interpreted, logits, weighted


def loss_of(z, t):
    return F.cross_entropy(z.view(-1, V).float(), t.flatten().clamp(0, V - 10))


def largest(x, w, t):
    z = logits(x, w)
    return (
        loss_of(z, t),
        z.detach().max(),
        z.detach().flatten().min(),
        z.detach().abs().amax((0, 2)),
    )


def spread(x, w, t):
    z = logits(x, w)
    d = z.detach()
    return loss_of(z, t), d.std(), d.var(unbiased=False), *torch.var_mean(d, (1, 2), keepdim=True)


def unusual(x, w, t):
    z = flat(x, w)
    return loss_of(z, t), z.isnan().any(), torch.isfinite(z).all(), z.isinf().sum()


def places(x, w, t):
    z = logits(x, w)
    d = z.detach()
    return (
        loss_of(z, t),
        d.argmax(),
        d.view(-1, V).argmin(),
        (d.argmax(-1) == t).float().mean(),
        d.flatten().logsumexp(0),
    )


def ranks(x, w, t):
    z = logits(x, w)
    d = z.detach()
    return loss_of(z, t), d.kthvalue(5)[0].mean(), d.nanmedian(-1)[0].std(), d.quantile(0.9, -1)


def of_tokens(x, w, t):
    z = logits(x, w)
    p = torch.log_softmax(z.detach(), -1)
    entropy = -(p.exp() * p).sum(-1)
    return loss_of(z, t), entropy.mean(), entropy.std(), entropy.max(), entropy.median()


def in_the_loss(x, w, t):
    z = logits(x, w).float()
    return loss_of(z, t) + z.std() + 0.1 * z.max()


def classes_left_out(x, w, t):
    z = logits(x, w)
    z[..., V - 9 :] = -1e4
    return loss_of(z, t)


def classes_changed(x, w, t):
    z = flat(x, w).float() * 1.5
    z[:, 5:9] = float("-inf")
    z[:, 3] += 1
    return F.softplus(z).mean()


def margin(x, w, t):
    z, rows, t = flat(x, w).float(), torch.arange(t.numel()), t.flatten().clamp(min=0)
    z = z * 1
    z[rows, t] = z[rows, t] - 0.35
    return F.cross_entropy(z, t)


def target_cleared(x, w, t):
    z = flat(x, w).float() * 2
    z[torch.arange(t.numel()), t.flatten()] = -5.0  # -100 is a negative index here
    return torch.logsumexp(z, -1).square().mean()


def margin_scattered(x, w, t):
    z, t = flat(x, w).float(), t.flatten().clamp(min=0)[:, None]
    z = z.scatter(1, t, z.gather(1, t) - 0.35)
    return F.cross_entropy(z, t[:, 0])


LOGGED = [largest, spread, unusual, places, ranks, of_tokens, in_the_loss]
PASSES = {in_the_loss: 3, places: 2, ranks: 2, of_tokens: 2}
WRITTEN = [classes_left_out, classes_changed, margin, target_cleared, margin_scattered]


@pytest.mark.in_turn
@pytest.mark.parametrize("loss", [*LOGGED, *WRITTEN], ids=lambda f: f.__name__)
def test_chunked(loss):
    torch.compiler.reset()
    inputs, reports = arguments(), []
    got = weighted(interpreted(loss, num_chunks=8, reports=reports), *inputs)
    x, w, t = inputs
    exact = weighted(loss, x.double(), w.double(), t)
    for ours, want in zip(got, exact, strict=True):
        torch.testing.assert_close(ours, want.to(ours.dtype), rtol=1e-4, atol=1e-5)
    assert reports[0].num_chunks >= 8  # the op may use more tiles
    assert reports[0].num_passes == PASSES.get(loss, 1)


def test_logged_numbers_in_bf16():
    torch.compiler.reset()
    x, w, t = arguments(torch.bfloat16)
    _, *got = interpreted(spread, num_chunks=8)(x, w, t)
    _, *want = spread(x, w, t)
    torch.testing.assert_close(got, want)


def test_metrics_detect_a_nan_in_any_chunk():
    torch.compiler.reset()
    x, w, t = arguments()
    x.data[-1, -1, 0] = float("nan")
    _, any_nan, all_finite, _ = interpreted(unusual, num_chunks=8)(x, w, t)
    assert any_nan and not all_finite


@pytest.mark.in_turn
def test_a_constant_at_the_targets_in_inductor():
    torch.compiler.reset()
    inputs = arguments()
    compiled = torch.compile(target_cleared, backend="storage_ops", options={"num_chunks": 8})
    for ours, want in zip(
        weighted(compiled, *inputs), weighted(target_cleared, *inputs), strict=True
    ):
        torch.testing.assert_close(ours, want, rtol=1e-4, atol=1e-5)
