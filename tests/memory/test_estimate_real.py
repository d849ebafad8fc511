"""Where fake tensors differ from real ones: simulated peaks against measured ones of the CPU."""

import pytest
import torch
from torch.nn import functional as F

from storage_ops.memory import estimate, measure

ROWS, WIDTH = 512, 2048
CASES = {
    "gather": lambda x, i, y: x.gather(1, i[:, None]),
    "take_along_dim": lambda x, i, y: torch.take_along_dim(x, i[:, None], 1),
    "index": lambda x, i, y: x[i % ROWS],
    "pairs": lambda x, i, y: x[torch.arange(ROWS), i],
    "index_select": lambda x, i, y: x.index_select(0, i % ROWS),
    "take": lambda x, i, y: x.take(i),
    "max": lambda x, i, y: x.max(-1)[0],
    "min": lambda x, i, y: x.min(0)[0],
    "topk": lambda x, i, y: x.topk(4)[0],
    "median": lambda x, i, y: x.median(-1)[0],
    "sort": lambda x, i, y: x.sort(-1)[0],
    "cummax": lambda x, i, y: x.cummax(0)[0],
    "trace": lambda x, i, y: x.trace(),
    "mse_loss": lambda x, i, y: F.mse_loss(x, y),
    "sum of mse_loss": lambda x, i, y: F.mse_loss(x, y, reduction="sum"),
    "mse_loss of each": lambda x, i, y: F.mse_loss(x, y, reduction="none"),
    "mse_loss, broadcast": lambda x, i, y: F.mse_loss(x, y[:1]),
    "smooth_l1_loss": lambda x, i, y: F.smooth_l1_loss(x, y),
    "binary_cross_entropy": lambda x, i, y: F.binary_cross_entropy(x, y),
    "logsumexp": lambda x, i, y: x.logsumexp(-1),
    "scatter_add by hand": lambda x, i, y: torch.zeros_like(x).scatter_add(1, i[:, None], x[:, :1]),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", CASES)
def test_peaks(name, backward):
    x, y = torch.rand(ROWS, WIDTH, requires_grad=True), torch.rand(ROWS, WIDTH)
    i = torch.randint(WIDTH, (ROWS,))

    def run():
        value = CASES[name](x, i, y)
        return torch.autograd.grad(value.sum(), x) if backward else value

    e = estimate(run)
    run()
    with measure() as m:
        run()
    assert e.peak_bytes - e.input_bytes == pytest.approx(m.peak_bytes, rel=0.005, abs=4096)


def test_a_choice_that_is_made_again_in_the_backward_of_one_keeps_its_zeros():
    x = torch.rand(ROWS, WIDTH, requires_grad=True)
    i = torch.randint(WIDTH, (ROWS, 1))

    def block(x):
        zeros = torch.zeros_like(x)
        return zeros.scatter_add(1, i, x[:, :1]) * zeros.cos()

    def run():
        y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return torch.autograd.grad(y.gather(1, i).sum(), x)

    e = estimate(run)
    run()
    with measure() as m:
        run()
    assert e.peak_bytes - e.input_bytes == pytest.approx(m.peak_bytes, rel=0.005)
