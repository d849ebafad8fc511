"""The package's own products on a CPU (csrc/products), which copy operands into scratch memory."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from storage_ops.matmul import aten, scratch
from storage_ops.matmul.interface import SLICE, Kind, Matmul

with contextlib.suppress(ImportError, OSError):  # plans for a GPU need no torch
    import torch

if TYPE_CHECKING:
    from torch import Tensor

    from storage_ops.loss.planning.devices import Rates


@dataclass(frozen=True)
class Packed(Matmul):
    """The package's own products: sums in float32, and scratch for a given number of threads.

    torch's 16-bit products on a CPU round their result to 16 bits. Summed over many tiles, the
    gradients would be less accurate than those of the unchunked loss. torch also packs operands in
    any amount of memory, up to several MB with AMX, whatever the budget. In float32, torch's
    products are Intel's, which are slower on processors of other makers.

    Attributes:
        rounds: whether 16-bit results are computed directly. Otherwise they are rounded from
            float32 slices.
    """

    rounds: bool = False

    limits_threads = True

    @property
    def one_pass(self) -> int:  # type: ignore[override]
        """Return the most classes whose input gradient is rounded without separate sums."""
        return scratch.one_pass() if self.rounds else 0

    @property
    def upcasts(self) -> bool:  # type: ignore[override]
        """Return True if 16-bit results are rounded from slices in float32."""
        return self.itemsize < 4 and not self.rounds

    def logits(self, x: Tensor, w: Tensor, out: Tensor) -> None:
        """See `Matmul`."""
        if not self.upcasts or out.dtype == torch.float32:
            self.multiply(x, w.t(), out, False, True)
            return
        for begin in range(0, len(w), SLICE):
            classes = slice(begin, begin + SLICE)
            piece = out.new_empty(out[:, classes].shape, dtype=torch.float32)
            self.multiply(x, w[classes].t(), piece, False, True)
            out[:, classes] = piece
            del piece  # otherwise two pieces are alive at a time

    def input_gradient(self, dz: Tensor, w: Tensor, out: Tensor, add: bool) -> None:
        """See `Matmul`."""
        if not self.upcasts or out.dtype == torch.float32:
            self.multiply(dz, w, out, add, True)
            return
        wide = out.float() if add else out.new_empty(out.shape, dtype=torch.float32)
        self.multiply(dz, w, wide, add, True)
        out.copy_(wide)

    def weight_gradient(self, dz: Tensor, x: Tensor, out: Tensor, add: bool) -> None:
        """See `Matmul`."""
        if not self.upcasts or out.dtype == torch.float32:
            self.multiply(dz.t(), x, out, add, False)
            return
        for begin in range(0, len(out), SLICE):
            classes = slice(begin, begin + SLICE)
            piece = out[classes]
            product = piece.new_empty(piece.shape, dtype=torch.float32)
            self.multiply(dz[:, classes].t(), x, product, False, False)
            out[classes] = product.add_(piece) if add else product
            del product  # otherwise two products are alive at a time

    def multiply(
        self, left: Tensor, right: Tensor, out: Tensor, add: bool, direct: bool = False
    ) -> None:
        """Compute out = left @ right, or out += left @ right.

        With `direct`, a small scratch buffer holds copies of `left`. Otherwise a product with a
        16-bit result may overwrite `left`.
        """
        if self.itemsize == 4 and len(left) == 1:  # a copy of the right operand gains nothing
            aten.multiply(left, right, out, add)
            return
        (m, k), n = left.shape, right.shape[1]
        rounded = out.dtype != torch.float32
        height, slots = scratch.piece(m, n, k, self.threads, rounded, direct)
        memory = torch.empty(slots, dtype=torch.float32)
        if rounded and not direct and height >= m:
            torch.ops.storage_ops._transposed_product(out, left.t(), right, memory, add)
            return
        for begin in range(0, m, height or 1):
            rows = slice(begin, begin + height)
            torch.ops.storage_ops._product(out[rows], left[rows], right, memory, add)

    def scratch_bytes(self, kind: Kind, rows: int, classes: int, hidden: int, wide: bool) -> int:
        """See `Matmul`."""
        m, n, k = _sizes(kind, rows, classes, hidden)
        formed, rounded = 0, self.rounds and not wide
        if self.upcasts and not wide:  # the float32 slice that is rounded
            if kind is Kind.LOGITS:
                n = min(n, SLICE)
            elif kind is Kind.WEIGHT:
                m = min(m, SLICE)
            formed = m * n
        slots = scratch.piece(m, n, k, self.threads, rounded, kind is not Kind.WEIGHT)[1]
        return 4 * (formed + slots)

    def seconds(
        self, kind: Kind, rows: int, classes: int, hidden: int, wide: bool,
        moved: float, sums: float, rates: Rates,
    ) -> float:  # fmt: skip
        """See `Matmul`."""
        compute = 2 * rows * classes * hidden / self.rate(rates)
        sums /= rates.bandwidth
        moved /= rates.bandwidth
        if not self.rounds:  # sums are fetched while products compute
            return moved + max(compute, sums)
        # Memory traffic overlaps with arithmetic, but copies do not. The right operand is copied
        # for each piece of rows. The left operand is copied if it is transposed.
        m, n, k = _sizes(kind, rows, classes, hidden)
        copied = 1 / m
        if kind is not Kind.LOGITS:
            copied = 1 / scratch.piece(m, n, k, self.threads, True, kind is not Kind.WEIGHT)[0]
        if kind is Kind.WEIGHT:
            copied += 2 / n
        return max(compute * (1 + rates.copying * copied), moved + sums)


def _sizes(kind: Kind, rows: int, classes: int, hidden: int) -> tuple[int, int, int]:
    """Return the rows, columns and depth of a product."""
    if kind is Kind.LOGITS:
        return rows, classes, hidden
    if kind is Kind.INPUT:
        return rows, hidden, classes
    return classes, hidden, rows


def exists(dtype: torch.dtype, device: str) -> bool:
    """Return True if the package's own products exist here and are better than torch's."""
    if device != "cpu" or dtype == torch.float64 or not scratch.kind():
        return False
    return dtype != torch.float32 or "AuthenticAMD" in processor()


@functools.cache
def processor() -> str:
    """Return Linux's description of the first processor, or "" on other systems."""
    try:
        with open("/proc/cpuinfo") as file:
            return file.read(4096)
    except OSError:
        return ""


def rounds(dtype: torch.dtype) -> bool:
    """Return True if this processor has own products with a 16-bit result."""
    return dtype == torch.bfloat16 and scratch.kind().endswith("bf16")
