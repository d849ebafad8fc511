"""The ops of linear cross-entropy: kernels, fakes, autograd and vmap.

A mean or a sum has one upstream number, so the forward computes the gradients, and the backward
multiplies them by this number. Otherwise the forward keeps the state of the rows, a few numbers per
token. The backward computes the logits again, when it knows the upstream gradient of each token. In
eager code the forward also keeps the last tile of logits, which then is not computed again. With a
large enough budget this tile has all logits. With a smaller one, the forward may allocate the
gradient of the weight, and keep logits there. A backward overwrites these logits, so a second
backward works without them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import register_autograd, register_fake, register_vmap
from torch.utils._python_dispatch import _disable_current_modes

from storage_ops import _schemas
from storage_ops._autograd import (
    batched,
    call_once,
    exact,
    looped,
    needs_no_graph,
    raise_not_twice,
    transforming,
    without_graph,
)
from storage_ops.loss import formulas, reference
from storage_ops.loss.call import Call, arithmetic, count_of, with_tensors
from storage_ops.loss.engine import kept, ranks
from storage_ops.loss.engine.autograd import (
    Gradients,
    HeadFunction,
    backward,
    gradients_like,
    set_up,
    without_bases,
)
from storage_ops.loss.planning.cost import STATE_ROWS
from storage_ops.loss.planning.planner import keeping
from storage_ops.loss.row_function import CrossEntropyRun, run_of, target_gradient
from storage_ops.matmul import reference as matmul_reference

_OPS = torch.ops.storage_ops
_DIFFERENTIABLE = 5  # the first outputs of the forward: loss, nll, lse, entropy, picked
# Positions of input, weight, bias and target among the arguments.
_PLACES = tuple(map(Call._fields.index, ("input", "weight", "bias", "target")))
# Arguments of the backward before those of the forward: upstream gradients, and the state.
_UPSTREAM = 6


def _forward(*args: Any) -> tuple[Tensor, ...]:
    call = Call(*args)
    if call.in_forward and (call.reduction == "none" or call.accumulate_into is not None):
        raise ValueError(
            "linear_cross_entropy: `in_forward` is True. Expected False with reduction='none' or "
            "accumulate_into, whose gradients are computed in the backward."
        )
    kept.make_room(call.input)
    run, input = run_of(call), call.input
    tokens, rows = run.head.tokens, run.rows
    if call.in_forward and any(call.grad_mask):
        rows.upstream = formulas.upstream_of(tokens, call, formulas.scale_of(tokens, call))
        grads = run.statistics_and_gradients()
    else:
        tile = run.statistics()
        grads = [input.new_empty(0) for _ in call.grad_mask]
        if tile is not None:
            grads[0] = tile
            grads[1] = grads[1] if run.parked is None else run.parked
    state, argmax, wants = rows.state, rows.argmax, call.wants
    out = formulas.Outputs.of(tokens, call, state)
    nll = out.nll
    if nll is out.loss and wants[0] and call.reduction == "none":
        nll = nll.clone()  # two results of an op may not share memory
    picked, top_ids = state.new_empty(0), input.new_empty(0, dtype=torch.int64)
    if rows.picked is not None:
        picked, top_ids = map(tokens.spread, rows.picked.log_probabilities())
    dropped = state.new_empty(0)
    if run.dropped is not None:
        dropped = tokens.spread(run.head.ranks.add_up(run.dropped))
    return (
        rows.reduced(out.loss),
        tokens.spread(nll) if wants[0] else state.new_empty(0),
        tokens.spread(out.lse_of(state)) if wants[1] else state.new_empty(0),
        tokens.spread(out.entropy_of(state)) if wants[2] else state.new_empty(0),
        picked,
        input.new_empty(0, dtype=torch.int64) if argmax is None else tokens.spread(argmax),
        top_ids,
        dropped,
        tokens.spread_state(state),
        *grads,
    )


_Kept = tuple[Tensor | None, Tensor | None]


def _resumed(
    args: tuple[Any, ...], into: bool = False, logits: _Kept = (None, None)
) -> CrossEntropyRun:
    """Return the run of a call at the point where its forward ended.

    The arguments are those of a backward op.
    """
    call = call_of_backward(args, into)
    state = args[_UPSTREAM - 1]
    run = run_of(call, state, logits)
    tokens, rows = run.head.tokens, run.rows
    gradients = [None if grad is None else grad.to(state.dtype) for grad in args[: _UPSTREAM - 1]]
    *gradients, picked = gradients
    gradients[1:] = [None if grad is None else tokens.collect(grad) for grad in gradients[1:]]
    if picked is not None and rows.picked is not None:
        of_lse = rows.picked.differentiate(tokens.collect(picked, 1))
        gradients[2] = of_lse if gradients[2] is None else gradients[2] + of_lse
    if gradients[0] is not None:
        total = gradients[0] if call.reduction != "none" else tokens.collect(gradients[0])
        gradients[0] = total * formulas.scale_of(tokens, call)
    rows.upstream = formulas.upstream_of(tokens, call, *gradients)
    return run


def call_of_backward(args: tuple[Any, ...], into: bool = False) -> Call:
    """Return the call from the arguments of a backward op, with `into` of accumulate_into."""
    call_args = args[_UPSTREAM:]
    call = Call(*call_args) if into else Call.of_backward(call_args)
    # The results are gradients, so accumulate_into must not be written.
    return call._replace(in_forward=False, wants=(False,) * 4, want_dropped=False)


def _backward(
    *args: Any, into: bool = False, logits: _Kept = (None, None)
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gradients by a second pass over the logits, for any upstream gradients."""
    run = _resumed(args, into, logits)
    grad_input, grad_weight, grad_bias = run.gradients()
    if run.took_over:  # an op may not return the memory of an argument
        grad_weight = grad_weight.new_empty(0)
    return grad_input, grad_weight, grad_bias


