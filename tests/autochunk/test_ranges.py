"""Losses of ranges of logits, and of several logits, are chunked with right gradients."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from storage_ops.autochunk import backend, chunk
from storage_ops.memory import measure

from . import losses

pytestmark = pytest.mark.in_turn

B, T, D, V = 8, 64, 64, 4000
N, BETA = B * T, 0.1


def data(dtype=torch.float32):
    """Return policy (x, w, b), reference (y, v), and targets that ignore the ends of sequences."""
    x, w, b = torch.randn(B, T, D), torch.randn(V, D) * 0.3, torch.randn(V) * 0.1
    y, v, t = torch.randn(B, T, D), torch.randn(V, D) * 0.3, torch.randint(V, (B, T))
    t[:, -5:] = -100
    policy = [a.to(dtype).requires_grad_() for a in (x, w, b)]
    return *policy, y.to(dtype), v.to(dtype), t


def log_probs(z, t):
    return z.log_softmax(-1).gather(-1, t.clamp(min=0)[..., None])[..., 0]


def sequences(z, t, mean=False):
    """Return the log-probabilities of whole sequences, or their means per token."""
    mask = t != -100
    total = (log_probs(z, t) * mask).sum(-1)
    return total / mask.sum(-1) if mean else total


def penalty(r, p):
    return ((r - p).exp() - (r - p) - 1).mean()


def policy_first(x, w, b, y, v, t):
    p = log_probs(x @ w.t(), t)
    return penalty(log_probs(y @ v.t(), t), p)


def reference_first(x, w, b, y, v, t):
    r = log_probs(y @ v.t(), t)
    return penalty(r, log_probs(x @ w.t(), t))


def sums_policy_first(x, w, b, y, v, t):
    p = sequences(x @ w.t(), t, mean=True)
    return penalty(sequences(y @ v.t(), t, mean=True), p)


def sums_reference_first(x, w, b, y, v, t):
    r = sequences(y @ v.t(), t, mean=True)
    return penalty(r, sequences(x @ w.t(), t, mean=True))


def stacked(dim):
    """Return the Jensen-Shannon divergence of distillation, with logits stacked in `dim`."""

    def jsd(x, w, b, y, v, t):
        s, q = (x @ w.t()).log_softmax(-1), (y @ v.t()).log_softmax(-1)
        m = torch.logsumexp(torch.stack([s, q], dim=dim), dim=dim)
        return F.kl_div(m, s, reduction="sum", log_target=True)

    jsd.__name__ = f"stacked_{dim}"
    return jsd


def generalized_jsd(x, w, b, y, v, t):
    s, q = (x @ w.t() + b).log_softmax(-1), (y @ v.t()).log_softmax(-1)
    m = torch.logsumexp(torch.stack([s + 0.7, q + 0.3]), 0)
    divergences = [F.kl_div(m, a, reduction="none", log_target=True).sum(-1) for a in (s, q)]
    return ((0.7 * divergences[0] + 0.3 * divergences[1]) * (t != -100)).sum() / (t != -100).sum()


def sliced_first(x, w, b, y, v, t):
    """The teacher's product is a batched one, because its weight needs no gradient."""
    return stacked(0)(x[:, :-1], w, b, y[:, :-1], v, t)


def frozen_head(x, w, b, y, v, t):
    """The gradient of the hidden states is a batched product, too."""
    s, q = ((a[:, 1:] @ v.t()).log_softmax(-1) for a in (x, y))
    return F.kl_div(s, q, reduction="batchmean", log_target=True) + (w * b[:, None]).sum() * 1e-6


def side_by_side(x, w, b, y, v, t):
    z = torch.cat([x @ w.t(), y[:5] @ v.t()])
    return z.softmax(-1).square().sum(-1).mean()


def turned_around(x, w, b, y, v, t):
    z = x @ w.t()
    z = torch.cat([z[3:] * 2, z[:3]])
    return z.softmax(-1).square().sum(-1).mean()


def some_and_all(x, w, b, y, v, t):
    z = (x @ w.t()).flatten(0, 1)
    return F.cross_entropy(z[:256], t.flatten()[:256]) + F.cross_entropy(z, t.flatten())


