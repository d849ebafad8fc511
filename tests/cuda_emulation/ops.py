"""The ops that have kernels for a GPU, called with these kernels on tensors of the CPU."""

import ctypes
import functools
import os
from pathlib import Path

import torch

from . import build
from .memory import call_fenced

# "thread" or "address" where python runs under that sanitizer; see `make sanitize`.
SANITIZER = os.environ.get("STORAGE_OPS_EMULATION_SANITIZER", "")


class Emulated:
    """Stands in for `torch.ops.storage_ops`. An op without a kernel for a GPU is the ordinary one.

    Attributes:
        library: the compiled kernels.
        calls: how many of its ops were called.
    """

    def __init__(self, library: Path, namespace: str = build.NAMESPACE) -> None:
        self.library, self.calls = build.load(library, namespace), 0
        self._namespace = namespace

    def seed(self, seed: int) -> None:
        """Fix the order of threads from here on."""
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
    """The ops, compiled and loaded at the first call."""
    return Emulated(build.built(SANITIZER))
