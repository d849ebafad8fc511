"""The K-dimensional loss of `F.linear_cross_entropy`: one head for each output position.

A weight (C, d_1, ..., d_K, D) gives C logits at each of the d_1 * ... * d_K positions of a token.
Each position is a separate linear cross-entropy. The positions share only the input. A mean divides
by what it sums over all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from storage_ops._autograd import refuse_forward_mode, transforming
from storage_ops.loss.call import arithmetic
from storage_ops.loss.checks import (
    OP,
    check_devices,
    check_divisor,
    check_head,
    check_ignore_index,
    check_shapes,
    wrong,
)
from storage_ops.loss.formulas import total_weight

# Options that do not apply to positions, or would differ for each position.
_SINGLE = ("process_group", "plan", "shift", "accumulate_into", "selected_ids")


def loss_of_positions(
    loss: Callable[..., Any],
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    token_weight: Tensor | None,
    reduction: str,
    ignore_index: int | None,
    returns: tuple[str, ...],
    **options: Any,
) -> Any:
    """Call `loss`, linear cross-entropy with a (V, D) weight, at every position. Join the results.

    The arguments are those of the loss, with input (N, D), linear_weight (C, d_1, ..., d_K, D) and
    linear_bias (C, d_1, ..., d_K). target and token_weight are (N, d_1, ..., d_K). With
    probabilities the target is (N, C, d_1, ..., d_K).
    """
    for name in _SINGLE:
        value = options.get(name)
        if value is not None and (isinstance(value, Tensor) or value):
            raise wrong(ValueError, name, "is given", f"none with a {linear_weight.dim()}-D weight")
    classes, *places, _ = linear_weight.shape
    if input.dim() != 2:
        rule = f"(N, D) with a linear_weight of shape {tuple(linear_weight.shape)}"
        raise wrong(ValueError, "input has shape", tuple(input.shape), rule)
    check_head(OP, {"input": input, "linear_weight": linear_weight})
    dense, tokens = target.is_floating_point(), (input.shape[0], *places)
    shape = (input.shape[0], classes, *places) if dense else tokens
    check_shapes(
        OP,
        ("target", target, shape),
        ("token_weight", token_weight, tokens),
        ("linear_bias", linear_bias, (classes, *places)),
        ("weight", weight, (classes,)),
    )
    if options["divisor"] is not None:
        check_divisor(options["divisor"], reduction)
    ignored = -100 if ignore_index is None else ignore_index
    check_ignore_index(ignored)
    check_devices(OP, input, ("target", target), ("weight", weight), ("token_weight", token_weight))
    if reduction == "mean":
        dtype = arithmetic(input.dtype)
        total = total_weight(target, 1, weight, token_weight, ignored, dtype)
        options["divisor"], reduction = total, "sum"
    refuse_forward_mode(input)
    inputs = _shared(input, len(targets := _unbound(target, 2 if dense else 1)))
    weights, biases = _unbound(linear_weight, 1, -1), _unbound(linear_bias, 1)
    losses = [
        loss(
            x, w, t, linear_bias=b, weight=weight, token_weight=a, reduction=reduction,
            ignore_index=ignore_index, returns=returns, **options,
        )
        for x, w, t, b, a in zip(
            inputs, weights, targets, biases, _unbound(token_weight, 1), strict=False
        )
    ]  # fmt: skip
    results = [(values,) if len(returns) == 1 else values for values in losses]
    together = tuple(
        _together(name, [values[i] for values in results], reduction, places)
        for i, name in enumerate(returns)
    )
    return together[0] if len(together) == 1 else together


def _shared(input: Tensor, count: int) -> list[Tensor]:
    """Return the input for each position, with 16-bit gradients summed in float32."""
    narrow = input.dtype.itemsize < 4 and count > 1
    if not narrow or not input.requires_grad or not torch.is_grad_enabled() or transforming():
        return [input] * count
    total = _Total.apply(input)  # type: ignore[no-untyped-call]
    return [_Part.apply(total, input.detach()) for _ in range(count)]  # type: ignore[no-untyped-call]


class _Total(torch.autograd.Function):
    """Represents an input whose gradient autograd sums in float32. It has no memory."""

    @staticmethod
    def forward(input: Tensor) -> Tensor:
        return input.new_zeros((), dtype=torch.float32).expand(input.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.to(ctx.dtype)


class _Part(torch.autograd.Function):
    """The input at one position. Its gradient goes to `total`."""

    @staticmethod
    def forward(total: Tensor, input: Tensor) -> Tensor:
        return input.view_as(input)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(torch.float32), None


def _unbound(t: Tensor | None, start: int, stop: int | None = None) -> Any:
    """Return the tensor at each position. Dimensions start to stop are the positions."""
    if t is None:
        return iter(lambda: None, 0)
    stop = t.dim() if stop is None else t.dim() + stop
    return t.flatten(start, stop - 1).unbind(start)


def _together(name: str, parts: list[Any], reduction: str, places: list[int]) -> Any:
    if name == "loss" and reduction != "none":
        return torch.stack(parts).sum()
    if name == "topk":
        return tuple(_together("", list(each), "none", places) for each in zip(*parts, strict=True))
    return torch.stack(parts, 1).unflatten(1, places)
