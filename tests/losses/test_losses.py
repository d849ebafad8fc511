"""Every loss agrees with its paper's formula, computed sequence by sequence."""

import functools
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import storage_ops as so
from storage_ops import losses
from storage_ops.divergence import reference
from storage_ops.loss import reference as loss_reference
from tests.losses.problem import FORMS, D, E, Problem, S, V, compare, log_sigmoid, smoothed

from ..refused import refused


@pytest.mark.parametrize("form", FORMS)
def test_losses_of_pairs_without_a_reference(form):
    p, half = Problem(form), S // 2
    mean = p.sums() / p.counts()
    odds = (mean.exp() / (1 - mean.exp())).log()
    ratio = -log_sigmoid(odds[:half] - odds[half:]).mean()
    compare(p, losses.orpo(p.x, p.w, p.target, beta=0.3, **p.options),
            p.nll_of_chosen() + 0.3 * ratio)  # fmt: skip
    for e in (0.0, 0.1):
        margin = 2.5 * (p.sums() / p.counts()).view(2, half).diff(dim=0)[0].neg() - 0.7
        simpo = losses.simpo(p.x, p.w, p.target, beta=2.5, gamma=0.7, label_smoothing=e,
                             **p.options)  # fmt: skip
        compare(p, simpo, smoothed(margin, e).mean())
        h = p.sums()[:half] - p.sums()[half:]
        for normalized in (False, True):
            length = p.counts() if normalized else torch.ones(S)
            h = (p.sums() / length)[:half] - (p.sums() / length)[half:]
            cpo = losses.cpo(p.x, p.w, p.target, beta=0.2, alpha=0.5, label_smoothing=e,
                             length_normalize=normalized, **p.options)  # fmt: skip
            compare(p, cpo, smoothed(0.2 * h, e).mean() + 0.5 * p.nll_of_chosen())


@pytest.mark.parametrize("form", FORMS)
def test_orpo_with_other_targets_for_the_nll(form):
    """The nll includes prompts, leaves out some tokens of completions, and replaces others."""
    p, half = Problem(form), S // 2
    more = torch.where(p.target == -100, torch.randint(V, p.target.shape), p.target)
    more = torch.where(torch.rand(p.target.shape) < 0.2, torch.randint(V, p.target.shape), more)
    more = torch.where(torch.rand(p.target.shape) < 0.2, -100, more)
    loss = losses.orpo(p.x, p.w, p.target, beta=0.3, nll_target=more, **p.options)
    mean = p.sums() / p.counts()
    odds = (mean.exp() / (1 - mean.exp())).log()
    ratio = -log_sigmoid(odds[:half] - odds[half:]).mean()
    p.target = more
    compare(p, loss, p.nll_of_chosen() + 0.3 * ratio)


