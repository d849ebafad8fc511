"""Gradients of products and extrema, which autograd computes differently for fake tensors.

If no element is zero, autograd divides the result by the input. It looks for zeros only in plain
tensors, and uses more memory for fake ones. Training steps rarely have an exact zero in a product,
so these functions divide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from storage_ops.simulate.values.wrappers import is_wrapper

_PROD: set[object] = {torch.prod, Tensor.prod}
OF_PRODS: set[object] = {*_PROD, torch.cumprod, Tensor.cumprod}
OF_EXTREMA: set[object] = {
    torch.max, Tensor.max, torch.min, Tensor.min, torch.median, Tensor.median, torch.nanmedian,
    Tensor.nanmedian,
}  # fmt: skip


def call_prod(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of `OF_PRODS` in a simulation, so that its backward divides by the input."""
    named = dict(zip(("input", "dim", "keepdim"), args, strict=False)) | kwargs
    x, dim, dtype = named.get("input"), named.get("dim"), named.get("dtype")
    if not _divides(x, dim) or named.get("out") is not None:
        return func(*args, **kwargs)
    if func in _PROD:
        return _Prod.apply(  # type: ignore[no-untyped-call]
            x, dim, named.get("keepdim", False), dtype
        )
    return _Cumprod.apply(x, dim, dtype)  # type: ignore[no-untyped-call]


def call_extremum(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of `OF_EXTREMA`, so that its backward compares all elements with one."""
    named = dict(zip(("input", "dim"), args, strict=False)) | kwargs
    x = named.get("input")
    if len(named) > 1 or not _reads_values(x):
        return func(*args, **kwargs)
    return _Extremum.apply(func, x)  # type: ignore[no-untyped-call]


def _divides(x: Any, dim: object) -> bool:
    """Return True if autograd looks for zeros in `x`, a tensor with elements along `dim`."""
    return (dim is None or isinstance(dim, int)) and _reads_values(x)


def _reads_values(x: Any) -> bool:
    """Return True if autograd reads values of the real tensor that `x` represents."""
    if not isinstance(x, Tensor) or is_wrapper(x):
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(x) or x.dim() == 0 or x.numel() <= 1:
        return False
    return torch.is_grad_enabled() and x.requires_grad


class _Prod(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int | None, keepdim: bool, dtype: torch.dtype | None
    ) -> Tensor:
        out = x.prod(dtype=dtype) if dim is None else x.prod(dim, keepdim, dtype=dtype)
        ctx.save_for_backward(x, out)
        ctx.dim, ctx.keepdim = dim, keepdim
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        x, out = ctx.saved_tensors
        x, dim = x.to(gradient.dtype), ctx.dim
        zeros = x == 0
        if dim is None:
            del zeros
            return gradient * (out / x).conj(), None, None, None
        counts = zeros.sum(dim, keepdim=True)  # autograd keeps both until it returns
        if not ctx.keepdim:
            gradient, out = gradient.unsqueeze(dim), out.unsqueeze(dim)
        result = gradient * (out / x).conj()
        del zeros, counts
        return result, None, None, None


class _Extremum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, func: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        out = func(x)
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        x, out = ctx.saved_tensors
        mask, result = x == out, torch.zeros_like(x)
        return None, result.masked_fill_(mask, gradient / mask.sum())


class _Cumprod(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:
        out = x.cumprod(dim, dtype=dtype)
        ctx.save_for_backward(x, out)
        ctx.dim = dim
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        x, out = ctx.saved_tensors
        gradient = gradient.to(x.dtype)
        if x.shape[ctx.dim] == 1:
            return gradient, None, None
        products = out.conj() * gradient
        zeros = x == 0  # autograd keeps it until it returns
        result = _summed_from_the_end(products, ctx.dim).div(x.conj())
        del products, zeros
        return result, None, None


def _summed_from_the_end(x: Tensor, dim: int) -> Tensor:
    reversed_ = x.flip(dim)
    sums = reversed_.cumsum(dim)  # `reversed_` stays alive until the results are returned
    return sums.flip(dim)
