"""What the native library says of its own products: the instructions they use, and their scratch.

How much scratch a product takes is explained in csrc/products/product_scratch.h. Where there is no
such library, the ops behind these are those of `reference`: no instructions, and no scratch.
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
    """The instructions that products use: "avx2", "avx512", "avx512_bf16", "amx_bf16", or ""."""
    return str(_ask("_product_kind")[0])


@functools.cache
def one_pass() -> int:
    """Depth of a product with a result in 16 bits that needs no sums in float32 beside it."""
    return int(_ask("_product_kind")[1])


@functools.lru_cache(maxsize=4096)
def piece(
    rows: int, columns: int, depth: int, threads: int, rounded: bool, direct: bool
) -> tuple[int, int]:
    """Rows of a product (rows, depth) @ (depth, columns) formed at a time, and their scratch.

    The latter is a number of slots of 4 bytes.

    Args:
        rounded: the result is in 16 bits.
        direct: the left operand is read in place.
    """
    height, slots = _ask("_product_scratch", rows, columns, depth, threads, rounded, direct)
    return height, slots


def packed_slots(rows: int, columns: int, depth: int, threads: int) -> int:
    """Slots of 4 bytes that a product takes whose result is in float32."""
    return piece(rows, columns, depth, threads, False, False)[1]