@pytest.mark.parametrize("pad", [0, V])
def test_orpo_with_a_class_as_ignore_index(pad):
    p = Problem("shifted")
    target = p.target.clamp_min(1 - pad // V).masked_fill(p.target == -100, pad)
    more = torch.randint(1, V, target.shape)  # includes prompts
    same = [torch.where(t == pad, -100, t) for t in (target, more)]
    results = []
    for (own, nll_target), index in (((target, more), pad), (same, -100)):
        loss = losses.orpo(p.x, p.w, own, nll_target=nll_target, ignore_index=index, **p.options)
        results.append((loss, *torch.autograd.grad(loss, p.leaves)))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("kl", [0.0, 1.3, torch.tensor(-2.0)])
@pytest.mark.parametrize("form", FORMS)
def test_kto(form, kl):
    p = Problem(form)
    good = torch.tensor([True, False, True, True, False, False])
    reference = {"ref_input": p.ref[0], "ref_weight": p.ref[1]}
    z = max(float(kl), 0)
    for normalized in (False, True):
        loss = losses.kto(p.x, p.w, p.target, good, beta=0.3, kl=kl, desirable_weight=1.5,
                          undesirable_weight=0.8, length_normalize=normalized, **reference,
                          **p.options)  # fmt: skip
        r = (p.sums() - p.sums(ref=True)) / (p.counts() if normalized else 1)
        losses_of_sequences = torch.where(good, 1.5 * (1 - torch.sigmoid(0.3 * (r - z))),
                           0.8 * (1 - torch.sigmoid(0.3 * (z - r))))  # fmt: skip
        compare(p, loss, losses_of_sequences.mean())


@pytest.mark.parametrize("form", FORMS)
def test_sft_and_kd(form):
    p, weight = Problem(form), None
    weight = torch.rand(p.target.shape)
    own = weight.view(-1, weight.shape[-1])
    loss = losses.sft(p.x, p.w, p.target, token_weight=weight, **p.options)
    total = scale = 0
    for (row, span), (logp, mask, _) in zip(p.parts, p.tokens(), strict=True):
        a = own[row, span][p.shift :].double() * mask
        total, scale = total - (a * logp).sum(), scale + a.sum()
    compare(p, loss, total / scale)

    t = 2.0
    z = F.linear(p.x, p.w, p.b).view(-1, V) / t, (p.ref[0] @ p.ref[1].T).view(-1, V) / t
    log_q, log_p = (torch.log_softmax(logp, -1) for logp in z)
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1).view(-1, p.target.shape[-1])
    nll = kl = count = 0
    for (row, span), (logp, mask, _) in zip(p.parts, p.tokens(), strict=True):
        own = divergence[row, span][: len(logp)]
        nll, kl, count = nll - logp.sum(), kl + own[mask].sum(), count + mask.sum()
    for alpha in (0.0, 1e-9, 0.3, 1.0):
        loss = losses.kd(p.x, p.w, *p.ref, p.target, alpha=alpha, temperature=t, **p.options)
        compare(p, loss, (alpha * t**2 * kl + (1 - alpha) * nll) / count)


def test_options_that_both_losses_of_kd_take():
    """A soft-cap and padded classes apply to the divergence and to the loss of the targets."""
    p = Problem("shifted")
    target, more = p.target.clamp(max=V - 3), {"softcap": 1.5, "valid_classes": V - 2}
    loss = losses.kd(p.x, p.w, *p.ref, target, alpha=0.3, **more, **p.options)
    options = {"shift": True, "linear_bias": p.b, **more}
    weight = target != -100
    kl = reference.linear_kl_div(p.x, p.w, *p.ref, token_weight=weight, **options)
    nll = loss_reference.linear_cross_entropy(p.x, p.w, target, **options)
    compare(p, loss, 0.3 * kl + 0.7 * nll)


def test_tokens_after_the_last_sequence_are_padding():
    p = Problem("packed and shifted")
    short = p.bounds[:-1]
    loss = losses.kto(p.x, p.w, p.target, torch.ones(S - 1, dtype=torch.bool), cu_seqlens=short,
                      shift=True)  # fmt: skip
    end = int(short[-1])
    right = losses.kto(p.x[:, :end], p.w, p.target[:, :end], torch.ones(S - 1, dtype=torch.bool),
                       cu_seqlens=short, shift=True)  # fmt: skip
    torch.testing.assert_close(loss, right)


def test_the_budget_holds_for_policy_and_reference():
    vocab, p = 20_000, Problem("shifted", torch.float32)
    w, ref = torch.randn(vocab, D).requires_grad_(), torch.randn(vocab, E)
    x, tokens = torch.randn(8, 100, D, requires_grad=True), torch.randint(vocab, (8, 100))

    def step():
        losses.dpo(x, w, tokens, ref_input=torch.randn(8, 100, E), ref_weight=ref, shift=True,
                   memory_budget="4 MiB").backward()  # fmt: skip

    step()
    x.grad = w.grad = None
    with so.memory.measure() as m:
        step()
    assert p is not None
    assert m.peak_bytes - w.grad.nbytes - x.grad.nbytes < 4.5 * (1 << 20) < 800 * vocab * 4 / 10


