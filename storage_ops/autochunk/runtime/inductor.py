"""Bugs of Inductor on a CPU, and their workarounds."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx

_ONE_ROW_FOR_SEVERAL = torch.__version__ < "2.14"
_mending: ContextVar[bool] = ContextVar("mending", default=False)
_ARG_REDUCTIONS = {
    torch.ops.aten.argmax.default,
    torch.ops.aten.argmin.default,
    torch.ops.aten.max.dim,
    torch.ops.aten.min.dim,
}


@contextmanager
def mended() -> Iterator[None]:
    """Compile without rows that overwrite each other.

    Before torch 2.14, Inductor may store values between two loops over columns in a buffer of one
    row, although the outer loop processes several rows at a time. One cause is a bias that is not
    contiguous. Values and gradients are then silently wrong, also in a plain `torch.compile`
    (https://github.com/pytorch/pytorch/pull/185855).
    """
    if _ONE_ROW_FOR_SEVERAL:
        _guard_local_buffers()
    mark = _mending.set(True)
    try:
        yield
    finally:
        _mending.reset(mark)


@functools.cache
def _guard_local_buffers() -> None:
    from torch._inductor.codegen import cpp
    from torch._inductor.virtualized import V

    node: Any = cpp.OuterLoopFusedSchedulerNode
    fits = node.check_outer_fusion_loop_level_attr

    def checked(self: object, kernels: list[Any], depth: int) -> bool:
        several_rows = any(loop.steps != 1 for k in kernels for loop in k.loop_nest.loops[:depth])
        in_one_row = getattr(V.local_buffer_context, "local_buffers", None)
        if _mending.get() and in_one_row and several_rows:
            return False  # Inductor then generates separate loops, through whole buffers
        return bool(fits(self, kernels, depth))

    node.check_outer_fusion_loop_level_attr = checked


def miscompiled(body: fx.GraphModule, device: str) -> bool:
    """Return True if Inductor may compile a body to wrong values under all options.

    Before torch 2.13 it does so for indices of the largest or smallest element of a row on a CPU
    (https://github.com/pytorch/pytorch/issues/178964).
    """
    if device != "cpu" or torch.__version__ >= "2.13":
        return False
    return any(node.target in _ARG_REDUCTIONS for node in body.graph.nodes)
