"""Checksums of the bytes of tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from storage_ops.storage.storage import wait_for

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 1 << 20  # elements that are hashed at a time, to limit temporary memory
# The constants of SplitMix64, as signed numbers.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))


def checksum_of(t: Tensor) -> Tensor:
    """Return a 64-bit checksum that depends on every bit of a tensor and on its position.

    The checksum is the sum of SplitMix64 (Steele, Lea and Flood 2014) over the elements and their
    indices. It needs no device sync. An xor of the elements, such as `torch.hash_tensor`, does not
    detect the same change in an even number of elements. A tensor that consists of other tensors,
    such as a sparse one or a DTensor, has a checksum of theirs.

    `csrc/checkpoint/checksum.cpp` does the same for strided tensors.
    """
    t = t.detach()
    parts = _parts(t)
    if parts is not None:
        total = torch.zeros((), dtype=torch.int64)
        for part in parts:  # their order counts
            total = checksum_of(part) + total.to(part.device) * 3
        return total
    if t.is_meta or t.numel() == 0:
        return torch.zeros((), dtype=torch.int64)
    if t.is_quantized:
        t = t.int_repr()
    bits = bits_of(t).contiguous().view(-1)
    total = torch.zeros((), dtype=torch.int64, device=t.device)
    for start in range(0, len(bits), _PIECE):
        total += _sum_of_hashes(bits[start : start + _PIECE], start)
    return total


def _sum_of_hashes(bits: Tensor, start: int) -> Tensor:
    """Return the sum of the hashes of elements and their indices, which begin at `start`."""
    mixed = torch.arange(start, start + len(bits), device=bits.device).mul_(_GAMMA).add_(bits)
    for shift, factor in _ROUNDS:  # shifts of signed numbers, which hash equally well
        mixed = mixed.bitwise_xor_(mixed >> shift).mul_(factor)
    return mixed.bitwise_xor_(mixed >> 31).sum()


def bits_of(t: Tensor) -> Tensor:
    """Return the bits of a strided tensor as integers. A NaN is equal to one with the same bits."""
    if t.is_complex():
        t = torch.view_as_real(t.resolve_conj())
    return t.resolve_neg().view(_INTEGERS[t.element_size()])


def _parts(t: Tensor) -> list[Tensor] | None:
    """Return the tensors that a tensor consists of, or None if it has bytes of its own."""
    if t.is_nested:  # the shape or the offsets are in its description
        return [t.values()]
    if is_traceable_wrapper_subclass(t):
        wait_for(t)
        values = (getattr(t, name) for name in t.__tensor_flatten__()[0])
        return [part for part in values if isinstance(part, Tensor)]  # a DTensor names its mesh
    if t.layout == torch.strided:
        return None
    if t.layout == torch.sparse_coo:
        return [t._indices(), t._values()]
    if t.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [t.crow_indices(), t.col_indices(), t.values()]
    if t.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [t.ccol_indices(), t.row_indices(), t.values()]
    return [t.to_dense()]


def text_of(checksum: Tensor) -> str:
    """Return a checksum as a hexadecimal number."""
    return f"{int(checksum) & (1 << 64) - 1:016x}"