@pytest.mark.in_turn
@pytest.mark.parametrize("form", ["shifted", "packed and shifted"])
def test_compile(form):
    torch._dynamo.reset()
    p = Problem(form, torch.float32)
    advantages = torch.randn(S)

    def step(x, w):
        reference = {"ref_input": p.ref[0], "ref_weight": p.ref[1]}
        one, pairs = losses.dpo(x, w, p.target, loss_type="aot", rpo_alpha=0.3,
                                return_metrics=True, **reference, **p.options)  # fmt: skip
        two, tokens = losses.grpo(
            x, w, p.target, advantages, kl_weight=0.1, loss_type="sapo", normalize="token",
            num_items_in_batch=items, importance_sampling_ratio=advantages.exp(),
            return_metrics=True, **reference, **p.options,
        )  # fmt: skip
        three = losses.orpo(x, w, p.target, nll_target=p.target.clamp_min(0), **p.options)
        return one + two + three, pairs, tokens

    items = torch.tensor(70)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    (right, *expected), (loss, *metrics) = step(p.x, p.w), compiled(p.x, p.w)
    torch.testing.assert_close(loss, right)
    torch.testing.assert_close(metrics, expected)
    got, wanted = (torch.autograd.grad(v, (p.x, p.w)) for v in (loss, right))
    torch.testing.assert_close(got, wanted)


SCALED = ("dpo", "cpo", "kto")


