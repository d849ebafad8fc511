"""For tokens with hidden states that are not finite, compiled losses have eager values."""

import pytest
import torch
from torch.autograd import grad
from torch.nn import functional as F

N, D, V = 64, 8, 300


def masked(nll, mask):
    return (nll * mask).sum() / mask.sum()


def selected(nll, mask):
    return torch.where(mask > 0, nll, 0.0).sum() / mask.sum()


def powers(nll, mask):
    return ((1 - nll.neg().exp()) ** 2 * nll * mask).sum()


@pytest.mark.in_turn
@pytest.mark.parametrize("tail, hidden", [(masked, "nan"), (selected, "inf"), (powers, "nan")])
def test_a_token_of_weight_zero(tail, hidden):
    x, w = torch.randn(N, D), torch.randn(V, D, requires_grad=True)
    t, mask = torch.randint(V, (N,)), torch.randint(2, (N,)).float()
    mask[7], x[7] = 0, float(hidden)
    x.requires_grad_()

    def loss(x, w, mask):
        return tail(F.cross_entropy(x @ w.t(), t, reduction="none"), mask)

    compiled = torch.compile(loss, backend="storage_ops", options={"num_chunks": 4, "strict": True})
    got, want = compiled(x, w, mask), loss(x, w, mask)
    torch.testing.assert_close(got, want, equal_nan=True)
    of_x, of_w = grad(got, (x, w))
    if tail is selected:  # the op leaves the token out of the loss and the gradients
        kept = mask.nonzero().squeeze(1)
        clean = x.detach()[kept].requires_grad_()
        other = grad(F.cross_entropy(clean @ w.t(), t[kept]), (clean, w))
        torch.testing.assert_close((of_x[kept], of_w), other)
        assert not of_x[7].any()
    else:
        assert got.isnan() and of_x[7].isnan().any() and of_w.isnan().any()
        assert of_x[mask == 1].isfinite().all()
