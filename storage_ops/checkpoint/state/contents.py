"""The bytes of tensors that a region may write: copied before its forward, compared after it.

Not every write moves a version counter: those of batch norm and through `.data` do not. So a tensor
that may be written is copied before the forward. A copy of at most `SMALL` bytes is kept. A larger
tensor is compared with its copy after the forward, and the copy is kept only if they differ. That
reads and writes four times the bytes of the tensor in each forward. A region copies at most
`BUDGET` bytes of larger tensors, or `LARGE_BUDGET` bytes if its code may write through `.data`
(`code_writes`). For a tensor beyond the budget only the version is noted. If the code may write
through `.data`, sums of the bytes are noted as well, which read the tensor four times.

A tensor that was written once is copied from then on. Parameters are copied where code may write
them through `.data`, or may write them at all and their module has its first forward.

A GPU compares on the device, and the host does not wait. The result arrives in pinned memory.
Copies whose result is not there yet have at most `BUDGET` bytes, beyond which the host waits.
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

from storage_ops.checkpoint.saved.saved import INTEGERS, checksum_of, set_versions
from storage_ops.checkpoint.state.containers import Undo

SMALL = 256 << 10
BUDGET = 64 << 20
LARGE_BUDGET = 1 << 30
# Larger tensors and parameters that a forward has written.
written = WeakIdKeyDictionary()
# Modules whose parameters were copied in a forward.
looked_at: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_WIDTH = 4093  # words in a row of the sums: a prime, so that no shape of a tensor fits into it


class Contents:
    """A tensor that may be written, and a copy of it where one was made.

    Attributes:
        version, after: of the tensor, before and after the forward.
    """

    __slots__ = (
        "__weakref__", "_before", "_comparison", "_is_small", "_ref", "_sums", "_tensor",
        "_trusted", "after", "version",
    )  # fmt: skip

    def __init__(self, t: Tensor, trusted: bool, copied: bool, summed: bool = False) -> None:
        """Copy a tensor before the forward, or remember its version.

        Args:
            t: the tensor.
            trusted: whether its version says if it was written.
            copied: whether to copy it.
            summed: whether to compare sums of its bytes where it is not copied.
        """
        self.version = self.after = t._version
        self._ref, self._is_small = weakref.ref(t), t.nbytes <= SMALL
        self._trusted = trusted and self._is_small
        self._tensor = t if copied else None  # held as long as the copy
        self._before = memory_of(t).clone() if copied else None
        self._sums = [_sums(t)] if summed and not copied else []
        self._comparison: _Comparison | None = None

    def finish(self) -> None:
        """Let go of the copy of a larger tensor that the forward has left alone."""
        t = self._ref()
        if t is None:
            return
        self.after = t._version
        if self._sums:
            self._sums.append(_sums(t))
        if self.after != self.version:
            self._keep(t)
        elif self._before is not None and not self._is_small:
            self._compare(t, self._before)

    def _compare(self, t: Tensor, before: Tensor) -> None:
        memory = memory_of(t)
        # In a simulation, the copy of a real tensor is a fake one.
        if isinstance(before, FakeTensor) or t.is_meta:
            self._let_go()
        elif memory.shape != before.shape or memory.dtype != before.dtype:
            self._keep(t)
        elif t.is_cuda:
            if not torch.cuda.is_current_stream_capturing():  # what is in it cannot be asked
                self._comparison = _Comparison(memory, before)
                _compared.append(self)
        elif torch.equal(_bits(memory), _bits(before)):
            self._let_go()
        else:
            self._keep(t)

    def _keep(self, t: Tensor) -> None:
        if not isinstance(t, FakeTensor) and (not self._is_small or isinstance(t, nn.Parameter)):
            written[t] = True

    def settle(self, wait: bool) -> bool:
        """Let go of the copy if the device has found the tensor unchanged.

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
                self._let_go()
            elif self._tensor is not None:
                self._keep(self._tensor)
        return True

    def _let_go(self) -> None:
        self._tensor = self._before = None

    @property
    def tensor(self) -> Tensor | None:
        """Return the tensor, if there is a copy."""
        return self._tensor

    @property
    def nbytes(self) -> int:
        """Return the bytes of the copy."""
        return 0 if self._before is None else self._before.nbytes

    def lost(self) -> Tensor | None:
        """Return the tensor if the forward has written it and there is no copy.

        A parameter whose version tells is left to `RepeatedWrites`.
        """
        t = self._ref()
        if self._before is not None or t is None:
            return None
        moved = self.after != self.version and not isinstance(t, nn.Parameter)
        is_known = len(self._sums) == 2 and not isinstance(self._sums[0], FakeTensor)
        differs = is_known and not torch.equal(*self._sums)
        return t if moved or differs else None

    def changed(self) -> Tensor | None:
        """Return the tensor if it was written since the forward and there is no copy."""
        t = self._ref()
        self.settle(wait=True)
        return t if self._before is None and t is not None and t._version != self.after else None

    def restore(self, undo: Undo, running: bool) -> None:
        """Put the copy into the tensor.

        The version becomes that of the forward, plus the writes of others since then.

        Args:
            undo: gets what puts back the contents of now.
            running: whether the forward has not ended.
        """
        self.settle(wait=True)
        t, before = self._tensor, self._before
        if t is None or before is None:
            return
        now = t._version
        if self._trusted and now == self.version:
            return
        undo.append(_Write(t, memory_of(t).clone(), now))
        _Write(t, before, self.version if running else self.version + now - self.after)()