@pytest.mark.parametrize(
    "name, change, kind, message",
    [
        refused(ValueError, "`loss_type` is 'exo'", "dpo", loss_type="exo"),
        refused(ValueError, "`beta` is 0", "dpo", beta=0),
        refused(ValueError, "`beta` is 1e+39", "dpo", beta=1e39),
        refused(ValueError, "`beta` is Fraction(1, 2)", "dpo", beta=Fraction(1, 2)),
        refused(ValueError, "`rpo_alpha` is 1180591620717411303424", "dpo", rpo_alpha=2**70),
        refused(ValueError, "`label_smoothing` is 0.5", "dpo", label_smoothing=0.5),
        refused(
            ValueError, "`label_smoothing` is 0.1", "dpo", label_smoothing=0.1, loss_type="ipo"
        ),
        refused(ValueError, "`label_smoothing` is 0.0", "dpo", loss_type="exo_pair"),
        refused(ValueError, "`discopop_tau` is 0", "dpo", discopop_tau=0),
        refused(ValueError, "`rpo_alpha` is None", "dpo", rpo_alpha=None),
        refused(ValueError, "`loss_type` is array", "dpo", loss_type=np.zeros(2)),
        *(refused(TypeError, "`length_normalize` is 1", n, length_normalize=1) for n in SCALED),
        refused(TypeError, "`ref_weight` is None", "dpo", ref_input=torch.ones(6, 9, D)),
        refused(ValueError, "`ref_logps` has shape (5,)", "dpo", ref_logps=torch.ones(5)),
        refused(TypeError, "`ref_logps` is a list", "dpo", ref_logps=[0.0] * 6),
        refused(TypeError, "`ref_logps` is torch.bool", "dpo", ref_logps=torch.ones(6).bool()),
        refused(
            ValueError, "`ref_logps` is on meta", "dpo", ref_logps=torch.ones(6, device="meta")
        ),
        refused(TypeError, "`ref_bias` is given without ref_input", "dpo", ref_bias=torch.ones(V)),
        refused(TypeError, "`target` is a list", "dpo", target=[1]),
        refused(TypeError, "dpo: `target` is torch.float32", "dpo", target=torch.rand(6, 9, V)),
        refused(TypeError, "grpo: `target` is torch.float32", "grpo", target=torch.rand(6, 9, V)),
        refused(TypeError, "`ref_input` is a l", "dpo", ref_input=[1], ref_weight=torch.ones(V, D)),
        refused(TypeError, "`ignore_index` is 'pad'", "dpo", ignore_index="pad"),
        refused(TypeError, "`returns` is given", "dpo", returns=("nll",)),
        refused(TypeError, "`cu_seqlens` is torch.float32", "dpo", cu_seqlens=torch.ones(3)),
        refused(ValueError, "`target` has shape (6, 9)", "dpo", cu_seqlens=torch.tensor([0, 4])),
        refused(TypeError, "`return_metrics` is 1", "dpo", return_metrics=1),
        refused(TypeError, "`return_metrics` is 'yes'", "orpo", return_metrics="yes"),
        refused(TypeError, "`nll_target` is a list", "orpo", nll_target=[1]),
        refused(TypeError, "`nll_target` is torch.float32", "orpo", nll_target=torch.ones(6, 9)),
        refused(
            ValueError, "`nll_target` has shape (3, 9", "orpo", nll_target=torch.ones(3, 9).long()
        ),
        refused(ValueError, "`beta` is -1", "orpo", beta=-1),
        refused(ValueError, "`label_smoothing` is 1", "simpo", label_smoothing=1),
        refused(ValueError, "`gamma` is 'x'", "simpo", gamma="x"),
        refused(ValueError, "`alpha` is None", "cpo", alpha=None),
        refused(TypeError, "`desirable` is torch.float32", "kto", desirable=torch.ones(6)),
        refused(ValueError, "`desirable` has shape (5,)", "kto", desirable=torch.ones(5).bool()),
        refused(TypeError, "`desirable` is a NoneType", "kto", desirable=None),
        refused(TypeError, "`desirable` is a list", "kto", desirable=[True] * 6),
        refused(ValueError, "`kl` is nan", "kto", kl=float("nan")),
        refused(ValueError, "`kl` has shape (2,)", "kto", kl=torch.ones(2)),
        refused(ValueError, "`kl_weight` is 0.1", "grpo", kl_weight=0.1),
        refused(ValueError, "`old_logps` has shape (6, 9)", "grpo", old_logps=torch.ones(6, 9)),
        refused(ValueError, "`advantages` has shape (3,)", "grpo", advantages=torch.ones(3)),
        refused(
            ValueError, "(6, 1). Expected (6,), one for each", "grpo", advantages=torch.ones(6, 1)
        ),
        refused(TypeError, "`advantages` is a list", "grpo", advantages=[1.0] * 6),
        refused(TypeError, "`advantages` is torch.bool", "grpo", advantages=torch.ones(6).bool()),
        refused(TypeError, "`old_logps` is a list", "grpo", old_logps=[1.0]),
        refused(ValueError, "`entropy_weight` is 'x'", "grpo", entropy_weight="x"),
        refused(ValueError, "`kl_weight` is nan", "grpo", kl_weight=float("nan")),
        refused(ValueError, "`clip_low` is 1e+39", "grpo", clip_low=1e39),
        refused(ValueError, "`max_length` is 1.5", "grpo", max_length=1.5),
        refused(ValueError, "`loss_type` is 'dapo'", "grpo", loss_type="dapo"),
        refused(ValueError, "`delta` is 0.0", "grpo", delta=0.0),
        refused(ValueError, "`delta` is 4.0", "grpo", delta=4.0, loss_type="sapo"),
        refused(ValueError, "`sapo_temperature_pos` is 0", "grpo", sapo_temperature_pos=0),
        refused(ValueError, "`sapo_temperature_neg` is None", "grpo", sapo_temperature_neg=None),
        refused(ValueError, "`num_items_in_batch` is given", "grpo", num_items_in_batch=9),
        refused(ValueError, "`num_items_in_batch` is '9'", "dapo", num_items_in_batch="9"),
        refused(
            ValueError, "`num_items_in_batch` has shape", "dapo", num_items_in_batch=torch.ones(2)
        ),
        refused(
            TypeError, "`importance_sampling_ratio` is a f", "grpo", importance_sampling_ratio=1.0
        ),
        refused(ValueError, "ratio` has shape", "grpo", importance_sampling_ratio=torch.ones(6, 1)),
        refused(ValueError, "`return_logps` is T", "grpo", return_logps=True, return_metrics=True),
        refused(ValueError, "`normalize` is 'batch'", "grpo", normalize="batch"),
        refused(TypeError, "`logit_scale` is given", "grpo", logit_scale=2.0),
        refused(ValueError, "`max_length` is 0", "grpo", max_length=0),
        refused(
            ValueError,
            "`target` has shape (2, 3, 9). Expected (S, T)",
            "dapo",
            input=torch.randn(2, 3, 9, D, dtype=torch.float64),
            target=torch.ones(2, 3, 9).long(),
        ),
        refused(TypeError, "`target` is a NoneType", "kd", target=None),
        refused(TypeError, "`ignore_index` is 1.0", "kd", ignore_index=1.0),
        refused(ValueError, "`ignore_index` is 9223", "kd", ignore_index=2**63),
        refused(ValueError, "`alpha` is 2", "kd", alpha=2),
        refused(TypeError, "`reduction` is given", "kd", reduction="sum"),
        refused(ValueError, "`temperature` is 0", "kd", temperature=0.0),
        refused(ValueError, "`temperature` is 0", "kd", temperature=0.0, alpha=0),
        refused(ValueError, "`divergence` is 'x'", "kd", divergence="x", alpha=0.0),
        refused(TypeError, "`returns` is given", "sft", returns=("loss",)),
        refused(TypeError, "`shift` is 2", "sft", shift=2),
        refused(TypeError, "`shift` is None", "kd", shift=None),
        refused(TypeError, "`shift` is 2", "simpo", shift=2),
        refused(TypeError, "`z_loss` is given", "dpo", z_loss=1e-4),
        refused(TypeError, "`top_k` is given", "orpo", top_k=3),
        refused(TypeError, "`weight` is given", "cpo", weight=torch.ones(V)),
        refused(TypeError, "`label_smoothing` is given", "orpo", label_smoothing=0.1),
        refused(TypeError, "`divisor` is given", "grpo", divisor=3.0),
    ],
)
def test_errors(name, change, kind, message):
    p = Problem("shifted")
    arguments = {"input": p.x, "linear_weight": p.w, "target": p.target, "shift": True}
    more = {
        "kto": {"desirable": torch.ones(S).bool()},
        "grpo": {"advantages": torch.randn(S)},
        "dapo": {"advantages": torch.randn(S)},
        "kd": {"teacher_input": p.ref[0], "teacher_weight": p.ref[1]},
    }
    arguments |= more.get(name, {})
    getattr(losses, name)(**arguments)
    with pytest.raises(kind) as raised:
        getattr(losses, name)(**{**arguments, **change})
    assert message in str(raised.value) and "Expected" in str(raised.value)


