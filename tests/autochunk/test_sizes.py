"""A few graphs serve all sizes, for each number of chunks."""

import pytest
import torch

from . import losses
from .losses import B, D, V, interpreted


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "loss",
    [losses.cross_entropy, losses.dpo, losses.focal, losses.softmax_sum],
    ids=lambda f: f.__name__,
)
def test_graphs(loss):
    torch.compiler.reset()
    weight, reports = torch.nn.Parameter(torch.randn(V, D) * 0.5), []

    def of_head(x, t):
        return loss(x, weight, t)

    compiled = interpreted(of_head, num_chunks=4, dynamic=True, reports=reports)
    for tokens in (8, 5, 12, 7, 3):
        x, t = torch.randn(B, tokens, D), torch.randint(V, (B, tokens))
        got = torch.autograd.grad(compiled(x, t), weight)
        torch.testing.assert_close(got, torch.autograd.grad(loss(x, weight, t), weight))
    assert len(reports) <= 3 and all(report.chunked for report in reports)


def indexed(x, w, t):
    p = torch.log_softmax(losses.flat(x, w), -1)[torch.arange(t.numel()), t.flatten()]
    return -((1 - p.exp()) ** 2 * p).mean()


@pytest.mark.in_turn
@pytest.mark.parametrize("loss", [losses.focal, indexed], ids=lambda f: f.__name__)
def test_a_short_last_batch(loss):
    """Sizes become dynamic by themselves, and each input has symbols of its own."""
    torch.compiler.reset()
    weight, reports = torch.nn.Parameter(torch.randn(V, D) * 0.5), []

    def of_head(x, t):
        return loss(x, weight, t)

    compiled = interpreted(of_head, num_chunks=4, dynamic=None, reports=reports)
    for batch in (8, 5, 3):
        x, t = torch.randn(batch, 6, D), torch.randint(V, (batch, 6))
        got = torch.autograd.grad(compiled(x, t), weight)
        torch.testing.assert_close(got, torch.autograd.grad(loss(x, weight, t), weight))
    assert len(reports) == 2 and all(report.chunked for report in reports)
