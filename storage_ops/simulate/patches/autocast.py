"""GPU autocast in a simulation, where CPU tensors represent GPU tensors.

Autocast casts the arguments of ops by lists, which differ between CPU and GPU. For example, softmax
and norms run in float32 on a GPU, and in the dtype of their input on a CPU.
"""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, fallthrough_kernel
from torch.utils._pytree import tree_map_only

from storage_ops._op_arguments import tensors_in
from storage_ops.foundation.op_names import Overload

# Ops whose policy on a GPU differs from the one on a CPU, by their GPU policy.
_FLOAT32 = (
    "_upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d"
    " _upsample_nearest_exact2d _upsample_nearest_exact3d acos asin cosh cosine_similarity dist"
    " erfinv exp expm1 frobenius_norm.dim group_norm layer_norm log log10 log1p log2 logsumexp"
    " native_layer_norm nuclear_norm nuclear_norm.dim pdist pow.Scalar pow.Tensor_Scalar"
    " pow.Tensor_Tensor reciprocal renorm rms_norm rsqrt sinh softplus tan upsample_bicubic2d"
    " upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d"
    " upsample_nearest3d upsample_trilinear3d"
)
_RESULT_IN_FLOAT32 = (  # cast by their `dtype` argument, unless the caller passes one
    "cumprod cumsum linalg_matrix_norm linalg_matrix_norm.str_ord linalg_vector_norm"
    " log_softmax.int prod prod.dim_int softmax.int sum sum.dim_IntList"
)
_LOWER = "addmv addr chain_matmul einsum linalg_multi_dot mv"
_WIDEST = (
    "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot"
)

_KEY = "AutocastCPU"


@contextlib.contextmanager
def autocast_of_gpu() -> Iterator[None]:
    """Let CPU autocast use the lists of a GPU in a with block, for all threads."""
    library = Library("aten", "IMPL")
    own = {
        name: _kernel(name, change)
        for names, change in (
            (_FLOAT32, _to_float32),
            (_RESULT_IN_FLOAT32, _with_result_in_float32),
            (_LOWER, _to_lower),
            (_WIDEST, _to_widest),
        )
        for name in names.split()
        if _has_kernel(name, "AutocastCUDA")
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about an overridden kernel
            for name, kernel in own.items():
                library.impl(name, kernel, _KEY)
            for name in _cast_on_a_cpu_alone():
                library.impl(name, fallthrough_kernel, _KEY)
        yield
    finally:
        library._destroy()


def _has_kernel(name: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key))


@functools.cache
def _cast_on_a_cpu_alone() -> list[str]:
    """Return the ops whose arguments autocast casts on a CPU but not on a GPU."""
    names = [
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if re.match(r"aten::\w", name)
    ]
    own = [n for n in names if _has_kernel(n, _KEY) and not _has_kernel(n, "AutocastCUDA")]
    # Convolutions with padding as a string call other convolutions, which are cast on both.
    return [name for name in own if not name.endswith(".padding")]


_Change = Callable[[Overload, tuple[Any, ...], dict[str, Any]], tuple[Any, Any]]


def _kernel(name: str, change: _Change) -> Callable[..., Any]:
    """Return a kernel that runs an op with changed arguments, and with autocast off."""
    packet, _, overload = name.partition(".")
    op: Overload = getattr(getattr(torch.ops.aten, packet), overload or "default")
    excluded = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            args, kwargs = change(op, args, kwargs)
            return op(*args, **kwargs)

    return kernel


def _cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t.to(dtype) if _is_cast(t) else t


def _is_cast(t: Tensor) -> bool:
    return t.is_floating_point() and t.dtype != torch.float64


def _to_float32(_: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    return _all_to(torch.float32, args, kwargs)


def _to_lower(_: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    return _all_to(torch.get_autocast_dtype("cpu"), args, kwargs)


def _to_widest(_: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    wide = any(t.dtype == torch.float32 for t in tensors_in((args, kwargs)))
    return _all_to(torch.float32 if wide else torch.get_autocast_dtype("cpu"), args, kwargs)


def _all_to(dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    changed: tuple[Any, Any] = tree_map_only(Tensor, lambda t: _cast(t, dtype), (args, kwargs))
    return changed


def _with_result_in_float32(
    op: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    names = [argument.name for argument in op._schema.arguments]
    by_name = dict(zip(names, args, strict=False)) | kwargs
    if by_name.get("dtype") is None and _is_cast(args[0]):
        by_name["dtype"] = torch.float32
    return (), by_name
