"""With `return_metrics`, losses return the metrics of a step and the same loss."""

import pytest
import torch
from torch.nn import functional as F

from storage_ops import losses
from tests.losses.problem import FORMS, Problem, S, compare

HALF = S // 2


def of_pairs(p, rewards):
    """Return the metrics of pairs by their formulas."""
    logps, rewards = p.sums().detach(), rewards.detach()
    margins = rewards[:HALF] - rewards[HALF:]
    return {
        "logps": logps, "rewards": rewards,
        "logps/chosen": logps[:HALF].mean(), "logps/rejected": logps[HALF:].mean(),
        "rewards/chosen": rewards[:HALF].mean(), "rewards/rejected": rewards[HALF:].mean(),
        "rewards/margins": margins.mean(), "rewards/accuracies": (margins > 0).double().mean(),
    }  # fmt: skip


def check(p, result, plain, expected):
    """Check that the loss equals `plain`, and that metrics are detached and as expected."""
    loss, metrics = result
    compare(p, loss, plain)
    assert not any(value.requires_grad for value in metrics.values())
    assert metrics.keys() == expected.keys()
    torch.testing.assert_close(metrics, expected, equal_nan=True)


@pytest.mark.parametrize("form", FORMS)
def test_pairs(form):
    p = Problem(form)
    call, keywords = (p.x, p.w, p.target), {"ref_input": p.ref[0], "ref_weight": p.ref[1]}
    keywords |= p.options
    frozen, mean = p.sums(ref=True), p.sums() / p.counts()
    ratios, nll = p.sums() - frozen, p.nll_of_chosen().detach()

    def both(loss, **options):
        return loss(*call, return_metrics=True, **options), loss(*call, **options)

    for options, rewards, more in (
        ({}, 0.2 * ratios, {}),
        ({"rpo_alpha": 0.5, "loss_type": "ipo"}, 0.2 * ratios, {"nll_loss": nll}),
        ({"length_normalize": True}, 0.2 * ratios / p.counts(), {}),
    ):
        expected = of_pairs(p, rewards) | {"ref_logps": frozen} | more
        check(p, *both(losses.dpo, beta=0.2, **options, **keywords), expected)
    check(p, *both(losses.dpo, beta=0.2, **p.options), of_pairs(p, 0.2 * p.sums()))
    check(p, *both(losses.simpo, **p.options), of_pairs(p, 2 * mean))
    cpo = of_pairs(p, 0.1 * p.sums())
    check(p, *both(losses.cpo, **p.options), cpo | {"nll_loss": nll})
    check(p, *both(losses.cpo, alpha=0.0, **p.options), cpo)
    odds = (mean.exp() / (1 - mean.exp())).log().detach()
    odds = odds[:HALF] - odds[HALF:]
    check(p, *both(losses.orpo, **p.options), of_pairs(p, 0.1 * mean) | {
        "nll_loss": nll, "log_odds_chosen": odds.mean(),
        "log_odds_ratio": torch.sigmoid(odds).log().mean(),
    })  # fmt: skip


@pytest.mark.parametrize("good", [[True, False, True, True, False, False], [True] * 6])
def test_judged_sequences(good):
    p, good = Problem("packed and shifted"), torch.tensor(good)
    options = {"kl": 0.7, "ref_logps": p.sums(ref=True), **p.options}
    call = p.x, p.w, p.target, good
    logps = p.sums().detach()
    rewards = 0.1 * (logps - options["ref_logps"])
    expected = {"logps": logps, "rewards": rewards, "kl": torch.tensor(0.7).double()}
    for name, values in (("logps", logps), ("rewards", rewards)):
        expected[name + "/chosen"] = values[good].mean()
        expected[name + "/rejected"] = values[~good].mean()  # nan if there is none
    expected["rewards/margins"] = expected["rewards/chosen"] - expected["rewards/rejected"]
    expected["ref_logps"] = options["ref_logps"]
    check(p, losses.kto(*call, return_metrics=True, **options), losses.kto(*call, **options),
          expected)  # fmt: skip


@pytest.mark.parametrize("loss_type", ["grpo", "cispo", "sapo"])
@pytest.mark.parametrize("form", FORMS)
def test_policies(form, loss_type):
    p, a = Problem(form), torch.randn(S, dtype=torch.float64)
    options = {"ref_input": p.ref[0], "ref_weight": p.ref[1], "kl_weight": 0.3}
    old = [logp.detach() + 0.4 * torch.randn(len(logp)).double() for logp, *_ in p.tokens()]
    options |= {"old_logps": p.spread(old), "loss_type": loss_type, **p.options}
    collected = {name: [] for name in ("kl", "entropy", "low", "high")}
    for k, ((logp, mask, entropy), (ref, *_)) in enumerate(
        zip(p.tokens(), p.tokens(ref=True), strict=True)
    ):
        logp, d, r = logp.detach(), (logp - ref).detach(), (logp.detach() - old[k]).exp()
        collected["kl"].append((torch.exp(-d) + d - 1)[mask])
        collected["entropy"].append(entropy.detach()[mask])
        collected["low"].append(((r < 0.8) & (a[k] < 0))[mask])
        collected["high"].append(((r > 1.2) & (a[k] > 0))[mask])
    means = {name: torch.cat(values).double().mean() for name, values in collected.items()}
    low, high = means.pop("low"), means.pop("high")
    shares = {"low": low, "high": high, "region": low + high}
    kept = {"grpo": shares, "cispo": ["high"], "sapo": []}[loss_type]
    expected = means | {f"clip_ratio/{name}_mean": shares[name] for name in kept}
    expected["logps"] = p.spread([logp for logp, *_ in p.tokens()]).detach()
    expected["ref_logps"] = p.spread([logp for logp, *_ in p.tokens(ref=True)])
    call = p.x, p.w, p.target, a
    check(p, losses.grpo(*call, return_metrics=True, **options), losses.grpo(*call, **options),
          expected)  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_targets_and_a_teacher(form):
    p = Problem(form)
    tokens = list(p.tokens())
    logps = p.spread([logp for logp, *_ in tokens]).detach()
    count = sum(mask.sum() for _, mask, _ in tokens)
    nll = -logps.sum() / count
    entropy = torch.cat([entropy.detach()[mask] for _, mask, entropy in tokens]).mean()
    expected = {"logps": logps, "nll_loss": nll, "entropy": entropy}
    call = p.x, p.w, p.target
    loss, metrics = losses.sft(*call, return_metrics=True, **p.options)
    best = F.linear(p.x, p.w, p.b).argmax(-1)
    hits = 0
    for row, span in p.parts:
        predicted, target = (torch.atleast_2d(t)[row, span] for t in (best, p.target))
        hits += (predicted[:-1] == target[1:] if p.shift else predicted == target).sum()
    accuracy = metrics.pop("mean_token_accuracy")
    assert accuracy == hits / count
    check(p, (loss, metrics), losses.sft(*call, **p.options), expected)
    call = p.x, p.w, *p.ref, p.target
    for alpha in (0.0, 0.3, 1.0):
        plain = losses.kd(*call, alpha=alpha, temperature=2.0, **p.options)
        loss, metrics = losses.kd(
            *call, alpha=alpha, temperature=2.0, return_metrics=True, **p.options
        )
        assert metrics.pop("mean_token_accuracy") == accuracy
        soft = losses.kd(*call, alpha=1.0, temperature=2.0, **p.options).detach()
        soft = soft if alpha else soft * float("nan")
        check(p, (loss, metrics), plain, expected | {"kd_loss": soft})