@pytest.mark.parametrize("name, option", [("dpo", "beta"), ("simpo", "gamma"), ("kto", "kl")])
def test_numbers_of_numpy(name, option):
    p = Problem("shifted")
    more = {"desirable": torch.ones(S).bool()} if name == "kto" else {}
    call = functools.partial(getattr(losses, name), p.x, p.w, p.target, shift=True, **more)
    results = [call(**{option: value}) for value in (np.float32(0.25), 0.25)]
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", ["sft", "dpo", "orpo", "grpo", "kd"])
def test_int32_targets_with_an_ignore_index_of_more_bits(name):
    """A comparison with int32 would ignore a class that has the same lowest 32 bits."""
    p = Problem("shifted")
    target = torch.randint(V, p.target.shape)
    ignored = 2**32 + int(target[0, -1])
    more = {
        "grpo": {"advantages": torch.randn(S)},
        "kd": {"teacher_input": p.ref[0], "teacher_weight": p.ref[1]},
    }.get(name, {})
    losses_of_dtypes = [
        getattr(losses, name)(
            p.x, p.w, target=target.to(dtype), ignore_index=ignored, shift=True, **more
        )
        for dtype in (torch.int32, torch.int64)
    ]
    torch.testing.assert_close(*losses_of_dtypes, rtol=0, atol=0)


def test_a_bound_of_none_is_no_bound():
    p = Problem("packed")
    for bounds in ([1, 4], [0, 9, 5], [0, 99]):
        with pytest.raises(ValueError, match="bounds from 0"):
            losses.orpo(p.x, p.w, p.target, cu_seqlens=torch.tensor(bounds))
    with pytest.raises(ValueError, match="`target` has 3 sequences"):
        losses.orpo(p.x, p.w, p.target, cu_seqlens=torch.tensor([0, 4, 9, 12]))


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_kd_ignores_only_ignore_index(alpha):
    p = Problem("padded")
    target = torch.zeros(S, p.x.shape[1], dtype=torch.long)
    call = p.x, p.w, *p.ref[:2]
    target[0, 0] = -100
    with pytest.raises(RuntimeError, match="out of range"):
        losses.kd(*call, target, alpha=alpha, ignore_index=3)
