"""Facts about the native library's own products: instructions and scratch memory.

csrc/products/product_scratch.h explains how much scratch memory a product takes. Without this
library, `reference` has the ops. They use no such instructions and no scratch memory.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

with contextlib.suppress(ImportError, OSError):  # plans for a GPU need no torch
    import torch


def _ask(op: str, *sizes: int) -> Any:
    with torch._C._DisableTorchDispatch():  # ask the processor, not a mode
        return getattr(torch.ops.storage_ops, op).default(*sizes)


@functools.cache
def kind() -> str:
    """Return the instructions of products: "avx2", "avx512", "avx512_bf16", "amx_bf16", or ""."""
    return str(_ask("_product_kind")[0])


@functools.cache
def one_pass() -> int:
    """Return the largest depth of a 16-bit product that needs no separate float32 sums."""
    return int(_ask("_product_kind")[1])


@functools.lru_cache(maxsize=4096)
def piece(
    rows: int, columns: int, depth: int, threads: int, rounded: bool, direct: bool
) -> tuple[int, int]:
    """Return the rows of a product computed at a time, and the 4-byte slots that they need.

    The product is (rows, depth) @ (depth, columns).

    Args:
        rounded: whether the result is in 16 bits.
        direct: whether the left operand is read in place.
    """
    height, slots = _ask("_product_scratch", rows, columns, depth, threads, rounded, direct)
    return height, slots


def packed_slots(rows: int, columns: int, depth: int, threads: int) -> int:
    """Return the 4-byte slots that a product with a float32 result takes."""
    return piece(rows, columns, depth, threads, False, False)[1]
