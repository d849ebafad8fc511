"""The ops with CUDA kernels, which run emulated on CPU tensors."""

import ctypes
import functools
import os
from pathlib import Path

import torch

from . import build
from .memory import call_fenced

# "thread" or "address" if Python runs under this sanitizer, as in `make sanitize`.
SANITIZER = os.environ.get("STORAGE_OPS_EMULATION_SANITIZER", "")


class Emulated:
    """Replaces `torch.ops.storage_ops`. Ops without a CUDA kernel are the ordinary ones.

    Attributes:
        library: the compiled kernels.
        calls: the number of calls of emulated ops.
    """

    def __init__(self, library: Path, namespace: str = build.NAMESPACE) -> None:
        self.library, self.calls = build.load(library, namespace), 0
        self._namespace = namespace

    def seed(self, seed: int) -> None:
        """Seed the order of threads of later calls."""
        self.library.emulation_seed(ctypes.c_uint64(seed))

    def __getattr__(self, name: str) -> object:
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        if not has_kernel(f"{self._namespace}::{name}", "CPU"):
            return getattr(torch.ops.storage_ops, name)
        return functools.partial(
            self._call, getattr(getattr(torch.ops, self._namespace), name).default
        )

    def _call(self, op: torch._ops.OpOverload, *args: object) -> object:
        self.calls += 1
        return call_fenced(op, *args, number=self.calls)


@functools.cache
def emulated() -> Emulated:
    """Return the emulated ops. The first call compiles and loads them."""
    return Emulated(build.built(SANITIZER))
