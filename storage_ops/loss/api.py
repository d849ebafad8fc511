"""Cross-entropy of `input @ linear_weight.T` without the logits in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from storage_ops._autograd import refuse_forward_mode, transforming
from storage_ops.foundation.autocast import autocast_dtype, cast_argument
from storage_ops.loss import op
from storage_ops.loss.call import (
    RESULTS,
    Call,
    CallOptions,
    InputGrad,
    Result,
    Several,
    TensorResult,
    arithmetic,
)
from storage_ops.loss.checks import (
    OP,
    budget_of,
    check_arguments,
    check_tensors,
    check_torch_options,
    class_indices,
    group_of,
    names_of,
)
from storage_ops.loss.engine import ranks
from storage_ops.loss.planning.planner import Plan
from storage_ops.loss.planning.problem import Reduction
from storage_ops.loss.positions import loss_of_positions

# Options that the op takes by the same name; `weight` is the op's name for linear_weight.
_OF_THE_OP = tuple(n for n in Call._fields if n in CallOptions.__annotations__ and n != "weight")
# Results per token that are differentiable.
_PER_TOKEN = ("nll", "lse", "entropy", "selected", "topk")


@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *,
    returns: tuple[TensorResult] = ..., **options: Unpack[CallOptions],
) -> Tensor: ...  # fmt: skip
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *,
    returns: tuple[Literal["topk"]], **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *,
    returns: tuple[TensorResult, TensorResult], **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *,
    returns: tuple[TensorResult, TensorResult, TensorResult], **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *,
    returns: Several, **options: Unpack[CallOptions],
) -> tuple[Tensor, ...]: ...  # fmt: skip
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *,
    returns: Sequence[Result], **options: Unpack[CallOptions],
) -> Any: ...  # fmt: skip
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    token_weight: Tensor | None = None,
    shift: bool | int = False,
    max_valid: int | Literal["sync"] | None = None,
    accumulate_into: Tensor | None = None,
    accumulate_dtype: torch.dtype | None = None,
    memory_budget: int | float | str | None = None,
    plan: Plan | None = None,
    process_group: Any = None,
    valid_classes: int | None = None,
    input_grad: InputGrad = "replicate",
    check_ranks: bool = False,
    divisor: float | Tensor | None = None,
    logits_dtype: torch.dtype | None = None,
    selected_ids: Tensor | None = None,
    top_k: int | None = None,
    gradient_tolerance: float = 0.0,
    max_classes: float | None = None,
    returns: Sequence[Result] = ("loss",),
    options: Any = None,
) -> Any:
    """Compute the cross-entropy of a linear layer's output, with no logits tensor in memory.

    The loss and gradients equal those of `F.cross_entropy(F.linear(input, linear_weight,
    linear_bias), target)`. A token has the logits z, lse = log sum exp z, the target t and the
    weight a. The classes have the weights C, and e is the label smoothing. The token's loss is

        a * ((1 - e) C_t (lse - z_t) + e/V sum_j C_j (lse - z_j) + z_loss * lse^2)

    and for a distribution q as target, with q' = (1 - e) q + e/V,

        a * (sum_j C_j q'_j (lse - z_j) + z_loss * lse^2)

    Args:
        input: (..., D), float64, float32, bfloat16 or float16.
        linear_weight: (V, D), the dtype of input. For torch's K-dimensional loss it is
            (V, d_1, ..., d_K, D), with input (N, D) and linear_bias (V, d_1, ..., d_K). The target
            is then (N, d_1, ..., d_K) or (N, V, d_1, ..., d_K), and values per token have the
            dimensions d_1, ..., d_K after N. Each position takes a product of its own.
        target: (...), class indices of int64, int32 or uint8, from 0 to V - 1 or ignore_index. Or
            (..., V), floating point, a distribution over the classes for every token
            (differentiable).
        linear_bias: (V,), the dtype of input, or float32 with 16-bit input.
        weight: (V,), floating point; weights of the classes.
        reduction: "mean" (the sum divided by that of a * C_t, or of a for distributions, over the
            tokens that are not ignored), "sum" or "none". The mean divides the z-loss too, so that
            z_loss * lse^2 counts by weights of classes or tokens. Others divide it by the number of
            tokens. Without smoothing the mean is
            (sum_i a_i (C_t (lse - z_t) + z_loss * lse^2)) / (sum_i a_i C_t).
        ignore_index: tokens with this target have no loss and no gradient. None means -100. Their
            hidden states may be nan or infinite: the loss, every other result and the gradients of
            input and linear_bias do not depend on them under any plan. Nor does the gradient of
            linear_weight on a CPU, with max_valid, and for distributions of token_weight 0. On a
            GPU without max_valid, and in a graph of `make_fx`, its columns in which such a hidden
            state is not finite are nan. `F.cross_entropy` makes all of that gradient nan, and that
            of the ignored token.
        label_smoothing: from 0 to 1: this part of a target is spread over all classes.
        z_loss: weight of lse^2, the z-loss of PaLM (Chowdhery et al. 2022, section 5).
        softcap: logits become softcap * tanh(logits / softcap), as in Gemma 2. None: no soft-cap.
        logit_scale: logits are multiplied by this, before the soft-cap.
        token_weight: the shape of target's indices, floating point or bool. Tokens of weight 0 or
            False are ignored.
        shift: for causal language models, whose target is their input. With True or 1 the token at
            position i is scored with target i + 1, and with k, with target i + k (multi-token
            prediction). Equals calling with input[..., :-k, :], target[..., k:] and
            token_weight[..., k:], without the copy.
        max_valid: an upper bound for the number of tokens that are not ignored, for a GPU. Without
            it ignored tokens cost as much as others, because only the device knows how many there
            are. More tokens than the bound make the loss nan. "sync" reads the number, and waits
            for the device once. It has no effect on a CPU, where ignored tokens cost nothing, and
            on distributions, all of which are computed.
        accumulate_into: (V, D), float32 (float64 for float64 weights): the weight's gradient is
            added to it in the backward instead of being returned, and linear_weight.grad stays as
            it is.
        accumulate_dtype: gradients of 16-bit arguments are summed in float32 (None); their own
            dtype takes less memory and loses accuracy with every tile. A processor without 16-bit
            products sums in float32 in any case.
        memory_budget: bytes of scratch memory beyond inputs, outputs and returned gradients, as a
            number or text such as "400 MiB". None takes a quarter of the logits (on a GPU all of
            them), at least 32 MiB and at most 1 GiB. If it is at least 1 % faster, it takes up to
            1/32 of a GPU's memory. With more tokens than the hidden size it adds a float32 sum for
            the gradient of a 16-bit weight, if the forward computes it. Logits are stored in the
            gradient of the weight until it is written, so a small budget costs little time up to
            that many tokens. The float32 sums of a 16-bit gradient of the input are stored there
            too, if the budget has no room for them. `storage_ops.plan` shows the plan for a
            budget.
        plan: a plan of `storage_ops.plan` to follow, instead of choosing one for memory_budget.
        process_group: torch.distributed group, or a DeviceMesh of one dimension, whose ranks hold
            consecutive slices of the vocabulary (linear_weight, linear_bias, weight), of one size
            or not. Every rank has all tokens, in the same order, and target holds indices of the
            whole. For a sequence that is sharded see input_grad. Ranks compare sizes, options and
            checksums of the targets, on a GPU in the first call of a shape. All of them raise if
            these differ, and on a CPU also if one rank refuses its arguments. DTensors need no
            group: their placements say what the ranks hold.
        valid_classes: the number of classes of the whole vocabulary before padding. Padding has no
            probability, and its gradients are 0. None: there is no padding.
        input_grad: the gradient of the input that each rank of a process_group gets. "replicate":
            the sum over the ranks. "partial": the rank's own part of this sum. Use it if a gather
            before the loss adds up gradients in its backward, as in sequence parallelism.
            "reduce_scatter": input is the rank's part of the tokens, and the op gathers all parts.
            The rank gets the summed gradient of its part. All parts have one size, and target and
            token_weight cover all tokens. The sums over the ranks are under way while the next
            tiles are multiplied.
        check_ranks: on a GPU too, compare in every call (which waits for the device), but not in a
            capture.
        divisor: with reduction "sum": the sum is divided by this, a number or a tensor of shape (),
            such as the number of valid tokens in all micro-batches of all ranks. If the caller
            divides the result instead, gradients of 16-bit arguments are rounded twice. The host
            does not wait for a tensor. If it is 0, gradients are zero.
        logits_dtype: None: logits have the dtype of input. torch.float32, for 16-bit input: logits
            are not rounded before the softmax, which importance ratios in reinforcement learning
            need. Only tiles of logits are in float32, within memory_budget. Each logit
            takes twice as much of it, and none is stored in the gradient of the weight. Gradients
            of logits are still rounded to 16 bits before they are multiplied.
        selected_ids: for "selected": (..., K), dtypes of target, K classes for every token. shift
            moves them as it moves target; ignore_index stands for no class.
        top_k: for "topk": how many classes.
        gradient_tolerance: how much of each token's probability may be left out of its gradient, as
            one number from 0 (nothing is) to below 1. Losses and all results stay exact. For every
            token, the classes that are left out hold at most this much of its probability; its
            target and all others have their exact gradient. An average of the classes that are left
            out replaces them in the input's gradient. So its error is far below tolerance * the
            largest norm of a row of linear_weight. 3e-3 has errors like those of
            rounding to bfloat16. If the model is sure, most classes are left out of two of the
            three products. If it is not, as at the first step, nothing is. It is an error with
            smoothed labels and distributions, and with "entropy", "selected" and "topk". See the
            page "Below three products" in docs.
        max_classes: with gradient_tolerance: the share of the classes, from above 0 to 1, that the
            gradient is multiplied with, whatever tokens leave out. On a GPU that saves one wait for
            the device for each chunk of tokens, so it may be captured in a CUDA graph; "dropped"
            tells what it costs. None: as many as the tolerance asks for.
        returns: the names of the results. "loss". "nll": lse - z_t, or the cross-entropy with a
            distribution. "lse". "entropy": that of the softmax, in nats. "argmax". "correct": True
            if argmax is the target, or the most probable class of a distribution (not with a
            process_group). "z_loss": z_loss * lse^2. "selected": the log-probabilities of
            selected_ids. "topk": a pair of the top_k largest log-probabilities, largest first, and
            their classes. Of equal ones, it has the lowest classes. "dropped": the probability that
            is left out of the token's gradient, or 0 without gradients. It needs gradients that the
            forward computes. All results but the loss have one value for each token, or K values.
            These are 0, or -1 for classes, if the token is ignored. loss, nll, lse, entropy,
            selected and the log-probabilities of topk are differentiable.
        options: the chunking options of `torch.nn.functional.linear_cross_entropy`, so that its
            calls need no edit. Without effect: memory_budget says what chunks may take.

    Returns:
        The result, or a tuple if `returns` names several. The loss has shape () for "mean" and
        "sum", that of the tokens for "none"; float64 for float64 input, float32 for all others. If
        every token is ignored the mean is nan and the gradients are zero. Under autocast the
        product runs in the autocast dtype, as F.linear does. Autocast casts no float64. A token
        with a nan or +inf logit, or with no logit above -inf, has a nan loss, as in
        F.cross_entropy.

        A mean or a sum computes its gradients in the forward, in three matrix products (up to five
        with a small budget). The backward multiplies them by the upstream gradient. This rounds
        those of 16-bit arguments a second time, unless it is 1 or another power of two. Reduction
        "none", float16, accumulate_into, and "nll", "lse", "entropy", "selected" or "topk" in
        `returns` keep a few numbers per token. They compute the logits again in the backward, in
        four or up to five products. Eager code keeps the last tile of logits until then, within
        memory_budget, or until the next call on the device. It may also allocate the weight's
        gradient in the forward, to keep logits in it. So a budget for all logits takes three
        products. With up to about as many tokens as the hidden size, so does a smaller one. A call
        without gradients takes one. Two runs give the same bits.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype, shape, device or value, or calls of a
            process_group's ranks that differ. Another cause is a memory_budget that no plan can
            keep; the error has the smallest that one can.
        RuntimeError: a target or a selected class out of range (on CUDA that token's loss, or that
            log-probability, is nan instead). Other causes: more valid tokens than max_valid on a
            CPU, a gradient that is differentiated again, and forward-mode AD.

    Example:
        >>> x, w = torch.randn(2, 8, 16, requires_grad=True), torch.randn(100, 16)
        >>> loss = storage_ops.linear_cross_entropy(x, w, torch.randint(100, (2, 8)))
        >>> loss.backward()
        >>> loss.shape, x.grad.shape
        (torch.Size([]), torch.Size([2, 8, 16]))
        >>> tokens = torch.randint(100, (2, 8))
        >>> nll, entropy = storage_ops.linear_cross_entropy(
        ...     x, w, tokens, shift=True, softcap=30.0, returns=("nll", "entropy")
        ... )
        >>> nll.shape
        torch.Size([2, 7])
        >>> values, ids = storage_ops.linear_cross_entropy(x, w, tokens, returns=("topk",), top_k=5)
        >>> values.shape, ids.shape
        (torch.Size([2, 8, 5]), torch.Size([2, 8, 5]))
    """
    checked_tensors: dict[str, Tensor | None] = {
        "input": input, "linear_weight": linear_weight, "target": target,
        "linear_bias": linear_bias, "weight": weight, "token_weight": token_weight,
        "accumulate_into": accumulate_into, "selected_ids": selected_ids,
    }  # fmt: skip
    check_tensors(OP, checked_tensors, ("input", "linear_weight", "target"))
    target = class_indices(target)
    if token_weight is not None and token_weight.dtype == torch.bool:
        token_weight = token_weight.to(torch.float32)  # a mask of tokens
    selected_ids = None if selected_ids is None else class_indices(selected_ids)
    memory_budget = budget_of(memory_budget, OP)
    returns = names_of(returns, RESULTS)
    check_torch_options(options)
    keywords: dict[str, Any] = {
        "linear_bias": linear_bias, "weight": weight, "token_weight": token_weight,
        "accumulate_into": accumulate_into, "reduction": reduction, "ignore_index": ignore_index,
        "returns": returns, "label_smoothing": label_smoothing, "z_loss": z_loss,
        "softcap": softcap, "logit_scale": logit_scale, "shift": shift, "max_valid": max_valid,
        "accumulate_dtype": accumulate_dtype, "memory_budget": memory_budget, "plan": plan,
        "process_group": process_group, "valid_classes": valid_classes, "input_grad": input_grad,
        "check_ranks": check_ranks, "divisor": divisor, "logits_dtype": logits_dtype,
        "selected_ids": selected_ids, "top_k": top_k, "gradient_tolerance": gradient_tolerance,
        "max_classes": max_classes,
    }  # fmt: skip
    if linear_weight.dim() > 2:
        return loss_of_positions(linear_cross_entropy, input, linear_weight, target, **keywords)
    dtype = autocast_dtype(input.device.type)
    if dtype is not None:
        input, linear_weight = cast_argument(input, dtype), cast_argument(linear_weight, dtype)
        linear_bias = None if linear_bias is None else cast_argument(linear_bias, dtype)
    ignore_index = -100 if ignore_index is None else ignore_index
    process_group = group_of(process_group, OP)
    try:
        check_arguments(input, linear_weight, target, {
            **keywords, "linear_bias": linear_bias, "ignore_index": ignore_index,
            "process_group": process_group,
        })  # fmt: skip
    except (TypeError, ValueError):
        ranks.tell_of_refusal(process_group, input)
        raise
    tensors = (input, linear_weight, target, linear_bias, weight, token_weight, selected_ids)
    if any(hasattr(t, "device_mesh") for t in tensors):
        from storage_ops.loss import dtensor

        return dtensor.linear_cross_entropy(
            linear_cross_entropy, input, linear_weight, target, **keywords
        )
    if divisor is not None and not isinstance(divisor, Tensor):
        divisor = torch.full((), divisor, dtype=arithmetic(input.dtype), device=input.device)
    elif divisor is not None:
        whole: Any = divisor
        divisor = whole.full_tensor() if hasattr(whole, "device_mesh") else divisor
        divisor = divisor.to(input.device, arithmetic(input.dtype))
    refuse_forward_mode(input, linear_weight, target, linear_bias, weight, token_weight)
    head = (input, linear_weight, linear_bias)
    needs = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in head)
    wants = [name in returns for name in ("nll", "lse", "entropy", "argmax")]
    wants[1] = wants[1] or "z_loss" in returns
    wants[3] = wants[3] or "correct" in returns
    in_forward = (
        reduction != "none"
        and accumulate_into is None
        and input.dtype != torch.float16  # its range is too small before upstream is known
        and not target.requires_grad
        and not any(name in returns for name in _PER_TOKEN)
        and not transforming()
    )
    if "dropped" in returns and any(needs) and not in_forward:
        raise ValueError(
            "linear_cross_entropy: `returns` has 'dropped', but the gradients are computed in the "
            "backward. Expected reduction 'mean' or 'sum', no float16, no accumulate_into, no "
            f"torch.func, no target that requires grad and none of {_PER_TOKEN} in `returns`."
        )
    if selected_ids is not None and shift:
        selected_ids = selected_ids[..., int(shift) :, :]
    keywords.update(
        ignore_index=ignore_index, softcap=softcap or 0.0, shift=int(shift),
        max_valid=-1 if max_valid == "sync" else max_valid, plan="" if plan is None else plan.key,
        divisor=divisor, selected_ids=selected_ids, top_k=top_k or 0,
    )  # fmt: skip
    call = Call(
        input, linear_weight, target, linear_bias, weight, group=ranks.name_of(process_group),
        in_forward=in_forward, grad_mask=needs, wants=tuple(wants),
        want_dropped="dropped" in returns,
        **{name: keywords[name] for name in _OF_THE_OP},
    )  # fmt: skip
    loss, nll, lse, entropy, picked, argmax, top_ids, dropped, *_ = op.apply(call)
    results: dict[str, Any] = {
        "loss": loss, "nll": nll, "lse": lse, "entropy": entropy, "argmax": argmax,
        "dropped": dropped,
    }  # fmt: skip
    if "selected" in returns or "topk" in returns:
        first = picked.shape[-1] - (top_k or 0)
        results["selected"], results["topk"] = picked[..., :first], (picked[..., first:], top_ids)
    if "z_loss" in returns:
        results["z_loss"] = z_loss * lse.detach().square()
    if "correct" in returns:
        results["correct"] = (argmax == _classes(target, int(shift), valid_classes)) & (argmax >= 0)
    chosen = tuple(results[name] for name in returns)
    return chosen[0] if len(chosen) == 1 else chosen


def _classes(target: Tensor, shift: int, valid: int | None) -> Tensor:
    """Return the class of every token's target.

    For a distribution it is the most probable class that is no padding.
    """
    classes = target[..., :valid].argmax(-1) if target.is_floating_point() else target
    return classes[..., shift:] if shift else classes
