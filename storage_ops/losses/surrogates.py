"""The losses of tokens that a policy sampled, by name.

`grpo` looks its formula up in SURROGATES. Each formula is a function of a token's importance
weight, log-probability and advantage, and its gradient is a policy gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from storage_ops.losses.options import PolicyLossType


@dataclass(frozen=True)
class Sampled:
    """Tokens with their advantages. All tensors have the shape of `logps`.

    Attributes:
        ratio: importance weights, pi / pi_old for the tokens or for their sequences.
        logps: log-probabilities under the policy.
        advantages: the advantages, without a gradient.
        clip_low, clip_high, delta, sapo_temperature_pos, sapo_temperature_neg: arguments of `grpo`.
    """

    ratio: Tensor
    logps: Tensor
    advantages: Tensor
    clip_low: float
    clip_high: float
    delta: float | None
    sapo_temperature_pos: float
    sapo_temperature_neg: float


def _grpo(s: Sampled) -> Tensor:
    free = s.ratio if s.delta is None else s.ratio.clamp(max=s.delta)
    clipped = s.ratio.clamp(1 - s.clip_low, 1 + s.clip_high)
    return -torch.minimum(free * s.advantages, clipped * s.advantages)


def _cispo(s: Sampled) -> Tensor:
    return -s.ratio.detach().clamp(max=1 + s.clip_high) * s.advantages * s.logps


def _sapo(s: Sampled) -> Tensor:
    temperature = torch.full_like(s.advantages, s.sapo_temperature_neg)
    temperature = temperature.masked_fill(s.advantages > 0, s.sapo_temperature_pos)
    gate = torch.sigmoid(temperature * (s.ratio - 1)) * (4 / temperature)
    return -gate * s.advantages


SURROGATES: dict[PolicyLossType, Callable[[Sampled], Tensor]] = {
    "grpo": _grpo,
    "cispo": _cispo,
    "sapo": _sapo,
}


def clip_ratios(s: Sampled, loss_type: PolicyLossType) -> dict[str, Tensor]:
    """Return which tokens the formula clips, as 0 and 1, by the names of their metrics."""
    low = (s.ratio < 1 - s.clip_low) & (s.advantages < 0)
    high = (s.ratio > 1 + s.clip_high) & (s.advantages > 0)
    ratios_by_side = {
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low | high,
    }
    names = {"grpo": list(ratios_by_side), "cispo": ["clip_ratio/high_mean"], "sapo": []}[loss_type]
    return {name: ratios_by_side[name].to(s.logps.dtype) for name in names}
