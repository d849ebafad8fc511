"""Copy the tensors that a region may write before its forward, and compare them afterwards.

Some writes do not increment the version counter, such as those of batch norm and through `.data`.
So a tensor that may be written is copied before the forward. A copy of at most `SMALL` bytes is
kept. A larger tensor is compared with its copy after the forward, and the copy is kept only if they
differ. The copy and the comparison read and write four times the bytes of the tensor.

A region copies at most `BUDGET` bytes of larger tensors, or `LARGE_BUDGET` bytes if its code may
write through `.data` (`code_writes`). For tensors beyond the budget only the version is noted. If
the code may write through `.data`, checksums are noted too, which read the tensor four times.

If a forward has written a tensor, every later forward copies it. Parameters are copied if code may
write them through `.data`. They are also copied in the first forward of their module, if code may
write them in any way.

On a GPU, the device compares, and the host does not wait. The result arrives in pinned memory.
Copies whose result has not arrived have at most `BUDGET` bytes together. Beyond that, the host
waits.
"""

from __future__ import annotations

import collections
import threading
import weakref

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from storage_ops.checkpoint.saved.checksums import bits_of, checksum_of
from storage_ops.checkpoint.saved.saved import set_versions
from storage_ops.checkpoint.state.containers import Undo

SMALL = 256 << 10
BUDGET = 64 << 20
LARGE_BUDGET = 1 << 30
# Tensors of more than `SMALL` bytes, and parameters, that a forward has written.
written = WeakIdKeyDictionary()
# Modules whose parameters were copied before a forward.
looked_at: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_WIDTH = 4093  # words in a row of the sums: a prime, so that it divides no usual tensor size


def is_any_parameter_written() -> bool:
    """Return True if a forward has written a parameter, so that later forwards copy it."""
    return len(written) > 0 and any(isinstance(t, nn.Parameter) for t in list(written))


