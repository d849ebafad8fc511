"""Targets in another order of the tokens, as in mixup, are computed chunk by chunk."""

import pytest
import torch
from torch.nn import functional as F

from .losses import B, D, T, V, arguments, flat, interpreted, run

Q = torch.softmax(torch.linspace(-2, 2, B * T * V).sin().view(B * T, V), -1)
ORDER = torch.randperm(B * T)
BATCH = torch.randperm(B)


def one_hot(t):
    return F.one_hot(t.clamp(min=0), V).float()


def flipped(x, w, t):
    q = one_hot(t.flatten())
    return F.cross_entropy(flat(x, w), 0.3 * q + 0.7 * q.flip(0))


def permuted(x, w, t):
    q = one_hot(t.flatten()) * 0.9 + 0.1 / V
    q = 0.5 * (q + q[ORDER]) + 0.5 * q[ORDER][ORDER]
    return -(q * torch.log_softmax(flat(x, w), -1)).sum(-1).mean()


def rolled(x, w, t):
    """Mix targets as torchvision does."""
    q = one_hot(t.flatten())
    return F.cross_entropy(flat(x, w), q.roll(1, 0).mul_(0.3).add_(q * 0.7))


def sequences(x, w, t):
    q = one_hot(t)
    q = 0.2 * q + 0.3 * q.flip(0, 1) + 0.5 * q.index_select(0, BATCH)
    return F.cross_entropy(flat(x, w), q.flatten(0, 1))


def pixels(x, w, t):
    """Mix mirrored images, with classes in dimension 1."""
    z, q = (
        F.linear(x, w).view(2, 2, T, V).movedim(-1, 1),
        one_hot(t).view(2, 2, T, V).movedim(-1, 1),
    )
    return F.cross_entropy(z, 0.4 * q + 0.6 * q.flip(-1))


def given_flipped(x, w, t):
    return F.cross_entropy(flat(x, w), 0.5 * (Q + Q.flip(0)))


def given_permuted(x, w, t):
    return F.cross_entropy(flat(x, w), Q[ORDER])


def looked_up(x, w, t):
    """Take the targets from the rows of a table of all classes."""
    return F.cross_entropy(flat(x, w), Q.repeat(10, 1)[t.flatten().clamp(min=0)])


def by_the_logits(x, w, t):
    """Take the targets from rows that the logits choose."""
    z = flat(x, w)
    return (z.softmax(-1) * Q.repeat(10, 1)[z.argmax(-1)]).sum(-1).log().mean()


LOSSES = [
    flipped, permuted, rolled, sequences, pixels, given_flipped, given_permuted, looked_up,
    by_the_logits,
]  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_chunked(loss):
    torch.compiler.reset()
    inputs, reports = arguments(), []
    got = run(interpreted(loss, num_chunks=16, reports=reports), *inputs)
    want = run(loss, *(a.double() if a.is_floating_point() else a for a in inputs))
    for ours, exact in zip(got, want, strict=True):
        torch.testing.assert_close(ours.double(), exact.double(), rtol=1e-4, atol=1e-6)
    (report,) = reports
    beside = 4 * 10 * Q.numel() * (loss in (looked_up, by_the_logits))  # bytes of the table
    gradients = 4 * D * (V + B * T)
    assert report.num_chunks == 16
    assert report.peak_after < beside + gradients + 2 * Q.numel()  # half of the targets


def test_targets_of_the_logits_are_declined():
    def loss(x, w, t):
        z = flat(x, w)
        return F.cross_entropy(z, z.detach().flip(0).softmax(-1))

    torch.compiler.reset()
    reports = []
    with pytest.warns(UserWarning, match=r"prims.rev.default: mixes tokens"):
        interpreted(loss, strict=False, reports=reports)(*arguments())
    assert not reports[0].chunked