def chunks(x, w, b, y, v, t):
    first, second = (x @ w.t()).flatten(0, 1).chunk(2, 0)
    return (torch.logsumexp(first, -1) - torch.logsumexp(second, -1)).square().mean()


def measured(x, w, b, y, v, t):
    z = (x @ w.t()).flatten(0, 1)
    return z.softmax(-1).square().sum(-1).mean(), z[:200].detach().mean()


def selective(x, w, b, y, v, t):
    """Compute the log-softmax one sequence after the other."""
    z = x @ w.t()
    picked = z.gather(-1, t.clamp(min=0)[..., None])[..., 0]
    lse = torch.stack([torch.logsumexp(each, -1) for each in z])
    return -((picked - lse).exp() * (t != -100)).sum() / (t != -100).sum()


def splits(x, w, b, y, v, t):
    a, c, d = (x @ w.t()).split([1, 4, 3])
    return sum(torch.logsumexp(z, -1).square().mean() for z in (a, d)) + c.sigmoid().mean()


def in_turns(x, w, b, y, v, t):
    z = x @ w.t()
    return (torch.logsumexp(z[::2], -1) - torch.logsumexp(z[1::2], -1)).square().mean()


def both_ways(x, w, b, y, v, t):
    z = (x @ w.t())[:, :-1]
    return z[:5].softmax(-1).square().sum(-1).mean() + torch.logsumexp(z[:, 3:], -1).square().mean()


def dpo(x, w, b, y, v, t):
    """Rafailov et al. 2023, https://arxiv.org/abs/2305.18290."""
    z, n = x @ w.t() + b, B // 2
    with torch.no_grad():
        r = sequences(y @ v.t(), t)
    chosen, rejected = sequences(z[:n], t[:n]) - r[:n], sequences(z[n:], t[n:]) - r[n:]
    shown = z[:n].detach().mean() - z[n:].detach().mean()
    return -F.logsigmoid(BETA * (chosen - rejected)).mean(), shown


def cpo(x, w, b, y, v, t):
    """Xu et al. 2024, https://arxiv.org/abs/2401.08417."""
    p, n = (x @ w.t()).log_softmax(-1), B // 2
    chosen, rejected = sequences(p[:n], t[:n]), sequences(p[n:], t[n:])
    nll = F.nll_loss(p[:n].flatten(0, 1), t[:n].flatten())
    return nll - F.logsigmoid(BETA * (chosen - rejected)).mean()


def orpo(x, w, b, y, v, t):
    """Hong et al. 2024, https://arxiv.org/abs/2403.07691."""
    z, n = x @ w.t() + b, B // 2
    p = sequences(z, t, mean=True)
    odds = p - torch.log1p(-p.exp())
    nll = F.cross_entropy(z[:n].flatten(0, 1), t[:n].flatten())
    return nll - BETA * F.logsigmoid(odds[:n] - odds[n:]).mean()


def simpo(x, w, b, y, v, t):
    """Meng et al. 2024, https://arxiv.org/abs/2405.14734."""
    chosen, rejected = (sequences(z, s, mean=True)
                        for z, s in zip((x @ w.t()).chunk(2), t.chunk(2), strict=True))  # fmt: skip
    return -F.logsigmoid(2 * (chosen - rejected) - 0.5).mean()


def kto(x, w, b, y, v, t):
    """Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306."""
    z, good = x @ w.t(), torch.arange(B) % 3 > 0
    gain = sequences(z, t) - sequences(y @ v.t(), t)
    shown = (z.square() * good.view(-1, 1, 1)).sum().detach()  # a sum without cancellation
    return (1 - torch.sigmoid(BETA * gain * torch.where(good, 1, -1))).mean(), shown


