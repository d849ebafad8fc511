"""The predicted peak of forward and backward is within 5 % of the measured peak."""

import pytest
import torch
from torch.nn import functional as F

import storage_ops
from storage_ops.autochunk import explain
from storage_ops.autochunk.backend import backend, collected

from . import losses, test_ranges

CHUNKS = 8
B, T, D, V = 4, 128, 64, 4000
SIZE = 4 * B * T * V


def linear_sum(x, w, t):
    return (x @ w.t()).sum()


def weighed(x, w, t):
    return ((x @ w.t()) * torch.linspace(0, 1, V)).mean()


def with_z_loss(x, w, t):
    z = losses.flat(x, w)
    return F.cross_entropy(z, t.flatten()), 1e-4 * torch.logsumexp(z, -1).square().mean()


def per_token(x, w, t):
    return losses.log_probs(x, w, t)


def top_entropy(x, w, t):
    p = torch.log_softmax(losses.flat(x, w), -1)
    entropy = -(p.exp() * p).sum(-1).detach()
    mask = losses.largest_fifth(entropy)
    now = p.gather(-1, t.flatten().clamp(min=0)[:, None])[:, 0]
    return -((now - now.detach()).exp() * mask).sum() / mask.sum()


def kl_to_reference(x, w, t):
    """Compute the policy before the reference, whose logits have no gradient."""
    p = losses.log_probs(x, w, t)
    r = losses.log_probs(x.detach() * 0.5, w.detach() + 0.1, t)
    return ((r - p).exp() - (r - p) - 1).mean()


def masked(x, w, t):
    mask = t >= 0  # all but two
    p = torch.log_softmax(losses.logits(x, w)[mask], -1).gather(-1, t[mask][:, None])
    return -((1 - p.exp()) ** 2 * p).mean()


ISSUE = [linear_sum, weighed, with_z_loss, per_token, top_entropy, kl_to_reference, masked]
# Inductor chooses other buffers, up to a third more (stacked_0: 6 % on a processor with only AVX2).
MISSED = {"stacked_0", "stacked_1", "frozen_head"}
RANGES = [f for f in test_ranges.LOSSES if f.__name__ not in MISSED]


@pytest.fixture
def sizes(monkeypatch):
    """Set larger sizes for losses that use constants, and let Dynamo capture masks."""
    for name, size in zip("BTDV", (B, T, D, V), strict=True):
        monkeypatch.setattr(losses, name, size)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


def step(f, *args):
    out = f(*args)
    sum(o.sum() for o in (out if isinstance(out, tuple) else (out,))).backward()


def moco(q, k, queue):
    """Put a column in front of the logits, which an einsum computes."""
    one, others = torch.einsum("nc,nc->n", q, k)[:, None], torch.einsum("nc,ck->nk", q, queue)
    target = torch.zeros(len(q), dtype=torch.long)
    return F.cross_entropy(torch.cat([one, others], 1) / 0.07, target)


def check(f, inputs):
    torch._dynamo.reset()
    leaves = [a for a in inputs if a.requires_grad]
    compiled = torch.compile(f, backend=backend, options={"num_chunks": CHUNKS}, dynamic=False)
    with collected() as reports:  # reports of the measured compilation
        step(compiled, *inputs)
    step(compiled, *inputs)
    for leaf in leaves:
        leaf.grad = None  # otherwise the measurement would count its release
    with storage_ops.memory.measure() as m:
        step(compiled, *inputs)
    (report,) = reports
    assert report.chunked
    assert report.peak_after == pytest.approx(m.peak_bytes, rel=0.05)
    assert (report.peak_after < report.peak_before) == (f is not losses.soft_targets)


@pytest.mark.slow
@pytest.mark.parametrize("f", [*losses.LOSSES, *ISSUE], ids=lambda f: f.__name__)
def test_peak(f, sizes):
    check(f, losses.arguments())


@pytest.mark.in_turn
def test_a_loss_that_takes_less_memory_unchunked_is_not_chunked(sizes):
    """Inductor never stores these targets, and every chunk would read them."""
    reports = []
    options = {"num_chunks": None, "memory_budget": SIZE // CHUNKS, "strict": False}
    with pytest.warns(UserWarning, match="as a whole, less than the .* in chunks"):
        run = losses.interpreted(losses.soft_targets, reports=reports, **options)
        run(*losses.arguments())
    assert not reports[0].chunked and reports[0].peak_after == reports[0].peak_before


@pytest.mark.slow
@pytest.mark.parametrize("f", RANGES, ids=lambda f: f.__name__)
def test_peak_of_ranges(f):
    check(f, test_ranges.data())


@pytest.mark.slow
def test_explain_predicts_the_same_peaks(sizes):
    torch._dynamo.reset()
    inputs = losses.arguments()
    report = explain(linear_sum, *inputs, num_chunks=CHUNKS)
    assert report.peak_after < 0.3 * SIZE < SIZE <= report.peak_before
    with collected() as reports:
        options = {"num_chunks": CHUNKS}
        step(torch.compile(linear_sum, backend=backend, options=options, dynamic=False), *inputs)
    assert (report.peak_before, report.peak_after) == (
        reports[0].peak_before,
        reports[0].peak_after,
    )


@pytest.mark.slow
def test_peak_beside_a_concatenated_column():
    q = torch.randn(256, 32, requires_grad=True)
    check(moco, (q, torch.randn(256, 32), torch.randn(32, 16384)))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_peak_of_interpolated_logits(mode):
    def loss(x, w, b, t):
        return F.cross_entropy(F.interpolate(F.conv2d(x, w, b), size=(64, 64), mode=mode), t)

    sizes = (16, 16, 16, 16), (40, 16, 1, 1), (40,)
    leaves = [torch.randn(size, requires_grad=True) for size in sizes]
    check(loss, (*leaves, torch.randint(40, (16, 64, 64))))
