"""Losses of policies that are trained with rewards."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from storage_ops.loss.call import is_integer
from storage_ops.losses.options import (
    ESTIMATORS,
    IMPORTANCES,
    NORMALIZES,
    POLICY_LOSS_TYPES,
    Estimator,
    Importance,
    Normalize,
    PolicyLossType,
    PolicyOptions,
    typed_as,
)
from storage_ops.losses.sequences import (
    Scored,
    check_choice,
    check_number,
    check_range,
    check_returns,
    check_tensor,
    check_values,
    reference_logps,
    score,
    wrong,
)
from storage_ops.losses.surrogates import SURROGATES, Sampled, clip_ratios


@overload
def grpo(
    input: Tensor, linear_weight: Tensor, target: Tensor, advantages: Tensor, *,
    return_logps: Literal[False] = False, return_metrics: Literal[False] = False,
    **options: Unpack[PolicyOptions],
) -> Tensor: ...  # fmt: skip
@overload
def grpo(
    input: Tensor, linear_weight: Tensor, target: Tensor, advantages: Tensor, *,
    return_logps: Literal[True], return_metrics: Literal[False] = False,
    **options: Unpack[PolicyOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def grpo(
    input: Tensor, linear_weight: Tensor, target: Tensor, advantages: Tensor, *,
    return_logps: Literal[False] = False, return_metrics: Literal[True],
    **options: Unpack[PolicyOptions],
) -> tuple[Tensor, dict[str, Tensor]]: ...  # fmt: skip
@overload
def grpo(
    input: Tensor, linear_weight: Tensor, target: Tensor, advantages: Tensor, *,
    return_logps: bool = False, return_metrics: bool = False,
    **options: Unpack[PolicyOptions],
) -> Tensor | tuple[Tensor, Tensor | dict[str, Tensor]]: ...  # fmt: skip
def grpo(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    advantages: Tensor,
    *,
    old_logps: Tensor | None = None,
    loss_type: PolicyLossType = "grpo",
    clip_low: float = 0.2,
    clip_high: float | None = None,
    delta: float | None = None,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    importance: Importance = "token",
    importance_sampling_ratio: Tensor | None = None,
    normalize: Normalize = "sequence",
    max_length: int | None = None,
    num_items_in_batch: int | float | Tensor | None = None,
    kl_weight: float = 0.0,
    kl_estimator: Estimator = "k3",
    entropy_weight: float = 0.0,
    temperature: float = 1.0,
    ref_input: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    ref_logps: Tensor | None = None,
    return_logps: bool = False,
    return_metrics: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor | dict[str, Tensor]]:
    """Compute a policy-gradient loss: GRPO, DAPO, Dr. GRPO, GSPO, CISPO or SAPO.

    With A the advantage, and r = pi(token) / pi_old(token) the importance weight, a token has

        c f(r) + kl_weight * k - entropy_weight * H

    c is importance_sampling_ratio or 1, and f is one of

        "grpo"   -min(min(r, delta) A, clip(r, 1 - clip_low, 1 + clip_high) A)
                 Shao et al. 2024, DeepSeekMath, equation 3; with delta Prime Intellect 2025,
                 INTELLECT-2, section 3.4, two-sided clipping
        "cispo"  -min(r, 1 + clip_high) A log pi(token), where no gradient flows to the minimum
                 MiniMax 2025, MiniMax-M1, equations 4 and 5, without a lower bound
        "sapo"   -(4 / t) S(t (r - 1)) A, where S is the logistic function, and t is
                 sapo_temperature_pos if A > 0, else sapo_temperature_neg
                 Gao et al. 2025, Soft Adaptive Policy Optimization

    H is the entropy of the token's distribution. With d = log pi - log ref, k estimates the
    divergence from the reference: k1 = d, k2 = d^2 / 2, k3 = exp(-d) + d - 1. (Schulman 2020,
    Approximating KL Divergence.) The papers add up tokens in these ways:

        GRPO      normalize="sequence": the mean over sequences of means over their tokens; k3.
                  SAPO too
        DAPO      normalize="token", clip_high=0.28: the sum divided by the number of tokens
                  Yu et al. 2025, DAPO, equation 8; no k. CISPO too
        Dr. GRPO  normalize="length": the sum divided by S times max_length
                  Liu et al. 2025, Understanding R1-Zero-Like Training, section 3.2; no k
        GSPO      importance="sequence": r is (pi(y) / pi_old(y))^(1/|y|) of the whole completion
                  Zheng et al. 2025, Group Sequence Policy Optimization, equations 5 and 7; clips
                  of about 3e-4

    Args:
        input, linear_weight, target: hidden states (S, T, D), head (V, D) and targets (S, T) of the
            policy, or packed: see cu_seqlens. Targets of prompts and padding are ignore_index.
        advantages: (S,), or one for every token in the shape of its log-probability.
        old_logps: log-probabilities of the targets when they were sampled, in the shape of the
            tokens' log-probabilities: (S, T), with shift (S, T - 1). None: the current ones, so r
            is 1 and its gradient that of the log-probability.
        loss_type: the function f: "grpo", "cispo" or "sapo".
        clip_low, clip_high: how far r may be from 1. clip_high=None means clip_low. "cispo" uses
            only clip_high, as the distance from 1 and not as the bound itself. "sapo" uses neither.
        delta: upper bound of r for "grpo", which matters most for negative advantages. It should be
            more than 1 + clip_high. None: no bound.
        sapo_temperature_pos, sapo_temperature_neg: t, > 0, for "sapo".
        importance: "token" or "sequence".
        importance_sampling_ratio: c, for samples of another engine, whose probabilities differ from
            old_logps. It is exp(old_logps - logps of the engine), clipped or masked as the caller
            likes. (S,), or one for every token. No gradient flows to it.
        normalize: "sequence", "token" or "length".
        max_length: the longest completion in tokens, for normalize="length". None: the length of
            rows.
        num_items_in_batch: for normalize="token": divide by this number of tokens, not by the
            number in this call, for a batch that several calls accumulate. A number or a
            0-dimensional tensor; less than 1 counts as 1. If gradients are averaged over processes,
            divide it by the number of processes.
        kl_weight, kl_estimator: weight of k, and "k1", "k2" or "k3". The gradient is that of the
            estimate.
        entropy_weight: a bonus for entropy.
        temperature: logits are divided by it, as when sampling, and so are the reference's logits.
        ref_input, ref_weight, ref_bias: the frozen reference's hidden states and head.
        ref_logps: instead, its log-probabilities of the targets, in the shape of old_logps.
        return_logps: return the loss and the log-probabilities of tokens, detached. The next steps
            on the same samples take them as old_logps.
        return_metrics: return the loss and a dictionary of detached tensors. "logps" are the
            log-probabilities of tokens, "ref_logps" those of the reference with kl_weight. The
            others are means over tokens: "entropy", and with kl_weight "kl", which is k. Shares of
            clipped tokens are "clip_ratio/low_mean", where r < 1 - clip_low and A < 0, and
            "clip_ratio/high_mean", where r > 1 + clip_high and A > 0. "clip_ratio/region_mean" is
            their sum. "cispo" has only "clip_ratio/high_mean", and "sapo" none of them. The metrics
            need no second pass.
        options: cu_seqlens, shift, and options of `storage_ops.linear_cross_entropy`, as in `dpo`.

    Returns:
        The loss, 0-dimensional, differentiable in input, linear_weight and linear_bias. With
        return_logps or return_metrics a pair of the loss and these.

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
    check_returns("grpo", return_logps, return_metrics)
    check_choice("grpo", "loss_type", loss_type, POLICY_LOSS_TYPES)
    check_choice("grpo", "importance", importance, IMPORTANCES)
    check_choice("grpo", "normalize", normalize, NORMALIZES)
    check_choice("grpo", "kl_estimator", kl_estimator, ESTIMATORS)
    check_range("grpo", "clip_low", clip_low, 0)
    clip_high = clip_low if clip_high is None else clip_high
    check_range("grpo", "clip_high", clip_high, 0)
    check_range("grpo", "sapo_temperature_pos", sapo_temperature_pos)
    check_range("grpo", "sapo_temperature_neg", sapo_temperature_neg)
    check_range("grpo", "temperature", temperature)
    check_number("grpo", "kl_weight", kl_weight)
    check_number("grpo", "entropy_weight", entropy_weight)
    if delta is not None:
        check_range("grpo", "delta", delta)
        if loss_type != "grpo":
            raise wrong("grpo", ValueError, "delta is", delta, f"None with loss_type={loss_type!r}")
    if num_items_in_batch is not None:
        _check_items(num_items_in_batch, normalize)
    if max_length is not None and not (is_integer(max_length) and max_length >= 1):
        raise wrong("grpo", ValueError, "max_length is", repr(max_length), "None or a count >= 1")
    if "logit_scale" in options:
        raise wrong("grpo", TypeError, "logit_scale", "is given", "`temperature`, its inverse")
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
        "grpo",
        input,
        linear_weight,
        target,
        with_entropy=bool(entropy_weight) or return_metrics,
        **options,
    )
    logps, shape = scored.logps, tuple(scored.logps.shape)
    check_values("grpo", "old_logps", old_logps, shape, logps)
    check_values("grpo", "ref_logps", reference, shape, logps)
    old = logps.detach() if old_logps is None else old_logps.detach().to(logps.dtype)
    ratios = _ratios(scored, logps - old, importance)
    advantages = _of_tokens(scored, "advantages", advantages)
    sampled = Sampled(
        ratios, logps, advantages, clip_low, clip_high, delta, sapo_temperature_pos,
        sapo_temperature_neg,
    )  # fmt: skip
    token_losses = SURROGATES[loss_type](sampled)
    if importance_sampling_ratio is not None:
        token_losses = token_losses * _of_tokens(
            scored, "importance_sampling_ratio", importance_sampling_ratio
        )
    kl = None
    if reference is not None:
        kl = _estimate(torch.where(scored.mask, logps - reference, 0), kl_estimator)
        token_losses = token_losses + kl_weight * kl
    if scored.entropy is not None and entropy_weight:
        token_losses = token_losses - entropy_weight * scored.entropy
    loss = _reduced(
        scored, torch.where(scored.mask, token_losses, 0), normalize, max_length, num_items_in_batch
    )
    if return_metrics:
        metrics = {"entropy": scored.entropy, "kl": kl, **clip_ratios(sampled, loss_type)}
        means = {
            name: _mean(scored, token_losses)
            for name, token_losses in metrics.items()
            if token_losses is not None
        }
        frozen = {} if reference is None else {"ref_logps": reference}
        return loss, {"logps": logps.detach(), **frozen, **means}
    return (loss, logps.detach()) if return_logps else loss


