"""Every form of linear cross-entropy becomes the op.

Other losses of the same few numbers per token take these numbers from the op. Losses that only look
similar are chunked by the general rewrite.
"""

import pytest
import torch
from torch.nn import functional as F

from .losses import (
    B,
    T,
    V,
    arguments,
    biased,
    cross_entropy,
    cross_entropy_sum,
    flat,
    interpreted,
    log_probs,
    run,
    softcap_scaled,
)  # fmt: skip

OP, GENERAL = "storage_ops.linear_cross_entropy.default", "storage_ops._chunked_span.default"
BACKWARD = "storage_ops.linear_cross_entropy_backward.default"
CONNECT = "storage_ops._connect.default"  # makes second derivatives raise, for some losses
CLASSES = torch.linspace(0.5, 2, V)
TOKENS = torch.linspace(0, 1, B * T).roll(3)  # one of them is zero
Q = torch.softmax(torch.linspace(-2, 2, B * T * V).sin().view(B * T, V), -1)


def without_connect(ops):
    return [op for op in ops if op != CONNECT]


def z(x, w):
    return flat(x, w).float()


def smoothed(x, w, t):
    return F.cross_entropy(z(x, w), t.flatten(), label_smoothing=0.1)


def smoothed_sum(x, w, t):
    return F.cross_entropy(z(x, w), t.flatten(), label_smoothing=0.1, reduction="sum") * 3 / 7


def class_weights(x, w, t):
    return F.cross_entropy(z(x, w), t.flatten(), weight=CLASSES)


def class_weights_smoothed(x, w, t):
    return F.cross_entropy(z(x, w), t.flatten(), weight=CLASSES, label_smoothing=0.2)


def token_weights(x, w, t):
    nll = F.cross_entropy(z(x, w), t.flatten(), reduction="none")
    return (nll * TOKENS).sum() / TOKENS.sum()


def token_weights_smoothed(x, w, t):
    nll = F.cross_entropy(z(x, w), t.flatten(), reduction="none", label_smoothing=0.1)
    return (nll * TOKENS).mean()


