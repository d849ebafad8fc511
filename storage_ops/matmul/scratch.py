"""Facts of the native library's own products: the instructions they use, and their scratch.

csrc/products/product_scratch.h explains how much scratch a product takes. Without this library, the
ops are those of `reference`, which use no such instructions and no scratch.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

with contextlib.suppress(ImportError, OSError):  # plans for a GPU are made without torch
    import torch


def _ask(op: str, *sizes: int) -> Any:
    with torch._C._DisableTorchDispatch():  # the processor is asked, not a mode
        return getattr(torch.ops.storage_ops, op).default(*sizes)


@functools.cache
def kind() -> str:
    """Return the instructions of products: "avx2", "avx512", "avx512_bf16", "amx_bf16", or ""."""
    return str(_ask("_product_kind")[0])


@functools.cache
def one_pass() -> int:
    """Return the depth of a product with a 16-bit result that needs no float32 sums beside it."""
    return int(_ask("_product_kind")[1])


@functools.lru_cache(maxsize=4096)
def piece(
    rows: int, columns: int, depth: int, threads: int, rounded: bool, direct: bool
) -> tuple[int, int]:
    """Return the rows of a product formed at a time, and the slots of 4 bytes that they need.

    The product is (rows, depth) @ (depth, columns).

    Args:
        rounded: the result is in 16 bits.
        direct: the left operand is read in place.
    """
    height, slots = _ask("_product_scratch", rows, columns, depth, threads, rounded, direct)
    return height, slots


def packed_slots(rows: int, columns: int, depth: int, threads: int) -> int:
    """Return the slots of 4 bytes that a product with a float32 result takes."""
    return piece(rows, columns, depth, threads, False, False)[1]
