"""Memory behaviour of GPU kernels that differ from the CPU's, for fake CPU tensors.

torch chooses these kernels inside functions that it decomposes before any mode sees them. So the
functions themselves are replaced during a simulation, for tensors of the simulation only.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.library import Library
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from storage_ops.foundation.autocast import autocast_dtype
from storage_ops.foundation.values import TENSOR
from storage_ops.foundation.walk import walk
from storage_ops.simulate.mode import Simulation


@contextlib.contextmanager
def following_resizes() -> Iterator[None]:
    """Let modes with a ledger see `untyped_storage().resize_` inside a with block."""
    plain = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = plain(storage, size)
        for mode in _get_current_dispatch_mode_stack():
            if hasattr(mode, "follow_resize"):
                mode.follow_resize(storage)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = plain  # type: ignore[method-assign]


@contextlib.contextmanager
def gpu_kernels() -> Iterator[None]:
    """Replace CPU kernels by the memory behaviour of GPU kernels inside a with block."""
    with contextlib.ExitStack() as stack:
        for module, name, kernel in _REPLACED_FUNCTIONS:
            stack.enter_context(_replaced(importlib.import_module(module), name, kernel))
        if hasattr(bitsandbytes := sys.modules.get("bitsandbytes"), "matmul"):
            stack.enter_context(_replaced(bitsandbytes, "matmul", _matmul_8bit))
        stack.enter_context(_replaced_ops())
        yield


@contextlib.contextmanager
def _replaced(module: object, name: str, kernel: Callable[..., Any]) -> Iterator[None]:
    """Replace a function of a module while a thread is simulating."""
    original = getattr(module, name)

    def function(*args: object, **kwargs: object) -> Any:
        # Dynamo can trace a call of the original, but cannot read modes.
        if torch.compiler.is_compiling() or not _is_simulated():
            return original(*args, **kwargs)
        return kernel(*args, **kwargs)

    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, original)


@contextlib.contextmanager
def _replaced_ops() -> Iterator[None]:
    library = Library("aten", "IMPL")
    replaced = {
        "rms_norm": _rms_norm,
        "dropout": _dropout,
        "scaled_dot_product_attention": _attention,
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about an overridden kernel
            for name, kernel in replaced.items():
                for key in ("AutogradCPU", "AutogradMeta"):
                    library.impl(name, kernel, key)
        yield
    finally:
        library._destroy()


def _simulation() -> Simulation | None:
    """Return the simulation of this thread, because a replacement affects the whole process."""
    modes = _get_current_dispatch_mode_stack()
    return next((mode for mode in modes if isinstance(mode, Simulation)), None)


def _is_simulated() -> bool:
    return _simulation() is not None


def _original(name: str, *args: object, **kwargs: object) -> Any:
    """Call the original kernel, which torch decomposes."""
    op = getattr(torch.ops.aten, name).default
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def _dropout(input: Tensor, p: float, train: bool) -> Any:
    """Keep a byte mask. On the CPU the mask has the dtype of the input."""
    if not _is_simulated() or not train or not 0 < p < 1:
        return _original("dropout", input, p, train)
    return torch.native_dropout(input, p, True)[0]


class _Context(Protocol):
    """The context of a `torch.autograd.Function`.

    torch's own class is not used, because its annotations do not allow to save None.
    """

    saved_tensors: tuple[Any, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def mark_non_differentiable(self, *outputs: Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


class _FusedRMSNorm(torch.autograd.Function):
    """One kernel that keeps the input and a number per row. On the CPU it is several ops."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, dims: int, weight: Tensor | None) -> Tensor:
        rows = (*x.shape[: x.dim() - dims], *(1 for _ in range(dims)))
        rstd = x.new_empty(rows, dtype=torch.promote_types(x.dtype, torch.float32))
        ctx.save_for_backward(x, weight, rstd)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None, Tensor | None]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None, None if weight is None else torch.empty_like(weight)


def _rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Any:
    if not _is_simulated():
        return _original("rms_norm", input, normalized_shape, weight, eps)
    return _FusedRMSNorm.apply(input, len(normalized_shape), weight)  # type: ignore[no-untyped-call]


