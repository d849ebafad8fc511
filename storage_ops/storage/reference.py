"""Each op in plain torch: the fallback without native libraries, and the reference for tests.

These storage ops keep the identity of the StorageImpl, so every view sees the change. They cannot
share memory, so they copy the bytes.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import UntypedStorage as Storage

_next_id = itertools.count(1).__next__
# Held while an op reads or changes storages. Reentrant, because the garbage collector may run a
# finalizer that calls another op.
lock = threading.RLock()


@dataclass
class Record:
    """Facts about a storage that torch does not have. An attribute of the storage object.

    Attributes:
        nbytes: size before the storage was discarded.
        owner: the tensor that holds the memory when several storages share it.
        id: identifies the bytes in this storage. Storages that receive the bytes later have larger
            ids.
        first_id: the id of the bytes in the storage that they come from.
        external: True if other code may use the bytes through this storage.
    """

    nbytes: int
    owner: Tensor | None
    id: int
    first_id: int
    external: bool = False

    @classmethod
    def fresh(cls, nbytes: int = 0) -> Record:
        """Return a record for bytes that no other storage has."""
        id = _next_id()
        return cls(nbytes, None, id, id)


def record_of(storage: Storage) -> Record:
    """Return the record of a storage, created on first use."""
    attributes = vars(storage)
    if "_storage_ops" not in attributes:
        attributes["_storage_ops"] = Record.fresh()
    record: Record = attributes["_storage_ops"]
    if record.owner is not None and record.owner.data_ptr() != storage.data_ptr():
        # Other code has replaced the bytes, as share_memory_() and queues of processes do.
        record = attributes["_storage_ops"] = Record.fresh()
    return record


def bytes_reached(t: Tensor) -> int:
    """Return the bytes that a strided tensor reaches into its storage, or 0 without elements."""
    # A nested tensor has sizes per component; a lower bound shows whether it has bytes.
    if t.is_nested:
        return t.numel() * t.element_size()
    if t.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return int(t.storage_offset() + last + 1) * t.element_size()


def is_discarded(self: Tensor) -> bool:
    """Return True if the bytes of a tensor were discarded."""
    return self.layout == torch.strided and self.untyped_storage().nbytes() < bytes_reached(self)


def is_lazy_copy(t: Tensor) -> bool:
    """Return True if a tensor is copy-on-write."""
    try:
        return bool(torch._C._is_cow_tensor(t))  # type: ignore[attr-defined]
    except RuntimeError:  # torch >= 2.14 does not tell for subclasses; `lacks_bytes` makes the copy
        return False


def lacks_bytes(t: Tensor) -> bool:
    """Return True if a tensor has a size but no memory: torch's zero tensors, and wrappers."""
    storage = t.untyped_storage()
    if storage.device.type == "meta" or storage.nbytes() == 0:
        return False
    try:
        return storage.data_ptr() == 0
    except RuntimeError:  # torch raises this error for such a storage
        return True


def storage_of(op: str, name: str, t: Tensor) -> Storage:
    """Return the storage of an argument. Raise an error if the storage ops do not support it."""
    if t.layout != torch.strided:
        raise RuntimeError(f"{op}: `{name}` has layout {t.layout}. Expected a strided tensor.")
    if t.is_nested:
        raise RuntimeError(
            f"{op}: `{name}` is a nested tensor with layout torch.strided. Expected a plain tensor "
            "or layout torch.jagged."
        )
    if t.is_quantized:
        raise RuntimeError(f"{op}: `{name}` is quantized. Expected a plain tensor.")
    if is_lazy_copy(t):
        raise RuntimeError(
            f"{op}: `{name}` is a lazy copy (copy-on-write). Expected a tensor that owns its "
            "storage."
        )
    if lacks_bytes(t):
        raise RuntimeError(
            f"{op}: `{name}` has no bytes of its own, it is a zero tensor or wraps others. "
            "Expected a plain tensor."
        )
    return t.untyped_storage()


