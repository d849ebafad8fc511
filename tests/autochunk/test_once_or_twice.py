"""On a GPU the op takes losses that form the logits twice anyway; others form them once."""

import pytest
import torch
from torch.nn import functional as F

from storage_ops.autochunk import recognise

from . import losses
from .losses import arguments, interpreted, largest_fifth, log_probs, logits, weighted


def of_pairs_of_sequences(x, w, t):
    chosen, rejected = log_probs(x, w, t).sum(-1).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def of_pairs_of_tokens(x, w, t):
    p = log_probs(x, w, t)
    return -F.logsigmoid(p[:2] - p[2:]).mean()


def two_results(x, w, t):
    z = logits(x, w).float()
    return F.cross_entropy(z.flatten(0, 1), t.flatten()), torch.logsumexp(z, -1).square().mean()


def of_the_least_certain(x, w, t):
    p = torch.log_softmax(logits(x, w).float(), -1)
    entropy = -(p.exp() * p).sum(-1)
    mask = largest_fifth(entropy.detach())
    return -(p.gather(-1, t.clamp(min=0)[..., None])[..., 0] * mask).sum() / mask.sum()


def normalized(x, w, t):
    p = log_probs(x, w, t)
    return ((p - p.mean()) / (p.std() + 1e-3) * p).mean()


def with_a_logged_mean(x, w, t):
    p = log_probs(x, w, t)
    return 0.1 * p.sum() + p.detach().mean() ** 2


TWICE = [
    losses.dpo, log_probs, of_pairs_of_sequences, of_pairs_of_tokens, two_results,
    of_the_least_certain, normalized,
]  # fmt: skip
ONCE = [losses.focal, losses.policy_ratio, losses.z_loss_and_entropy, with_a_logged_mean]


@pytest.mark.parametrize("loss", TWICE + ONCE)
def test_where_products_decide(loss, monkeypatch):
    monkeypatch.setattr(recognise, "products_decide", lambda device: True)
    given, ops, reports = arguments(), [], []
    got = weighted(interpreted(loss, reports=reports, ops=ops), *given)
    for ours, eager in zip(got[-2:], weighted(loss, *given)[-2:], strict=True):
        assert (ours - eager).norm() <= 1e-5 * eager.norm()
    twice = loss in TWICE
    assert reports[0].num_passes == 1 + twice
    expected = "storage_ops.linear_cross_entropy.default" if twice else (
        "storage_ops._chunked_span.default"
    )  # fmt: skip
    assert expected in ops