def grpo(level):
    """Shao et al. 2024, https://arxiv.org/abs/2402.03300, or for sequences Zheng et al. 2025.

    The second is https://arxiv.org/abs/2507.18071. The logged value is not detached.
    """

    def loss(x, w, b, y, v, t):
        p, mask = log_probs(x @ w.t(), t), (t != -100).to(x.dtype)
        with torch.no_grad():
            r = log_probs(y @ v.t(), t)
        ratio, gain = p - p.detach() - 0.05, torch.linspace(-1, 1, B)[:, None]
        if level == "sequence":
            ratio = (ratio * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)
        ratio, kl = ratio.exp(), (r - p).exp() - (r - p) - 1
        losses = BETA * kl - torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
        return (losses * mask).sum() / mask.sum(), (kl * mask).sum() / mask.sum()

    loss.__name__ = f"grpo_{level}"
    return loss


def cosine(x, w, b, y, v, t):
    """Return the cosine distance of a student's and a teacher's logits, plus cross-entropy."""
    z, q = x @ w.t(), y @ v.t()
    near = F.cosine_similarity(F.normalize(z, dim=-1), F.normalize(q, dim=-1), dim=-1)
    return F.cross_entropy(z.flatten(0, 1), t.flatten()) + (1 - near).mean()


LOSSES = [
    policy_first, reference_first, sums_policy_first, sums_reference_first, stacked(0), stacked(1),
    generalized_jsd, sliced_first, frozen_head, side_by_side, turned_around, some_and_all, chunks,
    measured, selective, splits,
    in_turns, both_ways, dpo, cpo, orpo, simpo, kto, grpo("token"), grpo("sequence"), cosine,
]  # fmt: skip


def run(f, inputs):
    """Return results, gradients, and the peak memory as a share of one logits buffer."""
    leaves = [a.detach().clone().requires_grad_(a.requires_grad) for a in inputs]
    with measure() as measurement:
        out = f(*leaves)
        out = out if isinstance(out, tuple) else (out,)
        out[0].backward()
    share = measurement.peak_bytes / (N * V * inputs[0].element_size())
    return [o.detach() for o in out] + [a.grad for a in leaves if a.grad is not None], share


def check(got, plain, exact):
    for ours, eager, want in zip(got, plain, exact, strict=True):
        assert ours.dtype == eager.dtype and ours.shape == eager.shape
        # Terms of a loss may cancel, together with eager's rounding errors.
        floor = 1e-5 * want.norm() + 1e-6 * (not want.dim())
        assert (ours - want).norm() <= 4 * (eager - want).norm() + floor


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_share_of_the_logits(loss):
    torch._dynamo.reset()
    inputs = data()
    options = {"num_chunks": 8, "strict": True}
    compiled = torch.compile(loss, backend=backend.backend, options=options)
    run(compiled, inputs)
    inputs = data()  # other values than in the compilation
    got, share = run(compiled, inputs)
    plain, whole = run(loss, inputs)
    check(got, plain, run(loss, [a.double() if a.is_floating_point() else a for a in inputs])[0])
    # A stack inside of sequences is chunked by whole sequences, and Inductor stores the stack.
    assert share < (0.8 if loss.__name__ == "stacked_1" else 0.6) and whole > 1.9


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss", [generalized_jsd, selective, grpo("token"), grpo("sequence"), cosine],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_share_of_the_logits_in_16_bits(loss):
    torch._dynamo.reset()
    compiled = torch.compile(
        loss, backend=backend.backend, options={"num_chunks": 8, "strict": True}
    )
    run(compiled, data(torch.bfloat16))
    assert run(compiled, data(torch.bfloat16))[1] < 0.6


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_gradients(loss):
    torch._dynamo.reset()
    inputs, reports = data(), []
    got, _ = run(losses.interpreted(loss, 8, reports=reports), inputs)
    exact, _ = run(loss, [a.double() if a.is_floating_point() else a for a in inputs])
    check(got, run(loss, inputs)[0], exact)
    assert reports[0].num_chunks >= 8 and reports[0].peak_after < reports[0].peak_before / 2


