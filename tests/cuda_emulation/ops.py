"""The ops that have kernels for a GPU, called with these kernels on tensors of the CPU."""

import ctypes
import functools
import os
import random

import torch

from . import build
from .memory import call_fenced


class Emulated:
    """Stands in for `torch.ops.storage_ops`. An op without a kernel for a GPU is the ordinary one.

    Attributes:
        calls: how many ops ran in the emulation.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library, self.calls, self._random = library, 0, random.Random()

    def seed(self, seed: int) -> None:
        """Fix the order of threads from here on, and where tensors have their fences."""
        self._random.seed(seed)
        self._library.emulation_seed(ctypes.c_uint64(seed))

    def __getattr__(self, name: str) -> object:
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        if not has_kernel(f"{build.NAMESPACE}::{name}", "CPU"):
            return getattr(torch.ops.storage_ops, name)
        return functools.partial(self._call, getattr(torch.ops, build.NAMESPACE), name)

    def _call(self, namespace: object, name: str, *args: object) -> object:
        self.calls += 1
        return call_fenced(getattr(namespace, name).default, *args, random=self._random)


@functools.cache
def emulated() -> Emulated:
    """The ops, compiled and loaded at the first call."""
    return Emulated(build.load(build.built(os.environ.get("STORAGE_OPS_EMULATION_SANITIZER", ""))))
