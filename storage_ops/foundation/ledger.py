"""The ledger of a simulated run: which block of memory lives from when to when."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
from torch import UntypedStorage as Storage

from storage_ops.quantities import next_multiple

_BLOCK = 512  # the size of every block is a multiple of this
_LARGE = 10 << 20  # a request of this size or more gets a segment of its own
_SEGMENT = 2 << 20  # segments of large requests are multiples of this
_SLACK = 1 << 20  # the rest of a segment becomes a block of its own only above this size


def rounded(nbytes: int) -> int:
    """Return the bytes that the CUDA caching allocator takes for a request, without fragmentation.

    Blocks are multiples of 512 bytes. A request of 10 MiB or more gets a segment whose size is a
    multiple of 2 MiB. It keeps the rest of the segment, unless the rest is more than 1 MiB
    (c10/cuda/CUDACachingAllocator).
    """
    block = next_multiple(nbytes, _BLOCK)
    segment = next_multiple(block, _SEGMENT)
    return segment if block >= _LARGE and segment - block <= _SLACK else block


def levels(changes: Iterable[int], start: int = 0) -> list[int]:
    """Return the bytes in memory at the start and after each change."""
    return list(accumulate(changes, initial=start))


@dataclass(eq=False)
class ModuleCall:
    """A call of a module, or another part of a step, during which blocks are allocated.

    Attributes:
        name: the name of the module, as in `named_modules`, or of the part.
        end: the number of events when it ended. None while it runs.
    """

    name: str
    end: int | None = None


@dataclass(eq=False)
class Block:
    """Memory that one allocation takes.

    Attributes:
        nbytes: its size as the allocator of the device rounds it.
        shape, dtype: the shape and dtype of the tensor that it was allocated for.
        made_by: the op that allocated it, or "input".
        call: the innermost call during which it was allocated.
        asked: requested bytes, before rounding.
        node: the number of the autograd node that allocated it. None outside of a backward.
    """

    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    made_by: str
    call: ModuleCall | None = None
    asked: int = 0
    node: int | None = None
    _storages: int = 0  # the number of storages that use this block


@dataclass(eq=False)
class _Bound:
    """The record of a live storage."""

    storage: weakref.ref[Storage]
    nbytes: int  # size of the storage itself, to notice a resize
    first: Block  # the first block of the storage
    block: Block | None = None  # the current block


class Ledger:
    """Follows storages from their first sight to their end.

    Attributes:
        inputs: blocks that existed before the run.
        events: (seconds since the start, block, True if it was allocated, False if it was freed).
        calls: the calls in progress, innermost last.
        discarded: blocks that were freed by discarding a storage.
        added_to: blocks of gradients to which autograd has added other gradients in place.
    """

    def __init__(
        self, round_up: Callable[[int], int] = rounded, outer: Ledger | None = None
    ) -> None:
        """Start a ledger.

        `round_up` returns the bytes that the allocator takes for a request. `outer` is the ledger
        of the whole run, if this one covers a part.
        """
        self.inputs: list[Block] = []
        self.calls: list[ModuleCall] = []
        self.discarded: set[Block] = set()
        self.added_to: set[Block] = set()
        self.round_up = round_up
        self.events: list[tuple[float, Block, bool]] = []
        self._start = time.perf_counter()
        self._outer = outer
        self._bound: dict[int, _Bound] = {}

    @property
    def is_of_a_part(self) -> bool:
        """Return True if this ledger covers a part of a run, and another ledger covers the rest."""
        return self._outer is not None

    def mark(self) -> int:
        """Return the current moment, as a number of events."""
        return len(self.events)

    def levels(self) -> list[int]:
        """Return the bytes in memory at each moment, from the start."""
        start = sum(block.nbytes for block in self.inputs)
        return levels((b.nbytes if taken else -b.nbytes for _, b, taken in self.events), start)

    def see(self, t: Tensor, made_by: str, *, is_input: bool = False) -> None:
        """Record the storage of a tensor, unless it is known."""
        storage = t.untyped_storage()
        key = storage._cdata
        if key in self._bound or (self._outer is not None and key in self._outer._bound):
            return
        block = self.block(t, storage.nbytes(), made_by)
        reference = weakref.ref(storage, partial(self._gone, key))
        self._bound[key] = bound = _Bound(reference, storage.nbytes(), block)
        if is_input:
            self.inputs.append(block)
            bound.block, block._storages = block, 1
        elif bound.nbytes:
            self._bind(bound, block)

    def temporary(self, t: Tensor, made_by: str, nbytes: int | None = None) -> None:
        """Record a block that lives only inside a kernel.

        By default it is as large as the tensor.
        """
        self.give_back(self.take(self.block(t, t.nbytes if nbytes is None else nbytes, made_by)))

    def follow_resize(self, storage: Storage) -> None:
        """Record the new size of a storage if it was resized in place."""
        bound = self._bound.get(storage._cdata)
        if bound is not None and storage.nbytes() != bound.nbytes:
            bound.nbytes = storage.nbytes()
            self._unbind(bound)
            if bound.nbytes:
                nbytes = self.round_up(bound.nbytes)
                self._bind(bound, replace(bound.first, nbytes=nbytes, _storages=0))

    def block(self, t: Tensor, nbytes: int, made_by: str) -> Block:
        """Return an unrecorded block of `nbytes` for a tensor that is created now."""
        call = self.calls[-1] if self.calls else None
        node = torch._C._current_autograd_node()
        number = None if node is None else node._sequence_nr()
        # A nested tensor with layout torch.strided has no shape.
        shape = (t.numel(),) if t.is_nested and t.layout == torch.strided else tuple(t.shape)
        return Block(self.round_up(nbytes), shape, t.dtype, made_by, call, nbytes, number)

    @contextlib.contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Assign blocks that are allocated inside a with block to this call."""
        call = ModuleCall(name)
        self.calls.append(call)
        try:
            yield
        finally:
            self.calls.pop()
            call.end = len(self.events)

    def block_of(self, t: Tensor) -> Block | None:
        """Return the current block of a tensor's storage, or None if it has none or is unknown."""
        bound = self._bound.get(t.untyped_storage()._cdata)
        return None if bound is None else bound.block

    def has(self, key: int) -> bool:
        """Return True if the storage with this key is in the ledger and still exists."""
        bound = self._bound.get(key)
        return bound is not None and bound.storage() is not None

    def alive(self) -> list[Storage]:
        """Return the storages that still exist."""
        known = [bound.storage() for bound in self._bound.values()]
        return [storage for storage in known if storage is not None]

    def discard(self, t: Tensor) -> None:
        """Free the block of a storage."""
        bound = self._of(t)
        if bound.block is not None:
            self.discarded.add(bound.block)
        self._unbind(bound)

    def see_as(self, t: Tensor, block: Block) -> None:
        """Record the new storage of a tensor as a user of an existing block."""
        storage = t.untyped_storage()
        reference = weakref.ref(storage, partial(self._gone, storage._cdata))
        self._bound[storage._cdata] = bound = _Bound(reference, storage.nbytes(), block)
        self._bind(bound, block)

    def release(self, t: Tensor) -> None:
        """Free the block of a storage that is still referenced, but not read again."""
        bound = self._bound.get(t.untyped_storage()._cdata)
        if bound is not None:
            self._unbind(bound)

    def take(self, block: Block) -> Block:
        """Record a block that has no storage. `give_back` frees it."""
        self._event(block, True)
        return block

    def give_back(self, block: Block) -> None:
        """Record the end of a block that has no storage."""
        self._event(block, False)

    def is_discarded(self, t: Tensor) -> bool:
        """Return True if a storage that should have a block has none."""
        return self._of(t).block is None and t.numel() > 0

    def share(self, dst: Tensor, src: Tensor, copies: bool) -> None:
        """Bind dst's storage to the block of src, or with `copies` to a new block of equal size."""
        to, source = self._of(dst), self._of(src).block
        if source is None or to.block is source or (copies and to.block is not None):
            return
        if copies:
            source = replace(source, made_by="share_storage by a copy", _storages=0)
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
