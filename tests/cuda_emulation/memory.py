"""Copies of tensors between pages that nobody may touch, for a kernel to run on."""

import ctypes
import mmap

import torch

_libc = ctypes.CDLL(None, use_errno=True)
_PAGE = mmap.PAGESIZE
_VECTOR = 16  # bytes of the widest access, whose alignment kernels may depend on
_POISON = 0xFF  # numbers of these bytes are nan or -1


class Fenced:
    """A copy of a tensor with the alignment, the strides and the gaps that it has.

    Its first or its last byte, as `side` says, is within 16 bytes of a page without access. What
    lies between, and the rest of the page at its other end, is nan.
    """

    def __init__(self, original: torch.Tensor, side: str) -> None:
        steps = zip(original.shape, original.stride(), strict=True)
        reach = 1 + sum((size - 1) * stride for size, stride in steps)
        elements = reach if original.numel() else 0
        self._address, self._nbytes = original.data_ptr(), elements * original.element_size()
        first = _PAGE + self._address % _VECTOR
        end = _PAGE + -(-(self._nbytes + _VECTOR) // _PAGE) * _PAGE
        if side == "end":
            first += (end - first - self._nbytes) // _VECTOR * _VECTOR
        self._around = (slice(_PAGE, first), slice(first + self._nbytes, end))
        self._area = mmap.mmap(-1, end + _PAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._area))
        ctypes.memset(start + _PAGE, _POISON, end - _PAGE)
        self._copy = start + first
        ctypes.memmove(self._copy, self._address, self._nbytes)
        for page in (start, start + end):
            if _libc.mprotect(ctypes.c_void_p(page), _PAGE, 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        flat = original.new_empty(0)
        if elements:
            flat = torch.frombuffer(self._area, dtype=original.dtype, count=elements, offset=first)
        self.tensor = flat.as_strided(original.shape, original.stride())

    def take_back(self) -> None:
        """Write what became of the copy, and of the gaps in it, to the original.

        As a kernel does it: autograd does not see it.
        """
        for around in self._around:
            if self._area[around].strip(bytes([_POISON])):
                raise RuntimeError("CUDA emulation: a kernel wrote outside of a tensor")
        ctypes.memmove(self._address, self._copy, self._nbytes)


def call_fenced(op: torch._ops.OpOverload, *args: object, number: int) -> object:
    """Call an op on fenced copies of its tensors, and take back those that it writes.

    By the `number` of the call, each has its fence before its first byte or behind its last.
    """
    fences = {
        i: Fenced(arg, ("start", "end")[(i + number) % 2])
        for i, arg in enumerate(args)
        if isinstance(arg, torch.Tensor)
    }
    result = op(*(fences[i].tensor if i in fences else arg for i, arg in enumerate(args)))
    for i, fence in fences.items():
        if op._schema.arguments[i].is_write:
            fence.take_back()
    return result
