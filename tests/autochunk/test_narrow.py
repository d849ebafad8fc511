"""Tokens that a loss drops after the product are dropped before it."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from storage_ops.autochunk import chunk, driver
from storage_ops.autochunk.cross_entropy import recognise

from .losses import D, V, arguments, interpreted, run

LINEAR = "storage_ops.linear_cross_entropy.default"


def nll(z, t):
    return F.cross_entropy(z.flatten(0, -2).float(), t.flatten())


def log_prob(z, t):
    return torch.log_softmax(z.float(), -1).gather(-1, t.clamp(min=0)[..., None])[..., 0]


def contiguous(x, w, t):
    z = F.linear(x, w)
    return nll(z[..., :-1, :].contiguous(), t[..., 1:].contiguous())


def capped(x, w, t):
    z = 5 * torch.tanh(F.linear(x, w, w[:, 0]).float() / 5)
    return nll(z[:, :-1], t[:, 1:])


def padded_vocabulary(x, w, t):
    z = F.linear(x, w)[..., : V - 20]
    return nll(z[:, 2:-1], t[:, 3:].clamp(max=V - 21))


def twice(x, w, t):
    z = F.linear(x, w)[:, :-1]
    return nll(z[:, -4:], t[:, -4:])


def every_other(x, w, t):
    return nll(F.linear(x, w)[:, ::2], t[:, ::2])


def sequence_first(x, w, t):
    z = F.linear(x.transpose(0, 1), w)
    return nll(z[:-1], t.t()[1:])


def sequences(x, w, t):
    return nll(F.linear(x, w)[:2], t[:2])


def after_the_softmax(x, w, t):
    p = torch.log_softmax(F.linear(x, w).float(), -1)[:, :-1]
    return -p.gather(-1, t[:, 1:, None].clamp(min=0)).mean()


def after_the_gather(x, w, t):
    return -log_prob(F.linear(x, w), t.roll(-1, 1))[:, :-1].sum()


def preference(x, w, t):
    z, mask = F.linear(x, w)[:, :-1], t[:, 1:] > 99
    chosen = (log_prob(z, t[:, 1:]) * mask).sum(-1)
    return -F.logsigmoid(chosen * 0.1).mean()


def teacher(x, w, t):
    p = torch.log_softmax(F.linear(x.detach() * 0.5, w.detach() + 0.1)[:, :-1].float(), -1)
    q = torch.log_softmax(F.linear(x, w)[:, :-1].float(), -1)
    return F.kl_div(q, p, log_target=True, reduction="batchmean")


def one_hot(x, w, t):
    z = F.linear(x, w).float()
    z = z + torch.nn.functional.one_hot(t.clamp(min=0), V) * 0.5
    return torch.logsumexp(z[:, 1:], -1).square().mean()


def same_slice_for_two(x, w, t):
    z = F.linear(x, w).float()
    return nll(z[:, :-1], t[:, 1:]) + 1e-2 * torch.logsumexp(z[:, :-1], -1).square().sum()


def last_token(x, w, t):
    return F.cross_entropy(F.linear(x, w)[:, -1].float(), t[:, -1])


def first_token(x, w, t):
    return -torch.log_softmax(F.linear(x, w).float().select(1, 0), -1).square().mean()


NARROWED = [
    contiguous, capped, padded_vocabulary, twice, every_other, sequence_first, sequences,
    after_the_softmax, after_the_gather, preference, teacher, one_hot, same_slice_for_two,
    last_token, first_token,
]  # fmt: skip


def two_slices(x, w, t):
    z = F.linear(x, w).float()
    return nll(z[:, :-1], t[:, 1:]) + torch.logsumexp(z[:, 1:], -1).square().mean()


def all_tokens_too(x, w, t):
    z = F.linear(x, w).float()
    return nll(z[:, :-1], t[:, 1:]) + torch.logsumexp(z, -1).square().mean()


def turned(x, w, t):
    return F.cross_entropy(F.linear(x, w)[:, :-1].transpose(1, 2), t[:, 1:])


def parts_of_tokens(x, w, t):
    z = F.linear(x, w).view(4, 16, V // 2)[:, :-2]
    return nll(z, torch.arange(56))


def one_token(x, w, t):
    return torch.logsumexp(F.linear(x, w, w[:, 0])[:, -1:], -1).square().sum()


def other_tokens(x, w, t):
    p = torch.softmax(F.linear(x.detach() * 0.5, w.detach()).float(), -1)
    q = torch.log_softmax(F.linear(x, w).float(), -1)
    return -(p[:, 1:] * q[:, :-1]).sum(-1).mean() - (p[:, :-1] * q[:, :-1]).sum(-1).mean()


def gated(x, w, t):
    h = F.glu(F.linear(x, w)) @ w[:, :3].t().repeat(1, 1)[:, : V // 2].t()
    return torch.logsumexp(h[:, :-1], -1).square().sum() + torch.logsumexp(F.linear(x, w), -1).sum()


def inputs(dtype, batch):
    x, w, t = arguments(dtype)
    return (x, w, t) if batch == 4 else (x.view(1, -1, D), w, t.view(1, -1))


def check(loss, arguments, dtype, **options):
    """Check that a loss is narrowed and chunked with right gradients. Return ops and report."""
    torch._dynamo.reset()
    ops, reports = [], []
    exact = run(loss, *(a.double() if a.is_floating_point() else a for a in arguments))
    plain = run(loss, *arguments)
    got = run(interpreted(loss, ops=ops, reports=reports, **options), *arguments)
    floor = 1e-5 if dtype == torch.float32 else 1e-2
    for ours, eager, want in zip(got, plain, exact, strict=True):
        assert ours.dtype == eager.dtype and ours.shape == eager.shape
        size = want.norm().clamp(min=1e-12)
        assert (ours - want).norm() / size <= 1.5 * (eager - want).norm() / size + floor
    return ops, reports[0]


@pytest.mark.slow
@pytest.mark.parametrize("batch", [4, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("loss", NARROWED, ids=lambda f: f.__name__)
def test_gradients(loss, dtype, batch, monkeypatch):
    narrowed = {}

    def watch(module, name):
        original = getattr(module, name)

        def watched(graph, product):
            result = original(graph, product)
            (left,) = result if isinstance(result, list) else [result]
            narrowed.setdefault(name, []).append(left if left is not product else None)
            return result

        monkeypatch.setattr(module, name, watched)

    watch(recognise, "take_apart")
    watch(driver, "take_apart")
    data = inputs(dtype, 4 if loss in (sequences, last_token, first_token) else batch)
    ops, report = check(loss, data, dtype)
    narrowed = narrowed["take_apart"]
    assert narrowed and all(narrowed)
    # The op stores the logits of up to D tokens in the weight gradient, so it needs few tiles.
    waits = LINEAR in ops and narrowed[-1].meta["val"].shape[0] <= D
    assert report.num_chunks >= (2 if waits else 4)
    exactly = (contiguous, capped, twice, every_other, sequence_first, sequences, after_the_softmax)
    if loss in (*exactly, last_token) and dtype == torch.float32:
        assert LINEAR in ops


@pytest.mark.parametrize("loss", [last_token, first_token], ids=lambda f: f.__name__)
def test_one_token_of_one_sequence(loss):
    _, report = check(loss, inputs(torch.float32, 1), torch.float32)
    assert report.chunked and report.peak_after < report.peak_before / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss",
    [contiguous, capped, preference, teacher, twice, one_token, last_token],
    ids=lambda f: f.__name__,
)
def test_dynamic_sizes(loss):
    _, report = check(loss, inputs(torch.float32, 4), torch.float32, dynamic=True)
    assert report.chunked


@pytest.mark.in_turn
def test_dynamic_sizes_that_no_input_has():
    torch._dynamo.reset()
    losses = [
        lambda x, w, t: torch.logsumexp(F.linear(x, w)[:, :-1], -1).square().sum(),
        lambda x, w, t: F.linear(x, w).cumsum(1)[:, :-1].logsumexp(-1).sum(),
    ]
    for loss in losses:
        check(loss, inputs(torch.float32, 4), torch.float32, dynamic=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss",
    [
        two_slices,
        all_tokens_too,
        turned,
        parts_of_tokens,
        one_token,
        other_tokens,
        gated,
    ],
    ids=lambda f: f.__name__,
)
def test_losses_that_cannot_be_narrowed(loss):
    _, report = check(loss, inputs(torch.float32, 4), torch.float32)
    assert report.chunked  # by whole sequences, so that a chunk is a quarter of the logits
    assert report.peak_after < 1.05 * report.peak_before


@pytest.mark.parametrize("whole", [False, True])
def test_a_mask_that_changes_after_it_was_read(whole):
    """The slice moves up in the graph, but never across an in-place change."""
    x, w, _ = inputs(torch.float32, 4)

    def step(x, w, mask):
        z = F.linear(x, w) + mask
        (mask.view(-1) if whole else mask[:, 2]).mul_(0.5)
        loss = torch.logsumexp((z * mask)[:, 1:], -1).square().sum()
        return loss, *torch.autograd.grad(loss, (x, w))

    mask = torch.rand(4, 8, 1)
    with pytest.warns(UserWarning, match="changes in place"):
        gm = chunk(make_fx(step, tracing_mode="fake")(x, w, mask.clone()), num_chunks=4)
    torch.testing.assert_close(gm(x, w, mask.clone()), step(x, w, mask.clone()))


def test_a_dropped_token_that_is_not_finite():
    torch._dynamo.reset()
    x, w, t = inputs(torch.float32, 4)
    spoilt = x.detach().clone()
    spoilt[:, -1] = torch.inf
    want = run(contiguous, x, w, t)
    got = run(interpreted(contiguous), spoilt, w, t)
    torch.testing.assert_close(got, want)
