"""Policy losses agree with their papers' formulas, computed sequence by sequence."""

import pytest
import torch

from storage_ops import losses
from storage_ops.losses.options import POLICY_LOSS_TYPES
from storage_ops.losses.surrogates import SURROGATES
from tests.losses.problem import FORMS, Problem, S, compare

VARIANTS = {
    "grpo": {"kl_weight": 0.04},
    "k1 entropy": {"kl_weight": 0.04, "kl_estimator": "k1", "entropy_weight": 0.3},
    "k2": {"kl_weight": 0.04, "kl_estimator": "k2", "temperature": 0.7},
    "dapo": {"normalize": "token", "clip_high": 0.5},
    "dr_grpo": {"normalize": "length", "max_length": 11},
    "gspo": {"importance": "sequence", "clip_low": 0.05, "clip_high": 0.04},
    "cispo": {"loss_type": "cispo", "clip_high": 0.1, "normalize": "token"},
    "sapo": {"loss_type": "sapo", "sapo_temperature_neg": 1.4, "kl_weight": 0.04},
    "delta": {"delta": 1.3, "clip_high": 0.1},
}


def surrogate(r, logp, a, options):
    """Return the loss of each token of a sequence with advantage `a`."""
    loss_type, low = options.get("loss_type", "grpo"), options.get("clip_low", 0.2)
    high = options.get("clip_high", low)
    if loss_type == "cispo":
        return -r.detach().clamp(max=1 + high) * a * logp
    if loss_type == "sapo":
        t = options.get("sapo_temperature_pos", 1.0) if a > 0 else options["sapo_temperature_neg"]
        return -4 / t / (1 + torch.exp(-t * (r - 1))) * a
    free = r.clamp(max=options.get("delta", float("inf")))
    return -torch.minimum(free * a, r.clamp(1 - low, 1 + high) * a)


@pytest.mark.parametrize("reference", ["hidden", "logps"])
@pytest.mark.parametrize("old", ["stored", "current"])
@pytest.mark.parametrize("variant", list(VARIANTS))
@pytest.mark.parametrize("form", FORMS)
def test_grpo(form, variant, old, reference):
    p, options = Problem(form), VARIANTS[variant]
    advantages, t = torch.randn(S, dtype=torch.float64), options.get("temperature", 1.0)
    tokens, ref = p.tokens(temperature=t), p.tokens(ref=True, temperature=t)
    scales = [0.01, *[0.4] * (S - 1)]  # the first sequence is not clipped, so there is a gradient
    before = [logp.detach() + scale * torch.randn(len(logp)).double() * mask
              for scale, (logp, mask, _) in zip(scales, tokens, strict=True)]  # fmt: skip
    extra = {}
    if "kl_weight" in options:
        extra = {"ref_logps": p.spread([logp for logp, *_ in ref]).detach()}
        if reference == "hidden":
            extra = {"ref_input": p.ref[0], "ref_weight": p.ref[1]}
    if old == "stored":
        extra["old_logps"] = p.spread(before)
    loss, logps = losses.grpo(p.x, p.w, p.target, advantages, return_logps=True, **extra, **options,
                              **p.options)  # fmt: skip
    sequences, count = [], 0
    for k, ((logp, mask, entropy), a) in enumerate(zip(tokens, advantages, strict=True)):
        change = logp - (before[k] if old == "stored" else logp.detach())
        r = change.exp()
        if variant == "gspo":
            r = (change.sum() / mask.sum()).exp().expand(len(logp))
        value = surrogate(r, logp, a, options)
        d = logp - ref[k][0]
        estimate = {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() + d - 1}
        value = value + options.get("kl_weight", 0) * estimate[options.get("kl_estimator", "k3")]
        value = (value - options.get("entropy_weight", 0) * entropy)[mask]
        sequences.append(value.sum() / (len(value) if "normalize" not in options else 1))
        count += len(value)
    by = {"token": count, "length": S * 11}.get(options.get("normalize"), S)
    compare(p, loss, sum(sequences) / by)
    torch.testing.assert_close(logps, p.spread([logp for logp, *_ in tokens]).detach())


def test_every_loss_type_of_policies_has_a_formula_here():
    assert list(SURROGATES) == list(POLICY_LOSS_TYPES)


@pytest.mark.parametrize("form", FORMS)
def test_samples_of_another_engine_and_tokens_of_several_calls(form):
    """The ratio multiplies only the policy's term. The sum is divided by the batch's tokens."""
    p, advantages = Problem(form), torch.randn(S, dtype=torch.float64)
    reference = {"ref_input": p.ref[0], "ref_weight": p.ref[1]}
    of_tokens = [torch.rand(len(logp)).double() * 2 for logp, *_ in p.tokens()]
    of_sequences = torch.rand(S, dtype=torch.float64) * 2
    tokens, ref = p.tokens(), p.tokens(ref=True)
    for ratio, spread in ((of_tokens, p.spread(of_tokens)), (of_sequences, of_sequences)):
        total = 0
        for c, a, (logp, mask, _), (frozen, *_) in zip(ratio, advantages, tokens, ref, strict=True):
            d = logp - frozen
            change = (logp - logp.detach()).exp()
            total = total + ((-c * change * a + 0.1 * (torch.exp(-d) + d - 1)) * mask).sum()
        for items in (53, torch.tensor(53)):
            loss = losses.grpo(
                p.x, p.w, p.target, advantages, importance_sampling_ratio=spread, kl_weight=0.1,
                normalize="token", num_items_in_batch=items, **reference, **p.options,
            )  # fmt: skip
            compare(p, loss, total / 53)
    none = losses.dapo(p.x, p.w, p.target, advantages, num_items_in_batch=0, **p.options)
    assert none.isfinite()


def test_values_of_ignored_tokens_are_not_read():
    p = Problem("shifted")
    mask = p.target[:, 1:] != -100
    stored, values = torch.where(mask, -3.0, torch.nan), torch.where(mask, 0.7, torch.nan)
    for loss_type in POLICY_LOSS_TYPES:
        loss = losses.grpo(p.x, p.w, p.target, values, old_logps=stored, ref_logps=stored,
                           kl_weight=0.1, shift=True, importance_sampling_ratio=values,
                           loss_type=loss_type)  # fmt: skip
        grads = torch.autograd.grad(loss, (p.x, p.w))
        assert loss.isfinite() and all(g.isfinite().all() for g in grads)


def test_named_settings_of_grpo():
    hidden, head = torch.randn(4, 9, 16), torch.randn(50, 16)
    target, advantages, old = torch.randint(50, (4, 9)), torch.randn(4), -torch.rand(4, 9)
    target[0, :3] = -100
    call = hidden, head, target, advantages
    for variant, options in (
        (losses.dapo, {"normalize": "token", "clip_low": 0.2, "clip_high": 0.28}),
        (losses.dr_grpo, {"normalize": "length", "max_length": 12}),
        (losses.gspo, {"importance": "sequence", "clip_low": 3e-4, "clip_high": 4e-4}),
    ):
        extra = {"old_logps": old, "max_length": options.get("max_length")}
        right = losses.grpo(*call, old_logps=old, **options)
        assert torch.equal(variant(*call, **extra), right)
        plain = losses.grpo(*call, old_logps=old, max_length=options.get("max_length"))
        assert not torch.equal(plain, right)