class Contents:
    """A tensor that may be written, and its copy from before the forward, if there is one.

    Attributes:
        version: the tensor's version before the forward.
        after: the tensor's version after the forward.
    """

    __slots__ = (
        "__weakref__", "_aliased", "_before", "_comparison", "_is_small", "_ref", "_sums",
        "_tensor", "_trusted", "after", "version",
    )  # fmt: skip

    def __init__(
        self,
        t: Tensor,
        trusted: bool,
        copied: bool,
        summed: bool = False,
        aliased: bool = False,
    ) -> None:
        """Copy a tensor before the forward, or remember its version.

        Args:
            t: the tensor.
            trusted: whether every write to the tensor increments its version.
            copied: whether to copy the tensor.
            summed: whether to compare checksums of the tensor if it is not copied.
            aliased: whether the tensor itself stands for its copy, in a simulation.
        """
        self.version = self.after = t._version
        self._aliased = aliased
        self._ref, self._is_small = weakref.ref(t), t.nbytes <= SMALL
        self._trusted = trusted and self._is_small
        self._tensor = t if copied else None  # referenced as long as the copy exists
        self._before: Tensor | None = None
        if copied:
            self._before = memory_of(t) if aliased else memory_of(t).clone()
        self._sums = [_sums(t)] if summed and not copied else []
        self._comparison: _Comparison | None = None

    @classmethod
    def of_library(
        cls, t: Tensor, before: Tensor, version: int, after: int, trusted: bool
    ) -> Contents:
        """Return an object for a small tensor that the library has copied before the forward.

        Args:
            t: the tensor.
            before: the copy.
            version, after: the versions of the tensor before and after the forward.
            trusted: as in `__init__`.
        """
        self = cls.__new__(cls)
        self.version, self.after = version, after
        self._ref, self._tensor, self._before = weakref.ref(t), t, before
        self._is_small, self._trusted, self._aliased = True, trusted, False
        self._sums, self._comparison = [], None
        return self

    def finish(self) -> None:
        """Drop the copy of a larger tensor that the forward has not written."""
        t = self._ref()
        if t is None:
            return
        self.after = t._version
        if self._sums:
            self._sums.append(_sums(t))
        if self.after != self.version:
            self._note_written(t)
        elif self._before is not None and not (self._is_small or self._aliased):
            self._compare(t, self._before)

    def _compare(self, t: Tensor, before: Tensor) -> None:
        memory = memory_of(t)
        # In a simulation, the copy of a real tensor is a fake one.
        if isinstance(before, FakeTensor) or t.is_meta:
            self._drop_copy()
        elif memory.shape != before.shape or memory.dtype != before.dtype:
            self._note_written(t)
        elif t.is_cuda:
            if not torch.cuda.is_current_stream_capturing():  # a capture runs no comparison
                self._comparison = _Comparison(memory, before)
                _compared.append(self)
        elif torch.equal(bits_of(memory), bits_of(before)):
            self._drop_copy()
        else:
            self._note_written(t)

    def _note_written(self, t: Tensor) -> None:
        if not isinstance(t, FakeTensor) and (not self._is_small or isinstance(t, nn.Parameter)):
            written[t] = True

    def settle(self, wait: bool) -> bool:
        """Drop the copy if the device has found that the tensor is unchanged.

        Args:
            wait: whether to wait for the device.

        Returns:
            True if the result of the comparison is known.
        """
        comparison = self._comparison
        if comparison is not None:
            if not (wait or comparison.event.query()):
                return False
            comparison.event.synchronize()
            self._comparison = None
            if not comparison.differs:
                self._drop_copy()
            elif self._tensor is not None:
                self._note_written(self._tensor)
        return True

    def _drop_copy(self) -> None:
        self._tensor = self._before = None

    @property
    def tensor(self) -> Tensor | None:
        """Return the tensor if there is a copy, else None."""
        return self._tensor

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of the copy."""
        return 0 if self._before is None else self._before.nbytes

    def lost(self) -> Tensor | None:
        """Return the tensor if the forward has written it and there is no copy.

        A parameter whose version has changed is left to `RepeatedWrites`.
        """
        t = self._ref()
        if self._before is not None or t is None:
            return None
        has_new_version = self.after != self.version and not isinstance(t, nn.Parameter)
        is_summed = len(self._sums) == 2 and not isinstance(self._sums[0], FakeTensor)
        differs = is_summed and not torch.equal(*self._sums)
        return t if has_new_version or differs else None

    def changed(self) -> Tensor | None:
        """Return the tensor if it was written since the forward and there is no copy."""
        t = self._ref()
        self.settle(wait=True)
        return t if self._before is None and t is not None and t._version != self.after else None

    def restore(self, undo: Undo, running: bool) -> None:
        """Restore the contents of the tensor from the copy.

        The version becomes that of the forward, plus the number of writes since the forward ended.

        Args:
            undo: a list, to which a function is appended that restores the present contents.
            running: whether the forward is still running.
        """
        self.settle(wait=True)
        t, before = self._tensor, self._before
        if t is None or before is None:
            return
        now = t._version
        if (self._trusted or self._aliased) and now == self.version:
            return
        undo.append(_Write(t, memory_of(t).clone(), now))
        _Write(t, before, self.version if running else self.version + now - self.after)()


class Uninitialized(Contents):
    """A lazy buffer, which gets its shape in the forward. The recompute must not write it again."""

    __slots__ = ()

    def __init__(self, t: Tensor) -> None:
        """Remember the buffer, which has no contents yet."""
        self._ref, self._tensor, self._before, self._comparison = weakref.ref(t), None, None, None
        self._sums, self.version, self.after = [], 0, 0

    def finish(self) -> None:
        """Do nothing, because there is no copy to compare with."""

    def changed(self) -> Tensor | None:
        """Return None, because the recompute does not read the buffer."""

    def restore(self, undo: Undo, running: bool) -> None:
        """Append a function to `undo` that restores the present contents after the recompute."""
        t = self._ref()
        if t is not None and not is_lazy(t):
            undo.append(_Write(t, memory_of(t).clone(), t._version))


class _Comparison:
    """A comparison of two tensors on a GPU. The host gets the result later."""

    __slots__ = ("differs", "event")

    def __init__(self, first: Tensor, second: Tensor) -> None:
        self.differs = torch.empty((), dtype=torch.bool, pin_memory=True)
        self.differs.copy_((bits_of(first) != bits_of(second)).any(), non_blocking=True)
        self.event = torch.cuda.current_stream(first.device).record_event()


class _Compared:
    """Copies that a GPU compares, the oldest first."""

    def __init__(self) -> None:
        self._waiting: collections.deque[weakref.ref[Contents]] = collections.deque()
        self._lock = threading.Lock()

    def append(self, contents: Contents) -> None:
        """Add a copy. Wait for the oldest copies if all together exceed the budget."""
        with self._lock:
            self._waiting.append(weakref.ref(contents))
            total = sum(copy.nbytes for ref in self._waiting if (copy := ref()) is not None)
            while self._waiting:
                oldest = self._waiting[0]()
                if oldest is not None:
                    nbytes = oldest.nbytes
                    if not oldest.settle(wait=total > BUDGET):
                        break
                    total -= nbytes
                self._waiting.popleft()


_compared = _Compared()


def memory_of(t: Tensor) -> Tensor:
    """Return an alias of a tensor in which expanded dimensions have at most one element.

    A write to the alias does not increment the version of the tensor.
    """
    t = t.data
    for dim, stride in enumerate(t.stride()):
        if stride == 0:
            t = t.narrow(dim, 0, min(1, t.shape[dim]))
    return t


def _sums(t: Tensor) -> Tensor:
    """Return checksums of the row sums and column sums of a tensor's bytes as 64-bit words."""
    data = bits_of(memory_of(t)).contiguous().view(-1).view(torch.uint8)
    row = 8 * _WIDTH
    whole = len(data) // row * row
    words = data[:whole].view(torch.int64).view(-1, _WIDTH)
    return torch.stack([checksum_of(part) for part in (words.sum(0), words.sum(1), data[whole:])])


class _Write:
    """Sets the contents and the version of a tensor when it is called."""

    __slots__ = ("contents", "tensor", "version")

    def __init__(self, tensor: Tensor, contents: Tensor, version: int) -> None:
        self.tensor, self.contents, self.version = tensor, contents, version

    def __call__(self) -> None:
        try:
            self._write()
        except BaseException:  # after an interrupt, the contents may be incomplete
            self._write()
            raise

    def _write(self) -> None:
        memory = memory_of(self.tensor)
        if memory.shape == self.contents.shape:
            memory.copy_(self.contents)
        else:  # resized, for example by a quantization observer in its first call
            self.tensor.data = self.contents.clone()
        set_versions((self.tensor,), (self.version,))
