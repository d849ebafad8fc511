"""Types of the losses' keyword arguments, and names that some arguments accept.

`tests/test_types.py` compares the names with the functions' arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args

from torch import Tensor
from typing_extensions import TypedDict

from storage_ops.divergence.checks import Divergence, Tail
from storage_ops.loss.call import Options, SumOptions

LossType = Literal[
    "sigmoid", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "aot",
    "aot_unpaired", "apo_zero", "apo_down", "discopop",
]  # fmt: skip
PolicyLossType = Literal["grpo", "cispo", "sapo"]
Importance = Literal["token", "sequence"]
Normalize = Literal["sequence", "token", "length"]
Estimator = Literal["k1", "k2", "k3"]

LOSS_TYPES: tuple[LossType, ...] = get_args(LossType)
POLICY_LOSS_TYPES: tuple[PolicyLossType, ...] = get_args(PolicyLossType)
IMPORTANCES: tuple[Importance, ...] = get_args(Importance)
NORMALIZES: tuple[Normalize, ...] = get_args(Normalize)
ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)

_Function = TypeVar("_Function")


def typed_as(function: _Function) -> Callable[[Any], _Function]:
    """Decorate a function that passes its arguments on to `function` and has the same type."""
    return lambda given: given


class ScoreOptions(Options, total=False):
    """Options of losses of log-probabilities."""

    linear_bias: Tensor | None
    cu_seqlens: Tensor | None
    shift: bool
    ignore_index: int


class SequenceOptions(ScoreOptions, total=False):
    """Options of the losses of sequences."""

    logit_scale: float


class ReferenceOptions(TypedDict, total=False):
    """A frozen reference: its hidden states and head, or its log-probabilities."""

    ref_input: Tensor | None
    ref_weight: Tensor | None
    ref_bias: Tensor | None
    ref_logps: Tensor | None


class PreferenceOptions(SequenceOptions, ReferenceOptions, total=False):
    """Keyword arguments of `dpo`, except `return_logps` and `return_metrics`."""

    beta: float
    loss_type: LossType
    label_smoothing: float
    discopop_tau: float
    rpo_alpha: float
    length_normalize: bool


class OddsOptions(SequenceOptions, total=False):
    """Keyword arguments of `orpo`, except `return_metrics`."""

    beta: float
    nll_target: Tensor | None


class MarginOptions(SequenceOptions, total=False):
    """Keyword arguments of `simpo`, except `return_metrics`."""

    beta: float
    gamma: float
    label_smoothing: float


class ContrastiveOptions(SequenceOptions, total=False):
    """Keyword arguments of `cpo`, except `return_metrics`."""

    beta: float
    alpha: float
    label_smoothing: float
    length_normalize: bool


class JudgedOptions(SequenceOptions, ReferenceOptions, total=False):
    """Keyword arguments of `kto`, except `return_metrics`."""

    beta: float
    kl: Tensor | float
    desirable_weight: float
    undesirable_weight: float
    length_normalize: bool


class PolicyOptions(ScoreOptions, ReferenceOptions, total=False):
    """Keyword arguments of `grpo`, except `return_logps` and `return_metrics`."""

    old_logps: Tensor | None
    loss_type: PolicyLossType
    clip_low: float
    clip_high: float | None
    delta: float | None
    sapo_temperature_pos: float
    sapo_temperature_neg: float
    importance: Importance
    importance_sampling_ratio: Tensor | None
    normalize: Normalize
    max_length: int | None
    num_items_in_batch: int | float | Tensor | None
    kl_weight: float
    kl_estimator: Estimator
    entropy_weight: float
    temperature: float


class SupervisedOptions(Options, SumOptions, total=False):
    """Options of `sft`."""

    linear_bias: Tensor | None
    weight: Tensor | None
    accumulate_into: Tensor | None


class SftOptions(SupervisedOptions, total=False):
    """Keyword arguments of `sft`, except `return_metrics`."""

    token_weight: Tensor | None
    cu_seqlens: Tensor | None
    shift: bool
    ignore_index: int


class DistillationOptions(TypedDict, total=False):
    """Options of `kd`, which are those of `linear_kl_div`."""

    divergence: Divergence
    beta: float
    teacher_bias: Tensor | None
    teacher_topk: tuple[Tensor, Tensor] | None
    teacher_tail: Tail
    valid_classes: int | None
    max_valid: int | Literal["sync"] | None
    softcap: float | None
    teacher_softcap: float | None
    process_group: Any
    gradient_tolerance: float


class KdOptions(DistillationOptions, total=False):
    """Keyword arguments of `kd`, except `return_metrics`."""

    alpha: float
    temperature: float
    linear_bias: Tensor | None
    cu_seqlens: Tensor | None
    shift: bool
    ignore_index: int
    memory_budget: int | float | str | None
