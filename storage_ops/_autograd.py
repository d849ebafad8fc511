"""Shared autograd code of the ops that compute their gradients in the forward.

Such an op returns its gradients beside its result. Its backward multiplies them by the upstream
gradient, in place if no other tensor shares their memory. The gradients are first derivatives. A
second differentiation raises an error instead of returning zeros.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.library import register_autograd, register_fake

from storage_ops import _schemas
from storage_ops.foundation.autocast import autocast_dtype
from storage_ops.matmul.full_sums import full_sums

_OPS = torch.ops.storage_ops
_INSTEAD = "Use a loss of torch.nn.functional.linear(...), whose logits are in memory,"
_NOT_TWICE = (
    "linear_cross_entropy or linear_kl_div: the gradient was differentiated, and double backward "
    f"is not supported. {_INSTEAD} where you need it."
)
NOT_FORWARD = (
    "linear_cross_entropy or linear_kl_div: an argument carries a tangent, and forward-mode AD is "
    f"not supported. {_INSTEAD} for it."
)


def raise_not_twice(ctx: Any, *grads: Tensor) -> None:
    """Raise an error, because a gradient is differentiated again."""
    raise RuntimeError(_NOT_TWICE)


def raise_not_forward(ctx: Any, *tangents: Tensor) -> None:
    """Raise an error, because these ops have no forward-mode derivative."""
    raise RuntimeError(NOT_FORWARD)


def refuse_forward_mode(*tensors: Tensor | None) -> None:
    """Raise an error for a dual tensor, whose tangent would be dropped silently."""
    if forward_ad._current_level < 0:
        return
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise RuntimeError(NOT_FORWARD)


class _NotTwice(torch.autograd.Function):
    """A function whose results may be used in a graph, but not differentiated."""

    backward = staticmethod(raise_not_twice)
    jvp = staticmethod(raise_not_forward)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
        pass


class _OnceDifferentiable(_NotTwice):
    """Returns the first `count` tensors unchanged. Differentiating them raises an error.

    They depend on the other tensors. Autograd runs a node only if it leads to a tensor whose
    gradient is needed, so all tensors must be arguments.
    """

    @staticmethod
    def forward(count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if t is None else t.view_as(t) for t in tensors[:count])


class _Root(torch.autograd.Function):
    """Represents a tensor in the autograd graph, without holding its memory."""

    backward = staticmethod(raise_not_twice)

    # With a `setup_context` torch inspects the signature in every call, which takes 20 us.
    @staticmethod
    def forward(ctx: object, t: Tensor) -> Tensor:
        return t.new_empty(0)


def roots(tensors: tuple[Tensor | None, ...]) -> list[Tensor]:
    """Return stand-ins, without memory, for tensors that gradients from the forward depend on."""
    if transforming():
        return []
    with torch.enable_grad():
        return [_Root.apply(t) for t in tensors if t is not None and t.requires_grad]  # type: ignore[no-untyped-call]


def sources_of(tensors: Iterable[Tensor | None], outputs: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors that a backward must read so that `connect` works under AOTAutograd.

    Args:
        tensors: the arguments of the op. Inputs of the traced graph, and the bases of views of an
            input, lead to the gradients of that input.
        outputs: the differentiable results of the op. An output that the graph returns unchanged
            leads to all inputs of the graph.

    Returns:
        Tensors to store on `ctx` itself, because `save_for_backward` detaches an output in a trace.
        An empty list outside of a trace.
    """
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL) is None:
        return []
    tracked = [t for t in tensors if t is not None and t.requires_grad]
    bases: list[Tensor] = [t._base if t._base is not None else t for t in tracked]
    inputs = [t for t in bases if t.grad_fn is None or not t.grad_fn.next_functions]
    # A data-dependent size may not be compared, because that would add a guard.
    asked = [t for t in outputs if not any(type(n) is int and n == 0 for n in t.shape)]
    return [*dict.fromkeys(inputs), *asked]


def connect(upstream: Sequence[Tensor | None], sources: Sequence[Tensor]) -> list[Tensor | None]:
    """Return upstream gradients that depend on `sources` in a compiled graph.

    AOTAutograd raises an error for a second derivative only if a tensor that the backward reads
    leads to the tensor that the caller asks for. Gradients that the forward has computed lead to no
    tensor. Their second derivative would be zero without an error.
    """
    gradients = list(upstream)
    first = next((i for i, g in enumerate(gradients) if g is not None), None)
    if sources and first is not None:
        gradients[first] = _OPS._connect(gradients[first], list(sources))
    return gradients


def once(grads: list[Tensor | None], sources: list[Tensor | None]) -> list[Tensor | None]:
    """Return the results of a backward so that differentiating them raises an error.

    `sources`: the tensors that the results depend on.
    """
    if torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active():
        return list(_OnceDifferentiable.apply(len(grads), *grads, *sources))  # type: ignore[no-untyped-call]
    return grads