class _FlashAttention(torch.autograd.Function):
    """Keeps its inputs, its output and a number per query and head, but never a score matrix."""

    @staticmethod
    def forward(ctx: _Context, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        # Call the GPU op, so that policies of checkpoints see it. In memory, its output has heads
        # after tokens, as the next layer needs it.
        keys, values = _for_each_batch(q, k, v)
        op = torch.ops.aten._scaled_dot_product_flash_attention
        return _output_of(ctx, (q, k, v, mask), op(q, keys, values))

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, _, out, lse = ctx.saved_tensors
        # Call the GPU op, so that its arithmetic counts. Its arguments about sequences are not
        # read.
        lengths = (lse, lse, q.shape[2], k.shape[2])
        gradients: Any = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, *lengths, 0.0, False, lse, lse
        )
        return (*gradients, None)


class _EfficientAttention(torch.autograd.Function):
    """Like `_FlashAttention`, but supports masks, float32, and values with another head size."""

    @staticmethod
    def forward(ctx: _Context, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        keys, values = _for_each_batch(q, k, v)
        op = torch.ops.aten._scaled_dot_product_efficient_attention
        bias = None if mask is None else mask.detach()
        return _output_of(ctx, (q, k, v, mask), op(q, keys, values, bias, True))

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, lse = ctx.saved_tensors
        op: Any = torch.ops.aten._scaled_dot_product_efficient_attention_backward
        wanted = [True, True, True, ctx.needs_input_grad[3]]
        *gradients, of_mask = op(grad, q, k, v, mask, out, lse, lse, lse, 0.0, wanted)
        return (*gradients, of_mask if wanted[3] else None)


def _output_of(ctx: _Context, inputs: Sequence[Tensor | None], results: Any) -> Tensor:
    """Save the inputs of a kernel, its output and its number per query. Return the output."""
    out: Tensor = results[0]
    ctx.save_for_backward(*inputs, out, results[1])
    return out


def _for_each_batch(q: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Return keys and values, which batches may share, expanded to the batches of the queries."""
    return [t.detach().expand(len(q), *t.shape[1:]) for t in tensors]


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:  # fmt: skip
    rest = attn_mask, dropout_p, is_causal
    # torch 2.10 divides by the number of key heads, which may be 0.
    enable_gqa = enable_gqa and query.shape[-3:-2] != key.shape[-3:-2]
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    simulation = _simulation()
    if simulation is None or query.dim() != 4 or not query.numel():
        return _original("scaled_dot_product_attention", query, key, value, *rest, **options)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        # The float mask that is added to scores.
        attn_mask = torch.empty_like(attn_mask, dtype=query.dtype)
        rest = attn_mask, dropout_p, is_causal
    kernel = _fused_kernel(query, key, value, attn_mask, is_causal)
    if kernel is None:
        math = torch.ops.aten._scaled_dot_product_attention_math
        with simulation.values.unfollowed():  # its causal mask has an element for each score
            return math(query, key, value, *rest, **options)[0]
    if attn_mask is not None:
        attn_mask = _aligned(attn_mask, query, key)
    size = value.shape[3]
    if size % 8 and kernel is _FlashAttention:
        query, key, value = (_filled_up(t) for t in (query, key, value))
    out = kernel.apply(query, key, value, attn_mask)
    return out[..., :size] if size < out.shape[3] else out


def _fused_kernel(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool
) -> type[torch.autograd.Function] | None:
    """Return the fused kernel that torch chooses on a GPU. None if torch computes the scores.

    The conditions are those of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp in torch 2.11.
    cuDNN's kernel, which torch may prefer on Hopper, keeps the same tensors. Only cuDNN's kernel
    supports shared key heads together with a mask.
    """
    is_half = q.dtype in (torch.float16, torch.bfloat16)
    if not is_half and q.dtype != torch.float32:
        return None
    size, shared = q.shape[3], q.shape[1] != k.shape[1]
    same_sizes, is_square = v.shape[3] == size, q.shape[2] == k.shape[2]
    no_mask = mask is None and (is_square or not is_causal)
    if is_half and same_sizes and size <= 256 and no_mask:
        return _FlashAttention
    if size % (8 if is_half else 4) or v.shape[3] % (8 if is_half else 4):
        return None
    if not shared:
        return _EfficientAttention
    by_cudnn = is_half and same_sizes and size <= 128  # sizes that all versions of cuDNN support
    return _FlashAttention if by_cudnn and not (mask is not None and mask.requires_grad) else None


def _aligned(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return the mask as the kernel reads it: rows padded to 8, expanded to heads and batches."""
    if mask.shape[-1] % 8:
        mask = _filled_up(mask)[..., : mask.shape[-1]]
    return mask.expand(*q.shape[:3], k.shape[2])


def _filled_up(t: Tensor) -> Tensor:
    """Return a copy whose last dimension is padded to a multiple of 8."""
    return torch.nn.functional.pad(t, (0, -t.shape[-1] % 8))


class _FlexAttention(torch.autograd.Function):
    """The compiled kernel of flex_attention, which computes neither scores nor a mask.

    The forward allocates the output, and two numbers per query and head: the log-sum-exp, which is
    kept, and the maximum. The backward allocates a number per query and head, the gradients, and
    the float32 gradients of tensors that score_mod captures.
    """

    @staticmethod
    def forward(ctx: _Context, q: Tensor, k: Tensor, v: Tensor, *captured: Tensor) -> Any:
        strides = q.stride()
        order = sorted(range(4), key=lambda dim: -strides[dim])  # the memory order of the queries
        shape = (*q.shape[:3], v.shape[3])
        out = q.new_empty([shape[dim] for dim in order]).permute([order.index(d) for d in range(4)])
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        top = torch.empty_like(lse)
        ctx.save_for_backward(q, k, v, out, lse, *captured)
        ctx.mark_non_differentiable(top)
        ctx.set_materialize_grads(False)
        return out, lse, top

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor | None) -> Any:
        q, k, v, _, lse, *captured = ctx.saved_tensors
        delta = torch.empty_like(lse)
        of_q = torch.empty_like(q)
        # The gradient of keys that batches share is summed afterwards.
        of_k, of_v = (t.new_empty((len(q), *t.shape[1:])) for t in (k, v))
        sums = [
            torch.empty_like(t, dtype=torch.float32) if t.requires_grad else None for t in captured
        ]
        del delta
        if len(k) < len(q):
            of_k, of_v = of_k.sum(0, keepdim=True), of_v.sum(0, keepdim=True)
        of_captured = [
            total if total is None else total.to(t.dtype)
            for total, t in zip(sums, captured, strict=True)
        ]
        return of_q, of_k, of_v, *of_captured


def _flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: object, block_mask: object, *rest: object,
    **options: object,
) -> Any:  # fmt: skip
    simulation = _simulation()
    assert simulation is not None
    for t in tree_leaves(block_mask):
        if isinstance(t, Tensor):
            simulation.twins.of(t)  # in memory, although no op reads it
    dtype = autocast_dtype(query.device.type)
    if dtype is not None:
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    reached = walk([("score_mod", score_mod)])
    captured = [v.value for v in reached if v.kind == TENSOR and v.is_first]
    return _FlexAttention.apply(query, key, value, *captured)  # type: ignore[no-untyped-call]


