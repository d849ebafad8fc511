"""Copies of tensors between pages that nobody may touch, for a kernel to run on."""

import ctypes
import mmap
import random

import torch

_libc = ctypes.CDLL(None, use_errno=True)
_PAGE = mmap.PAGESIZE
_VECTOR = 16  # bytes of the widest access, whose alignment kernels may depend on
_POISON = 0xFF  # numbers of these bytes are nan or -1


class Fenced:
    """A copy of a tensor with the alignment, strides and gaps that it has.

    Its first or its last byte, whichever `side` says, is within 16 bytes of a page without access.
    What lies between, and the rest of the page at its other end, is nan.
    """

    def __init__(self, original: torch.Tensor, side: str) -> None:
        self.original = original
        steps = zip(original.shape, original.stride(), strict=True)
        reach = 1 + sum((size - 1) * stride for size, stride in steps)
        self._elements = reach if original.numel() else 0
        nbytes = self._elements * original.element_size()
        offset = original.data_ptr() % _VECTOR
        inside = -(-(nbytes + _VECTOR) // _PAGE) * _PAGE
        self._area = mmap.mmap(-1, inside + 2 * _PAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._area))
        ctypes.memset(address + _PAGE, _POISON, inside)
        if side == "end":
            offset += (inside - offset - nbytes) // _VECTOR * _VECTOR
        self._place = slice(_PAGE + offset, _PAGE + offset + nbytes)
        self._inside = slice(_PAGE, _PAGE + inside)
        flat = original.new_empty(0)
        if nbytes:
            flat = torch.frombuffer(
                self._area, dtype=original.dtype, count=self._elements, offset=self._place.start
            )
            flat.copy_(self._reached())
        self.tensor = flat.as_strided(original.shape, original.stride())
        for page in (address, address + _PAGE + inside):
            if _libc.mprotect(ctypes.c_void_p(page), _PAGE, 0):
                raise OSError(ctypes.get_errno(), "mprotect")

    def _reached(self) -> torch.Tensor:
        """Everything from the original's first element to its last, gaps included."""
        return self.original.as_strided((self._elements,), (1,), self.original.storage_offset())

    def take_back(self) -> None:
        """Write what became of the copy, and of the gaps in it, to the original."""
        view = memoryview(self._area)
        before = view[self._inside.start : self._place.start]
        after = view[self._place.stop : self._inside.stop]
        for around in (before, after):
            if bytes(around) != bytes([_POISON]) * len(around):
                raise RuntimeError("CUDA emulation: a kernel wrote outside of a tensor")
        if self._elements:
            self._reached().copy_(self.tensor.as_strided((self._elements,), (1,)))


def call_fenced(op: torch._ops.OpOverload, *args: object, random: random.Random) -> object:
    """Call an op on fenced copies of its tensors, and take back those that it writes."""
    fences = [
        Fenced(arg, random.choice(["start", "end"])) if isinstance(arg, torch.Tensor) else None
        for arg in args
    ]
    result = op(*(arg if fence is None else fence.tensor for arg, fence in zip(args, fences)))  # noqa: B905
    for parameter, fence in zip(op._schema.arguments, fences, strict=True):
        if fence is not None and parameter.is_write:
            fence.take_back()
    return result
