"""The ops of linear_kl_div: kernels, fakes, autograd and vmap.

As in `storage_ops.loss.op`: one upstream number scales gradients that the forward has made; every
other case keeps the statistics of the rows, and forms the logits once more in the backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import register_autograd, register_fake, register_vmap

from storage_ops import _autograd, _schemas
from storage_ops.divergence.call import DivergenceCall
from storage_ops.divergence.row_function import run_of
from storage_ops.loss import formulas
from storage_ops.loss.call import count_of
from storage_ops.loss.engine import kept

_OPS = torch.ops.storage_ops
_NAME = "storage_ops::linear_kl_div"
_BIAS = 4  # the place of the student's bias among the arguments


def _forward(*args: Any) -> tuple[Tensor, ...]:
    call = DivergenceCall(*args)
    if call.in_forward and call.reduction == "none":
        raise ValueError(
            "linear_kl_div: early is True; expected False with reduction='none', whose gradients "
            "are made in the backward"
        )
    kept.make_room(call.input)
    run, input = run_of(call), call.input
    tokens, rows = run.head.tokens, run.rows
    grads = [input.new_empty(0) for _ in call.grad_mask]
    if call.in_forward and any(call.grad_mask):
        rows.set_upstream(input.new_ones((), dtype=call.wide))
        grads = run.statistics_and_gradients()
        if call.grad_mask[0]:
            grads[0] = grads[0].view(input.shape)
    else:
        run.statistics()
    loss = formulas.reduce(rows.divergences(), tokens, run.head.call)
    return loss, tokens.spread_state(rows.state), *grads


def _backward(grad_loss: Tensor, state: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Gradients by a second pass over the logits, for any upstream gradient."""
    call = DivergenceCall(*args)
    run = run_of(call, state)
    each = grad_loss if call.reduction != "none" else run.head.tokens.collect(grad_loss)
    run.rows.set_upstream(each)
    grads = run.gradients()
    grads[0] = grads[0].view(call.input.shape) if call.grad_mask[0] else grads[0]
    return tuple(grads)


def _needs(ctx: Any) -> tuple[bool, bool, bool]:
    given = ctx.needs_input_grad
    return given[0], given[1], given[_BIAS]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    call, (_, state, *grads) = DivergenceCall(*inputs), output
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # or torch would allocate zeros for the gradient outputs
    # The mask of a direct caller of the op may promise less than autograd asks for.
    ctx.ready = call.in_forward and all(
        have or not need for have, need in zip(call.grad_mask, _needs(ctx), strict=True)
    )
    ctx.call = call.with_tensors()
    ctx.roots = _autograd.roots(call.tensors()) if ctx.ready else []
    ctx.sources = _autograd.sources_of(call.tensors(), output[:1])
    # Detached: then the storage is ours alone exactly when the caller holds no gradient output.
    saved = [g.detach() for g in grads] if ctx.ready else [state.detach(), *call.tensors()]
    ctx.save_for_backward(*saved)


def _gradients(ctx: Any, upstream: Tensor | None, *others: Any) -> tuple[Tensor | None, ...]:
    needs, keep = _needs(ctx), _autograd.retained()
    saved = ctx.saved_tensors  # once: a checkpoint gives them once
    (upstream,) = _autograd.connect([upstream], ctx.sources)
    made: list[Tensor | None] = [None] * 3
    with torch.no_grad():
        if upstream is None:
            pass
        elif ctx.ready:
            made = [
                _autograd.times(g, upstream, keep) if need else None
                for g, need in zip(saved, needs, strict=True)
            ]
        else:
            state, *tensors = saved
            call = ctx.call.with_tensors(tuple(tensors))
            call = call._replace(in_forward=False, grad_mask=needs)
            made = list(_autograd.call_once(_OPS.linear_kl_div_backward, upstream, state, *call))
    made = [g if need else None for g, need in zip(made, needs, strict=True)]
    grads = _autograd.once(made, [upstream, *(ctx.roots if ctx.ready else saved)])
    result: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    result[0], result[1], result[_BIAS] = grads
    return tuple(result)


class _Transformable(torch.autograd.Function):
    """The op for torch.func, which takes no other autograd formula than a Function's."""

    generate_vmap_rule = True
    backward = staticmethod(_gradients)
    jvp = staticmethod(_autograd.raise_not_forward)
    setup_context = staticmethod(_setup_context)

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = _OPS.linear_kl_div(*args)
        return outputs


def apply(call: DivergenceCall) -> Tensor:
    """The loss, by an op that eager code, torch.compile and torch.func all take."""
    loss: Tensor
    if _autograd.needs_no_graph():
        loss = _autograd.without_graph(apply, call._replace(in_forward=False))
        return loss
    if _autograd.transforming():
        return _Transformable.apply(*call)[0]  # type: ignore[no-any-return, no-untyped-call]
    loss = _OPS.linear_kl_div(*call)[0]
    return loss


def _fake_grads(call: DivergenceCall, made: bool) -> tuple[Tensor, ...]:
    shapes = (call.input.shape, call.weight.shape, call.weight.shape[:1])
    masks = zip(shapes, call.grad_mask, strict=True)
    return tuple(call.input.new_empty(shape if have and made else (0,)) for shape, have in masks)


def _fake_forward(*args: Any) -> tuple[Tensor, ...]:
    call = DivergenceCall(*args)
    shape = list(call.input.shape[:-1])
    if call.shift:
        shape[-1] = torch.sym_max(shape[-1] - 1, 0)
    loss = call.input.new_empty(shape if call.reduction == "none" else (), dtype=call.wide)
    tokens = count_of(call.input.shape[:-1])
    state = call.input.new_empty((call.state_rows, tokens), dtype=call.wide)
    return loss, state, *_fake_grads(call, call.in_forward)


def _fake_backward(grad_loss: Tensor, state: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return _fake_grads(DivergenceCall(*args), True)


for _end, _kernel, _fake in (
    ("", _forward, _fake_forward),
    ("_backward", _backward, _fake_backward),
):
    _schemas.library.impl(
        "linear_kl_div" + _end, _autograd.exact(_kernel), "CompositeExplicitAutograd"
    )
    register_fake(_NAME + _end, _fake, lib=_schemas.library)
    register_vmap(
        _NAME + _end, _autograd.looped(getattr(_OPS, "linear_kl_div" + _end)), lib=_schemas.library
    )
register_autograd(_NAME, _gradients, setup_context=_setup_context, lib=_schemas.library)
register_autograd(_NAME + "_backward", _autograd.raise_not_twice, lib=_schemas.library)