@typed_as(grpo)
def dapo(
    input: Tensor, linear_weight: Tensor, target: Tensor, advantages: Tensor, **options: Any
) -> Tensor | tuple[Tensor, Tensor | dict[str, Tensor]]:
    """Compute the loss of `grpo` with the choices of DAPO: mean over tokens, clips 0.2 and 0.28.

    Yu et al. 2025, DAPO: An Open-Source LLM Reinforcement Learning System at Scale, equation 8.

    Args:
        input, linear_weight, target, advantages: as in `grpo`.
        options: options of `grpo`, including those that DAPO sets.

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
    result: Tensor | tuple[Tensor, Tensor | dict[str, Tensor]]
    result = grpo(input, linear_weight, target, advantages, **options)
    return result


@typed_as(grpo)
def dr_grpo(
    input: Tensor, linear_weight: Tensor, target: Tensor, advantages: Tensor, **options: Any
) -> Tensor | tuple[Tensor, Tensor | dict[str, Tensor]]:
    """Compute the loss of `grpo` with the choice of Dr. GRPO: the sum over S times max_length.

    Liu et al. 2025, Understanding R1-Zero-Like Training: A Critical Perspective, section 3.2. The
    caller decides whether to divide advantages by their standard deviation. The paper does not.

    Args:
        input, linear_weight, target, advantages: as in `grpo`.
        options: options of `grpo`, such as max_length.

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
    result: Tensor | tuple[Tensor, Tensor | dict[str, Tensor]]
    result = grpo(input, linear_weight, target, advantages, **options)
    return result