def token_mask(x, w, t):
    mask = (t.flatten() > V // 2).float()
    nll = F.cross_entropy(z(x, w), t.flatten(), reduction="none")
    return (nll * mask).sum() / mask.sum()


def probabilities(x, w, t):
    return F.cross_entropy(z(x, w), Q)


def probabilities_smoothed_weighted(x, w, t):
    return F.cross_entropy(z(x, w), Q, weight=CLASSES, label_smoothing=0.1, reduction="sum")


def probabilities_token_weights(x, w, t):
    return (F.cross_entropy(z(x, w), Q, reduction="none") * TOKENS).sum()


def z_loss(x, w, t):
    logits, kept = z(x, w), t.flatten() != -100
    squares = torch.logsumexp(logits, -1).square() * kept
    return F.cross_entropy(logits, t.flatten()) + 1e-2 * squares.sum() / kept.sum()


def z_loss_of_all(x, w, t):
    logits = z(x, w)
    log_p = torch.log_softmax(logits, -1).gather(1, t.clamp(min=0).view(-1, 1))
    return -log_p.mean() + 1e-2 * torch.logsumexp(logits, -1).square().mean()


def log_likelihood(x, w, t):
    return -log_probs(x, w, t).mean()


def policy_gradient(x, w, t):
    return -(log_probs(x, w, t) * TOKENS.view(B, T)).sum()


def by_indices(x, w, t):
    log_p = torch.log_softmax(z(x, w), -1)
    return -log_p[torch.arange(B * T), t.clamp(min=0).flatten()].mean()


def in_einsum(x, w, t):
    return F.cross_entropy(torch.einsum("td,vd->tv", x.flatten(0, 1), w).float(), t.flatten())


def everything(x, w, t):
    logits = F.linear(x, w, w[:, 0]).flatten(0, 1).float() * 1.5
    logits = 5 * torch.tanh(logits / 5)
    nll = F.cross_entropy(logits, t.flatten(), CLASSES, reduction="none", label_smoothing=0.1)
    return (nll * TOKENS).sum() / 10


def squared(x, w, t):
    return cross_entropy(x, w, t) ** 2


def under_autocast(x, w, t):
    with torch.autocast("cpu", torch.bfloat16, enabled=x.dtype == torch.float32):
        logits = flat(x, w)
    return F.cross_entropy(logits.float(), t.flatten())


FORMS = [
    cross_entropy, cross_entropy_sum, biased, softcap_scaled, smoothed, smoothed_sum, class_weights,
    class_weights_smoothed, token_weights, token_weights_smoothed, token_mask, probabilities,
    probabilities_smoothed_weighted, probabilities_token_weights, z_loss, z_loss_of_all,
    log_likelihood, policy_gradient, by_indices, in_einsum, everything,
    squared,
]  # fmt: skip
IN_BF16 = [smoothed, class_weights, token_weights, probabilities, z_loss]


def z_loss_without_mask(x, w, t):
    logits = z(x, w)
    return F.cross_entropy(logits, t.flatten()) + torch.logsumexp(logits, -1).square().mean()


def shown_without_weights(x, w, t):
    nll = F.cross_entropy(z(x, w), t.flatten(), reduction="none")
    return (nll * TOKENS).sum() + nll.detach().sum()


def another_target(x, w, t):
    log_p, t = torch.log_softmax(z(x, w), -1), t.clamp(min=0).view(-1, 1)
    return -(log_p.gather(1, t) + log_p.gather(1, t.flip(0))).mean()


def brier(x, w, t):
    p = torch.softmax(z(x, w), -1)
    return (p * p).sum(-1).mean() - 2 * p.gather(1, t.clamp(min=0).view(-1, 1)).mean()


def smoothing_without_weights(x, w, t):
    log_p = torch.log_softmax(z(x, w), -1)
    nll = F.nll_loss(log_p, t.flatten(), reduction="none")
    return (nll * TOKENS).sum() - 1e-3 * log_p.sum()


def saturated(x, w, t):
    return F.cross_entropy(z(x, w).clamp(-50, 50), t.flatten())


def saturated_by_a_choice(x, w, t):
    logits = z(x, w)
    return F.cross_entropy(torch.where(logits > 30, 30.0, logits), t.flatten())


def floored(x, w, t):
    p = torch.softmax(z(x, w), -1).clamp(min=1e-12)
    return F.nll_loss(p.log(), t.flatten())


def finite(x, w, t):
    return F.cross_entropy(torch.nan_to_num(z(x, w), posinf=100.0, neginf=-100.0), t.flatten())


def again_detached(x, w, t):
    log_p, t = torch.log_softmax(z(x, w), -1), t.clamp(min=0).view(-1, 1)
    return -(log_p.gather(1, t) + log_p.detach().gather(1, t)).mean()


def learned_weights(x, w, t):
    nll = F.cross_entropy(z(x, w), t.flatten(), reduction="none")
    return (nll * x.mean(-1).flatten()).mean()


def of_a_changed_input(x, w, t):
    return F.cross_entropy(z((x * 1).add_(0.5), w), t.flatten())


def z_loss_of_some(x, w, t):
    logits, target = z(x, w), t.flatten().clamp(min=0)
    squares = torch.logsumexp(logits, -1).square() * (TOKENS > 0.5)
    return F.cross_entropy(logits, target, reduction="sum") + squares.sum()


def z_loss_of_the_good(x, w, t):
    logits, target, gain = z(x, w), t.flatten().clamp(min=0), TOKENS - 0.5
    nll = F.cross_entropy(logits, target, reduction="none")
    return (nll * gain + torch.logsumexp(logits, -1).square() * gain.relu()).sum()


def class_weights_focal(x, w, t):
    nll = F.cross_entropy(z(x, w), t.flatten(), weight=CLASSES, reduction="none")
    return ((1 - (-nll).exp()) ** 2 * nll).mean()


def smoothed_focal(x, w, t):
    nll = F.cross_entropy(z(x, w), t.flatten(), weight=CLASSES, reduction="none",
                          label_smoothing=0.1)  # fmt: skip
    return nll.square().mean()


def capped_entropy(x, w, t):
    log_p = torch.log_softmax(5 * torch.tanh(F.linear(x, w, w[:, 0]).float() / 5), -1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return (entropy * log_p.gather(-1, t.clamp(min=0)[..., None])[..., 0]).mean()


def probabilities_squared(x, w, t):
    return F.cross_entropy(z(x, w), Q, CLASSES, reduction="none").square().mean()


def under_no_grad(x, w, t):
    """Values computed from the logits under no_grad have no gradient."""
    log_p = torch.log_softmax(z(x, w), -1)
    with torch.no_grad():
        entropy = -(log_p.exp() * log_p).sum(-1)
    return -(log_p.gather(1, t.clamp(min=0).view(-1, 1))[:, 0] * entropy.exp()).mean()


def mixup(x, w, t):
    t = t.flatten().clamp(min=0)
    q = 0.3 * F.one_hot(t, V) + 0.7 * F.one_hot(t.flip(0), V)
    return -(q * torch.log_softmax(z(x, w), -1)).sum(-1).mean()


def smoothed_one_hot(x, w, t):
    one_hot = F.one_hot(t.flatten().clamp(min=0), V)
    return F.cross_entropy(z(x, w), one_hot.float() * 0.9 + 0.1 / V)


def softened(x, w, t):
    return F.cross_entropy(z(x, w), torch.softmax(Q.view(B, T, V).flatten(0, 1) * 3, -1))


def z_alone(x, w, t):
    return torch.logsumexp(z(x, w), -1).square().mean()


def log_odds(x, w, t):
    """softplus returns large numbers unchanged, although their exponential overflows."""
    return F.softplus(-100 * log_probs(x, w, t)).mean()


def sum_of_logits(x, w, t):
    """The result is V lse minus the sum over all classes, up to rounding."""
    return (z(x, w).sum(-1) * TOKENS).square().mean()


def weighed_logits(x, w, t):
    return (z(x, w) * CLASSES).sum(-1).square().mean()


def unnormalised(x, w, t):
    return (z(x, w) * Q * 2).sum(-1).square().mean()


RARELY = [saturated, saturated_by_a_choice, floored, finite]  # unlike cross-entropy
OTHERS = [
    brier, of_a_changed_input, sum_of_logits, weighed_logits, unnormalised, *RARELY, mixup,
    smoothed_one_hot, softened,
]  # fmt: skip
ROWS = [
    z_loss_without_mask, shown_without_weights, another_target, smoothing_without_weights,
    again_detached, learned_weights, z_loss_of_some, z_loss_of_the_good, class_weights_focal,
    smoothed_focal, capped_entropy, probabilities_squared, under_no_grad, z_alone, log_odds,
]  # fmt: skip


def check(loss, dtype, op):
    torch._dynamo.reset()
    inputs, ops = arguments(dtype), []
    exact = run(loss, *(a.double() if a.is_floating_point() else a for a in inputs))
    plain = run(loss, *inputs)
    got = run(interpreted(loss, ops=ops), *inputs)
    assert op in ops and set(without_connect(ops)) <= {op, BACKWARD}
    floor = 1e-2 if dtype.itemsize == 2 else 1e-5
    for ours, eager, want in zip(got, plain, exact, strict=True):
        size = want.double().norm()
        assert ours.dtype == eager.dtype and ours.shape == eager.shape
        error, allowed = (ours.double() - want).norm(), 1.5 * (eager.double() - want).norm()
        assert error <= allowed + floor * size
    return ops


@pytest.mark.slow
@pytest.mark.parametrize("loss", FORMS, ids=lambda f: f.__name__)
def test_becomes_the_op(loss):
    check(loss, torch.float32, OP)


@pytest.mark.parametrize("loss", IN_BF16, ids=lambda f: f.__name__)
def test_becomes_the_op_in_bf16(loss):
    check(loss, torch.bfloat16, OP)


def test_under_autocast():
    torch._dynamo.reset()
    inputs, ops = arguments(), []
    got = run(interpreted(under_autocast, ops=ops), *inputs)
    assert set(without_connect(ops)) == {OP}
    for ours, eager in zip(got, run(under_autocast, *inputs), strict=True):
        torch.testing.assert_close(ours, eager, rtol=2e-2, atol=2e-4)


def test_read_twice():
    """The op has its own autograd formula, in which upstream gradients are summed."""
    torch._dynamo.reset()
    x, w, t = arguments()
    ops, results = [], []

    def twice(x, w, t):
        loss = cross_entropy(x, w, t)
        return loss, loss.square() * 2

    for f in (interpreted(twice, ops=ops), twice):
        first, second = f(x, w, t)
        results.append(torch.autograd.grad(first * 3 - second, (x, w)))
    assert set(without_connect(ops)) == {OP}
    torch.testing.assert_close(*results)


@pytest.mark.in_turn
@pytest.mark.parametrize("loss", OTHERS, ids=lambda f: f.__name__)
def test_stays_general(loss):
    check(loss, torch.float32, GENERAL)


@pytest.mark.parametrize("loss", [mixup, smoothed_one_hot], ids=lambda f: f.__name__)
def test_targets_that_the_function_computes_are_chunked(loss):
    torch._dynamo.reset()
    inputs, reports = arguments(), []
    interpreted(loss, num_chunks=16, reports=reports)(*inputs)
    (report,) = reports
    gradients = sum(a.nbytes for a in inputs)
    assert report.peak_after < gradients + 4 * B * T * V / 2  # half of the targets


@pytest.mark.slow
@pytest.mark.parametrize("loss", ROWS, ids=lambda f: f.__name__)
def test_its_rows_become_the_op(loss):
    ops = check(loss, torch.float32, OP)
    assert without_connect(ops) == [OP, BACKWARD]


@pytest.mark.in_turn
@pytest.mark.parametrize("loss", [capped_entropy, z_loss_of_some], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bf16", "double"])
def test_its_rows_in_other_dtypes(loss, dtype):
    assert without_connect(check(loss, dtype, OP)) == [OP, BACKWARD]


@pytest.mark.in_turn
def test_rows_under_a_dynamic_size():
    torch._dynamo.reset()
    x, w, t = arguments()
    ops = []
    compiled = interpreted(capped_entropy, dynamic=None, ops=ops)  # from the second size on
    for tokens in (8, 5):
        inputs = x[:, :tokens].detach(), w, t[:, :tokens]
        torch.testing.assert_close(run(compiled, *inputs), run(capped_entropy, *inputs))
    assert set(without_connect(ops)) == {OP, BACKWARD}


def test_a_target_out_of_range():
    """A target that eager code refuses is refused, not ignored."""
    torch._dynamo.reset()
    x, w, t = arguments()

    def focal(x, w, t):
        p = torch.log_softmax(flat(x, w), -1).gather(-1, t.view(-1, 1))
        return ((1 - p.exp()) ** 2 * p).mean()

    for wrong in (-100, V):
        with pytest.raises(RuntimeError, match="out of range"):
            interpreted(focal)(x, w, t.clamp(min=0).index_fill(1, torch.tensor(2), wrong))


@pytest.mark.parametrize("loss", RARELY[:3], ids=lambda f: f.__name__)
def test_losses_with_large_logits(loss):
    """Most logits are in a range that the comparison with random tokens does not reach."""
    torch._dynamo.reset()
    x, w, t = arguments()
    x, w = (a.detach().mul(8).requires_grad_() for a in (x, w))
    for ours, want in zip(run(interpreted(loss), x, w, t), run(loss, x, w, t), strict=True):
        torch.testing.assert_close(ours, want, equal_nan=True)


@pytest.mark.parametrize("loss", [cross_entropy, class_weights], ids=lambda f: f.__name__)
def test_float16_keeps_its_range(loss):
    check(loss, torch.float16, GENERAL)


@pytest.mark.in_turn
def test_a_single_token():
    """With one token, recognition sees one random target at a time."""

    def masked_z_loss(x, w, t):
        logits, target = F.linear(x[0, :1], w).float(), t[0, 2:3]
        squares = torch.logsumexp(logits, -1).square() * (target > V // 2)
        return F.cross_entropy(logits, target) + squares.sum()

    def plain(x, w, t):
        return F.cross_entropy(F.linear(x[0, :1], w).float(), t[0, 2:3])

    for loss, expected in ((masked_z_loss, {OP, BACKWARD}), (plain, {OP})):
        for target in (3, V - 3):
            torch._dynamo.reset()
            x, w, t = arguments()
            t[0, 2], ops = target, []
            torch.testing.assert_close(run(interpreted(loss, ops=ops), x, w, t), run(loss, x, w, t))
            assert set(without_connect(ops)) == expected


@pytest.mark.in_turn
@pytest.mark.parametrize("loss", [cross_entropy, smoothed, class_weights, z_loss])
def test_all_tokens_ignored(loss):
    torch._dynamo.reset()
    x, w, t = arguments()
    t = torch.full_like(t, -100)
    grads = torch.autograd.grad(interpreted(loss)(x, w, t), (x, w))
    assert not any(g.any() for g in grads)