def can_resize(storage: Storage) -> bool:
    """Return True if torch allocated the bytes, and no other code uses them."""
    if storage.nbytes() == 0:  # there are no bytes to lose
        return True
    # torch says for every CUDA storage that processes may share it.
    return storage.resizable() and not (storage.device.type == "cpu" and storage.is_shared())


def check_may_lose_bytes(op: str, name: str, storage: Storage, external: bool) -> None:
    """Raise an error for a storage that must keep its bytes because other code may use them."""
    record = record_of(storage)
    # A storage whose bytes belong to an owner is never resizable.
    is_own = not record.external if record.owner is not None else can_resize(storage)
    if not (is_own or external):
        raise RuntimeError(
            f"{op}: `{name}` has bytes that torch cannot resize: they come from numpy, a file, "
            "shared memory, pin_memory() or another library, or numpy shows them. Expected a "
            "tensor whose bytes only torch uses. Pass allow_external=True if no other code uses "
            "them any more."
        )


def received_later(storage: Storage, source: Storage) -> bool:
    """Return True if `storage` received the bytes of `source` later than `source` itself."""
    later, first = record_of(storage), record_of(source)
    return later.first_id == first.first_id and later.id > first.id


def note_discard(storage: Storage) -> None:
    """Record that a storage is about to lose its bytes."""
    vars(storage)["_storage_ops"] = Record.fresh(storage.nbytes())


def note_share(to: Storage, source: Storage) -> None:
    """Record that `to` has the bytes of `source` now."""
    record = record_of(source)
    vars(to)["_storage_ops"] = Record(0, record.owner, _next_id(), record.first_id)


def check_discard(self: Tensor, external: bool = False) -> Storage | None:
    """Check the argument of discard_storage. Return None if it is already discarded."""
    storage = storage_of("discard_storage", "t", self)
    if storage.nbytes() == 0:
        return None
    check_may_lose_bytes("discard_storage", "t", storage, external)
    return storage


def check_alike(dst: Tensor, src: Tensor) -> None:
    """Raise an error unless both tensors have the same dtype and device."""
    if src.dtype != dst.dtype:
        raise RuntimeError(
            f"share_storage: `src` is {src.dtype}. Expected {dst.dtype}, the dtype of `dst`. To "
            f"bind the bytes as they are, pass src.view({dst.dtype})."
        )
    if src.device != dst.device:
        raise RuntimeError(
            f"share_storage: `src` is on {src.device}. Expected the device of `dst`, {dst.device}."
        )


def span_of(t: Tensor) -> tuple[int, int, bool]:
    """Return the elements of its storage that a non-empty tensor reads.

    Returns:
        The first element, the end, and whether elements in between are skipped.
    """
    begin = int(t.storage_offset())
    end, has_gaps = begin + 1, False
    dims = [(stride, size) for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1]
    for stride, size in sorted(dims):
        has_gaps |= bool(stride > end - begin)
        end += int((size - 1) * stride)
    return begin, end, has_gaps


def check_elements(dst: Tensor, src: Tensor) -> None:
    """Raise an error unless `src` has every element that `dst` reads, at the same place.

    For equal shapes, the same place means the same index.
    """
    places = [(t.shape, t.stride(), t.storage_offset()) for t in (dst, src)]
    # This comes first, because symbolic sizes may not be known otherwise.
    if places[0] == places[1] or dst.numel() == 0:
        return
    if dst.shape == src.shape:
        strides = zip(dst.shape, dst.stride(), src.stride(), strict=True)
        if dst.storage_offset() != src.storage_offset() or any(
            size > 1 and to != source for size, to, source in strides
        ):
            raise RuntimeError(
                f"share_storage: `src` has strides {list(src.stride())} and storage offset "
                f"{src.storage_offset()}. Expected {list(dst.stride())} and "
                f"{dst.storage_offset()}, those of `dst`, which has the same shape."
            )
        return
    if src.numel() == 0:
        raise RuntimeError("share_storage: `src` has no elements. Expected those that `dst` reads.")
    (begin, end, _), (first, last, has_gaps) = span_of(dst), span_of(src)
    if first > begin or end > last or has_gaps:
        raise RuntimeError(
            f"share_storage: `src` has elements {first} to {last - 1} of its "
            f"storage{', with gaps' if has_gaps else ''}. Expected all of elements {begin} to "
            f"{end - 1}, which `dst` reads."
        )


