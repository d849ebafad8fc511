"""The ops of linear cross-entropy: kernels, fakes, autograd and vmap.

A mean or a sum has one upstream number, so its gradients are made in the forward, and the backward
multiplies them by it. Every other case keeps the state of the rows (a few numbers per token) and
forms the logits once more in the backward, when it knows what each of them is worth.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import register_autograd, register_fake, register_vmap

from storage_ops import _schemas
from storage_ops.loss import plan_memory, planner, ranks
from storage_ops.loss import reference as loss_reference
from storage_ops.loss import tiles as loss_tiles
from storage_ops.loss.plan_memory import STATE_ROWS
from storage_ops.loss.task import Task, casts, new_state
from storage_ops.loss.tokens import (
    Outputs,
    Spec,
    Tokens,
    arithmetic,
    copy_elements,
    reduce,
    scale_of,
    tokens_of,
    upstream_of,
)
from storage_ops.matmul import products
from storage_ops.matmul.full_sums import full_sums

_OPS = torch.ops.storage_ops
_DIFFERENTIABLE = 4  # of the forward's outputs: loss, nll, lse, entropy
_TENSORS = 7  # leading arguments of the forward: tensors, accumulate_into last
_UPSTREAM = 5  # leading arguments of the backward, before those of the forward
_NOT_TWICE = (
    "linear_cross_entropy: its gradient was differentiated; double backward is not supported, use "
    "torch.nn.functional.cross_entropy(torch.nn.functional.linear(...)) where you need it"
)
NOT_FORWARD = (
    "linear_cross_entropy: an argument carries a tangent; forward-mode AD is not supported, use "
    "torch.nn.functional.cross_entropy(torch.nn.functional.linear(...)) for it"
)


def problem_of(
    tokens: Tokens, weight: Tensor, spec: Spec, grads: tuple[bool, bool, bool], early: bool,
    into: Tensor | None = None, bias: Tensor | None = None,
) -> plan_memory.Problem:  # fmt: skip
    """What the plan of a call depends on."""
    x = tokens.x
    cast = arithmetic(x.dtype).itemsize if casts(tokens) else 0
    copies = sum(t.nbytes for t in (x, weight) if not products.takes(t))
    copies += copy_elements(bias, x.dtype) * x.element_size()
    own = spec.accumulate_dtype == x.dtype
    return plan_memory.Problem(
        tokens.count,
        x.shape[1],
        len(weight),
        x.element_size(),
        grads,
        sums_fp32=not own,
        early=early,
        rescale=not tokens.probabilities
        and not spec.group
        and not (spec.label_smoothing and spec.softcap),
        into=into is not None,
        gather=tokens.kept is not None,
        masked=tokens.masked,
        left_out=len(x) - tokens.count,
        **products.traits(x.dtype, x.device.type),
        threads=1 if spec.group else torch.get_num_threads(),  # every rank must plan alike
        cast_bytes=cast,
        fixed_bytes=tokens.copied_bytes + copies,
    )


def _task(
    args: tuple[Any, ...], spec: Spec, grads: tuple[bool, bool, bool], early: bool
) -> tuple[Task, planner.Plan]:
    input, weight, target, bias, class_weight, token_weight, into = args
    ranks.check_equal(spec.group, weight)
    tokens = tokens_of(input, target, token_weight, class_weight, spec)
    p = problem_of(tokens, weight, spec, grads, early, into, bias)
    if spec.plan:
        plan = planner.parse(p, spec.plan)
    else:
        plan = planner.choose(p, spec.memory_budget, products.rates_of(input.device))
    p = dataclasses.replace(p, threads=plan.threads)
    tokens.x = tokens.x if products.takes(tokens.x) else tokens.x.contiguous()
    weight = weight if products.takes(weight) else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    first, vocabulary = ranks.place_of(spec.group, len(weight))
    return Task(tokens, weight, bias, spec, p, into, vocabulary, first), plan


def _forward(*args: Any) -> tuple[Tensor, ...]:
    tensors, options = args[:_TENSORS], args[_TENSORS:]
    *fields, early, mask, wants = options
    spec, input = Spec(*fields), tensors[0]
    if early and (spec.reduction == "none" or tensors[6] is not None):
        raise ValueError(
            "linear_cross_entropy: early is True; expected False with reduction='none' or "
            "accumulate_into, whose gradients are made in the backward"
        )
    want_nll, want_lse, want_entropy, want_argmax = wants
    task, plan = _task(tensors, spec, (mask[0], mask[1], mask[2]), early)
    tokens, state = task.tokens, new_state(task)
    argmax = None
    if want_argmax:
        argmax = input.new_zeros(tokens.count, dtype=torch.int64)
    if early and any(mask):
        upstream = upstream_of(tokens, spec, scale_of(tokens, spec))
        grads = loss_tiles.loss_and_gradients(task, plan, state, upstream, argmax)
    else:
        loss_tiles.statistics(task, plan, state, argmax, want_entropy)
        grads = [input.new_empty(0) for _ in mask]
    if early and mask[0]:
        grads[0] = grads[0].view(input.shape)
    out = Outputs.of(tokens, spec, state)
    return (
        reduce(out.loss, tokens, spec),
        tokens.spread(out.nll) if want_nll else state.new_empty(0),
        tokens.spread(out.lse) if want_lse else state.new_empty(0),
        tokens.spread(out.entropy_of(state)) if want_entropy else state.new_empty(0),
        input.new_empty(0, dtype=torch.int64) if argmax is None else tokens.spread(argmax),
        tokens.spread_state(state),
        *grads,
    )


def _gradients(
    grad_loss: Tensor | None,
    grad_nll: Tensor | None,
    grad_lse: Tensor | None,
    grad_entropy: Tensor | None,
    state: Tensor,
    *args: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by a second pass over the logits, for any upstream gradients."""
    task, plan, state, upstream = _resumed(
        (grad_loss, grad_nll, grad_lse, grad_entropy), state, args
    )
    grads = loss_tiles.gradients_of(task, plan, state, upstream)
    if task.problem.grads[0]:
        grads[0] = grads[0].view(args[0].shape)
    return grads[0], grads[1], grads[2]


