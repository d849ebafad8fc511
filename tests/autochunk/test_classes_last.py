"""Logits with their classes in dimension 1: the loss becomes the op, and keeps to a budget."""

import pytest
import torch
from torch.autograd import grad
from torch.nn import functional as F

from storage_ops.autochunk import explain
from storage_ops.autochunk.recognise import recognise

N, H, W, D, C = 2, 3, 5, 4, 64


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


@pytest.mark.parametrize(
    "loss",
    [permuted, transposed, moved, in_einsum, of_log_softmax, convolution, convolution_1d],
)
def test_losses(loss):
    found = []

    def backend(gm, inputs):
        found.append(recognise(gm, num_chunks=6))
        return gm

    x, w, t, c = data()
    torch.compiler.reset()
    compiled, want = torch.compile(loss, backend=backend)(x, w, t, c), loss(x, w, t, c)
    assert found[0].num_chunks >= 6  # more than there are images
    torch.testing.assert_close(compiled, want)
    torch.testing.assert_close(grad(compiled, (x, w)), grad(want, (x, w)))


def wide_kernel(x, w, t, c):
    kernel = w[:, :, None, None].expand(-1, -1, 3, 3)
    return F.cross_entropy(F.conv2d(x.permute(0, 3, 1, 2), kernel, padding=1), t)


def test_a_convolution_that_is_no_product_is_named():
    found = explain(wide_kernel, *data(), num_chunks=4)
    assert not found.chunked
    assert "aten.convolution.default: a convolution is no matrix product" in found.reason
