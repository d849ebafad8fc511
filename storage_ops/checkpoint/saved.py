"""What must be the same about a tensor in a forward and in its repetition."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor


def fail(what: str) -> NoReturn:
    """Raise the error that a user of a checkpoint sees."""
    raise RuntimeError(f"OutputDiscardCheckpoint: {what}")


def fail_modified(name: str, t: Tensor) -> NoReturn:
    """Raise the error for a tensor that region `name` would read with other contents."""
    fail(
        f"a tensor of shape {tuple(t.shape)} that {name} uses was modified in place between "
        "forward and recompute"
    )


class Saved:
    """A tensor that autograd saves, or that a region returns."""

    __slots__ = ("checksum", "is_leaf", "layout", "version")

    def __init__(self, t: Tensor, checksum: bool = False) -> None:
        """Describe a tensor."""
        stride = t.stride() if t.layout is torch.strided else ()
        self.layout = (t.shape, stride, t.dtype, t.device)
        self.checksum = _checksum(t) if checksum else None
        # A parameter, a buffer or a view of one: what changes it changes what is recomputed.
        base = t._base
        self.is_leaf = t.is_leaf if base is None else base.is_leaf
        self.version = t._version

    def is_like(self, other: Saved) -> bool:
        """Whether shape, strides, dtype, device and the checksums, where taken, are equal."""
        if self.layout != other.layout:
            return False
        if self.checksum is None or other.checksum is None:
            return True
        return torch.equal(self.checksum, other.checksum)

    def __str__(self) -> str:
        shape, stride, dtype, device = self.layout
        strides = "" if _is_dense(shape, stride) else f" with strides {stride}"
        value = "" if self.checksum is None else f" with checksum {_hex(self.checksum)}"
        return f"{tuple(shape)} {dtype} on {device}{strides}{value}"


def _is_dense(shape: torch.Size, stride: tuple[int, ...]) -> bool:
    dense, step = [], 1
    for size in reversed(shape):
        dense.append(step)
        step *= max(size, 1)
    return stride in ((), tuple(reversed(dense)))


def _hex(checksum: Tensor) -> str:
    return f"{int(checksum.view(torch.int64)) & (1 << 64) - 1:016x}"


def _checksum(t: Tensor) -> Tensor:
    """A number that changes, almost surely, with any bit of a tensor; no sync with a device."""
    t = t.detach()
    if t.layout != torch.strided or t.numel() == 0:
        return torch.zeros((), dtype=torch.uint64)
    if t.element_size() == 1:
        t = t.contiguous().view(torch.uint8)
    elif t.is_complex():
        t = torch.view_as_real(t.resolve_conj())
    return torch.hash_tensor(t)


def compare(name: str, first: list[Saved], again: list[tuple[Saved, Tensor]]) -> None:
    """Raise unless a region named `name` saved the same in its forward and in its repetition."""
    if len(again) != len(first):
        fail(
            f"{name} saved {len(first)} tensors in forward and {len(again)} when it was "
            "recomputed; it must do the same work both times"
        )
    for index, (before, (after, t)) in enumerate(zip(first, again, strict=True)):
        if not before.is_like(after):
            fail(
                f"tensor {index} that {name} saves was {before} in forward and is {after} when it "
                "is recomputed"
            )
        if t._version != after.version:
            fail(
                f"tensor {index} that {name} saves, {before}, was modified in place after autograd "
                "had saved it"
            )
        if before.is_leaf and before.version != after.version:
            fail_modified(name, t)