def _resumed(
    grads: tuple[Tensor | None, ...], state: Tensor, args: tuple[Any, ...]
) -> tuple[Task, planner.Plan, Tensor, Tensor]:
    """What a call was about to do when its forward ended, and the rows' upstream gradients."""
    tensors, options = args[:_TENSORS], args[_TENSORS:]
    *fields, _, mask, _ = options
    spec = Spec(*fields)
    task, plan = _task(tensors, spec, (mask[0], mask[1], mask[2]), False)
    tokens = task.tokens
    each = [None if grad is None else grad.to(state.dtype) for grad in grads]
    each[1:] = [None if grad is None else tokens.collect(grad) for grad in each[1:]]
    if each[0] is not None:
        total = each[0] if spec.reduction != "none" else tokens.collect(each[0])
        each[0] = total * scale_of(tokens, spec)
    return task, plan, tokens.collect_state(state), upstream_of(tokens, spec, *each)


def _backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients(*args[: _UPSTREAM + _TENSORS - 1], None, *args[_UPSTREAM + _TENSORS - 1 :])


def _backward_target(*args: Any) -> Tensor:
    """The gradient of targets that are probabilities."""
    grads, state, rest = args[: _UPSTREAM - 1], args[_UPSTREAM - 1], args[_UPSTREAM:]
    rest = (*rest[: _TENSORS - 1], None, *rest[_TENSORS - 1 :])
    task, plan, state, upstream = _resumed(grads, state, rest)
    return loss_tiles.target_gradient(task, plan, state, upstream, rest[2])


def _backward_into(*args: Any) -> tuple[Tensor, Tensor]:
    grad_input, _, grad_bias = _gradients(*args)
    return grad_input, grad_bias


def _raise_not_twice(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError(_NOT_TWICE)


def _raise_not_forward(ctx: Any, *tangents: Tensor) -> None:
    raise RuntimeError(NOT_FORWARD)


class _NotTwice(torch.autograd.Function):
    """A function whose results may be used in a graph, but not differentiated."""

    backward = staticmethod(_raise_not_twice)
    jvp = staticmethod(_raise_not_forward)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass


class _OnceDifferentiable(_NotTwice):
    """Passes the first tensors on under create_graph=True, and raises when they are differentiated.

    The others are what they depend on: autograd runs what lies on the way to it, and nothing else.
    """

    @staticmethod
    def forward(count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if t is None else t.view_as(t) for t in tensors[:count])


class _Root(_NotTwice):
    """Stands for a tensor in the graph of autograd, and holds none of its memory."""

    @staticmethod
    def forward(t: Tensor) -> Tensor:
        return t.new_empty(0)


def _roots(tensors: tuple[Tensor | None, ...]) -> list[Tensor]:
    with torch.enable_grad():
        return [_Root.apply(t) for t in tensors if t is not None and t.requires_grad]  # type: ignore[no-untyped-call]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, options = inputs[:_TENSORS], inputs[_TENSORS:]
    *ctx.options, early, mask, ctx.wants = options
    state, *grads = output[_DIFFERENTIABLE + 1 :]
    # Made in the forward, gradients are those of the loss alone.
    ctx.mark_non_differentiable(*output[1 if early else _DIFFERENTIABLE :])
    ctx.set_materialize_grads(False)  # or torch would allocate zeros for the gradient outputs
    needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3])
    # The mask of a direct caller of the op may promise less than autograd asks for.
    ctx.ready = early and all(
        have or not need for have, need in zip(mask, needs, strict=True)
    )  # fmt: skip
    # Not saved: others add to it in between, and may.
    ctx.into = tensors[6]
    ctx.roots = _roots(tensors[:_TENSORS]) if ctx.ready and not transforming() else []
    # Detached: then the storage is ours alone exactly when the caller holds no gradient output.
    saved = [g.detach() for g in grads] if ctx.ready else [state.detach(), *tensors[:6]]
    ctx.save_for_backward(*saved)


