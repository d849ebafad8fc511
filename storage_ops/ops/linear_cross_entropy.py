"""Cross-entropy of `input @ linear_weight.T` without ever holding the logits.

The tokens are taken in chunks. A chunk's logits are formed by one matrix product, a row kernel
turns them into losses and, in place, into their gradient, and two more products turn that gradient
into those of input and weight. So the gradients are ready when the forward ends, and the backward
only multiplies them by the upstream scalar; reduction="none" repeats the loop there instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import register_autograd, register_fake

from storage_ops import _schemas
from storage_ops.ops import planner, reference

_OPS = torch.ops.storage_ops
_FLOATS = (torch.float64, torch.float32, torch.bfloat16)
_REDUCTIONS = ("mean", "sum", "none")
_NOT_TWICE = (
    "linear_cross_entropy: its gradient was differentiated; double backward is not supported, use "
    "torch.nn.functional.cross_entropy(torch.nn.functional.linear(...)) where you need it"
)


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    memory_budget: int | None = None,
) -> Tensor:
    """Cross-entropy loss of a linear layer's output, with no logits tensor in memory.

    Equal to `F.cross_entropy(F.linear(input, linear_weight, linear_bias), target)`, in loss and in
    gradients. With p = softmax of a token's logits and t its target, the loss is -log p_t and its
    gradient with respect to the logits p - onehot(t).

    Args:
        input: (..., D), float64, float32 or bfloat16.
        linear_weight: (V, D), the dtype of input.
        target: (...), int32 or int64 class indices from 0 to V - 1, or ignore_index.
        linear_bias: (V,), the dtype of input.
        reduction: "mean" over the tokens that are not ignored, "sum" or "none".
        ignore_index: tokens with this target have no loss and no gradient.
        memory_budget: bytes of scratch memory beyond inputs, outputs and gradients. None takes a
            quarter of the logits, at least 32 MiB and at most 1 GiB, plus an fp32 accumulator for
            the gradient of a 16-bit weight.

    Returns:
        The loss: () for "mean" and "sum", the shape of target for "none"; float64 for float64
        input, float32 for all others. If every token is ignored the mean is nan and the gradients
        are zero. Under autocast the product runs in the autocast dtype, as F.linear does.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype, shape, device or value.
        RuntimeError: a target out of range (on CUDA that token's loss is nan instead); the gradient
            is differentiated again.

    Example:
        >>> x, w = torch.randn(2, 8, 16, requires_grad=True), torch.randn(100, 16)
        >>> loss = storage_ops.linear_cross_entropy(x, w, torch.randint(100, (2, 8)))
        >>> loss.backward()
        >>> loss.shape, x.grad.shape
        (torch.Size([]), torch.Size([2, 8, 16]))
    """
    device = input.device.type
    castable = input.is_floating_point() and input.dtype != torch.float64
    if castable and device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        input, linear_weight = input.to(dtype), linear_weight.to(dtype)
        linear_bias = None if linear_bias is None else linear_bias.to(dtype)
    _check(input, linear_weight, target, linear_bias, reduction)
    _refuse_forward_mode(input, linear_weight, linear_bias)
    with_grad = torch.is_grad_enabled()
    mask = [
        with_grad and t is not None and t.requires_grad for t in (input, linear_weight, linear_bias)
    ]
    loss: Tensor = _OPS.linear_cross_entropy(
        input.reshape(target.numel(), input.shape[-1]),
        linear_weight,
        target.reshape(-1),
        linear_bias,
        reduction,
        ignore_index,
        memory_budget,
        mask,
    )[0]
    return loss.view(target.shape) if reduction == "none" else loss


def _check(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, reduction: str
) -> None:
    name = "linear_cross_entropy"
    if reduction not in _REDUCTIONS:
        raise ValueError(f"{name}: reduction is {reduction!r}; expected one of {_REDUCTIONS}")
    if input.dtype not in _FLOATS:
        raise TypeError(f"{name}: input is {input.dtype}; expected a floating dtype of {_FLOATS}")
    if input.dim() < 1 or weight.dim() != 2 or weight.shape[1] != input.shape[-1]:
        raise ValueError(
            f"{name}: linear_weight has shape {tuple(weight.shape)}; expected (V, D) with D the "
            f"last size of input, which has shape {tuple(input.shape)}"
        )
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name}: target is {target.dtype}; expected int64 or int32 class indices")
    if target.shape != input.shape[:-1]:
        raise ValueError(
            f"{name}: target has shape {tuple(target.shape)}; expected that of input without its "
            f"last dimension, {tuple(input.shape[:-1])}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{name}: linear_bias has shape {tuple(bias.shape)}; expected ({weight.shape[0]},)"
        )
    for label, t in (("linear_weight", weight), ("linear_bias", bias)):
        if t is not None and t.dtype != input.dtype:
            raise TypeError(f"{name}: {label} is {t.dtype}; expected {input.dtype}, as input is")
    for label, t in (("linear_weight", weight), ("target", target), ("linear_bias", bias)):
        if t is not None and t.device != input.device:
            raise ValueError(f"{name}: {label} is on {t.device}; expected {input.device}, as input")


def _refuse_forward_mode(*tensors: Tensor | None) -> None:
    """Raise for a dual tensor: its tangent would be dropped without a word."""
    if forward_ad._current_level < 0:
        return
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise RuntimeError(
            "linear_cross_entropy: an argument carries a tangent; forward-mode AD is not supported,"
            " use torch.nn.functional.cross_entropy(torch.nn.functional.linear(...)) for it"
        )


def _arithmetic(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _accumulate_weight(total: Tensor, dlogits: Tensor, x: Tensor, first: bool) -> None:
    """Add dlogits.T @ x to the weight gradient; products of 16-bit chunks are summed in fp32."""
    if total.dtype == x.dtype:
        torch.addmm(total, dlogits.t(), x, beta=0 if first else 1, out=total)
        return
    for begin in range(0, total.shape[0], planner.SLICE):
        rows = slice(begin, begin + planner.SLICE)
        product = dlogits[:, rows].t() @ x
        if first:
            total[rows] = product
        else:
            total[rows] += product


def _run_chunks(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    scale: Tensor,
    ignore_index: int,
    memory_budget: int | None,
    mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Losses per token, and the gradients asked for of sum(losses * scale); others are empty."""
    (tokens, hidden), vocab = input.shape, weight.shape[0]
    arithmetic = _arithmetic(input.dtype)
    plan = planner.plan(
        tokens,
        hidden,
        vocab,
        input.element_size(),
        grads=(mask[0], mask[1], mask[2]),
        memory_budget=memory_budget,
    )
    target = target.contiguous()
    bias = None if bias is None else bias.contiguous()
    nll = torch.empty(tokens, dtype=arithmetic, device=input.device)
    grad_input = torch.empty_like(input, memory_format=torch.contiguous_format) if mask[0] else None
    summed = input.dtype if plan.num_chunks == 1 else arithmetic
    grad_weight = weight.new_empty(weight.shape, dtype=summed) if mask[1] else None
    grad_bias = weight.new_zeros(vocab, dtype=arithmetic) if mask[2] else None
    if plan.num_chunks == 0 and grad_weight is not None:
        grad_weight.zero_()
    # Rows start on 64 elements: odd vocabularies stay on the fast paths of products and kernel.
    buffer = input.new_empty(plan.rows, planner.padded(vocab))[:, :vocab]
    for begin in range(0, tokens, plan.rows or 1):
        rows = slice(begin, min(begin + plan.rows, tokens))
        x, logits = input[rows], buffer[: rows.stop - begin]
        torch.mm(x, weight.t(), out=logits)
        _OPS._cross_entropy_rows(
            logits,
            target[rows],
            bias,
            scale[rows] if scale.dim() else scale,
            nll[rows],
            ignore_index,
            any(mask),
        )
        if grad_input is not None:
            torch.mm(logits, weight, out=grad_input[rows])
        if grad_weight is not None:
            _accumulate_weight(grad_weight, logits, x, first=begin == 0)
        if grad_bias is not None:
            grad_bias += logits.sum(0)  # dtype= would cast the whole chunk first
    grads = [
        input.new_empty(0) if grad is None else grad.to(input.dtype)
        for grad in (grad_input, grad_weight, grad_bias)
    ]
    return nll, grads[0], grads[1], grads[2]


def _forward(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    reduction: str,
    ignore_index: int,
    memory_budget: int | None,
    grad_mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _refuse_forward_mode(input, linear_weight, linear_bias)
    # reduction="none" learns the gradient of each token's loss in the backward only.
    mask = grad_mask if reduction != "none" else [False] * 3
    scale = _mean_scale(target, ignore_index, reduction, input.dtype)
    with torch.autocast(input.device.type, enabled=False):
        nll, *grads = _run_chunks(
            input, linear_weight, target, linear_bias, scale, ignore_index, memory_budget, mask
        )
    loss = nll if reduction == "none" else nll.sum() * scale
    return loss, grads[0], grads[1], grads[2]


def _mean_scale(target: Tensor, ignore_index: int, reduction: str, dtype: torch.dtype) -> Tensor:
    """What the sum of the losses is multiplied by; stays on the device."""
    if reduction != "mean":
        return torch.ones((), dtype=_arithmetic(dtype), device=target.device)
    return (target != ignore_index).sum().to(_arithmetic(dtype)).reciprocal()


def _backward(
    grad_loss: Tensor,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    reduction: str,
    ignore_index: int,
    memory_budget: int | None,
    grad_mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by a second pass over the chunks, for any upstream gradient."""
    scale = _mean_scale(target, ignore_index, reduction, input.dtype)
    scale = (grad_loss.to(scale.dtype) * scale).contiguous()
    with torch.autocast(input.device.type, enabled=False):
        _, *grads = _run_chunks(
            input, linear_weight, target, linear_bias, scale, ignore_index, memory_budget, grad_mask
        )
    return grads[0], grads[1], grads[2]


class _OnceDifferentiable(torch.autograd.Function):
    """Passes gradients on under create_graph=True, and raises when they are differentiated."""

    @staticmethod
    def forward(anchor: Tensor, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if grad is None else grad.view_as(grad) for grad in grads)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(_NOT_TWICE)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    input, weight, target, bias, *options = inputs
    *ctx.options, ctx.mask = options
    _, *grads = output
    ctx.mark_non_differentiable(*grads)
    ctx.set_materialize_grads(False)  # or torch would allocate zeros for the gradient outputs
    needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3])
    # The mask of a direct caller of the op may promise less than autograd asks for.
    ctx.ready = ctx.options[0] != "none" and all(
        have or not need for have, need in zip(ctx.mask, needs, strict=True)
    )
    # Detached: then the storage is ours alone exactly when the caller holds no gradient output.
    saved = [g.detach() for g in grads] if ctx.ready else (input, weight, target, bias)
    ctx.save_for_backward(*saved)


def _times(grad: Tensor, upstream: Tensor, retained: bool) -> Tensor:
    """The gradient times the upstream scalar: in place when nobody else can see the memory."""
    storage = grad.untyped_storage() if type(grad) is Tensor else None
    # Two users: the saved tensor and `storage` itself.
    if retained or storage is None or torch._C._storage_Use_Count(storage._cdata) > 2:
        return grad * upstream
    return grad.mul_(upstream)


def _autograd(ctx: Any, grad_loss: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
    needs = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3]]
    retained = torch.is_grad_enabled() or torch._C._autograd._get_current_graph_task_keep_graph()
    with torch.no_grad():
        if ctx.ready:
            made = [
                _times(g, grad_loss, retained) if need else None
                for g, need in zip(ctx.saved_tensors, needs, strict=True)
            ]
        else:
            made = _OPS.linear_cross_entropy_backward(
                grad_loss, *ctx.saved_tensors, *ctx.options, needs
            )
    grads = [g if need else None for g, need in zip(made, needs, strict=True)]
    if torch.is_grad_enabled():
        anchor = torch.zeros((), device=grad_loss.device, requires_grad=True)
        grads = list(_OnceDifferentiable.apply(anchor, *grads))  # type: ignore[no-untyped-call]
    return grads[0], grads[1], None, grads[2], None, None, None, None


def _raise_not_twice(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError(_NOT_TWICE)


for _name, _kernel in {
    "_cross_entropy_rows": reference.cross_entropy_rows,
    "linear_cross_entropy": _forward,
    "linear_cross_entropy_backward": _backward,
}.items():
    _schemas.library.impl(_name, _kernel, "CompositeExplicitAutograd")

register_autograd(
    "storage_ops::linear_cross_entropy",
    _autograd,
    setup_context=_setup_context,
    lib=_schemas.library,
)
register_autograd(
    "storage_ops::linear_cross_entropy_backward", _raise_not_twice, lib=_schemas.library
)


@register_fake("storage_ops::_cross_entropy_rows", lib=_schemas.library)
def _(
    logits: Tensor,
    target: Tensor,
    bias: Tensor | None,
    scale: Tensor,
    nll: Tensor,
    ignore_index: int,
    grad: bool,
) -> None:
    return None


def _fake_grads(input: Tensor, weight: Tensor, mask: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (input.shape, weight.shape, weight.shape[:1])
    made = [input.new_empty(s if m else (0,)) for s, m in zip(shapes, mask, strict=True)]
    return made[0], made[1], made[2]


@register_fake("storage_ops::linear_cross_entropy", lib=_schemas.library)
def _(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    reduction, *_, grad_mask = options
    shape = target.shape if reduction == "none" else ()
    loss = input.new_empty(shape, dtype=_arithmetic(input.dtype))
    mask = grad_mask if reduction != "none" else [False] * 3
    return loss, *_fake_grads(input, linear_weight, mask)


@register_fake("storage_ops::linear_cross_entropy_backward", lib=_schemas.library)
def _(
    grad_loss: Tensor, input: Tensor, linear_weight: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_grads(input, linear_weight, options[-1])