def _backward_target(*args: Any) -> Tensor:
    """Return the gradient of targets that are distributions."""
    return target_gradient(_resumed(args))


def _backward_kept(
    tile: Tensor, parked: Tensor | None, *args: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _backward(*args, logits=(tile, parked))


def _backward_into(*args: Any, logits: _Kept = (None, None)) -> tuple[Tensor, Tensor]:
    grad_input, _, grad_bias = _backward(*args, into=True, logits=logits)
    return grad_input, grad_bias


def _backward_into_kept(tile: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return _backward_into(*args, logits=(tile, None))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    call = Call(*inputs)
    ctx.picks = call.selected_ids is not None or call.top_k > 0
    # It is not saved, because other code may add to it before the backward.
    ctx.into = call.accumulate_into
    logits = [t.detach() for t in output[-3:-1] if t.numel()] if call.keeps else []
    ctx.kept = kept.keep(*logits) if logits else None
    call = call._replace(accumulate_into=None)
    if call.selected_ids is not None and call.ignore_index >= 0:
        # The backward cannot distinguish a selected ignore_index from a most probable class.
        no_class = call.selected_ids == call.ignore_index
        call = call._replace(selected_ids=call.selected_ids.masked_fill(no_class, -1))
    if call.top_k:  # the backward needs both
        selected_ids, top_ids = call.selected_ids, output[-6]
        ids = top_ids if selected_ids is None else torch.cat((selected_ids, top_ids), -1)
        call = call._replace(selected_ids=ids, top_k=0)
    set_up(ctx, call, _PLACES, output, _DIFFERENTIABLE, (*logits, None, None)[:2])


def _autograd(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
    # Outputs that were not requested are empty, so their upstream gradients do not matter.
    asked = [True, *ctx.call.wants[:3], ctx.picks]
    upstream_grads = [g if want else None for g, want in zip(upstream, asked, strict=False)]
    return backward(ctx, upstream_grads, _second_pass)


def _second_pass(
    ctx: Any, saved: Sequence[Any], upstream: list[Tensor | None], needs: list[bool]
) -> Gradients:
    """Compute gradients of input, weight, bias and target. The logits are computed again."""
    tile, parked, state, *tensors = saved
    if ctx.kept is None or not kept.take(ctx.kept):
        tile = parked = None
    # .data is no use of a saved tensor. Otherwise autograd would refuse the next use.
    tile, parked = (t if t is None else t.data for t in (tile, parked))
    if tile is not None and any(g is not None and batched(g) for g in upstream):
        kept.free(tile, parked)  # kept logits serve one backward, but vmap runs several
        tile = None
    call = with_tensors(ctx.call, tensors)
    call = call._replace(in_forward=False, grad_mask=tuple(needs[:3]))
    arguments = (*upstream, state, *call.for_backward())
    if ctx.into is not None:
        into = (*upstream, state, *call._replace(accumulate_into=ctx.into))
        if tile is not None:
            gradients = _OPS.linear_cross_entropy_backward_into_kept(tile, *into)
        else:
            gradients = call_once(_OPS.linear_cross_entropy_backward_into, *into)
        gradients = gradients[0], None, gradients[1]
    elif tile is not None:
        gradients = _with_parked(
            _OPS.linear_cross_entropy_backward_kept(tile, parked, *arguments), parked, call.weight
        )
    else:
        gradients = _backwards(call, "linear_cross_entropy_backward", arguments)
    if not needs[3]:
        return tuple(gradients)
    return *gradients, _backwards(call, "linear_cross_entropy_backward_target", arguments)


def _with_parked(gradients: Gradients, parked: Tensor | None, weight: Tensor) -> Gradients:
    """Return gradients, with that of the weight if it is in the memory of parked logits."""
    of_input, of_weight, of_bias = gradients
    if parked is not None and of_weight is not None and not of_weight.numel():
        of_weight = kept.gradient_in(parked, weight)
    return of_input, of_weight, of_bias


def _backwards(call: Call, name: str, arguments: tuple[Any, ...]) -> Any:
    return ranks.run(functools.partial(call_once, getattr(_OPS, name)), _KERNELS[name], call,
                      *arguments)  # fmt: skip


class _Differentiable(HeadFunction):
    backward = staticmethod(_autograd)
    setup_context = staticmethod(_setup_context)

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        op, kernel = _OPS.linear_cross_entropy, _KERNELS["linear_cross_entropy"]
        return without_bases(ranks.run(op, kernel, Call(*args), *args))


def _may_keep(call: Call) -> bool:
    """Return True if a call may keep its last tile.

    A graph may save, copy and read again the outputs of an op, so none may be overwritten. Ranks
    keep no tile, because all ranks must process their tiles in the same order.
    """
    if call.in_forward or not any(call.grad_mask) or call.group:
        return False
    return not (torch.compiler.is_compiling() or ranks.traced() or transforming())


def apply(call: Call) -> tuple[Tensor, ...]:
    """Call the forward op so that it works in eager code, torch.compile and torch.func."""
    if needs_no_graph():
        return tuple(without_graph(apply, call._replace(in_forward=False)))
    bare, keeps = keeping(call.plan, False), _may_keep(call)
    if not bare or not keeps:
        call = call._replace(plan=keeping(bare, keeps))
    if torch.compiler.is_compiling():
        return tuple(_OPS.linear_cross_entropy(*call))
    outputs: tuple[Tensor, ...] = _Differentiable.apply(*call)  # type: ignore[no-untyped-call]
    return outputs


_FALLBACKS: dict[str, Callable[..., None]] = {
    "_cross_entropy_rows": reference.cross_entropy_rows,
    "_tile_sums": reference.tile_sums,
    "_gather_gradient": reference.gather_gradient,
    "_put_rows": reference.put_rows,
    "_product": matmul_reference.product,
    "_transposed_product": matmul_reference.transposed_product,
    "_scale": reference.scale,
}
# Ops without tensors, which return facts about the processor.
_FACTS: dict[str, Callable[..., Any]] = {
    "_product_scratch": matmul_reference.product_scratch,
    "_product_kind": matmul_reference.product_kind,
}
_KERNELS: dict[str, Callable[..., Any]] = {
    "_check_ranks": ranks.check,
    "linear_cross_entropy": exact(_forward),
    "linear_cross_entropy_backward": exact(_backward),
    "linear_cross_entropy_backward_kept": exact(_backward_kept),
    "linear_cross_entropy_backward_into": exact(_backward_into),
    "linear_cross_entropy_backward_into_kept": exact(_backward_into_kept),
    "linear_cross_entropy_backward_target": exact(_backward_target),
}
for _name, _kernel in {**_FALLBACKS, **_FACTS, **_KERNELS}.items():
    _schemas.library.impl(_name, _kernel, "CompositeExplicitAutograd")

_NAME, _BACKWARD_NAME = (f"storage_ops::linear_cross_entropy{end}" for end in ("", "_backward"))
register_autograd(_NAME, _autograd, setup_context=_setup_context, lib=_schemas.library)
register_autograd(_BACKWARD_NAME, raise_not_twice, lib=_schemas.library)
register_autograd(_BACKWARD_NAME + "_target", raise_not_twice, lib=_schemas.library)
register_vmap(_NAME, looped(_OPS.linear_cross_entropy), lib=_schemas.library)
register_vmap(_BACKWARD_NAME, looped(_OPS.linear_cross_entropy_backward), lib=_schemas.library)


for _name in _FALLBACKS:
    register_fake(f"storage_ops::{_name}", lambda *args: None, lib=_schemas.library)
register_fake("storage_ops::_check_ranks", lambda every, *_: every.new_empty(()),
              lib=_schemas.library)  # fmt: skip


def _asked(op: Callable[..., Any]) -> Callable[..., Any]:
    """Return a fake that calls the op itself, under any mode."""

    def fake(*args: Any) -> Any:
        with _disable_current_modes():
            return op(*args)

    return fake


for _name in _FACTS:
    register_fake(f"storage_ops::{_name}", _asked(getattr(_OPS, _name)), lib=_schemas.library)


@register_fake(_NAME, lib=_schemas.library)
def _(*args: Any) -> tuple[Tensor, ...]:
    call = Call(*args)
    input, wants, wide = call.input, call.wants, arithmetic(call.input.dtype)
    whole = call.target.shape if call.input_grad == "reduce_scatter" else input.shape[:-1]
    shape = list(whole)
    if call.shift:
        shape[-1] = torch.sym_max(shape[-1] - call.shift, 0)
    per_token = [input.new_empty(shape if want else (0,), dtype=wide) for want in wants[:3]]
    selected = 0 if call.selected_ids is None else call.selected_ids.shape[-1]
    picks = bool(call.top_k) or call.selected_ids is not None
    picked = input.new_empty((*shape, selected + call.top_k) if picks else (0,), dtype=wide)
    top_ids = input.new_empty((*shape, call.top_k) if picks else (0,), dtype=torch.int64)
    argmax = input.new_empty(shape if wants[3] else (0,), dtype=torch.int64)
    dropped = input.new_empty(shape if call.want_dropped else (0,), dtype=wide)
    loss = input.new_empty(shape if call.reduction == "none" else (), dtype=wide)
    state = input.new_empty((STATE_ROWS, count_of(whole)), dtype=wide)
    grads = gradients_like(call, call.in_forward)
    if call.keeps:
        run = run_of(call)
        parked = grads[1] if run.parked is None else run.parked
        grads = (run.left(), parked, grads[2])
    return loss, *per_token, picked, argmax, top_ids, dropped, state, *grads


@register_fake(_BACKWARD_NAME, lib=_schemas.library)
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return gradients_like(call_of_backward(args))


@register_fake(_BACKWARD_NAME + "_kept", lib=_schemas.library)
def _(tile: Tensor, parked: Tensor | None, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    of_input, of_weight, of_bias = gradients_like(call_of_backward(args))
    return of_input, of_weight if parked is None else of_weight.new_empty(0), of_bias


@register_fake(_BACKWARD_NAME + "_target", lib=_schemas.library)
def _(*args: Any) -> Tensor:
    target = call_of_backward(args).target
    return torch.empty_like(target, memory_format=torch.contiguous_format)


@register_fake(_BACKWARD_NAME + "_into", lib=_schemas.library)
def _(*args: Any) -> tuple[Tensor, Tensor]:
    grad_input, _, grad_bias = gradients_like(call_of_backward(args, into=True))
    return grad_input, grad_bias


@register_fake(_BACKWARD_NAME + "_into_kept", lib=_schemas.library)
def _(tile: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    grad_input, _, grad_bias = gradients_like(call_of_backward(args, into=True))
    return grad_input, grad_bias