def _times(grad: Tensor, upstream: Tensor, retained: bool) -> Tensor:
    """The gradient times the upstream scalar: in place when nobody else can see the memory."""
    storage = grad.untyped_storage() if type(grad) is Tensor else None
    # Two users: the saved tensor and `storage` itself. A batch of upstream gradients needs more.
    functorch = torch._C._functorch
    batched = functorch.is_batchedtensor(upstream) or functorch.is_legacy_batchedtensor(upstream)
    if retained or batched or storage is None or torch._C._storage_Use_Count(storage._cdata) > 2:
        return grad * upstream
    _OPS._scale(grad, upstream)
    return grad


def _autograd(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3]]
    grad_target = None
    retained = torch.is_grad_enabled() or torch._C._autograd._get_current_graph_task_keep_graph()
    # Outputs that were not asked for are empty, whatever someone differentiates them by.
    asked = [True, *ctx.wants[:3]]
    given = [g if want else None for g, want in zip(upstream, asked, strict=False)]
    with torch.no_grad():
        if ctx.ready:
            loss = given[0]
            made: Any = [
                _times(g, loss, retained) if need and loss is not None else None
                for g, need in zip(ctx.saved_tensors, needs, strict=True)
            ]
        else:
            made, grad_target = _recomputed(ctx, given, needs)
    grads = [g if need else None for g, need in zip(made, needs, strict=True)]
    grads.insert(2, grad_target)
    if torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active():
        sources = [*given, *(ctx.roots if ctx.ready else ctx.saved_tensors)]
        grads = list(_OnceDifferentiable.apply(len(grads), *grads, *sources))  # type: ignore[no-untyped-call]
    return *grads, *([None] * (len(ctx.needs_input_grad) - len(grads)))


def _recomputed(ctx: Any, given: list[Tensor | None], needs: list[bool]) -> tuple[Any, Any]:
    """Gradients of input, weight and bias, and of the target, from a second pass."""
    arguments = [*given, *ctx.saved_tensors]
    options = (*ctx.options, False, needs, ctx.wants)
    if ctx.into is not None:
        made = _once(_OPS.linear_cross_entropy_backward_into, *arguments, ctx.into, *options)
        needs[1], made = False, (made[0], None, made[1])
    else:
        made = _once(_OPS.linear_cross_entropy_backward, *arguments, *options)
    if not ctx.needs_input_grad[2]:
        return made, None
    return made, _once(_OPS.linear_cross_entropy_backward_target, *arguments, *options)


def _once(op: Callable[..., Any], *args: Any) -> Any:
    """Calls an op of the backward in a form that cannot be differentiated without a word."""
    if not transforming():  # what autograd itself sees is wrapped at the end
        return op(*args)
    with torch.enable_grad():
        return _TransformableBackward.apply(op, *args)  # type: ignore[no-untyped-call]


class _TransformableBackward(_NotTwice):
    """An op of the backward for torch.func."""

    generate_vmap_rule = True

    @staticmethod
    def forward(op: Callable[..., Any], *args: Any) -> Any:
        result = op(*args)
        return tuple(result) if isinstance(result, (tuple, list)) else result


class _Transformable(torch.autograd.Function):
    """The op for torch.func, which takes no other autograd formula than a Function's."""

    generate_vmap_rule = True
    backward = staticmethod(_autograd)
    jvp = staticmethod(_raise_not_forward)
    setup_context = staticmethod(_setup_context)

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = _OPS.linear_cross_entropy(*args)
        return outputs


def transforming() -> bool:
    """Whether a transform of torch.func is at work."""
    return not torch.compiler.is_compiling() and bool(torch._C._are_functorch_transforms_active())


