"""Limits a device to a smaller size, so that memory runs out as on a smaller GPU."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from storage_ops.foundation.op_names import Overload
from storage_ops.foundation.ops import Args, Kwargs
from storage_ops.measure.measurement import numbered
from storage_ops.oom.explain_oom import Explaining
from storage_ops.oom.tracking import Tracking
from storage_ops.quantities import parse_bytes, readable
from storage_ops.simulate.patches.gpu import following_resizes


@contextlib.contextmanager
def limit(nbytes: int | float | str, device: str | torch.device = "cpu") -> Iterator[None]:
    """Raise torch.OutOfMemoryError inside a with block if a device of this size would.

    On the CPU, the live storages count that ops create in this thread, in forward and backward.
    Earlier storages count once an op uses them, with the rest of their model or optimizer. The
    temporary memory of an op does not count. Functions under `torch.compile` run uncompiled,
    because memory inside compiled code is not seen. A block inside of a compiled function is an
    error of torch. Ops take some ten microseconds longer.

    On a CUDA device the allocator's own limit is set for the block. It counts the memory that the
    allocator has reserved.

    Args:
        nbytes: the size, in bytes or as text such as "4 GiB".
        device: "cpu" or a CUDA device.

    Raises:
        torch.OutOfMemoryError: the block needs more.
        TypeError, ValueError: an argument is wrong; the error names it.

    Example:
        >>> with storage_ops.memory.limit("1 MiB"):
        ...     torch.zeros(2**20)
        Traceback (most recent call last):
        torch.OutOfMemoryError: limit: out of memory. Tried to allocate 4 MiB for ...
    """
    most = parse_bytes(nbytes, "`nbytes`")
    where = numbered(device)
    if where.type == "cuda":
        with _limited_allocator(most, where):
            yield
        return
    if where.type != "cpu":
        raise ValueError(f"`device` is {device!r}. Expected 'cpu' or a CUDA device.")
    with torch.compiler.set_stance("force_eager"), following_resizes(), _Limit(most, where):
        yield


class _Limit(Tracking):
    """Raises an error once ops have allocated more than a number of bytes."""

    def __init__(self, most: int, device: torch.device) -> None:
        super().__init__(device)
        self._most = most

    def __torch_dispatch__(
        self, func: Overload, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        level, before = self.ledger.level, self._before
        if level <= self._most:
            return out
        del out
        error = torch.OutOfMemoryError(
            f"limit: out of memory. Tried to allocate {readable(level - before)} for {func}. "
            f"{readable(before)} of {readable(self._most)} are in use. Pass a larger limit, or "
            "allocate less."
        )
        error.limit_bytes = self._most  # type: ignore[attr-defined]  # for explain_oom
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, Explaining):
                mode.note(error, str(func))
        try:
            raise error
        finally:
            del error  # the frame would keep the error and so all frames below, with their tensors


@contextlib.contextmanager
def _limited_allocator(limit_bytes: int, device: torch.device) -> Iterator[None]:
    """Limit the caching allocator of a GPU to `most` bytes."""
    gc.collect()  # otherwise cycles that are collected later would leave reserved memory free
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(min(limit_bytes / total, before), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)
