"""Losses of policies that are trained with rewards."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from storage_ops.losses.options import (
    ESTIMATORS,
    IMPORTANCES,
    NORMALIZES,
    Estimator,
    Importance,
    Normalize,
    PolicyOptions,
)
from storage_ops.losses.sequences import (
    Scored,
    check_tensor,
    check_values,
    choice,
    number,
    reference_logps,
    score,
    within,
    wrong,
)


@overload
def grpo(
    input: Tensor, linear_weight: Tensor, target: Tensor, advantages: Tensor, *,
    return_logps: Literal[False] = False, **options: Unpack[PolicyOptions],
) -> Tensor: ...  # fmt: skip
@overload
def grpo(
    input: Tensor, linear_weight: Tensor, target: Tensor, advantages: Tensor, *,
    return_logps: Literal[True], **options: Unpack[PolicyOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def grpo(
    input: Tensor, linear_weight: Tensor, target: Tensor, advantages: Tensor, *,
    return_logps: bool, **options: Unpack[PolicyOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def grpo(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    advantages: Tensor,
    *,
    old_logps: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float | None = None,
    importance: Importance = "token",
    normalize: Normalize = "sequence",
    max_length: int | None = None,
    kl_weight: float = 0.0,
    kl_estimator: Estimator = "k3",
    entropy_weight: float = 0.0,
    temperature: float = 1.0,
    ref_input: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    ref_logps: Tensor | None = None,
    return_logps: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Clipped policy gradients with advantages of sequences: GRPO, DAPO, Dr. GRPO, GSPO.

    With A the advantage, and r = pi(token) / pi_old(token) the importance weight, a token has

        -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + kl_weight * k - entropy_weight * H

    where H is the entropy of its distribution and k estimates the divergence from the reference by
    d = log pi - log ref: k1 = d, k2 = d^2 / 2, k3 = exp(-d) + d - 1 (Schulman 2020, Approximating
    KL Divergence). How tokens are added up, and the papers' choices:

        GRPO      normalize="sequence": the mean over sequences of means over their tokens
                  Shao et al. 2024, DeepSeekMath, equation 3; k3
        DAPO      normalize="token", clip_high=0.28: the sum divided by the number of tokens
                  Yu et al. 2025, DAPO, equation 8; no k
        Dr. GRPO  normalize="length": the sum divided by S times max_length
                  Liu et al. 2025, Understanding R1-Zero-Like Training, section 3.2; no k
        GSPO      importance="sequence": r is (pi(y) / pi_old(y))^(1/|y|) of the whole completion
                  Zheng et al. 2025, Group Sequence Policy Optimization, equations 5 and 7; clips
                  of about 3e-4

    Args:
        input, linear_weight, target: the policy and what it is scored with, (S, T, D), (V, D) and
            (S, T), or packed: see cu_seqlens. Targets of prompts and padding are ignore_index.
        advantages: (S,), or one for every token in the shape of its log-probability.
        old_logps: log-probabilities of the targets when they were sampled, in the shape of the
            tokens' log-probabilities: (S, T), with shift (S, T - 1). None: those of now, so that r
            is 1 and its gradient that of the log-probability.
        clip_low, clip_high: how far r may be from 1; clip_high=None: clip_low.
        importance: "token" or "sequence".
        normalize: "sequence", "token" or "length".
        max_length: of a completion, in tokens; for normalize="length". None: the length of rows.
        kl_weight, kl_estimator: weight of k, and "k1", "k2" or "k3". Gradients are those of the
            estimate as it stands.
        entropy_weight: a bonus for entropy.
        temperature: logits are divided by it, as when sampling; those of the reference too.
        ref_input, ref_weight, ref_bias: the frozen reference's hidden states and head.
        ref_logps: instead, its log-probabilities of the targets, in the shape of old_logps.
        return_logps: return the loss and the log-probabilities of tokens, detached: what the next
            steps on the same samples take as old_logps.
        options: cu_seqlens, shift, and options of `storage_ops.linear_cross_entropy`, as in `dpo`.

    Returns:
        The loss, 0-dimensional, differentiable in input, linear_weight and linear_bias.

    Raises:
        TypeError, ValueError: an argument that is wrong, with its value and what was expected.

    Example:
        >>> hidden, head = torch.randn(4, 9, 16, requires_grad=True), torch.randn(100, 16)
        >>> tokens, advantages = torch.randint(100, (4, 9)), torch.randn(4)
        >>> loss, old = storage_ops.losses.grpo(
        ...     hidden, head, tokens, advantages, shift=True, return_logps=True
        ... )
        >>> dapo = storage_ops.losses.grpo(
        ...     hidden, head, tokens, advantages, old_logps=old, clip_high=0.28, normalize="token",
        ...     shift=True,
        ... )
        >>> dapo.backward()
    """
    check_tensor("grpo", "advantages", advantages)
    choice("grpo", "importance", importance, IMPORTANCES)
    choice("grpo", "normalize", normalize, NORMALIZES)
    choice("grpo", "kl_estimator", kl_estimator, ESTIMATORS)
    within("grpo", "clip_low", clip_low, 0)
    clip_high = clip_low if clip_high is None else clip_high
    within("grpo", "clip_high", clip_high, 0)
    within("grpo", "temperature", temperature, 1e-30)
    number("grpo", "kl_weight", kl_weight)
    number("grpo", "entropy_weight", entropy_weight)
    whole = isinstance(max_length, int) and not isinstance(max_length, bool)
    if max_length is not None and not (whole and max_length >= 1):
        raise wrong("grpo", ValueError, "max_length is", repr(max_length), "None or a count >= 1")
    if "logit_scale" in options:
        raise wrong("grpo", TypeError, "logit_scale", "is given", "temperature, its inverse")
    options["logit_scale"] = 1 / temperature
    reference = None
    if kl_weight:
        reference = reference_logps(
            "grpo", ref_logps, ref_input, ref_weight, ref_bias, target, False, **options
        )
        if reference is None:
            rule = "0, or a reference: ref_input and ref_weight, or ref_logps"
            raise wrong("grpo", ValueError, "kl_weight is", kl_weight, rule)
    scored = score(
        "grpo", input, linear_weight, target, with_entropy=bool(entropy_weight), **options
    )
    logps, shape = scored.logps, tuple(scored.logps.shape)
    check_values("grpo", "old_logps", old_logps, shape, logps)
    check_values("grpo", "ref_logps", reference, shape, logps)
    whole = tuple(advantages.shape) == (scored.sequences,)
    check_values("grpo", "advantages", advantages, (scored.sequences,) if whole else shape, logps)
    if whole:
        advantages = scored.per_token(advantages.to(logps.dtype))
    advantages = advantages.detach()
    old = logps.detach() if old_logps is None else old_logps.detach().to(logps.dtype)
    r = _ratios(scored, logps - old, importance)
    each = -torch.minimum(r * advantages, r.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if reference is not None:
        each = each + kl_weight * _estimate(
            torch.where(scored.mask, logps - reference, 0), kl_estimator
        )
    if scored.entropy is not None:
        each = each - entropy_weight * scored.entropy
    loss = _reduced(scored, torch.where(scored.mask, each, 0), normalize, max_length)
    return (loss, logps.detach()) if return_logps else loss


@overload
def dapo(
    input: Tensor, linear_weight: Tensor, target: Tensor, advantages: Tensor, *,
    return_logps: Literal[False] = False, **options: Unpack[PolicyOptions],
) -> Tensor: ...  # fmt: skip
@overload
def dapo(
    input: Tensor, linear_weight: Tensor, target: Tensor, advantages: Tensor, *,
    return_logps: Literal[True], **options: Unpack[PolicyOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def dapo(
    input: Tensor, linear_weight: Tensor, target: Tensor, advantages: Tensor, *,
    return_logps: bool, **options: Unpack[PolicyOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def dapo(
    input: Tensor, linear_weight: Tensor, target: Tensor, advantages: Tensor, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """`grpo` as DAPO has it: the sum over tokens divided by their number, clips of 0.2 and 0.28.

    Yu et al. 2025, DAPO: An Open-Source LLM Reinforcement Learning System at Scale, equation 8.

    Args:
        input, linear_weight, target, advantages: as in `grpo`.
        options: of `grpo`; those named above can be changed.

    Returns:
        As `grpo`.

    Raises:
        TypeError, ValueError: as `grpo`.

    Example:
        >>> hidden, head = torch.randn(4, 9, 16, requires_grad=True), torch.randn(100, 16)
        >>> tokens, advantages = torch.randint(100, (4, 9)), torch.randn(4)
        >>> storage_ops.losses.dapo(hidden, head, tokens, advantages, shift=True).backward()
    """
    options = {"clip_low": 0.2, "clip_high": 0.28, "normalize": "token", **options}
    result: Tensor | tuple[Tensor, Tensor]
    result = grpo(input, linear_weight, target, advantages, **options)
    return result


@overload
def dr_grpo(
    input: Tensor, linear_weight: Tensor, target: Tensor, advantages: Tensor, *,
    return_logps: Literal[False] = False, **options: Unpack[PolicyOptions],
) -> Tensor: ...  # fmt: skip
@overload
def dr_grpo(
    input: Tensor, linear_weight: Tensor, target: Tensor, advantages: Tensor, *,
    return_logps: Literal[True], **options: Unpack[PolicyOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def dr_grpo(
    input: Tensor, linear_weight: Tensor, target: Tensor, advantages: Tensor, *,
    return_logps: bool, **options: Unpack[PolicyOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def dr_grpo(
    input: Tensor, linear_weight: Tensor, target: Tensor, advantages: Tensor, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """`grpo` as Dr. GRPO has it: the sum over tokens divided by S times max_length.

    Liu et al. 2025, Understanding R1-Zero-Like Training: A Critical Perspective, section 3.2. That
    advantages are not divided by their standard deviation is up to the caller.

    Args:
        input, linear_weight, target, advantages: as in `grpo`.
        options: of `grpo`, such as max_length.

    Returns:
        As `grpo`.

    Raises:
        TypeError, ValueError: as `grpo`.

    Example:
        >>> hidden, head = torch.randn(4, 9, 16, requires_grad=True), torch.randn(100, 16)
        >>> tokens, advantages = torch.randint(100, (4, 9)), torch.randn(4)
        >>> storage_ops.losses.dr_grpo(hidden, head, tokens, advantages, max_length=9).backward()
    """
    options = {"normalize": "length", **options}
    result: Tensor | tuple[Tensor, Tensor]
    result = grpo(input, linear_weight, target, advantages, **options)
    return result


@overload
def gspo(
    input: Tensor, linear_weight: Tensor, target: Tensor, advantages: Tensor, *,
    return_logps: Literal[False] = False, **options: Unpack[PolicyOptions],
) -> Tensor: ...  # fmt: skip
@overload
def gspo(
    input: Tensor, linear_weight: Tensor, target: Tensor, advantages: Tensor, *,
    return_logps: Literal[True], **options: Unpack[PolicyOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def gspo(
    input: Tensor, linear_weight: Tensor, target: Tensor, advantages: Tensor, *,
    return_logps: bool, **options: Unpack[PolicyOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def gspo(
    input: Tensor, linear_weight: Tensor, target: Tensor, advantages: Tensor, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """`grpo` as GSPO has it: importance weights of whole completions, clips of 3e-4 and 4e-4.

    Zheng et al. 2025, Group Sequence Policy Optimization, equations 5 and 7, and section 5.1.

    Args:
        input, linear_weight, target, advantages: as in `grpo`.
        options: of `grpo`; those named above can be changed.

    Returns:
        As `grpo`.

    Raises:
        TypeError, ValueError: as `grpo`.

    Example:
        >>> hidden, head = torch.randn(4, 9, 16, requires_grad=True), torch.randn(100, 16)
        >>> tokens, advantages = torch.randint(100, (4, 9)), torch.randn(4)
        >>> storage_ops.losses.gspo(hidden, head, tokens, advantages, shift=True).backward()
    """
    options = {"clip_low": 3e-4, "clip_high": 4e-4, "importance": "sequence", **options}
    result: Tensor | tuple[Tensor, Tensor]
    result = grpo(input, linear_weight, target, advantages, **options)
    return result


def _ratios(scored: Scored, change: Tensor, importance: str) -> Tensor:
    """Importance weights of tokens, from the change of their log-probabilities."""
    change = torch.where(scored.mask, change, 0)
    if importance == "sequence":
        change = scored.per_token(scored.per_sequence(change) / scored.counts)
    return change.exp()


def _estimate(d: Tensor, estimator: str) -> Tensor:
    """The divergence of a token from d = log pi - log ref."""
    if estimator == "k1":
        return d
    return d.square() / 2 if estimator == "k2" else torch.expm1(-d) + d


def _reduced(scored: Scored, each: Tensor, normalize: str, max_length: int | None) -> Tensor:
    if normalize == "sequence":
        return (scored.per_sequence(each) / scored.counts).mean()
    if normalize == "token":
        return each.sum() / scored.mask.sum().clamp_min(1)
    if max_length is None and scored.of_sequence is not None:
        rule = "a count, for normalize='length' with cu_seqlens"
        raise wrong("grpo", ValueError, "max_length is", None, rule)
    return each.sum() / (scored.sequences * (max_length or each.shape[-1]))
