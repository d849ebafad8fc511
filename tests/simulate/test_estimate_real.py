"""Simulated peaks on a CPU are right for ops that allocate more than their fake tensors show."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

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
    "huber_loss": lambda x, i, y: F.huber_loss(x, y),
    "logsumexp": lambda x, i, y: x.logsumexp(-1),
    "scatter_add by hand": lambda x, i, y: torch.zeros_like(x).scatter_add(1, i[:, None], x[:, :1]),
}


@pytest.fixture
def tensors():
    """Return numbers that require grad, an index for each row, and numbers without grad."""
    y, i = torch.rand(ROWS, WIDTH), torch.randint(WIDTH, (ROWS,))
    return torch.rand(ROWS, WIDTH, requires_grad=True), i, y


def check(run):
    e = estimate(run)
    run()
    with measure() as m:
        run()
    assert e.peak_bytes - e.input_bytes == pytest.approx(m.peak_bytes, rel=0.005, abs=4096)


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", CASES)
def test_peaks(name, backward, tensors):
    def run():
        value = CASES[name](*tensors)
        return torch.autograd.grad(value.sum(), tensors[0]) if backward else value

    check(run)


@pytest.mark.parametrize("fn", [F.soft_margin_loss, lambda x, y: (9 * x).long().logsumexp(-1)])
def test_peaks_of_the_forward(fn, tensors):
    x, _, y = tensors
    check(lambda: fn(x.detach(), y))


def added(z, i, x):
    """Add to a copy of the zeros `z`, and read `z` afterwards."""
    return z.scatter_add(1, i[:, None], x[:, :1]) * z.cos()


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, i):
        ctx.save_for_backward(i)
        return x.gather(1, i[:, None])

    @staticmethod
    def backward(ctx, grad):
        return added(grad.new_zeros(ROWS, WIDTH), *ctx.saved_tensors, grad), None


def hooked(x, i):
    """Gather, with a hook on the result that computes."""
    chosen = x.sin().gather(1, i[:, None])
    chosen.register_hook(lambda grad: added(torch.zeros_like(x), i, x.detach())[:, :1] * grad)
    return chosen


def recomputed(x, i):
    """Gather in a checkpoint, whose recompute runs during the backward of the gather."""
    block = lambda x: added(torch.zeros_like(x), i, x).gather(1, i[:, None])  # noqa: E731
    return checkpoint(block, x, use_reentrant=False)


def after(x, i):
    """Gather after a checkpoint."""
    y = checkpoint(lambda x: added(torch.zeros_like(x), i, x.exp()), x, use_reentrant=False)
    return y.gather(1, i[:, None])


@pytest.mark.parametrize("of", [Gather.apply, hooked, recomputed, after])
def test_code_that_runs_during_the_backward_of_a_gather(of, tensors):
    x, i, _ = tensors
    check(lambda: torch.autograd.grad(of(x, i).sum(), x))


def test_under_transforms_real_tensors_are_wrapped_too(tensors):
    x, i, y = tensors
    check(lambda: torch.func.grad(lambda x: x.gather(1, i[:, None]).sum())(x.detach()))
    check(lambda: torch.func.jvp(lambda x: F.mse_loss(x, y), (x.detach(),), (y,)))


def heads(h, _):
    return sum((h @ weight).square() for weight in HEADS)


def walk(h, _):
    return sum(h[:, k : k + 256].sin() for k in range(0, WIDTH, 256))


def squared(h, _):
    return h * h + h.exp()


def with_a_hook(h, kept):
    h.register_hook(kept.append)
    other = h + 0
    other.register_hook(kept.append)
    return other.sum(0) + (h @ HEADS[0]).sum()


HEADS = [torch.randn(WIDTH, 2) for _ in range(4)]


@pytest.mark.parametrize("uses", [heads, walk, squared, with_a_hook])
def test_gradients_of_a_tensor_with_several_consumers(uses, tensors):
    """Autograd adds them in place, if no other code references the first gradient."""

    def run():
        kept = []
        uses(tensors[0] * 1.5, kept).sum().backward()
        tensors[0].grad = None

    check(run)
