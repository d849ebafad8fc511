"""Losses of logits with classes in dimension 1 are chunked inside of images."""

import pytest
import torch
from torch.autograd import grad
from torch.nn import functional as F

from storage_ops.autochunk import explain
from storage_ops.autochunk.cross_entropy.recognise import recognise

from .losses import interpreted

N, H, W, D, C = 2, 3, 5, 4, 64
Q = torch.linspace(-2, 2, N * C * H * W).sin().view(N, C, H, W).softmax(1)
PIXELS = torch.linspace(0, 1, H * W).view(H, W)


def permuted(x, w, t, c):
    return F.cross_entropy(F.linear(x, w).permute(0, 3, 1, 2) * 0.5, t, label_smoothing=0.1)


def transposed(x, w, t, c):
    logits = (x.flatten(1, 2) @ w.T).transpose(1, 2)
    return F.cross_entropy(logits, t.flatten(1), weight=c, reduction="none").sin().sum()


def moved(x, w, t, c):
    return torch.nn.CrossEntropyLoss(reduction="sum")(torch.movedim(x @ w.T, -1, 1), t)


def in_einsum(x, w, t, c):
    return F.cross_entropy(torch.einsum("bhwd,cd->bchw", x, w), t, weight=c)


def of_log_softmax(x, w, t, c):
    return F.nll_loss(F.log_softmax(F.linear(x, w).permute(0, 3, 1, 2), dim=1), t)


def convolution(x, w, t, c):
    z = F.conv2d(x.permute(0, 3, 1, 2), w[:, :, None, None], w[:, 0])
    return F.cross_entropy(z.float().flatten(2), t.flatten(1))


def convolution_1d(x, w, t, c):
    return F.cross_entropy(F.conv1d(x.flatten(1, 2).mT, w[:, :, None]), t.flatten(1))


def data():
    x, w = torch.randn(N, H, W, D), torch.randn(C, D)
    t = torch.randint(C, (N, H, W))
    t[0, 1] = -100
    return x.requires_grad_(), w.requires_grad_(), t, torch.rand(C)


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "loss",
    [permuted, transposed, moved, in_einsum, of_log_softmax, convolution, convolution_1d],
)
def test_losses(loss):
    reports = []

    def backend(gm, inputs):
        reports.append(recognise(gm, num_chunks=6))
        return gm

    x, w, t, c = data()
    torch.compiler.reset()
    compiled, want = torch.compile(loss, backend=backend)(x, w, t, c), loss(x, w, t, c)
    assert reports[0].num_chunks >= 6  # more chunks than images
    torch.testing.assert_close(compiled, want)
    torch.testing.assert_close(grad(compiled, (x, w)), grad(want, (x, w)))


def images(x, w):
    return F.linear(x, w).permute(0, 3, 1, 2)


def picked(z, t):
    return F.log_softmax(z, 1).gather(1, t.clamp(min=0)[:, None]).squeeze(1)


def focal(x, w, t, c):
    p = picked(images(x, w), t)
    return -((1 - p.exp()) ** 2 * p * PIXELS).mean()


def focal_of_a_convolution(x, w, t, c):
    p = picked(F.conv2d(x.permute(0, 3, 1, 2), weight=w[:, :, None, None], bias=c), t)
    return -((1 - p.exp()) ** 2 * p).sum()


def probabilities(x, w, t, c):
    return F.cross_entropy(images(x, w), Q, label_smoothing=0.1)


def distillation(x, w, t, c):
    z = (images(x, w) + c[:, None, None]).flatten(2)
    return F.kl_div(F.log_softmax(z, dim=1), Q.flatten(2), reduction="batchmean")


def dice(x, w, t, c):
    p, q = images(x, w).softmax(1), F.one_hot(t.clamp(min=0), C).movedim(-1, 1).float()
    return 1 - (2 * (p * q).sum((0, 2, 3)) / (p + q).sum((0, 2, 3))).mean()


def pixels(x, w, t, c):
    q = F.one_hot(t.clamp(min=0), C).permute(0, 3, 1, 2).float()
    return F.binary_cross_entropy_with_logits(images(x, w), q, weight=PIXELS)


def largest_and_spread(x, w, t, c):
    z = F.linear(x, w).flatten(1, 2).transpose(1, 2)
    return (
        z.amax(1).mean() + z.std(1, keepdim=True).mean() + (z * z.softmax(1)).sum(1).square().mean()
    )


def largest_index(x, w, t, c):
    z = images(x, w)
    return z.square().mean() + z.detach().argmax() + z.detach().argmax(1).float().mean()


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "loss",
    [focal, focal_of_a_convolution, probabilities, distillation, dice, pixels, largest_and_spread],
)
def test_any_loss(loss):
    torch.compiler.reset()
    (x, w, t, c), reports = data(), []
    compiled = interpreted(loss, num_chunks=6, reports=reports)(x, w, t, c)
    assert reports[0].num_chunks >= 6
    want = loss(x, w, t, c)
    torch.testing.assert_close(compiled, want)
    torch.testing.assert_close(grad(compiled, (x, w)), grad(want, (x, w)))


def test_an_index_of_all_elements_stays_right():
    torch.compiler.reset()
    x, w, t, c = data()
    compiled = interpreted(largest_index, num_chunks=6)(x, w, t, c)
    torch.testing.assert_close(compiled, largest_index(x, w, t, c))


@pytest.mark.in_turn
def test_sizes_that_change():
    torch.compiler.reset()
    weight, reports = torch.nn.Parameter(torch.randn(C, D)), []
    compiled = interpreted(lambda x, t: focal_of_rows(x, weight, t), 6, True, True, reports)
    for rows in (3, 2, 5):
        x, t = torch.randn(N, rows, W, D), torch.randint(C, (N, rows, W))
        want = grad(focal_of_rows(x, weight, t), weight)
        torch.testing.assert_close(grad(compiled(x, t), weight), want)
    assert len(reports) <= 2


def focal_of_rows(x, w, t):
    p = torch.softmax(images(x, w), 1).gather(1, t[:, None])
    return ((1 - p) ** 2).sum() + images(x, w).sigmoid().square().sum()


def test_a_chunk_copies_its_part_of_targets_with_other_strides():
    torch.compiler.reset()
    (x, w, t, c), reports = data(), []
    grad(interpreted(probabilities, num_chunks=6, reports=reports)(x, w, t, c), (x, w))
    assert reports[0].peak_after < x.nbytes + w.nbytes + Q.nbytes


def wide_kernel(x, w, t, c):
    kernel = w[:, :, None, None].expand(-1, -1, 3, 3)
    return F.cross_entropy(F.conv2d(x.permute(0, 3, 1, 2), kernel, padding=1), t)


@pytest.mark.in_turn
def test_a_convolution_that_is_not_a_product_is_named():
    report = explain(wide_kernel, *data(), num_chunks=4)
    assert not report.chunked
    assert "aten.convolution.default: a convolution is not a matrix product" in report.reason