class Uninitialized(Contents):
    """A lazy buffer, to which the forward gives a shape. The recompute must not write it again."""

    __slots__ = ()

    def __init__(self, t: Tensor) -> None:
        """Remember the buffer, which has no contents yet."""
        self._ref, self._tensor, self._before, self._comparison = weakref.ref(t), None, None, None
        self._sums, self.version, self.after = [], 0, 0

    def finish(self) -> None:
        """Do nothing: there is nothing to compare with."""

    def changed(self) -> Tensor | None:
        """Return None: training reads the statistics of the batch."""

    def restore(self, undo: Undo, running: bool) -> None:
        """Have the contents of now put back after the recompute."""
        t = self._ref()
        if t is not None and not is_lazy(t):
            undo.append(_Write(t, memory_of(t).clone(), t._version))


class _Comparison:
    """A comparison of two tensors of a GPU whose result the host learns later."""

    __slots__ = ("differs", "event")

    def __init__(self, first: Tensor, second: Tensor) -> None:
        self.differs = torch.empty((), dtype=torch.bool, pin_memory=True)
        self.differs.copy_((_bits(first) != _bits(second)).any(), non_blocking=True)
        self.event = torch.cuda.current_stream(first.device).record_event()


class _Compared:
    """Copies that GPUs compare, the oldest first."""

    def __init__(self) -> None:
        self._waiting: collections.deque[weakref.ref[Contents]] = collections.deque()
        self._lock = threading.Lock()

    def append(self, contents: Contents) -> None:
        """Add a copy. Wait for the oldest ones if all have more bytes than the budget."""
        with self._lock:
            self._waiting.append(weakref.ref(contents))
            total = sum(each.nbytes for ref in self._waiting if (each := ref()) is not None)
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
    """Return a tensor without the repetition of an expanded one.

    A write to it changes no version of the tensor.
    """
    t = t.data
    for dim, stride in enumerate(t.stride()):
        if stride == 0:
            t = t.narrow(dim, 0, min(1, t.shape[dim]))
    return t


def _bits(t: Tensor) -> Tensor:
    """Return the bits of a tensor as integers, which are equal where a NaN has not changed."""
    if t.is_complex():
        t = torch.view_as_real(t.resolve_conj())
    return t.resolve_neg().view(INTEGERS[t.element_size()])


def _sums(t: Tensor) -> Tensor:
    """Return sums over rows and over columns of a tensor's bytes, taken as 64-bit words."""
    data = _bits(memory_of(t)).contiguous().view(-1).view(torch.uint8)
    row = 8 * _WIDTH
    whole = len(data) // row * row
    words = data[:whole].view(torch.int64).view(-1, _WIDTH)
    return torch.stack([checksum_of(each) for each in (words.sum(0), words.sum(1), data[whole:])])


class _Write:
    """Gives a tensor contents and a version."""

    __slots__ = ("contents", "tensor", "version")

    def __init__(self, tensor: Tensor, contents: Tensor, version: int) -> None:
        self.tensor, self.contents, self.version = tensor, contents, version

    def __call__(self) -> None:
        try:
            self._write()
        except BaseException:  # an interrupt, after which the contents would be lost
            self._write()
            raise

    def _write(self) -> None:
        memory = memory_of(self.tensor)
        if memory.shape == self.contents.shape:
            memory.copy_(self.contents)
        else:  # resized, as observers of ranges do at their first call
            self.tensor.data = self.contents.clone()
        set_versions((self.tensor,), (self.version,))
