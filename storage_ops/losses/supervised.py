"""Losses of targets, and losses of a teacher."""

from __future__ import annotations

import functools
import inspect
from typing import Any, Literal, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from storage_ops.divergence.api import linear_kl_div
from storage_ops.divergence.checks import RULES
from storage_ops.loss.api import linear_cross_entropy
from storage_ops.loss.call import is_number
from storage_ops.loss.checks import check_rules
from storage_ops.losses.options import KdOptions, SftOptions
from storage_ops.losses.sequences import IGNORED, check_returns, separated, whole, wrong

_OF_TOKENS = "nll", "entropy", "correct"  # results per token that the metrics need
# With a smaller weight of the teacher, the relative weight of the targets may overflow.
_LEAST = 1e-6
_DEFAULTS = {p.name: p.default for p in inspect.signature(linear_kl_div).parameters.values()}


@overload
def sft(
    input: Tensor, linear_weight: Tensor, target: Tensor, *,
    return_metrics: Literal[False] = False, **options: Unpack[SftOptions],
) -> Tensor: ...  # fmt: skip
@overload
def sft(
    input: Tensor, linear_weight: Tensor, target: Tensor, *,
    return_metrics: Literal[True], **options: Unpack[SftOptions],
) -> tuple[Tensor, dict[str, Tensor]]: ...  # fmt: skip
@overload
def sft(
    input: Tensor, linear_weight: Tensor, target: Tensor, *,
    return_metrics: bool, **options: Unpack[SftOptions],
) -> Tensor | tuple[Tensor, dict[str, Tensor]]: ...  # fmt: skip
def sft(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    token_weight: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    shift: bool = False,
    ignore_index: int = IGNORED,
    return_metrics: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
    """Compute the loss of supervised fine-tuning: the mean nll of the targets, weighted by tokens.

        sum_i a_i (-log pi(target_i)) / sum_i a_i

    over the tokens that are not ignored. This is `storage_ops.linear_cross_entropy` for packed
    sequences, which do not predict the first token of the next one.

    Args:
        input, linear_weight, target: (..., D), (V, D) and (...); packed (N, D) or (1, N, D).
        token_weight: the weights a, in the shape of target. None: 1 for all tokens.
        cu_seqlens: (S + 1,) bounds of packed sequences.
        shift: the token at position i is scored with target i + 1.
        ignore_index: the target of tokens without a loss.
        return_metrics: return the loss and a dictionary of detached tensors. "logps" is the
            log-probability of each target, 0 where it is ignored. "nll_loss", "entropy" and
            "mean_token_accuracy" are means over the tokens that are not ignored. The backward then
            computes the logits again.
        options: options of `storage_ops.linear_cross_entropy`, such as reduction.

    Returns:
        The loss: 0-dimensional, unless reduction="none". With return_metrics the loss and the
        metrics.

    Example:
        >>> hidden, head = torch.randn(9, 16, requires_grad=True), torch.randn(100, 16)
        >>> loss = storage_ops.losses.sft(
        ...     hidden, head, torch.randint(100, (9,)), cu_seqlens=torch.tensor([0, 4, 9]),
        ...     shift=True,
        ... )
        >>> loss.backward()
    """
    if "returns" in options:
        raise wrong(
            "sft",
            TypeError,
            "returns",
            "is given",
            "storage_ops.linear_cross_entropy for results per token",
        )
    check_returns("sft", False, return_metrics)
    target = separated("sft", target, cu_seqlens, shift, ignore_index)
    call = functools.partial(
        linear_cross_entropy, input, linear_weight, target, token_weight=token_weight, shift=shift,
        ignore_index=ignore_index, **options,
    )  # fmt: skip
    if not return_metrics:
        return call()
    loss, *values = map(whole, call(returns=("loss", *_OF_TOKENS)))
    return loss, _metrics(target[..., int(shift) :] != ignore_index, *values)


@overload
def kd(
    input: Tensor, linear_weight: Tensor, teacher_input: Tensor | None,
    teacher_weight: Tensor | None, target: Tensor, *,
    return_metrics: Literal[False] = False, **options: Unpack[KdOptions],
) -> Tensor: ...  # fmt: skip
@overload
def kd(
    input: Tensor, linear_weight: Tensor, teacher_input: Tensor | None,
    teacher_weight: Tensor | None, target: Tensor, *,
    return_metrics: Literal[True], **options: Unpack[KdOptions],
) -> tuple[Tensor, dict[str, Tensor]]: ...  # fmt: skip
@overload
def kd(
    input: Tensor, linear_weight: Tensor, teacher_input: Tensor | None,
    teacher_weight: Tensor | None, target: Tensor, *,
    return_metrics: bool, **options: Unpack[KdOptions],
) -> Tensor | tuple[Tensor, dict[str, Tensor]]: ...  # fmt: skip
def kd(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor | None,
    teacher_weight: Tensor | None,
    target: Tensor,
    *,
    alpha: float = 0.5,
    temperature: float = 1.0,
    linear_bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    shift: bool = False,
    ignore_index: int = IGNORED,
    memory_budget: int | float | str | None = None,
    return_metrics: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
    """Compute the loss of knowledge distillation: a teacher's distributions and the targets.

        alpha T^2 D(teacher, student at temperature T) + (1 - alpha) nll(target)

    Both are means over the tokens whose target is not ignored. Hinton et al. 2015, Distilling the
    Knowledge in a Neural Network, section 2, where D is the forward divergence.

    Args:
        input, linear_weight: the student, (..., D) and (V, D).
        teacher_input, teacher_weight: the frozen teacher, (..., E) and (V, E); None with a
            `teacher_topk` among the options.
        target: (...), class indices.
        alpha: weight of the teacher, from 0 to 1. At 0 or 1 only one of the two losses is computed.
        temperature: T.
        linear_bias: (V,), of the student.
        cu_seqlens, shift, ignore_index: as in `sft`.
        memory_budget: for both losses together, which share the logits. With a process_group, for
            each loss.
        return_metrics: return the loss and a dictionary of detached tensors: the metrics of `sft`,
            and "kd_loss", the mean of T^2 D (nan if alpha is 0). The student's logits are computed
            again for them.
        options: options of `storage_ops.linear_kl_div`: divergence, beta, teacher_bias,
            teacher_topk, ...

    Returns:
        The loss, 0-dimensional. With return_metrics the loss and the metrics.

    Example:
        >>> hidden, head = torch.randn(2, 9, 16, requires_grad=True), torch.randn(100, 16)
        >>> teacher, its_head = torch.randn(2, 9, 32), torch.randn(100, 32)
        >>> tokens = torch.randint(100, (2, 9))
        >>> loss = storage_ops.losses.kd(
        ...     hidden, head, teacher, its_head, tokens, temperature=2.0, shift=True
        ... )
        >>> loss.backward()
    """
    if not is_number(alpha) or not 0 <= alpha <= 1:
        raise wrong("kd", ValueError, "alpha is", repr(alpha), "a number from 0 to 1")
    check_returns("kd", False, return_metrics)
    for name in ("reduction", "token_weight", "scale_by_temperature", "target_weight"):
        if name in options:
            raise wrong(
                "kd", TypeError, name, "is given", "only options that the loss does not set itself"
            )
    target = separated("kd", target, cu_seqlens, shift, ignore_index)
    own: dict[str, Any] = {
        "linear_bias": linear_bias,
        "shift": shift,
        "memory_budget": memory_budget,
    }
    soft = functools.partial(
        linear_kl_div, input, linear_weight, teacher_input, teacher_weight,
        temperature=temperature, scale_by_temperature=True, **own, **options,
    )  # fmt: skip
    # Both losses must agree in these arguments.
    shared = ("softcap", "process_group", "valid_classes", "max_valid")
    nll = functools.partial(
        linear_cross_entropy, input, linear_weight, target, ignore_index=ignore_index, **own,
        **{name: value for name, value in options.items() if name in shared},
    )  # fmt: skip
    counted = target[..., int(shift) :] != ignore_index
    loss: Tensor
    if _LEAST <= alpha < 1 and options.get("process_group") is None:  # both losses share the logits
        if ignore_index != IGNORED:  # linear_kl_div ignores only -100
            target = target.masked_fill(target == IGNORED, IGNORED - 1)
        target = target.masked_fill(target == ignore_index, IGNORED)
        loss = alpha * soft(target=target, target_weight=(1 - alpha) / alpha)
    else:
        parts = []
        if alpha > 0:
            parts.append(alpha * soft(token_weight=target != ignore_index))
        else:
            check_rules("kd", RULES, {**_DEFAULTS, "temperature": temperature, **options})
        if alpha < 1:
            tolerance = options.get("gradient_tolerance", 0.0)
            parts.append((1 - alpha) * nll(gradient_tolerance=tolerance))
        loss = sum(parts[1:], start=parts[0])
    if not return_metrics:
        return loss
    with torch.no_grad():
        metrics = _metrics(counted, *nll(returns=_OF_TOKENS))
        rest = loss.detach() - (1 - alpha) * metrics["nll_loss"]
        metrics["kd_loss"] = rest / alpha if alpha else torch.full_like(rest, float("nan"))
    return loss, metrics


def _metrics(counted: Tensor, nll: Tensor, entropy: Tensor, correct: Tensor) -> dict[str, Tensor]:
    """Return the metrics of tokens. `counted` of them are not ignored."""
    count = counted.sum()
    return {
        "logps": -nll.detach(), "nll_loss": nll.detach().sum() / count,
        "entropy": entropy.detach().sum() / count,
        "mean_token_accuracy": correct.sum() / count,
    }  # fmt: skip
