"""Products by torch, into existing buffers."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from storage_ops.matmul.interface import SLICE, Kind, Matmul
from storage_ops.quantities import next_multiple

with contextlib.suppress(ImportError, OSError):  # plans for a GPU need no torch
    import torch
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from torch import Tensor

    from storage_ops.loss.planning.devices import Rates


@dataclass(frozen=True)
class Aten(Matmul):
    """torch's products. On a GPU they add 16-bit products to float32. A CPU needs float32 copies.

    Attributes:
        cuda: whether the operands are on a GPU.
        upcasts: whether 16-bit products are slow on this processor, so that float32 is used
            instead.
        packs: whether torch copies the weight of x @ w.T in float32, in blocks of 8 classes.
    """

    cuda: bool = False
    upcasts: bool = False
    packs: bool = False

    def logits(self, x: Tensor, w: Tensor, out: Tensor) -> None:
        """See `Matmul`."""
        if not self._widens(out):
            multiply(x, w.t(), out, False)
            return
        wide = x.float()
        for begin in range(0, len(w), SLICE):
            classes = slice(begin, begin + SLICE)
            out[:, classes] = wide @ w[classes].float().t()

    def input_gradient(self, dz: Tensor, w: Tensor, out: Tensor, add: bool) -> None:
        """See `Matmul`."""
        if not self._widens(out):
            multiply(dz, w, out, add)
            return
        total = out
        if out.dtype != torch.float32:
            total = out.float() if add else out.new_empty(out.shape, dtype=torch.float32)
        for begin in range(0, len(w), SLICE):
            classes = slice(begin, begin + SLICE)
            multiply(dz[:, classes].float(), w[classes].float(), total, add or begin > 0)
        if total is not out:
            out.copy_(total)

    def weight_gradient(self, dz: Tensor, x: Tensor, out: Tensor, add: bool) -> None:
        """See `Matmul`."""
        if not self._widens(out):
            multiply(dz.t(), x, out, add)
            return
        wide = x.float()
        for begin in range(0, len(out), SLICE):
            classes = slice(begin, begin + SLICE)
            part, piece = dz[:, classes].float(), out[classes]
            if out.dtype == torch.float32:
                multiply(part.t(), wide, piece, add)
            else:
                product = part.t() @ wide
                out[classes] = product.add_(piece) if add else product
                del product  # otherwise two products are alive at a time
            del part  # otherwise two parts are alive at a time

    def _widens(self, out: Tensor) -> bool:
        """Return True if operands are copied to float32 first."""
        return self.upcasts or (out.element_size() > self.itemsize and not self.cuda)

    def scratch_bytes(self, kind: Kind, rows: int, classes: int, hidden: int, wide: bool) -> int:
        """See `Matmul`."""
        packs = self.packs and kind is Kind.LOGITS
        if self.itemsize >= 4:
            return packed_bytes(classes, hidden) if packs and self.itemsize == 4 else 0
        if self.cuda:  # here the product does not add to fp32 sums itself
            return 4 * SLICE * hidden * (wide and kind is not Kind.LOGITS)
        piece = min(SLICE, classes)
        # fp32 copies: the rows of one operand, a slice of the other one and of the tile.
        copies = 4 * (rows * hidden + piece * (hidden + rows))
        if self.upcasts:
            return copies + (packed_bytes(piece, hidden) if packs else 0)
        if wide:  # the sums themselves receive the copy of the rows of the input's gradient
            return copies - 4 * rows * hidden * (kind is Kind.INPUT)
        # Measured: memory in which each thread of oneDNN packs operands. It grows if the strides of
        # input and weight are powers of two. For the weight's gradient it grows with the tokens.
        packed = 1_750_000 if rows >= SLICE and hidden % 4096 == 0 else 200_000
        if kind is Kind.WEIGHT:
            packed = max(packed, min(1_400_000, 60_000 + (750 if rows <= 512 else 1400) * rows))
        return packed * self.threads

    def seconds(
        self, kind: Kind, rows: int, classes: int, hidden: int, wide: bool,
        moved: float, sums: float, rates: Rates,
    ) -> float:  # fmt: skip
        """See `Matmul`."""
        rate = self.rate(rates)
        if wide and not self.cuda:
            rate = rates.flops32
        elif self.itemsize < 4 and not self.upcasts:
            rate /= 1 + rates.few_rows16 / rows
        compute = 2 * rows * classes * hidden / rate
        if rates.overlaps:
            # A product takes the longer of its arithmetic and its memory traffic. Its result is
            # added to the sum after the arithmetic of a tile, so this addition overlaps with
            # nothing.
            return max(compute, moved / rates.bandwidth) + sums / rates.bandwidth
        return compute + (moved + sums) / rates.bandwidth


def packed_bytes(classes: int, hidden: int) -> int:
    """Return the bytes of the Arm library's copy of a float32 weight, in blocks of 8 classes."""
    return 4 * hidden * next_multiple(classes, 8)


