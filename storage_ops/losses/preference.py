"""Losses of sequences with a reference: pairs with a preferred one, and judged sequences."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from storage_ops.losses.options import LOSS_TYPES, JudgedOptions, LossType, PreferenceOptions
from storage_ops.losses.pairs import (
    FORMULAS,
    SMOOTHED,
    Pairs,
    halves,
    metrics_of_pairs,
    nll_of_chosen,
)
from storage_ops.losses.sequences import (
    check_choice,
    check_flag,
    check_number,
    check_range,
    check_returns,
    check_smoothing,
    check_tensor,
    check_values,
    reference_logps,
    score,
    wrong,
)


@overload
def dpo(
    input: Tensor, linear_weight: Tensor, target: Tensor, *,
    return_logps: Literal[False] = False, return_metrics: Literal[False] = False,
    **options: Unpack[PreferenceOptions],
) -> Tensor: ...  # fmt: skip
@overload
def dpo(
    input: Tensor, linear_weight: Tensor, target: Tensor, *,
    return_logps: Literal[True], return_metrics: Literal[False] = False,
    **options: Unpack[PreferenceOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def dpo(
    input: Tensor, linear_weight: Tensor, target: Tensor, *,
    return_logps: Literal[False] = False, return_metrics: Literal[True],
    **options: Unpack[PreferenceOptions],
) -> tuple[Tensor, dict[str, Tensor]]: ...  # fmt: skip
@overload
def dpo(
    input: Tensor, linear_weight: Tensor, target: Tensor, *,
    return_logps: bool = False, return_metrics: bool = False,
    **options: Unpack[PreferenceOptions],
) -> Tensor | tuple[Tensor, Tensor | dict[str, Tensor]]: ...  # fmt: skip
def dpo(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    beta: float = 0.1,
    loss_type: LossType = "sigmoid",
    label_smoothing: float = 0.0,
    discopop_tau: float = 0.05,
    rpo_alpha: float = 0.0,
    length_normalize: bool = False,
    ref_input: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    ref_logps: Tensor | None = None,
    return_logps: bool = False,
    return_metrics: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor | dict[str, Tensor]]:
    """Compute the loss of direct preference optimisation, or a loss of its kind.

    A chosen completion has the log-ratio w = log pi(y_w) - log ref(y_w), a rejected one
    l = log pi(y_l) - log ref(y_l). With h = w - l, e the label smoothing and S the logistic
    function, the loss is the mean over pairs of

        "sigmoid"       -(1 - e) log S(beta h) - e log S(-beta h)
                        Rafailov et al. 2023, Direct Preference Optimization, equation 7; e > 0:
                        Mitchell 2023, A note on DPO with noisy preferences
        "hinge"         max(0, 1 - beta h)
                        Liu et al. 2023, Statistical Rejection Sampling (RSO)
        "ipo"           (h - 1 / (2 beta))^2
                        Azar et al. 2023, A General Theoretical Paradigm (IPO), equation 17
        "robust"        (-(1 - e) log S(beta h) + e log S(-beta h)) / (1 - 2 e)
                        Chowdhury et al. 2024, Provably Robust DPO
        "exo_pair"      q log(q / (1 - e)) + (1 - q) log((1 - q) / e), with q = S(beta h) and e > 0
                        Ji et al. 2024, Towards Efficient Exact Optimization (EXO), equation 16
        "nca_pair"      -log S(beta w) - log S(-beta w) / 2 - log S(-beta l) / 2
                        Chen et al. 2024, Noise Contrastive Alignment
        "bco_pair"      -log S(beta w) - log S(-beta l)
                        Jung et al. 2024, Binary Classifier Optimization, with a shift of 0
        "sppo_hard"     (w - 1 / (2 beta))^2 + (l + 1 / (2 beta))^2
                        Wu et al. 2024, Self-Play Preference Optimization, equation 4.7, where the
                        chosen completion wins with probability 1 and 1 / beta is called eta
        "aot"           "sigmoid" of h = u - v, where u are the B margins log pi(y_w) - log pi(y_l)
                        in ascending order, and v those of the reference in theirs
        "aot_unpaired"  "sigmoid" of h = w - l, the B values of w and of l in ascending order
                        Melnyk et al. 2024, Distributional Preference Alignment via Optimal
                        Transport (AOT)
        "apo_zero"      S(-beta w) + S(beta l)
        "apo_down"      S(beta w) + S(-beta h)
                        D'Oosterlinck et al. 2024, Anchored Preference Optimization, equations 7
                        and 8, plus a constant
        "discopop"      -(1 - m) log S(beta h) + m exp(-beta h), with m = S(beta h / discopop_tau)
                        Lu et al. 2024, Discovering Preference Optimization Algorithms, equation 5

    Args:
        input, linear_weight, target: hidden states (2 B, T, D), head (V, D) and targets (2 B, T) of
            the policy: B chosen sequences, then the B rejected ones. Or packed: see cu_seqlens.
        beta: strength of the tie to the reference, > 0.
        loss_type: a name of the table.
        label_smoothing: e, from 0 to below 0.5, for the formulas that have it. "exo_pair" needs
            more than 0; its paper takes 1e-3.
        discopop_tau: temperature of "discopop", > 0.
        rpo_alpha: weight of the nll of the chosen completions, which is added to the loss (Pang et
            al. 2024, Iterative Reasoning Preference Optimization). The nll is a mean over all
            tokens of the chosen completions.
        length_normalize: divide log-probabilities of a completion by its number of tokens, as some
            implementations of "ipo" do. The papers do not.
        ref_input, ref_weight, ref_bias: the frozen reference: hidden states (2 B, T, E) and a head
            (V, E) of a hidden size of its own; no gradient flows to them.
        ref_logps: (2 B,), instead of the reference: log-probabilities of the completions, sums over
            tokens. With neither, all completions are equally probable under the reference.
        return_logps: return the loss and the policy's log-probabilities (2 B,), detached.
        return_metrics: return the loss and a dictionary of detached tensors. "logps" (2 B,) are the
            policy's log-probabilities, sums over tokens, "ref_logps" those of the reference if
            there is one, "rewards" beta w and beta l. "logps/chosen", "logps/rejected",
            "rewards/chosen", "rewards/rejected" and "rewards/margins" are means over pairs.
            "rewards/accuracies" is the share of pairs in which the chosen completion has the larger
            reward. "nll_loss" exists with rpo_alpha. The metrics need no second pass.
        options: cu_seqlens (2 B + 1,) has the bounds of packed sequences in input (N, D). Tokens
            after the last bound are padding. Others are shift, and options of
            `storage_ops.linear_cross_entropy` such as linear_bias, softcap, ignore_index and
            memory_budget. They apply to the reference, too.

    Returns:
        The loss, 0-dimensional, differentiable in input, linear_weight and linear_bias. With
        return_logps or return_metrics a pair of the loss and these.

    Raises:
        TypeError, ValueError: an argument that is wrong, with its value and what was expected.

    Example:
        >>> hidden, head = torch.randn(4, 9, 16, requires_grad=True), torch.randn(100, 16)
        >>> frozen, tokens = torch.randn(4, 9, 16), torch.randint(100, (4, 9))
        >>> loss = storage_ops.losses.dpo(
        ...     hidden, head, tokens, ref_input=frozen, ref_weight=head, shift=True
        ... )
        >>> loss.backward()
    """
    check_choice("dpo", "loss_type", loss_type, LOSS_TYPES)
    check_flag("dpo", "length_normalize", length_normalize)
    check_returns("dpo", return_logps, return_metrics)
    check_range("dpo", "beta", beta)
    check_smoothing("dpo", label_smoothing)
    check_range("dpo", "discopop_tau", discopop_tau)
    check_range("dpo", "rpo_alpha", rpo_alpha, 0)
    if label_smoothing and loss_type not in SMOOTHED:
        rule = f"0 with loss_type={loss_type!r}"
        raise wrong("dpo", ValueError, "label_smoothing is", label_smoothing, rule)
    if loss_type == "exo_pair" and not label_smoothing:
        rule = "more than 0 with loss_type='exo_pair', such as 1e-3"
        raise wrong("dpo", ValueError, "label_smoothing is", label_smoothing, rule)
    # The reference comes first, because the policy's call keeps logits for its backward.
    reference = reference_logps(
        "dpo", ref_logps, ref_input, ref_weight, ref_bias, target, True, **options
    )
    scored = score("dpo", input, linear_weight, target, **options)
    logps = scored.per_sequence(scored.logps)
    check_values("dpo", "ref_logps", reference, tuple(logps.shape), logps)
    ours, frozen = logps, torch.zeros_like(logps) if reference is None else reference.to(logps)
    if length_normalize:
        ours, frozen = ours / scored.counts, frozen / scored.counts
    (chosen, rejected), (good, bad) = halves("dpo", ours), halves("dpo", frozen)
    pairs = Pairs(
        chosen - good, rejected - bad, chosen - rejected, good - bad, beta, label_smoothing,
        discopop_tau,
    )  # fmt: skip
    loss, nll = FORMULAS[loss_type](pairs).mean(), None
    if rpo_alpha:
        nll = nll_of_chosen(scored)
        loss = loss + rpo_alpha * nll
    if return_metrics:
        rewards = beta * (ours - frozen)
        return loss, metrics_of_pairs("dpo", logps, rewards, ref_logps=reference, nll_loss=nll)
    return (loss, logps.detach()) if return_logps else loss


@overload
def kto(
    input: Tensor, linear_weight: Tensor, target: Tensor, desirable: Tensor, *,
    return_metrics: Literal[False] = False, **options: Unpack[JudgedOptions],
) -> Tensor: ...  # fmt: skip
@overload
def kto(
    input: Tensor, linear_weight: Tensor, target: Tensor, desirable: Tensor, *,
    return_metrics: Literal[True], **options: Unpack[JudgedOptions],
) -> tuple[Tensor, dict[str, Tensor]]: ...  # fmt: skip
@overload
def kto(
    input: Tensor, linear_weight: Tensor, target: Tensor, desirable: Tensor, *,
    return_metrics: bool, **options: Unpack[JudgedOptions],
) -> Tensor | tuple[Tensor, dict[str, Tensor]]: ...  # fmt: skip
def kto(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    desirable: Tensor,
    *,
    beta: float = 0.1,
    kl: Tensor | float = 0.0,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    length_normalize: bool = False,
    ref_input: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    ref_logps: Tensor | None = None,
    return_metrics: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
    """Compute the loss of Kahneman-Tversky optimisation.

    Sequences are judged one by one, not in pairs. With r = log pi(y) - log ref(y), the loss is the
    mean over sequences of

        w_d (1 - sigmoid(beta (r - z)))    of a desirable completion
        w_u (1 - sigmoid(beta (z - r)))    of an undesirable one

    Ethayarajh et al. 2024, KTO, equation 8, but for a constant that does not depend on the policy.
    With kl=0 it is APO-zero for sequences without pairs.

    Args:
        input, linear_weight, target: hidden states (S, T, D), head (V, D) and targets (S, T) of the
            policy, or packed.
        desirable: (S,) bool.
        beta: scale of the rewards, > 0.
        kl: z, the divergence of the policy from the reference, a number or a 0-dimensional tensor;
            no gradient flows to it, and less than 0 counts as 0. The paper estimates it as the mean
            of r over completions that belong to other prompts of the batch.
        desirable_weight, undesirable_weight: w_d and w_u.
        length_normalize: divide r by the number of tokens. The paper does not.
        return_metrics: return the loss and a dictionary of detached tensors. "logps", "rewards"
            (beta r) and "ref_logps" are (S,). "logps/chosen" and "rewards/chosen" are means over
            desirable completions, "logps/rejected" and "rewards/rejected" over undesirable ones
            (nan if there are none). "rewards/margins" is the difference of these rewards. "kl" is
            z.
        ref_input, ref_weight, ref_bias, ref_logps, options: as in `dpo`, for S sequences.

    Returns:
        The loss, 0-dimensional, or the loss and the metrics.

    Example:
        >>> hidden, head = torch.randn(3, 9, 16, requires_grad=True), torch.randn(100, 16)
        >>> judged = torch.tensor([True, False, True])
        >>> loss = storage_ops.losses.kto(
        ...     hidden, head, torch.randint(100, (3, 9)), judged, ref_logps=torch.zeros(3) - 40
        ... )
        >>> loss.backward()
    """
    check_range("kto", "beta", beta)
    check_range("kto", "desirable_weight", desirable_weight, 0)
    check_range("kto", "undesirable_weight", undesirable_weight, 0)
    check_tensor("kto", "desirable", desirable)
    check_flag("kto", "length_normalize", length_normalize)
    check_returns("kto", False, return_metrics)
    if not isinstance(kl, Tensor):
        check_number("kto", "kl", kl)
    reference = reference_logps(
        "kto", ref_logps, ref_input, ref_weight, ref_bias, target, True, **options
    )
    scored = score("kto", input, linear_weight, target, **options)
    logps = scored.per_sequence(scored.logps)
    check_values("kto", "desirable", desirable, tuple(logps.shape), logps, True)
    check_values("kto", "ref_logps", reference, tuple(logps.shape), logps)
    ratios = logps if reference is None else logps - reference
    ratios = ratios / scored.counts if length_normalize else ratios
    z = torch.as_tensor(kl, dtype=ratios.dtype, device=ratios.device).detach().clamp_min(0)
    check_values("kto", "kl", z, (), ratios)
    good = desirable.to(ratios.dtype)
    weight = desirable_weight * good + undesirable_weight * (1 - good)
    loss = (weight * torch.sigmoid(beta * (1 - 2 * good) * (ratios - z))).mean()
    if not return_metrics:
        return loss
    metrics = {"logps": logps.detach(), "rewards": beta * ratios.detach()}
    for name, values in tuple(metrics.items()):
        for end, judged in (("chosen", desirable), ("rejected", ~desirable)):
            metrics[f"{name}/{end}"] = torch.where(judged, values, 0).sum() / judged.sum()
    metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    return loss, metrics | {"kl": z} | ({} if reference is None else {"ref_logps": reference})
