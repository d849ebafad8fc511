"""The backward of ops that compute a head, from gradients of the forward or from a second pass.

A loss that is a mean or a sum has one upstream number. So its forward computes the gradients, and
the backward multiplies them by this number. Otherwise the forward keeps the state of the rows (a
few numbers per token), and the backward computes the logits again.

The last four results of an op are the state, and the gradients of input, weight and bias.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from storage_ops._autograd import (
    connect,
    once,
    raise_not_forward,
    retained,
    roots,
    sources_of,
    times,
)
from storage_ops.loss.call import tensors_of, with_tensors

# Gradients of input, weight and bias, and of other differentiable arguments.
Gradients = Sequence[Tensor | None]
SecondPass = Callable[[Any, Sequence[Any], list[Tensor | None], list[bool]], Gradients]


class HeadCall(Protocol):
    """The arguments of an op: `loss.call.Call` or `divergence.call.DivergenceCall`."""

    @property
    def input(self) -> Tensor:
        """Return the input (..., D)."""

    @property
    def weight(self) -> Tensor:
        """Return the weight (V, D)."""

    @property
    def bias(self) -> Tensor | None:
        """Return the bias (V,)."""

    @property
    def in_forward(self) -> bool:
        """Return True if the forward computes the gradients."""

    @property
    def grad_mask(self) -> tuple[bool, ...]:
        """Return whether input, weight and bias need gradients."""


class HeadFunction(torch.autograd.Function):
    """An op as a Function, for eager code and for torch.func, which supports no other form.

    With the autograd formula of an op, torch would walk through its schema in every call. That
    takes longer than a small loss.
    """

    generate_vmap_rule = True
    jvp = staticmethod(raise_not_forward)


def without_bases(outputs: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Return the results of an op's kernel as results of a `HeadFunction`.

    Results may be views. torch refuses in-place ops on a Function's result that is a view.
    """
    return tuple(t.detach() if t._is_view() else t for t in outputs)


def set_up(
    ctx: Any,
    call: HeadCall,
    places: Sequence[int],
    outputs: Sequence[Tensor],
    differentiable: int,
    kept: Sequence[Tensor | None] = (None, None),
) -> None:
    """Prepare `ctx` for `backward`.

    Args:
        places: positions of `Gradients` among the arguments of the op.
        outputs: the results of the op.
        differentiable: how many of the first results a second pass can differentiate. Gradients
            from the forward are those of the first result alone.
        kept: two tensors with logits from which a second pass may start, or None.
    """
    ctx.places, ctx.call = places, with_tensors(call)
    needs = [ctx.needs_input_grad[place] for place in places]
    # If the op was called directly, its mask may ask for fewer gradients than autograd.
    ctx.ready = call.in_forward and all(
        have or not need for have, need in zip(call.grad_mask, needs, strict=False)
    )
    ctx.mark_non_differentiable(*outputs[1 if call.in_forward else differentiable :])
    ctx.set_materialize_grads(False)  # otherwise torch allocates zeros for the gradient outputs
    tensors = tensors_of(call)
    ctx.roots = roots(tensors) if ctx.ready else []
    ctx.sources = sources_of(tensors, outputs[: 1 if ctx.ready else differentiable])
    if ctx.ready:
        # Detached, so that no other tensor shares the storage unless the caller keeps a gradient
        # output.
        ctx.save_for_backward(*(g.detach() for g in outputs[-3:]))
    else:
        ctx.save_for_backward(*kept, outputs[-4].detach(), *tensors)


def backward(
    ctx: Any, upstream: Sequence[Tensor | None], second_pass: SecondPass
) -> tuple[Tensor | None, ...]:
    """Return a gradient for every argument of the op.

    Args:
        upstream: gradients with respect to the differentiable results.
        second_pass: returns gradients, from `ctx`, the saved tensors, `upstream`, and which of the
            gradients are needed.
    """
    needs, keep = [ctx.needs_input_grad[place] for place in ctx.places], retained()
    upstream_grads = connect(upstream, ctx.sources)
    saved = ctx.saved_tensors  # read once, because a checkpoint returns them only once
    gradients: Gradients
    with torch.no_grad():
        if not ctx.ready:
            gradients = second_pass(ctx, saved, upstream_grads, needs)
        elif (loss := upstream_grads[0]) is None:
            gradients = (None,) * 3
        else:
            pairs = zip(saved, needs, strict=False)
            gradients = [times(g, loss, keep) if need else None for g, need in pairs]
    grads = [g if need else None for g, need in zip(gradients, needs, strict=False)]
    grads = once(grads, [*upstream_grads, *(ctx.roots if ctx.ready else saved[2:])])
    result: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    for place, grad in zip(ctx.places, grads, strict=False):
        result[place] = grad
    return tuple(result)


def gradients_like(call: HeadCall, needed: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Return uninitialised gradients of input, weight and bias; empty ones if not `needed`."""
    x, bias = call.input, call.bias if call.grad_mask[2] else None
    shapes = (x.shape, call.weight.shape, call.weight.shape[:1])
    masks = zip(shapes, call.grad_mask, strict=True)
    of_input, of_weight, of_bias = (
        x.new_empty(shape if needed and have else (0,)) for shape, have in masks
    )
    return of_input, of_weight, of_bias if bias is None else of_bias.to(bias.dtype)