@typed_as(grpo)
def gspo(
    input: Tensor, linear_weight: Tensor, target: Tensor, advantages: Tensor, **options: Any
) -> Tensor | tuple[Tensor, Tensor | dict[str, Tensor]]:
    """Compute the loss of `grpo` with the choices of GSPO.

    Importance weights are those of whole completions, with clips of 3e-4 and 4e-4. Zheng et al.
    2025, Group Sequence Policy Optimization, equations 5 and 7, and section 5.1.

    Args:
        input, linear_weight, target, advantages: as in `grpo`.
        options: options of `grpo`, including those that GSPO sets.

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
    result: Tensor | tuple[Tensor, Tensor | dict[str, Tensor]]
    result = grpo(input, linear_weight, target, advantages, **options)
    return result


def _check_items(count: object, normalize: str) -> None:
    """Raise a TypeError or ValueError unless `count` is a number and `normalize` divides by it."""
    if normalize != "token":
        rule = f"None with normalize={normalize!r}"
        raise wrong("grpo", ValueError, "num_items_in_batch", "is given", rule)
    if isinstance(count, Tensor):
        check_values("grpo", "num_items_in_batch", count, (), None)
    else:
        check_number("grpo", "num_items_in_batch", count)


def _of_tokens(scored: Scored, argument: str, value: Tensor) -> Tensor:
    """Return per-sequence or per-token values for every token, without gradient; 0 if ignored."""
    logps, shape = scored.logps, tuple(getattr(value, "shape", ()))
    of_sequences, of_tokens = (scored.sequences,), tuple(logps.shape)
    if isinstance(value, Tensor) and shape not in (of_sequences, of_tokens):
        rule = f"{of_sequences}, one for each sequence, or {of_tokens}, one for each token"
        raise wrong("grpo", ValueError, f"{argument} has shape", shape, rule)
    check_values("grpo", argument, value, shape, logps)
    value = value.detach().to(logps.dtype)
    value = scored.per_token(value) if shape == of_sequences else value
    return torch.where(scored.mask, value, 0)


def _ratios(scored: Scored, change: Tensor, importance: str) -> Tensor:
    """Return the importance weights of tokens from the change of their log-probabilities."""
    change = torch.where(scored.mask, change, 0)
    if importance == "sequence":
        change = scored.per_token(scored.per_sequence(change) / scored.counts)
    return change.exp()


def _estimate(d: Tensor, estimator: str) -> Tensor:
    """Return the estimated divergence of a token from d = log pi - log ref."""
    if estimator == "k1":
        return d
    return d.square() / 2 if estimator == "k2" else torch.expm1(-d) + d


def _mean(scored: Scored, values: Tensor) -> Tensor:
    """Return the mean of values of tokens over all completions, detached."""
    kept = torch.where(scored.mask, values.detach(), 0)
    return kept.sum() / scored.mask.sum().clamp_min(1)


def _reduced(
    scored: Scored,
    token_losses: Tensor,
    normalize: str,
    max_length: int | None,
    num_items_in_batch: int | float | Tensor | None,
) -> Tensor:
    if normalize == "sequence":
        return (scored.per_sequence(token_losses) / scored.counts).mean()
    if normalize == "token":
        count = scored.mask.sum() if num_items_in_batch is None else num_items_in_batch
        count = torch.as_tensor(
            count, dtype=token_losses.dtype, device=token_losses.device
        ).detach()
        return token_losses.sum() / count.clamp_min(1)
    if max_length is None and scored.of_sequence is not None:
        rule = "a count, for normalize='length' with cu_seqlens"
        raise wrong("grpo", ValueError, "max_length is", None, rule)
    return token_losses.sum() / (scored.sequences * (max_length or token_losses.shape[-1]))
