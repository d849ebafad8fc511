"""Losses of pairs of sequences with a preferred one, without a reference."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import Unpack

from storage_ops.loss.call import count_of
from storage_ops.loss.checks import class_indices
from storage_ops.losses.options import ContrastiveOptions, MarginOptions, OddsOptions
from storage_ops.losses.pairs import halves, metrics_of_pairs, nll_of_chosen, smoothed
from storage_ops.losses.sequences import (
    IGNORED,
    check_flag,
    check_indices,
    check_number,
    check_range,
    check_returns,
    check_smoothing,
    check_values,
    score,
    separated,
    whole,
)


@overload
def orpo(
    input: Tensor, linear_weight: Tensor, target: Tensor, *,
    return_metrics: Literal[False] = False, **options: Unpack[OddsOptions],
) -> Tensor: ...  # fmt: skip
@overload
def orpo(
    input: Tensor, linear_weight: Tensor, target: Tensor, *,
    return_metrics: Literal[True], **options: Unpack[OddsOptions],
) -> tuple[Tensor, dict[str, Tensor]]: ...  # fmt: skip
@overload
def orpo(
    input: Tensor, linear_weight: Tensor, target: Tensor, *,
    return_metrics: bool, **options: Unpack[OddsOptions],
) -> Tensor | tuple[Tensor, dict[str, Tensor]]: ...  # fmt: skip
def orpo(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    beta: float = 0.1,
    nll_target: Tensor | None = None,
    return_metrics: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
    """Compute the loss of odds ratio preference optimisation.

    It adds supervised learning of the chosen completions and a ratio of odds. P(y) =
    exp(log pi(y) / |y|) is the geometric mean of the probabilities of a completion's tokens, and
    odds(y) = P(y) / (1 - P(y)). The loss is the mean nll of the tokens of the chosen completions,
    plus the mean over pairs of

        -beta log sigmoid(log odds(y_w) - log odds(y_l))

    Hong et al. 2024, ORPO, equations 6 and 7, where beta is called lambda. There is no reference.

    Args:
        input, linear_weight, target, options: as in `dpo`.
        beta: weight of the ratio of odds.
        nll_target: other targets for the nll, in the shape of target. The authors' code includes
            the prompts here. Only the chosen half counts. Both targets of a token are scored in one
            pass.
        return_metrics: return the loss and a dictionary: the metrics of `dpo`, with
            beta log P(y) as rewards, and "nll_loss". "log_odds_chosen" is the mean of
            log odds(y_w) - log odds(y_l), and "log_odds_ratio" the mean of its log sigmoid.

    Returns:
        The loss, 0-dimensional, or the loss and the metrics.

    Example:
        >>> hidden, head = torch.randn(4, 9, 16, requires_grad=True), torch.randn(100, 16)
        >>> loss = storage_ops.losses.orpo(hidden, head, torch.randint(100, (4, 9)), shift=True)
        >>> loss.backward()
    """
    check_range("orpo", "beta", beta, 0)
    check_returns("orpo", False, return_metrics)
    if nll_target is not None:
        nll_target = _of_chosen(nll_target, target, **options)
    scored = score("orpo", input, linear_weight, target, second_target=nll_target, **options)
    logps = scored.per_sequence(scored.logps)
    mean = logps / scored.counts
    tiny = torch.finfo(mean.dtype).tiny
    chosen, rejected = halves("orpo", mean - (-torch.expm1(mean)).clamp_min(tiny).log())
    odds, nll = chosen - rejected, nll_of_chosen(scored)
    ratio = F.logsigmoid(odds).mean()
    loss = nll - beta * ratio
    if not return_metrics:
        return loss
    more = {"nll_loss": nll, "log_odds_chosen": odds.mean(), "log_odds_ratio": ratio}
    return loss, metrics_of_pairs("orpo", logps, beta * mean, **more)


@overload
def simpo(
    input: Tensor, linear_weight: Tensor, target: Tensor, *,
    return_metrics: Literal[False] = False, **options: Unpack[MarginOptions],
) -> Tensor: ...  # fmt: skip
@overload
def simpo(
    input: Tensor, linear_weight: Tensor, target: Tensor, *,
    return_metrics: Literal[True], **options: Unpack[MarginOptions],
) -> tuple[Tensor, dict[str, Tensor]]: ...  # fmt: skip
@overload
def simpo(
    input: Tensor, linear_weight: Tensor, target: Tensor, *,
    return_metrics: bool, **options: Unpack[MarginOptions],
) -> Tensor | tuple[Tensor, dict[str, Tensor]]: ...  # fmt: skip
def simpo(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    beta: float = 2.0,
    gamma: float = 0.5,
    label_smoothing: float = 0.0,
    return_metrics: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
    """Compute the loss of simple preference optimisation.

    Rewards are mean log-probabilities, with a margin. The loss is the mean over pairs of

        -log sigmoid(beta / |y_w| log pi(y_w) - beta / |y_l| log pi(y_l) - gamma)

    Meng et al. 2024, SimPO, equation 6. There is no reference.

    Args:
        input, linear_weight, target, options: as in `dpo`.
        beta: scale of the rewards, > 0.
        gamma: the margin between the rewards of the chosen and the rejected completion.
        label_smoothing: as in `dpo`.
        return_metrics: return the loss and a dictionary: the metrics of `dpo`, with
            beta / |y| log pi(y) as rewards.

    Returns:
        The loss, 0-dimensional, or the loss and the metrics.

    Example:
        >>> hidden, head = torch.randn(4, 9, 16, requires_grad=True), torch.randn(100, 16)
        >>> loss = storage_ops.losses.simpo(hidden, head, torch.randint(100, (4, 9)), shift=True)
        >>> loss.backward()
    """
    check_range("simpo", "beta", beta)
    check_number("simpo", "gamma", gamma)
    check_smoothing("simpo", label_smoothing)
    check_returns("simpo", False, return_metrics)
    scored = score("simpo", input, linear_weight, target, **options)
    logps = scored.per_sequence(scored.logps)
    rewards = beta * logps / scored.counts
    chosen, rejected = halves("simpo", rewards)
    loss = smoothed(chosen - rejected - gamma, label_smoothing).mean()
    return (loss, metrics_of_pairs("simpo", logps, rewards)) if return_metrics else loss


@overload
def cpo(
    input: Tensor, linear_weight: Tensor, target: Tensor, *,
    return_metrics: Literal[False] = False, **options: Unpack[ContrastiveOptions],
) -> Tensor: ...  # fmt: skip
@overload
def cpo(
    input: Tensor, linear_weight: Tensor, target: Tensor, *,
    return_metrics: Literal[True], **options: Unpack[ContrastiveOptions],
) -> tuple[Tensor, dict[str, Tensor]]: ...  # fmt: skip
@overload
def cpo(
    input: Tensor, linear_weight: Tensor, target: Tensor, *,
    return_metrics: bool, **options: Unpack[ContrastiveOptions],
) -> Tensor | tuple[Tensor, dict[str, Tensor]]: ...  # fmt: skip
def cpo(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    beta: float = 0.1,
    alpha: float = 1.0,
    label_smoothing: float = 0.0,
    length_normalize: bool = False,
    return_metrics: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
    """Compute the loss of contrastive preference optimisation.

    It is DPO with a uniform reference, plus alpha times the mean nll of the tokens of the chosen
    completions. The first term is the mean over pairs of -log sigmoid(beta log pi(y_w) - beta log
    pi(y_l)). Xu et al. 2024, Contrastive Preference Optimization, equations 3 to 6.

    Args:
        input, linear_weight, target, options: as in `dpo`.
        beta: scale of the log-probabilities, > 0.
        alpha: weight of the nll.
        label_smoothing: as in `dpo`.
        length_normalize: divide the log-probability of a completion by its number of tokens. The
            paper does not.
        return_metrics: return the loss and a dictionary: the metrics of `dpo`, with beta log pi(y)
            as rewards, and "nll_loss" unless alpha is 0.

    Returns:
        The loss, 0-dimensional, or the loss and the metrics.

    Example:
        >>> hidden, head = torch.randn(4, 9, 16, requires_grad=True), torch.randn(100, 16)
        >>> loss = storage_ops.losses.cpo(hidden, head, torch.randint(100, (4, 9)), shift=True)
        >>> loss.backward()
    """
    check_range("cpo", "beta", beta)
    check_range("cpo", "alpha", alpha, 0)
    check_smoothing("cpo", label_smoothing)
    check_flag("cpo", "length_normalize", length_normalize)
    check_returns("cpo", False, return_metrics)
    scored = score("cpo", input, linear_weight, target, **options)
    logps = scored.per_sequence(scored.logps)
    rewards = beta * (logps / scored.counts if length_normalize else logps)
    chosen, rejected = halves("cpo", rewards)
    loss, nll = smoothed(chosen - rejected, label_smoothing).mean(), None
    if alpha:
        nll = nll_of_chosen(scored)
        loss = loss + alpha * nll
    return (loss, metrics_of_pairs("cpo", logps, rewards, nll_loss=nll)) if return_metrics else loss


def _of_chosen(
    nll_target: Tensor,
    target: Tensor,
    cu_seqlens: Tensor | None = None,
    ignore_index: int = IGNORED,
    **options: Any,
) -> Tensor:
    """Return the targets of the nll, in which rejected sequences are ignored."""
    check_indices("orpo", "target", target)
    check_indices("orpo", "nll_target", nll_target)
    check_values("orpo", "nll_target", nll_target, tuple(target.shape), target)
    separated("orpo", target, cu_seqlens, False, ignore_index)  # checks the arguments
    if cu_seqlens is None:
        rows = torch.arange(count_of(target.shape[:-1]), device=target.device)
        rejected = (rows >= rows.shape[0] // 2).view(*target.shape[:-1], 1)
    else:
        places = torch.arange(target.shape[-1], device=target.device)
        rejected = places >= cu_seqlens[(cu_seqlens.shape[0] - 1) // 2]
    return whole(class_indices(nll_target)).masked_fill(rejected, ignore_index)