def _matmul_8bit(
    x: Tensor,
    weight: Tensor,
    out: Tensor | None = None,
    state: Any = None,
    threshold: float = 0.0,
    bias: Tensor | None = None,
) -> Any:
    """Multiply as bitsandbytes' 8-bit layers do on a GPU. On a CPU they dequantize the weight."""
    functions: Any = importlib.import_module("bitsandbytes.autograd._functions")
    state = state or functions.MatmulLtState()
    state.threshold = threshold or state.threshold
    return functions.MatMul8bitLt.apply(x, weight, out, bias, state)


_is_enabled: Callable[..., bool] = torch.is_autocast_enabled


def _is_autocast_enabled(*kind: str) -> bool:
    """Return True in a CPU autocast block, too, for callers that ask about the GPU."""
    return _is_enabled(*kind) if kind else _is_enabled() or _is_enabled("cpu")


def _cond(
    pred: object,
    true_fn: Callable[..., Any],
    false_fn: Callable[..., Any],
    operands: Sequence[object],
) -> Any:
    """Run the branch of a known condition."""
    return (true_fn if bool(pred) else false_fn)(*operands)


# Functions of torch that compile a kernel, trace their arguments, or ask for the device.
_REPLACED_FUNCTIONS = (
    ("torch.nn.attention.flex_attention", "flex_attention_hop", _flex_attention),
    ("torch.nn.attention.flex_attention", "_validate_device", lambda *_: None),
    # Hides a warning that the kernel is not compiled, which torch shows only once.
    ("torch.nn.attention.flex_attention", "_warn_once", lambda *_, **__: None),
    ("torch._higher_order_ops.cond", "cond_op", _cond),
    ("torch", "is_autocast_enabled", _is_autocast_enabled),
)
