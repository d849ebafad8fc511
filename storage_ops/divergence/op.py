"""The ops of linear_kl_div: kernels, fakes, autograd and vmap.

As in `storage_ops.loss.op`, the backward of a mean or a sum scales gradients that the forward has
computed. In all other cases the forward keeps the statistics of the rows, and the backward computes
the logits again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import register_autograd, register_fake, register_vmap

from storage_ops import _schemas
from storage_ops._autograd import (
    call_once,
    exact,
    looped,
    needs_no_graph,
    raise_not_twice,
    without_graph,
)
from storage_ops.divergence.call import DivergenceCall
from storage_ops.divergence.row_function import run_of
from storage_ops.loss import formulas
from storage_ops.loss.call import count_of, with_tensors
from storage_ops.loss.engine import kept
from storage_ops.loss.engine.autograd import (
    Gradients,
    HeadFunction,
    backward,
    gradients_like,
    set_up,
    without_bases,
)

_OPS = torch.ops.storage_ops
_NAME = "storage_ops::linear_kl_div"
_PLACES = tuple(map(DivergenceCall._fields.index, ("input", "weight", "bias")))


def _forward(*args: Any) -> tuple[Tensor, ...]:
    call = DivergenceCall(*args)
    if call.in_forward and call.reduction == "none":
        raise ValueError(
            "linear_kl_div: `in_forward` is True. Expected False with reduction='none', whose "
            "gradients are computed in the backward."
        )
    kept.make_room(call.input)
    run, input = run_of(call), call.input
    tokens, rows = run.head.tokens, run.rows
    grads = [input.new_empty(0) for _ in call.grad_mask]
    if call.in_forward and any(call.grad_mask):
        rows.set_upstream(input.new_ones((), dtype=call.wide))
        grads = run.statistics_and_gradients()
    else:
        run.statistics()
    loss = formulas.reduce(rows.divergences(), tokens, run.head.call)
    return loss, tokens.spread_state(rows.state), *grads


def _backward(grad_loss: Tensor, state: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Compute gradients by a second pass over the logits, for any upstream gradient."""
    call = DivergenceCall(*args)
    run = run_of(call, state)
    upstream = grad_loss if call.reduction != "none" else run.head.tokens.collect(grad_loss)
    run.rows.set_upstream(upstream)
    return tuple(run.gradients())


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    set_up(ctx, DivergenceCall(*inputs), _PLACES, output, 1)


def _autograd(ctx: Any, upstream: Tensor | None, *others: None) -> tuple[Tensor | None, ...]:
    return backward(ctx, [upstream], _second_pass)


def _second_pass(
    ctx: Any, saved: Sequence[Any], upstream: list[Tensor | None], needs: list[bool]
) -> Gradients:
    """Compute the gradients of input, weight and bias. The logits are computed again."""
    _, _, state, *tensors = saved
    if upstream[0] is None:
        return (None,) * 3
    call = with_tensors(ctx.call, tensors)._replace(in_forward=False, grad_mask=tuple(needs))
    gradients: Gradients = call_once(_OPS.linear_kl_div_backward, upstream[0], state, *call)
    return gradients


class _Differentiable(HeadFunction):
    backward = staticmethod(_autograd)
    setup_context = staticmethod(_setup_context)

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return without_bases(_OPS.linear_kl_div(*args))


def apply(call: DivergenceCall) -> Tensor:
    """Return the loss, by an op that works in eager code, torch.compile and torch.func."""
    loss: Tensor
    if needs_no_graph():
        loss = without_graph(apply, call._replace(in_forward=False))
        return loss
    if torch.compiler.is_compiling():
        loss = _OPS.linear_kl_div(*call)[0]
        return loss
    loss = _Differentiable.apply(*call)[0]  # type: ignore[no-untyped-call]
    return loss


def _fake_forward(*args: Any) -> tuple[Tensor, ...]:
    call = DivergenceCall(*args)
    shape = list(call.input.shape[:-1])
    if call.shift:
        shape[-1] = torch.sym_max(shape[-1] - 1, 0)
    loss = call.input.new_empty(shape if call.reduction == "none" else (), dtype=call.wide)
    tokens = count_of(call.input.shape[:-1])
    state = call.input.new_empty((call.state_rows, tokens), dtype=call.wide)
    return loss, state, *gradients_like(call, call.in_forward)


def _fake_backward(grad_loss: Tensor, state: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return gradients_like(DivergenceCall(*args))


for _end, _kernel, _fake in (
    ("", _forward, _fake_forward),
    ("_backward", _backward, _fake_backward),
):
    _schemas.library.impl("linear_kl_div" + _end, exact(_kernel), "CompositeExplicitAutograd")
    register_fake(_NAME + _end, _fake, lib=_schemas.library)
    register_vmap(_NAME + _end, looped(getattr(_OPS, "linear_kl_div" + _end)), lib=_schemas.library)
register_autograd(_NAME, _autograd, setup_context=_setup_context, lib=_schemas.library)
register_autograd(_NAME + "_backward", raise_not_twice, lib=_schemas.library)