def check_geometry(dst: Tensor, src: Tensor) -> None:
    """Raise the errors of share_storage for tensors without bytes: fakes, and those in graphs."""
    if not (dst.layout == src.layout == torch.strided) or (
        dst.untyped_storage()._cdata != src.untyped_storage()._cdata
    ):
        check_alike(dst, src)
        if dst.layout == src.layout == torch.strided:
            check_elements(dst, src)


def check_share(
    dst: Tensor, src: Tensor, external: bool = False, copies: bool = True
) -> tuple[Storage, Storage] | None:
    """Check the arguments of share_storage. Return None if both already have the same storage.

    Args:
        dst: as in `share_storage`.
        src: as in `share_storage`.
        external: True if `dst` may lose bytes that other code may use.
        copies: True if the bytes are copied. Then dst keeps its memory if it has the right size.
    """
    to, source = storage_of("share_storage", "dst", dst), storage_of("share_storage", "src", src)
    if to is source or to._cdata == source._cdata:
        return None
    check_alike(dst, src)
    if is_discarded(src) or (source.nbytes() == 0 and record_of(source).nbytes > 0):
        raise RuntimeError("share_storage: `src` is discarded. Expected a tensor with bytes.")
    needed = max(bytes_reached(dst), to.nbytes() or record_of(to).nbytes)
    if source.nbytes() < needed:
        raise RuntimeError(
            f"share_storage: `src` has {source.nbytes()} bytes of storage. Expected at least "
            f"{needed}, the storage of `dst`."
        )
    check_elements(dst, src)
    if received_later(source, to):
        raise RuntimeError(
            "share_storage: `src` shares the bytes of `dst` already, and sharing them back would "
            "close a reference cycle. Pass a clone of `src`."
        )
    if not (copies and to.nbytes() == source.nbytes()):
        check_may_lose_bytes("share_storage", "dst", to, external)
    return to, source


def check_storage(
    self: Tensor, src: Tensor | None, allow_external: bool = False, copies: bool = True
) -> None:
    """Raise what share_storage(self, src) or, without src, discard_storage(self) would raise."""
    with lock:
        if src is None:
            check_discard(self, allow_external)
        else:
            check_share(self, src, allow_external, copies)


def _check_resizable(op: str, name: str, storage: Storage) -> None:
    """Raise an error for a storage that only a native library can change."""
    if not can_resize(storage):
        raise RuntimeError(
            f"{op}: `{name}` has bytes that torch cannot resize, and allow_external=True needs a "
            'native library. storage_ops.info()["storage_path"] is "copy".'
        )


def discard_storage(self: Tensor, guard: str | None = None, allow_external: bool = False) -> None:
    """Free the bytes of the storage of `self`. Shape, strides and version counter stay.

    In plain torch, reads do not raise `guard`.
    """
    with lock:
        storage = check_discard(self, allow_external)
        if storage is not None:
            _check_resizable("discard_storage", "t", storage)
            note_discard(storage)
            storage.resize_(0)


def share_storage(dst: Tensor, src: Tensor, allow_external: bool = False) -> None:
    """Copy the bytes of `src` into the storage of `dst`."""
    with lock:
        storages = check_share(dst, src, allow_external)
        if storages is None:
            return
        to, source = storages
        if to.nbytes() != source.nbytes():
            _check_resizable("share_storage", "dst", to)
            to.resize_(source.nbytes())
        to.copy_(source)
        note_share(to, source)
