"""Logits that are interpolated before the loss, as in segmentation, are chunked by images."""

import pytest
import torch
from torch.nn import functional as F

from .losses import interpreted

N, C, SIZE, LARGE = 8, 12, (3, 4), (7, 9)


def of(mode, **options):
    def loss(x, w, b, t):
        z = F.interpolate(F.conv2d(x, w, b), size=LARGE, mode=mode, **options)
        return F.cross_entropy(z, t), (z.argmax(1) == t).float().mean()

    return loss


def focal(x, w, b, t):
    z = F.interpolate(F.conv2d(x, w, b), scale_factor=2, mode="bilinear").permute(0, 2, 3, 1)
    p = torch.log_softmax(z, -1)[..., 0]
    return -((1 - p.exp()) ** 2 * p).mean(), z.detach().mean()


LOSSES = [of("bilinear"), of("bilinear", align_corners=True), of("nearest"), of("bicubic"), focal]


@pytest.mark.in_turn
@pytest.mark.parametrize("channels", [6, 40])  # fewer than classes, and more
@pytest.mark.parametrize("loss", LOSSES, ids=["bilinear", "corners", "nearest", "bicubic", "focal"])
def test_chunked(loss, channels):
    torch.compiler.reset()
    x, w, b = torch.randn(N, channels, *SIZE), torch.randn(C, channels, 1, 1), torch.randn(C)
    leaves, t = [a.requires_grad_() for a in (x, w, b)], torch.randint(C, (N, *LARGE))
    reports = []
    got, number = interpreted(loss, reports=reports)(*leaves, t)
    want, _ = loss(*(a.double() for a in leaves), t)
    _, exact = loss(*leaves, t)  # not in float64, where another class may be the largest
    assert reports[0].num_chunks == 4 and reports[0].num_passes == 1
    torch.testing.assert_close([got, number], [want.float(), exact], rtol=1e-4, atol=1e-5)
    gradients = [g.float() for g in torch.autograd.grad(want, leaves)]
    ours = list(torch.autograd.grad(got, leaves))
    torch.testing.assert_close(ours, gradients, rtol=1e-3, atol=1e-5)


def test_few_interpolated_classes_of_many_channels_stay_whole():
    """The interpolated classes have fewer elements than the hidden states, so nothing is saved."""
    torch.compiler.reset()
    x, w, t = torch.randn(N, 99, *SIZE), torch.randn(C, 99, 1, 1), torch.randint(C, (N, *LARGE))
    reports = []
    with pytest.warns(UserWarning, match="not chunked"):
        interpreted(of("nearest"), strict=False, reports=reports)(
            x, w.requires_grad_(), torch.zeros(C), t
        )
    assert not reports[0].chunked