def retained() -> bool:
    """Return True if the saved tensors of a backward may be needed again after it."""
    keeps: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return torch.is_grad_enabled() or keeps


def batched(upstream: Tensor) -> bool:
    """Return True if a vmap of the backward has combined several gradients into this tensor."""
    functorch = torch._C._functorch
    return bool(functorch.is_batchedtensor(upstream) or functorch.is_legacy_batchedtensor(upstream))


def times(grad: Tensor, upstream: Tensor, retained: bool) -> Tensor:
    """Return the gradient times the upstream scalar, in place if no tensor shares its memory."""
    # A fake tensor represents one tensor in a simulation, but any tensor in a recorded graph.
    plain = type(grad) is Tensor or (type(grad) is FakeTensor and get_proxy_mode() is None)
    storage = grad.untyped_storage() if plain else None
    # The saved tensor and `storage` are two references. Batched upstream gradients need a new
    # tensor.
    if (
        retained
        or batched(upstream)
        or storage is None
        or torch._C._storage_Use_Count(storage._cdata) > 2
    ):
        return grad * upstream
    _OPS._scale(grad, upstream)
    return grad


def call_once(op: Callable[..., Any], *args: object) -> Any:
    """Call an op of the backward so that differentiating it raises an error."""
    if not transforming():  # `once` wraps results that autograd sees
        return op(*args)
    with torch.enable_grad():
        return _TransformableBackward.apply(op, *args)  # type: ignore[no-untyped-call]


class _TransformableBackward(_NotTwice):
    """An op of the backward for torch.func."""

    generate_vmap_rule = True

    @staticmethod
    def forward(op: Callable[..., Any], *args: object) -> Any:
        result = op(*args)
        return tuple(result) if isinstance(result, (tuple, list)) else result


def transforming() -> bool:
    """Return True if a transform of torch.func is active."""
    return not torch.compiler.is_compiling() and bool(torch._C._are_functorch_transforms_active())


def needs_no_graph() -> bool:
    """Return True if torch.compile must call a loss without a graph, by `without_graph`.

    In torch.func.grad, and in a vmap inside of it, Dynamo cannot run the autograd formula of an op.
    For a vmap alone there is a rule.
    """
    return torch.compiler.is_compiling() and _is_in_grad()


def _is_in_grad() -> bool:
    transforms = torch._C._functorch.get_interpreter_stack() or ()
    return any(transform.key() != TransformType.Vmap for transform in transforms)


# Dynamo evaluates a marked function while it traces, and guards on the transforms.
_is_in_grad._dynamo_marked_constant = True  # type: ignore[attr-defined]


def without_graph(apply: Callable[..., Any], call: object) -> Any:
    """Return `apply(call)`, for which torch.compile creates no graph."""
    # This import also loads Dynamo, so do it only when it is needed.
    from storage_ops._without_graph import run

    return run(apply, call)


def looped(op: Callable[..., Any]) -> Callable[..., Any]:
    """Return a vmap rule that calls an op once for every element of the batch."""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: object) -> tuple[Any, Any]:
        def one(index: int) -> list[Any]:
            return [
                a.select(dim, index) if isinstance(a, Tensor) and dim is not None else a
                for a, dim in zip(args, in_dims, strict=True)
            ]

        if not info.batch_size:
            empty = _empty(op, in_dims, args)
            return empty, (0,) * len(empty)
        results = [op(*one(index)) for index in range(info.batch_size)]
        stacked = tuple(torch.stack(column) for column in zip(*results, strict=True))
        return stacked, (0,) * len(stacked)

    return rule


def _empty(
    op: Callable[..., Any], in_dims: tuple[Any, ...], args: tuple[Any, ...]
) -> tuple[Tensor, ...]:
    """Return the results of an op for an empty batch. Meta tensors give the shapes."""
    arguments = list(args)
    for position, (a, dim) in enumerate(zip(args, in_dims, strict=True)):
        if isinstance(a, Tensor):
            sizes = [n for d, n in enumerate(a.shape) if d != dim]
            arguments[position] = a.new_empty(sizes, device="meta")
    like = next(a for a in args if isinstance(a, Tensor))
    return tuple(like.new_empty((0, *t.shape), dtype=t.dtype) for t in op(*arguments))


def exact(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel whose products keep their operands' dtype and sum in full precision."""

    @functools.wraps(kernel)
    def run(*args: object) -> Any:
        device = next(a.device.type for a in args if isinstance(a, Tensor))
        casts = autocast_dtype(device) is not None
        sums = full_sums if device == "cuda" else contextlib.nullcontext()
        with torch.autocast(device, enabled=False) if casts else contextlib.nullcontext(), sums:
            return kernel(*args)

    return run


def _connect(upstream: Tensor, sources: list[Tensor]) -> Tensor:
    return upstream.clone()


_schemas.library.impl("_connect", _connect, "CompositeExplicitAutograd")
register_fake("storage_ops::_connect", _connect, lib=_schemas.library)
register_autograd("storage_ops::_connect", raise_not_twice, lib=_schemas.library)
