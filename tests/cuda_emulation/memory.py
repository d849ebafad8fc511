"""Copies of tensors between protected pages, to detect accesses outside of a tensor."""

import ctypes
import mmap

import torch

_libc = ctypes.CDLL(None, use_errno=True)
_PAGE = mmap.PAGESIZE
_VECTOR = 16  # bytes of the widest access, to which kernels may align
_POISON = 0xFF  # floating-point numbers of these bytes are nan, integers -1


class Fenced:
    """A copy of a tensor with the same alignment, strides and gaps.

    `side` says whether its first or last byte is within 16 bytes of a page without access. Bytes
    between, and the rest of the page at the other end, are nan.
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
        """Copy the bytes back to the original, including the gaps.

        Like a kernel, this is not seen by autograd.
        """
        for gap in self._around:
            if self._area[gap].strip(bytes([_POISON])):
                raise RuntimeError("CUDA emulation: a kernel wrote outside of a tensor")
        ctypes.memmove(self._address, self._copy, self._nbytes)


def call_fenced(op: torch._ops.OpOverload, *args: object, number: int) -> object:
    """Call an op on fenced copies of its tensors, and copy back those that it writes.

    The `number` of the call decides whether the fence is before or behind each tensor.
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
