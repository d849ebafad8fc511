"""The divergence of two heads from hidden states, without the logits of either in memory."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from storage_ops import _autograd
from storage_ops.divergence import op
from storage_ops.divergence.call import DivergenceCall
from storage_ops.divergence.checks import (
    OP,
    Divergence,
    Tail,
    check_call,
    check_options,
    check_types,
)
from storage_ops.foundation.autocast import autocast_dtype, cast_argument
from storage_ops.loss.checks import budget_of, class_indices, group_of
from storage_ops.loss.engine import ranks
from storage_ops.loss.planning.problem import Reduction


def linear_kl_div(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor | None = None,
    teacher_weight: Tensor | None = None,
    *,
    divergence: Divergence = "forward",
    beta: float = 0.5,
    temperature: float = 1.0,
    scale_by_temperature: bool = False,
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    token_weight: Tensor | None = None,
    reduction: Reduction = "mean",
    shift: bool = False,
    memory_budget: int | float | str | None = None,
    teacher_topk: tuple[Tensor, Tensor] | None = None,
    teacher_tail: Tail = "bucket",
    valid_classes: int | None = None,
    max_valid: int | Literal["sync"] | None = None,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    process_group: Any = None,
    target: Tensor | None = None,
    target_weight: float = 1.0,
    gradient_tolerance: float = 0.0,
) -> Tensor:
    """Compute the divergence of a student's head from a frozen teacher's, without logits in memory.

    P = softmax((teacher_input @ teacher_weight.T + teacher_bias) / temperature) are the
    probabilities of the teacher, and Q those of the student. A token's divergence is

        "forward"  KL(P || Q) = sum_j P_j (log P_j - log Q_j)
        "reverse"  KL(Q || P) = sum_j Q_j (log Q_j - log P_j)
        "jsd"      beta KL(P || M) + (1 - beta) KL(Q || M),  M = beta P + (1 - beta) Q
        "tvd"      1/2 sum_j |P_j - Q_j|
        "cosine"   1 - sum_j z_j t_j / (|z| |t|), with the logits z of the student, t of the teacher

    The third is the generalised Jensen-Shannon divergence of GKD (Agarwal et al. 2024, On-Policy
    Distillation of Language Models, section 2). "jsd" / beta tends to the forward divergence for
    beta -> 0, and "jsd" / (1 - beta) to the reverse divergence for beta -> 1. At these two values
    the formula is 0 for any heads. So beta=0 computes "forward", and beta=1 computes "reverse".
    The gradient of "tvd" jumps where P_j = Q_j. It is a ramp where log P_j and log Q_j differ by
    less than 1.2e-4, or 2e-12 in float64, so that rounding does not decide its sign.

    Args:
        input: (..., D), the student's hidden states: float64, float32, bfloat16 or float16.
        linear_weight: (V, D), the student's head, in the dtype of input.
        teacher_input: (..., E), the teacher's hidden states of the same tokens, in any of these
            dtypes; E need not be D. None with teacher_topk.
        teacher_weight: (V, E), the teacher's head, in the dtype of teacher_input. The teacher is
            frozen: no gradient flows to it, whether its tensors require one or not.
        divergence: "forward", "reverse", "jsd", "tvd" or "cosine". The last one does not depend on
            the temperature, which must be 1. It needs all logits, so it does not take teacher_topk.
            Its rows are computed in plain torch.
        beta: from 0 to 1, for "jsd".
        temperature: both heads' logits are divided by it.
        scale_by_temperature: multiply the loss by temperature^2, as in Hinton et al. (2015,
            section 2), which keeps the size of gradients.
        linear_bias, teacher_bias: (V,), in the dtype of their weights.
        token_weight: (...), floating point or bool. Tokens of weight 0 or False are ignored. Their
            hidden states, the teacher's among them, may be nan or infinite as with ignore_index of
            `linear_cross_entropy`.
        reduction: "mean" (the sum divided by that of the token weights, or by the number of
            tokens), "sum" or "none".
        shift: for causal language models: the token at position i is weighted by token_weight at
            i + 1, which it predicts, and the last has none. Equals calling with input[..., :-1, :],
            teacher_input[..., :-1, :], teacher_topk of [..., :-1, :] and token_weight[..., 1:].
        memory_budget: bytes of scratch memory beyond inputs, outputs and returned gradients, as a
            number or text such as "400 MiB". None takes a quarter of both heads' logits (on a GPU
            all of them), at least 64 MiB and at most 2 GiB. If it is at least 1 % faster, it takes
            up to 1/16 of a GPU's memory. It adds a float32 sum for the gradient of a 16-bit
            weight.
        teacher_topk: a stored teacher: log-probabilities (..., K), at this temperature, and class
            indices (..., K), int64, int32 or uint8 and distinct for every token, such as the K most
            probable ones.
        teacher_tail: how the classes outside of teacher_topk are counted. "bucket": they form one
            more class. Its probability is 1 minus the teacher's K probabilities, and for the
            student the sum over these classes. This is the exact divergence of the K + 1 classes,
            at most that of all V. "renormalize": they are left out, and the K probabilities of
            each head are divided by their sum.
        valid_classes: the classes from this one on are padding in both heads, which may then have
            different numbers of classes: they have no probability, and their gradients are 0.
        max_valid: as in `linear_cross_entropy`: on a GPU, the most tokens that are not ignored, or
            "sync". Ignored tokens then cost no work.
        softcap, teacher_softcap: a head's logits z become c tanh(z / c), before the temperature.
        process_group: as in `linear_cross_entropy`: the ranks hold consecutive slices of the
            classes of both heads, the same slices of both, and all tokens. Not with teacher_topk or
            valid_classes. The gradient of input is that of all ranks, on each of them.
        target: (...), class indices, int64, int32 or uint8, as in knowledge distillation. The
            student's cross-entropy with them, at temperature 1 and times target_weight, is added to
            the divergence of each token. This takes no more matrix products. Tokens whose target is
            -100 are ignored. shift moves it as it moves token_weight. Not with a process_group.
        target_weight: at least 0. scale_by_temperature does not multiply it.
        gradient_tolerance: the part of each token's gradient that may be left out, from 0 (nothing)
            to below 1. The loss stays exact. g_j is the derivative of a token's
            divergence by the student's logit of class j. The sum of |g_j| over the classes that are
            left out is at most gradient_tolerance, in absolute terms. The error of the token's
            input gradient is at most
            gradient_tolerance * the largest norm of a row of linear_weight, times the upstream
            gradient. "forward" at temperature 1 has g_j = Q_j - P_j. Targets and all other classes
            have their exact gradient. Two of the four products leave classes out, where enough of
            them are negligible for that to pay. On a GPU each chunk of tokens waits for the device
            once.

    Returns:
        The loss: shape () for "mean" and "sum", the shape of the tokens for "none". It is float64
        for a float64 input, float32 for all others. Ignored tokens have loss 0. If every token is
        ignored the mean is nan and the gradients are zero. A token with a nan logit is nan. A class
        of logit -inf has probability 0, and 0 log 0 is 0. An infinite divergence is inf, and the
        gradients of an infinite "reverse" are not finite. Under autocast products run in the
        autocast dtype.

        A mean or a sum computes its gradients in the forward, in four matrix products of size
        tokens x D x V, one of them the teacher's. Reduction "none", float16, and a budget without
        room for the sum of the weight's gradient compute both heads' logits again, in six products.
        A call without gradients takes two. Two runs give the same bits.

    Raises:
        TypeError, ValueError: an argument has a wrong dtype, shape, device or value. Or no plan
            fits into memory_budget: the error names the smallest budget with a plan.
        RuntimeError: ids of teacher_topk out of range or not distinct (on CUDA that token's loss is
            nan instead). Other causes: more valid tokens than max_valid on a CPU, a gradient that
            is differentiated again, and forward-mode AD.

    Example:
        >>> x, w = torch.randn(2, 8, 16, requires_grad=True), torch.randn(100, 16)
        >>> teacher, head = torch.randn(2, 8, 32), torch.randn(100, 32)
        >>> loss = storage_ops.linear_kl_div(x, w, teacher, head, divergence="jsd", beta=0.1)
        >>> loss.backward()
        >>> loss.shape, x.grad.shape
        (torch.Size([]), torch.Size([2, 8, 16]))
        >>> stored = torch.log_softmax(teacher @ head.T, -1).topk(10)
        >>> loss = storage_ops.linear_kl_div(x, w, teacher_topk=tuple(stored))
    """
    check_types(
        {"input": input, "linear_weight": linear_weight, "teacher_input": teacher_input,
         "teacher_weight": teacher_weight, "linear_bias": linear_bias,
         "teacher_bias": teacher_bias, "token_weight": token_weight, "target": target},
        teacher_topk,
    )  # fmt: skip
    process_group = group_of(process_group, OP)
    check_options({
        "divergence": divergence, "beta": beta, "temperature": temperature,
        "scale_by_temperature": scale_by_temperature, "reduction": reduction, "shift": shift,
        "teacher_tail": teacher_tail, "valid_classes": valid_classes, "max_valid": max_valid,
        "softcap": softcap, "teacher_softcap": teacher_softcap, "process_group": process_group,
        "target_weight": target_weight, "gradient_tolerance": gradient_tolerance,
    })  # fmt: skip
    memory_budget = budget_of(memory_budget, OP)
    if divergence == "jsd" and beta in (0, 1):
        divergence = "reverse" if beta else "forward"
    if token_weight is not None and not token_weight.is_floating_point():
        token_weight = token_weight.to(torch.float32)
    target = None if target is None else class_indices(target)
    log_probs, ids = (None, None) if teacher_topk is None else teacher_topk
    ids = None if ids is None else class_indices(ids)
    teacher = [teacher_input, teacher_weight, teacher_bias, log_probs, ids]
    frozen = [None if t is None else t.detach() for t in teacher]
    tensors = [input, linear_weight, linear_bias, *frozen[:3]]
    dtype = autocast_dtype(input.device.type)
    if dtype is not None:
        tensors = [t if t is None else cast_argument(t, dtype) for t in tensors]
    student, weight, bias, hidden, head, offset = tensors
    assert student is not None and weight is not None
    needs = tuple(
        torch.is_grad_enabled() and t is not None and t.requires_grad
        for t in (student, weight, bias)
    )
    in_forward = (
        reduction != "none"
        and student.dtype != torch.float16  # its range is too small before upstream is known
        and not _autograd.transforming()
    )
    call = DivergenceCall(
        student, weight, hidden, head, bias, offset, token_weight, frozen[3], frozen[4],
        divergence, beta, temperature, softcap or 0.0, teacher_softcap or 0.0,
        teacher_tail == "bucket", reduction, shift, valid_classes,
        -1 if max_valid == "sync" else max_valid, memory_budget, ranks.name_of(process_group),  # type: ignore[arg-type]
        in_forward, needs, target,
        0.0 if target is None else target_weight / (temperature**2 if scale_by_temperature else 1),
        float(gradient_tolerance),
    )  # fmt: skip
    try:
        check_call(call)
    except (TypeError, ValueError):
        ranks.tell_of_refusal(process_group, input)
        raise
    _autograd.refuse_forward_mode(*tensors, token_weight, log_probs)
    loss = op.apply(call)
    return loss * temperature**2 if scale_by_temperature else loss
