"""The books of a simulated run: which block of memory lives from when to when."""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch import UntypedStorage as Storage

_BLOCK = 512  # every block is a multiple of this
_LARGE = 10 << 20  # from here on, a request gets a segment of its own
_SEGMENT = 2 << 20  # of whole this
_SLACK = 1 << 20  # what is left of a segment becomes a block of its own only above this


def rounded(nbytes: int) -> int:
    """Bytes that the CUDA caching allocator takes for a request, on a GPU that is not fragmented.

    Blocks are multiples of 512 bytes. A request of 10 MiB and more gets a segment of whole 2 MiB
    and keeps what is left of it, unless that is more than 1 MiB (c10/cuda/CUDACachingAllocator).
    """
    block = -(-nbytes // _BLOCK) * _BLOCK
    segment = -(-block // _SEGMENT) * _SEGMENT
    return segment if block >= _LARGE and segment - block <= _SLACK else block


@dataclass(eq=False)
class Block:
    """Memory that one allocation takes.

    Attributes:
        nbytes: its size as the CUDA caching allocator rounds it.
        shape, dtype: of the tensor that it was made for.
        made_by: the op that made it, or "input".
    """

    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    made_by: str
    _storages: int = 0  # that are bound to it

    @staticmethod
    def of(t: Tensor, nbytes: int, made_by: str) -> Block:
        """A block for the storage of a tensor."""
        return Block(rounded(nbytes), tuple(t.shape), t.dtype, made_by)


@dataclass(eq=False)
class _Bound:
    """What is known of a live storage."""

    storage: weakref.ref[Storage]
    nbytes: int  # of the storage itself, to notice when it is resized
    first: Block  # that it had at first
    block: Block | None = None  # that it has now


class Ledger:
    """Follows storages from their first sight to their end.

    Attributes:
        inputs: blocks that were there before the run.
        events: (seconds since the start, block, whether it was taken or given back).
    """

    def __init__(self) -> None:
        self.inputs: list[Block] = []
        self.events: list[tuple[float, Block, bool]] = []
        self._start = time.perf_counter()
        self._bound: dict[int, _Bound] = {}

    def see(self, t: Tensor, made_by: str, *, is_input: bool = False) -> None:
        """Book the storage of a tensor, unless it is known."""
        storage = t.untyped_storage()
        key = storage._cdata
        if key in self._bound:
            return
        block = Block.of(t, storage.nbytes(), made_by)
        reference = weakref.ref(storage, partial(self._gone, key))
        self._bound[key] = bound = _Bound(reference, storage.nbytes(), block)
        if is_input:
            self.inputs.append(block)
            bound.block, block._storages = block, 1
        elif bound.nbytes:
            self._bind(bound, block)

    def temporary(self, t: Tensor, made_by: str) -> None:
        """Book a block as large as a tensor that lives only inside a kernel."""
        block = Block.of(t, t.nbytes, made_by)
        self._event(block, True)
        self._event(block, False)

    def follow_resizes(self) -> None:
        """Notice the storages that were resized in place, which is not an op."""
        for bound in list(self._bound.values()):
            storage = bound.storage()
            if storage is not None and storage.nbytes() != bound.nbytes:
                bound.nbytes = storage.nbytes()
                self._unbind(bound)
                if bound.nbytes:
                    f = bound.first
                    self._bind(bound, Block(rounded(bound.nbytes), f.shape, f.dtype, f.made_by))

    def discard(self, t: Tensor) -> None:
        """Give back the block of a storage."""
        self._unbind(self._of(t))

    def is_discarded(self, t: Tensor) -> bool:
        """Whether a storage that should have a block has none."""
        return self._of(t).block is None and t.numel() > 0

    def share(self, dst: Tensor, src: Tensor, copies: bool) -> None:
        """Bind the storage of dst to the block of src, or to its own as large as that one."""
        to, source = self._of(dst), self._of(src).block
        if source is None or to.block is source or (copies and to.block is not None):
            return
        if copies:
            source = Block(source.nbytes, source.shape, source.dtype, "share_storage by a copy")
        self._unbind(to)
        self._bind(to, source)

    def _of(self, t: Tensor) -> _Bound:
        return self._bound[t.untyped_storage()._cdata]

    def _bind(self, bound: _Bound, block: Block) -> None:
        bound.block = block
        block._storages += 1
        if block._storages == 1:
            self._event(block, True)

    def _unbind(self, bound: _Bound) -> None:
        block, bound.block = bound.block, None
        if block is not None:
            block._storages -= 1
            if block._storages == 0:
                self._event(block, False)

    def _gone(self, key: int, reference: weakref.ref[Storage]) -> None:
        self._unbind(self._bound.pop(key))

    def _event(self, block: Block, taken: bool) -> None:
        self.events.append((time.perf_counter() - self._start, block, taken))