def call(*args: Any) -> tuple[Tensor, ...]:
    """The forward op, in a form that eager code, torch.compile and torch.func all take."""
    if transforming():
        outputs: tuple[Tensor, ...] = _Transformable.apply(*args)  # type: ignore[no-untyped-call]
        return outputs
    return tuple(_OPS.linear_cross_entropy(*args))


def _looped(op: Callable[..., Any]) -> Callable[..., Any]:
    """A vmap rule that calls an op once for every element of the batch."""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        def one(index: int) -> list[Any]:
            return [
                a.select(dim, index) if isinstance(a, Tensor) and dim is not None else a
                for a, dim in zip(args, in_dims, strict=True)
            ]

        results = [op(*one(index)) for index in range(info.batch_size)]
        stacked = tuple(torch.stack(column) for column in zip(*results, strict=True))
        return stacked, (0,) * len(stacked)

    return rule


def _exact(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel whose matrix products keep the dtype of their operands and sum in full precision."""

    @functools.wraps(kernel)
    def run(*args: Any) -> Any:
        device = next(a.device.type for a in args if isinstance(a, Tensor))
        if not torch.amp.is_autocast_available(device):  # such as the meta device
            return kernel(*args)
        sums = full_sums if device == "cuda" else contextlib.nullcontext()
        with torch.autocast(device, enabled=False), sums:
            return kernel(*args)

    return run


_KERNELS: dict[str, Callable[..., Any]] = {
    "_cross_entropy_rows": loss_reference.cross_entropy_rows,
    "linear_cross_entropy": _forward,
    "linear_cross_entropy_backward": _backward,
    "linear_cross_entropy_backward_into": _backward_into,
    "linear_cross_entropy_backward_target": _backward_target,
}
for _name, _kernel in _KERNELS.items():
    _schemas.library.impl(_name, _exact(_kernel), "CompositeExplicitAutograd")

_NAME, _BACKWARD_NAME = (f"storage_ops::linear_cross_entropy{end}" for end in ("", "_backward"))
register_autograd(_NAME, _autograd, setup_context=_setup_context, lib=_schemas.library)
register_autograd(_BACKWARD_NAME, _raise_not_twice, lib=_schemas.library)
register_autograd(_BACKWARD_NAME + "_target", _raise_not_twice, lib=_schemas.library)
register_vmap(_NAME, _looped(_OPS.linear_cross_entropy), lib=_schemas.library)
register_vmap(_BACKWARD_NAME, _looped(_OPS.linear_cross_entropy_backward), lib=_schemas.library)


@register_fake("storage_ops::_cross_entropy_rows", lib=_schemas.library)
def _(logits: Tensor, *args: Any) -> None:
    return None


def _fake_grads(input: Tensor, weight: Tensor, mask: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (input.shape, weight.shape, weight.shape[:1])
    made = [input.new_empty(s if m else (0,)) for s, m in zip(shapes, mask, strict=True)]
    return made[0], made[1], made[2]


@register_fake(_NAME, lib=_schemas.library)
def _(input: Tensor, weight: Tensor, target: Tensor, *args: Any) -> tuple[Tensor, ...]:
    *_, early, mask, wants = args
    spec = Spec(*args[_TENSORS - 3 : -3])
    wide = arithmetic(input.dtype)
    shape = list(input.shape[:-1])
    if spec.shift and not (isinstance(shape[-1], int) and shape[-1] == 0):
        shape[-1] -= 1
    per_token = [input.new_empty(shape if want else (0,), dtype=wide) for want in wants[:3]]
    argmax = input.new_empty(shape if wants[3] else (0,), dtype=torch.int64)
    loss = input.new_empty(shape if spec.reduction == "none" else (), dtype=wide)
    state = input.new_empty((STATE_ROWS, input.shape[:-1].numel()), dtype=wide)
    made = [early and have for have in mask]
    return loss, *per_token, argmax, state, *_fake_grads(input, weight, made)


@register_fake(_BACKWARD_NAME, lib=_schemas.library)
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_grads(args[_UPSTREAM], args[_UPSTREAM + 1], args[-2])


@register_fake(_BACKWARD_NAME + "_target", lib=_schemas.library)
def _(*args: Any) -> Tensor:
    return torch.empty_like(args[_UPSTREAM + 2], memory_format=torch.contiguous_format)


@register_fake(_BACKWARD_NAME + "_into", lib=_schemas.library)
def _(*args: Any) -> tuple[Tensor, Tensor]:
    grad_input, _, grad_bias = _fake_grads(args[_UPSTREAM], args[_UPSTREAM + 1], args[-2])
    return grad_input, grad_bias
