"""Every `loss_type` of pairs agrees with its paper's formula in float64."""

import functools

import pytest
import torch

from storage_ops import losses
from storage_ops.losses import pairs
from storage_ops.losses.options import LOSS_TYPES
from tests.losses.problem import FORMS, Problem, S, V, compare, log_sigmoid, smoothed


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def exo(h, e):
    q = sigmoid(h)
    return q * (q / (1 - e)).log() + (1 - q) * ((1 - q) / e).log()


def discopop(h, tau=0.3):
    m = sigmoid(h / tau)
    return -(1 - m) * log_sigmoid(h) + m * torch.exp(-h)


# Functions of log-ratios w and r, policy and reference margins u and v, beta and label smoothing.
PAIRS = {
    "sigmoid": lambda w, r, u, v, beta, e: smoothed(beta * (w - r), e),
    "hinge": lambda w, r, u, v, beta, e: (1 - beta * (w - r)).clamp_min(0),
    "ipo": lambda w, r, u, v, beta, e: (w - r - 1 / (2 * beta)) ** 2,
    "robust": lambda w, r, u, v, beta, e: (
        (-(1 - e) * log_sigmoid(beta * (w - r)) + e * log_sigmoid(-beta * (w - r))) / (1 - 2 * e)
    ),
    "exo_pair": lambda w, r, u, v, beta, e: exo(beta * (w - r), e),
    "nca_pair": lambda w, r, u, v, beta, e: (
        -log_sigmoid(beta * w) - log_sigmoid(-beta * w) / 2 - log_sigmoid(-beta * r) / 2
    ),
    "bco_pair": lambda w, r, u, v, beta, e: -log_sigmoid(beta * w) - log_sigmoid(-beta * r),
    "sppo_hard": lambda w, r, u, v, beta, e: (w - 0.5 / beta) ** 2 + (r + 0.5 / beta) ** 2,
    "aot": lambda w, r, u, v, beta, e: smoothed(beta * (u.sort()[0] - v.sort()[0]), e),
    "aot_unpaired": lambda w, r, u, v, beta, e: smoothed(beta * (w.sort()[0] - r.sort()[0]), e),
    "apo_zero": lambda w, r, u, v, beta, e: 1 - sigmoid(beta * w) + sigmoid(beta * r),
    "apo_down": lambda w, r, u, v, beta, e: sigmoid(beta * w) + 1 - sigmoid(beta * (w - r)),
    "discopop": lambda w, r, u, v, beta, e: discopop(beta * (w - r)),
}
HAVE_SMOOTHING = ["sigmoid", "robust", "exo_pair", "aot", "aot_unpaired"]


def test_every_loss_type_of_pairs_has_a_formula_here():
    assert list(PAIRS) == list(pairs.FORMULAS) == list(LOSS_TYPES)
    assert list(pairs.SMOOTHED) == HAVE_SMOOTHING


@pytest.mark.parametrize("reference", ["hidden", "logps", "absent"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_dpo(dtype, form, reference):
    p, beta = Problem(form, dtype), 0.2
    reference_options = {
        "hidden": {"ref_input": p.ref[0], "ref_weight": p.ref[1]},
        "logps": {"ref_logps": p.sums(ref=True)}, "absent": {},
    }[reference]  # fmt: skip
    ours, frozen = p.sums(), p.sums(ref=True)
    frozen = torch.zeros_like(frozen) if reference == "absent" else frozen
    for loss_type, formula in PAIRS.items():
        e = 0.15 if loss_type in HAVE_SMOOTHING else 0.0
        for normalized, alpha in ((False, 0.0), (True, 0.7)):
            loss, logps = losses.dpo(
                p.x, p.w, p.target, beta=beta, loss_type=loss_type, label_smoothing=e,
                discopop_tau=0.3, length_normalize=normalized, rpo_alpha=alpha, return_logps=True,
                **reference_options, **p.options,
            )  # fmt: skip
            length = p.counts() if normalized else 1
            (w, r), (a, b) = ((t / length).tensor_split(2) for t in (ours, frozen))
            right = formula(w - a, r - b, w - r, a - b, beta, e).mean()
            compare(p, loss, right + alpha * p.nll_of_chosen())
            torch.testing.assert_close(logps.double(), ours.detach(), rtol=1e-5, atol=1e-4)


def test_far_margins_of_every_loss_of_pairs_are_finite():
    """For such margins, one factor of a term of "discopop" is 0 and the other infinite."""
    for loss_type, formula in pairs.FORMULAS.items():
        w = torch.tensor([-3e3, 3e3, 0.0]).requires_grad_()
        margins = pairs.Pairs(w, -w, 2 * w, torch.zeros(3), 0.1, 0.1, 0.05)
        loss = formula(margins)
        assert loss.isfinite().all(), loss_type
        assert torch.autograd.grad(loss.sum(), w)[0].isfinite().all(), loss_type


@pytest.mark.parametrize("name, option", [("dpo", "rpo_alpha"), ("cpo", "alpha")])
@pytest.mark.parametrize("form", FORMS)
def test_the_nll_is_of_chosen_completions_only(form, name, option):
    p = Problem(form)
    call = functools.partial(getattr(losses, name), p.x, p.w, **p.options)
    # No chosen completion has tokens. The nll is nan, as a mean of nothing is, without a gradient.
    empty = p.target.clone()
    for row, span in p.parts[: S // 2]:
        empty.view(-1, empty.shape[-1])[row, span] = -100
    loss = call(empty, **{option: 1.0})
    assert loss.isnan()
    grads = [torch.autograd.grad(x, p.leaves) for x in (loss, call(empty, **{option: 0.0}))]
    torch.testing.assert_close(*grads)
    # A rejected completion has a token of probability 0.
    row, span = p.parts[-1]
    impossible = int(p.target.view(-1, p.target.shape[-1])[row, span].max())
    target = torch.where(p.target == impossible, (impossible + 1) % V, p.target)
    target.view(-1, target.shape[-1])[row, span.stop - 1 if p.packed else 2] = impossible
    p.options["linear_bias"] = p.b.detach().index_fill(0, torch.tensor(impossible), -torch.inf)
    call = functools.partial(getattr(losses, name), p.x, p.w, **p.options)
    loss, metrics = call(target, return_metrics=True, **{option: 1.0})
    assert metrics["logps"][-1] == -torch.inf
    assert loss.isfinite() and metrics["nll_loss"].isfinite()


def test_an_impossible_completion_is_not_in_the_means_of_the_others():
    p, judged = Problem("padded"), torch.arange(S) > 0
    p.options["linear_bias"] = torch.zeros(V).double()
    p.options["linear_bias"][p.target[0].max()] = -torch.inf
    p.target[1:][p.target[1:] == p.target[0].max()] = -100
    _, metrics = losses.kto(p.x, p.w, p.target, judged, return_metrics=True, **p.options)
    assert metrics["logps/chosen"].isfinite() and metrics["logps/rejected"] == -torch.inf
