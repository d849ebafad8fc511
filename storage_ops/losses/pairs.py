"""The losses of pairs by name. Each is a function of log-ratios.

A log-ratio is the log-probability of a completion under the policy minus that under the reference.
`dpo` looks its formula up in FORMULAS. `halves`, `smoothed` and `nll_of_chosen` also serve the
losses that have no reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from storage_ops.losses.options import LossType
from storage_ops.losses.sequences import Scored, wrong

# The formulas that `label_smoothing` changes.
SMOOTHED: tuple[LossType, ...] = ("sigmoid", "robust", "exo_pair", "aot", "aot_unpaired")


@dataclass(frozen=True)
class Pairs:
    """Log-ratios of B pairs, and the other arguments of the formulas.

    Attributes:
        chosen, rejected: (B,) log-ratios of the completions.
        policy: (B,) log-probability of the chosen completion minus that of the rejected one.
        reference: the same for the reference, or 0 without a reference.
        beta, label_smoothing, discopop_tau: arguments of `dpo`.
    """

    chosen: Tensor
    rejected: Tensor
    policy: Tensor
    reference: Tensor
    beta: float
    label_smoothing: float
    discopop_tau: float

    @property
    def margin(self) -> Tensor:
        """Return the reward of the chosen completion minus that of the rejected one."""
        return self.beta * (self.chosen - self.rejected)


def smoothed(margin: Tensor, label_smoothing: float) -> Tensor:
    """Return -log sigmoid of a margin, if this share of the labels is wrong."""
    right = -F.logsigmoid(margin)
    if not label_smoothing:
        return right
    return (1 - label_smoothing) * right - label_smoothing * F.logsigmoid(-margin)


def _sigmoid(p: Pairs) -> Tensor:
    return smoothed(p.margin, p.label_smoothing)


def _hinge(p: Pairs) -> Tensor:
    return torch.relu(1 - p.margin)


def _ipo(p: Pairs) -> Tensor:
    return (p.chosen - p.rejected - 1 / (2 * p.beta)).square()


def _robust(p: Pairs) -> Tensor:
    e = p.label_smoothing
    flipped = e * F.logsigmoid(-p.margin)
    return (flipped - (1 - e) * F.logsigmoid(p.margin)) / (1 - 2 * e)


def _exo_pair(p: Pairs) -> Tensor:
    right, flipped = math.log1p(-p.label_smoothing), math.log(p.label_smoothing)
    chosen, rejected = F.logsigmoid(p.margin), F.logsigmoid(-p.margin)
    return chosen.exp() * (chosen - right) + rejected.exp() * (rejected - flipped)


def _nca_pair(p: Pairs) -> Tensor:
    good, bad = p.beta * p.chosen, p.beta * p.rejected
    return -F.logsigmoid(good) - (F.logsigmoid(-good) + F.logsigmoid(-bad)) / 2


def _bco_pair(p: Pairs) -> Tensor:
    return -F.logsigmoid(p.beta * p.chosen) - F.logsigmoid(-p.beta * p.rejected)


def _sppo_hard(p: Pairs) -> Tensor:
    goal = 1 / (2 * p.beta)
    return (p.chosen - goal).square() + (p.rejected + goal).square()


def _aot(p: Pairs) -> Tensor:
    gain = p.policy.sort().values - p.reference.sort().values
    return smoothed(p.beta * gain, p.label_smoothing)


def _aot_unpaired(p: Pairs) -> Tensor:
    gain = p.chosen.sort().values - p.rejected.sort().values
    return smoothed(p.beta * gain, p.label_smoothing)


def _apo_zero(p: Pairs) -> Tensor:
    return torch.sigmoid(-p.beta * p.chosen) + torch.sigmoid(p.beta * p.rejected)


def _apo_down(p: Pairs) -> Tensor:
    return torch.sigmoid(p.beta * p.chosen) + torch.sigmoid(-p.margin)


def _discopop(p: Pairs) -> Tensor:
    share = p.margin / p.discopop_tau
    # One exponential avoids the product 0 * infinity for margins far below 0.
    exponential = (F.logsigmoid(share) - p.margin).exp()
    return -F.logsigmoid(p.margin) * torch.sigmoid(-share) + exponential


FORMULAS: dict[LossType, Callable[[Pairs], Tensor]] = {
    "sigmoid": _sigmoid,
    "hinge": _hinge,
    "ipo": _ipo,
    "robust": _robust,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "aot": _aot,
    "aot_unpaired": _aot_unpaired,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "discopop": _discopop,
}


def halves(loss: str, values: Tensor) -> tuple[Tensor, Tensor]:
    """Split values of sequences into values of chosen and of rejected completions."""
    if values.shape[0] % 2:
        rule = "an even number: the chosen ones, then the rejected ones"
        raise wrong(loss, ValueError, "target has", f"{values.shape[0]} sequences", rule)
    chosen, rejected = values.tensor_split(2)
    return chosen, rejected


def nll_of_chosen(scored: Scored) -> Tensor:
    """Return the mean nll of the chosen completions' tokens, by second targets if there are any."""
    logps, mask = scored.logps, scored.mask
    if scored.second is not None and scored.second_mask is not None:
        logps, mask = scored.second, scored.second_mask
    first = torch.arange(scored.sequences, device=logps.device) < scored.sequences // 2
    kept = mask & scored.per_token(first)
    # A product would have the gradient 0 * inf if no token is counted.
    return -torch.where(kept, logps, 0).sum() / kept.sum()


def metrics_of_pairs(
    loss: str, logps: Tensor, rewards: Tensor, **more: Tensor | None
) -> dict[str, Tensor]:
    """Return the metrics of `return_metrics`, detached, and the metrics in `more`."""
    logps, rewards = logps.detach(), rewards.detach()
    (chosen, rejected), (good, bad) = halves(loss, logps), halves(loss, rewards)
    metrics = {
        "logps": logps,
        "rewards": rewards,
        "logps/chosen": chosen.mean(),
        "logps/rejected": rejected.mean(),
        "rewards/chosen": good.mean(),
        "rewards/rejected": bad.mean(),
        "rewards/margins": (good - bad).mean(),
        "rewards/accuracies": (good > bad).to(rewards.dtype).mean(),
    }
    return metrics | {name: value.detach() for name, value in more.items() if value is not None}