@pytest.mark.parametrize("loss", [some_and_all, orpo], ids=lambda f: f.__name__)
def test_sums_of_16_bits(loss):
    """The sum over ranges is rounded once. The losses' own rounding does not hide errors of it."""
    torch._dynamo.reset()
    inputs = data(torch.bfloat16)
    exact, _ = run(loss, [a.double() if a.is_floating_point() else a for a in inputs])
    got, plain = run(losses.interpreted(loss, 8), inputs)[0], run(loss, inputs)[0]
    (value, *gradients), (eager_value, *eager), (true_value, *true) = got, plain, exact
    rounding = torch.finfo(torch.bfloat16).eps * true_value.abs()
    assert (value - true_value).abs() <= (eager_value - true_value).abs() + 2 * rounding
    for ours, theirs, want in zip(gradients, eager, true, strict=True):
        assert (ours - want).norm() <= 1.2 * (theirs - want).norm() + 2e-3 * want.norm()


@pytest.mark.slow
def test_dynamic_sizes():
    def halves(x, w, b, y, v, t):
        a, c = x @ w.t(), x.flip(0) @ w.t()
        z = torch.cat([a[:, 2:], c[:, :-2]], 1)
        return z.softmax(-1).square().sum(-1).mean() + torch.logsumexp(a[:, :-1], -1).mean()

    torch._dynamo.reset()
    compiled, arguments = losses.interpreted(halves, 8, dynamic=True), data()
    for batch, length in ((8, 64), (5, 33), (3, 12)):
        x, w, *others = arguments
        x = x[:batch, :length]
        inputs = (x.detach().requires_grad_(), w, *others)
        got, want = (run(f, inputs)[0] for f in (compiled, halves))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_a_traced_step():
    """Autograd has already decomposed the ranges. The product leaves out zeros."""

    def step(x, w):
        p = (x @ w.t())[:, :-1].softmax(-1)
        loss = p.square().sum(-1).mean()
        return loss, *torch.autograd.grad(loss, (x, w))

    x, w, *_ = data()
    gm = make_fx(step, tracing_mode="fake")(x, w)
    gm = chunk(gm, num_chunks=8, strict=True)
    torch.testing.assert_close(gm(x, w), step(x, w), rtol=1e-4, atol=1e-6)
    (span,) = (n for n in gm.graph.nodes if "_chunked_span" in str(n.target))
    assert span.args[3] == [B * (T - 1)]


def test_many_sequences():
    def per_sequence(x, w, b, y, v, t):
        z = x.view(16, -1, D) @ w.t()
        return torch.stack([torch.logsumexp(rows, -1) for rows in z]).square().sum()

    torch._dynamo.reset()
    inputs, reports = data(), []
    got, _ = run(losses.interpreted(per_sequence, 8, reports=reports), inputs)
    torch.testing.assert_close(got, run(per_sequence, inputs)[0], rtol=1e-4, atol=1e-4)
    assert reports[0].chunked


def test_consecutive_tokens_stay_whole():
    """There would be too many ranges of single tokens, so chunks are whole sequences."""

    def steps(x, w, b, y, v, t):
        z = x @ w.t()
        return (z[:, 1:] - z[:, :-1]).square().mean()

    torch._dynamo.reset()
    (x, *others), reports = data(), []
    inputs = x.detach()[:, :24].requires_grad_(), *others
    got, _ = run(losses.interpreted(steps, 8, reports=reports), inputs)
    torch.testing.assert_close(got, run(steps, inputs)[0], rtol=1e-4, atol=1e-6)
    assert reports[0].num_chunks == 8


@pytest.mark.parametrize("loss", [dpo, orpo, measured, in_turns], ids=lambda f: f.__name__)
def test_a_vocabulary_below_four_times_the_hidden_size(loss):
    """Hidden states are then as wide as logits, and their ranges must not be split again."""

    def few(x, w, b, y, v, t):
        return loss(x.tanh(), w[:100], b[:100], y.tanh(), v[:100], t.where(t < 0, t % 100))

    torch._dynamo.reset()
    inputs, reports = data(), []
    got, _ = run(losses.interpreted(few, 8, reports=reports), inputs)
    exact, _ = run(few, [a.double() if a.is_floating_point() else a for a in inputs])
    check(got, run(few, inputs)[0], exact)
    assert reports[0].chunked
