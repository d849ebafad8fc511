"""The three matrix products of a tile of logits, by torch or by this package.

With a tile of rows (tokens) by classes, and hidden size D:

    LOGITS  out (rows, classes)  = x (rows, D) @ w (classes, D).T
    INPUT   out (rows, D)       += dz (rows, classes) @ w (classes, D)
    WEIGHT  out (classes, D)    += dz (rows, classes).T @ x (rows, D)

`interface.Matmul` computes them, and tells the planner the scratch memory and the time of each. It
has two implementations. `aten.Aten` calls torch. `packed.Packed` calls the package's own products
on a CPU, which sum in float32 in a limited amount of scratch memory (`scratch`). `reference` has
them in plain torch. `of` chooses one. A result is `wide` if 16-bit operands are multiplied into a
float32 result, so that no sum is rounded.

`full_sums` is for GPUs: sums within a product are not rounded, whatever the settings of the
process.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from storage_ops.matmul import aten, packed
from storage_ops.matmul.interface import Kind, Matmul

if TYPE_CHECKING:
    import torch

__all__ = ["Kind", "Matmul", "of"]


@functools.cache
def of(dtype: torch.dtype, device: str, threads: int = 1) -> Matmul:
    """Return the products for a dtype on a kind of device such as "cuda", for some CPU threads."""
    if packed.exists(dtype, device):
        return packed.Packed(dtype.itemsize, threads, packed.rounds(dtype))
    if device != "cpu":
        return aten.Aten(dtype.itemsize, cuda=device == "cuda")
    upcasts, packs = not aten.is_fast(dtype), aten.has_arm_library()
    return aten.Aten(dtype.itemsize, threads, upcasts=upcasts, packs=packs)
