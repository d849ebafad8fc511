"""Losses with masks, labels and indices that are changed in place, negative or strided."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import storage_ops

from .losses import B, T, V, arguments, cross_entropy, flat, interpreted, log_probs, logits, run


def mask_with_zeros(x, w, t):
    keep = torch.ones(B * T)
    keep[: B * T // 2] = 0
    losses = F.cross_entropy(flat(x, w), t.flatten().clamp(min=0), reduction="none")
    return (losses * keep).sum() / keep.sum()


def mask_of_a_view(x, w, t):
    keep = torch.ones(B, T)
    keep[:, :3].mul_(0)
    return -(log_probs(x, w, t) * keep).sum() / keep.sum()


def labels_with_minus_100(x, w, t):
    labels = t.flatten().clone()
    labels[: B * T // 2] = -100
    return F.cross_entropy(flat(x, w), labels)


def shifted_labels(x, w, t):
    labels = torch.full_like(t, -100)
    labels[:, :-1] = t[:, 1:]
    return F.cross_entropy(flat(x, w), labels.flatten())


def preferences(x, w, t):
    labels = t[:, 1:].clone()
    mask = labels != -100
    labels[labels == -100] = 0
    picked = torch.log_softmax(logits(x, w)[:, :-1], -1).gather(-1, labels[..., None])[..., 0]
    chosen, rejected = (picked * mask).sum(-1).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def class_weights(x, w, t):
    weight = torch.ones(V)
    weight[: V // 2] = 0.25
    return F.cross_entropy(flat(x, w), t.flatten(), weight=weight)


def changed_afterwards(x, w, t):
    penalty = torch.ones(B, T)
    total = penalty - log_probs(x, w, t)
    penalty.zero_()
    return (total + penalty).mean()


def every_second_of_some(x, w, t):
    return torch.softmax(logits(x, w)[:, 0:6:2], -1).square().sum()


def every_second(x, w, t):
    return F.cross_entropy(logits(x, w)[:, ::2].flatten(0, 1), t[:, ::2].flatten())


def some_classes_in_steps(x, w, t):
    return logits(x, w)[..., 0:100:2].amax(-1).mean() + 0 * cross_entropy(x, w, t)


def from_the_end(x, w, t):
    picked = torch.log_softmax(flat(x, w), -1)[torch.arange(B * T), t.flatten().clamp(min=0) - V]
    return -picked.mean()


def by_ranges(x, w, t):
    log_p = torch.log_softmax(logits(x, w), -1)
    return -log_p[torch.arange(len(t))[:, None], torch.arange(t.shape[1]), t.clamp(min=0)].mean()


def by_a_grid(x, w, t):
    z, (b, n) = logits(x, w), torch.meshgrid(*map(torch.arange, t.shape), indexing="ij")
    return (z.logsumexp(-1) - z[b, n, t]).square().mean()  # -100 is a negative index here


def one_label_for_a_sequence(x, w, t):
    log_p = torch.log_softmax(logits(x, w), -1)
    return -log_p[
        torch.arange(len(t)).view(-1, 1), torch.arange(t.shape[1])[None], t[:, -1:]
    ].mean()


def margin_by_ranges(x, w, t):
    z, t = logits(x, w) * 1, t.clamp(min=0)
    index = torch.arange(len(t))[:, None], torch.arange(t.shape[1]), t
    z[index] = z[index] - 0.35
    return F.cross_entropy(z.flatten(0, 1), t.flatten())


BY_RANGES = [by_ranges, by_a_grid, one_label_for_a_sequence, margin_by_ranges]


def one_bias_for_all(x, w, t):
    return F.cross_entropy((logits(x, w) + w[0, :1]).flatten(0, 1), t.flatten())


class Signs(torch.autograd.Function):
    """Its gradient is the sign of the upstream gradient."""

    @staticmethod
    def forward(ctx, z):
        return z * 1

    @staticmethod
    def backward(ctx, g):
        return g.bool().to(g.dtype)


def signs_of_gradients(x, w, t):
    return 3 * torch.sigmoid(Signs.apply(logits(x, w))).mean()


LOSSES = [
    mask_with_zeros, mask_of_a_view, labels_with_minus_100, shifted_labels, preferences,
    class_weights, changed_afterwards, every_second_of_some, every_second, some_classes_in_steps,
    from_the_end, one_bias_for_all, signs_of_gradients, *BY_RANGES,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:storage_ops.autochunk. the graph is not")
@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_loss_and_gradients(loss):
    torch._dynamo.reset()
    inputs = arguments()
    compiled = interpreted(loss, strict=False)
    want = run(lambda *inputs: 3 * loss(*inputs), *inputs)
    got = run(lambda *inputs: 3 * compiled(*inputs), *inputs)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.in_turn
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("loss", BY_RANGES, ids=lambda f: f.__name__)
def test_chunked_by_ranges(loss, dynamic):
    torch._dynamo.reset()
    inputs, reports = arguments(), []
    compiled = interpreted(loss, dynamic=dynamic, reports=reports)
    x, w, t = inputs
    exact = run(loss, x.double(), w.double(), t)
    got = [g.double() for g in run(compiled, *inputs)]
    torch.testing.assert_close(got, list(exact), rtol=1e-4, atol=1e-5)
    assert reports[0].chunked


@pytest.mark.in_turn
def test_a_graph_with_one_result():
    x, w, _ = arguments()
    gm = make_fx(lambda x, w: torch.softmax(flat(x, w), -1).square().sum())(x.detach(), w.detach())
    want = gm(x, w)
    storage_ops.autochunk.chunk(gm, num_chunks=4, strict=True)
    torch.testing.assert_close(gm(x.detach(), w.detach()), want)