@functools.cache
def has_arm_library() -> bool:
    """Return True if oneDNN multiplies by Arm's Compute Library in this build of torch."""
    try:
        return bool(torch.backends.mkldnn.is_acl_available())
    except (AttributeError, NameError):  # NameError without torch
        return False


@functools.cache
def is_fast(dtype: torch.dtype) -> bool:
    """Return True if products of this dtype are fast on this processor; 16-bit ones may be slow.

    With AMX, torch packs the operands in several MB whatever the budget, so no plan could keep it.
    On Arm, torch copies whole tiles, and for the weight's gradient twice. So 16-bit products on
    both count as slow.
    """
    if dtype.itemsize >= 4:
        return True
    if has_arm_library():
        return False
    name = "bf16" if dtype == torch.bfloat16 else "fp16"
    try:
        # torch's AMX products ignore the package's environment variables.
        if torch.cpu._is_amx_tile_supported():
            return False
        with _disable_current_modes():  # ask the processor, not a mode of fake tensors
            return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")())
    except (AttributeError, RuntimeError):
        return False


def takes(t: Tensor) -> bool:
    """Return True if a matrix product reads this matrix in place, without copying it."""
    rows, columns = t.shape
    (outer, inner) = t.stride()
    if rows <= 1 or columns <= 1:
        return t.is_contiguous()
    return (inner == 1 and outer >= columns) or (outer == 1 and inner >= rows)


def multiply(left: Tensor, right: Tensor, out: Tensor, add: bool) -> None:
    """Compute out = left @ right, or out += left @ right.

    On a GPU `out` may be wider than its 16-bit operands.
    """
    if out.dtype != left.dtype:
        if not add:
            torch.ops.aten.mm.dtype_out(left, right, out.dtype, out=out)
        elif adds_wide(out, left.dtype):
            torch.ops.aten.addmm.dtype_out(out, left, right, out.dtype, out=out)
        else:
            for begin in range(0, len(out), SLICE):
                rows = slice(begin, begin + SLICE)
                out[rows] += torch.ops.aten.mm.dtype(left[rows], right, out.dtype)
    elif out.shape[1] == 1 and not out.is_contiguous():
        # In bf16 torch 2.10 writes only the first element of a column that is not contiguous.
        column = torch.mm(left, right)
        out.copy_(out + column if add else column)
    elif add:
        torch.addmm(out, left, right, out=out)
    else:
        torch.mm(left, right, out=out)


_adds_wide: dict[tuple[torch.device, torch.dtype, bool], bool] = {}


def adds_wide(out: Tensor, dtype: torch.dtype) -> bool:
    """Return True if this torch adds 16-bit products to a matrix like `out` without rounding.

    Some versions of torch can only multiply. The first call tries the addition, except during a
    graph capture, which cannot read results. For a fake matrix, the real GPU is tried.
    """
    fake = isinstance(out, FakeTensor) and not (out.is_cuda and torch.cuda.is_available())
    key = (out.device, dtype, out.is_meta or fake)
    if key not in _adds_wide:
        if out.is_cuda and not key[-1] and torch.cuda.is_current_stream_capturing():
            return False
        _adds_wide[key] = _try_to_add(*key)
    return _adds_wide[key]


def _try_to_add(device: torch.device, dtype: torch.dtype, fake: bool) -> bool:
    with contextlib.nullcontext() if fake else _disable_current_modes():
        # The matrix, the product and their sum do not fit into 16 bits.
        parts = [
            torch.full((16, n), v, dtype=dtype, device=device) for n, v in ((1, 1), (15, 2**-6))
        ]
        left = torch.cat(parts, 1)
        out = torch.full((16, 16), 1 + 2.0**-16, device=device)
        total = out + (1 + 15 * 2.0**-12)
        try:
            torch.ops.aten.addmm.dtype_out(out, left, left.t(), out.dtype, out=out)
        except (RuntimeError, TypeError):  # TypeError from torch's fakes, before torch 2.13
            return False
        return fake or torch.equal(out, total)
