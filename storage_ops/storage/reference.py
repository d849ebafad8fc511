"""Each op in plain torch: the fallback without native libraries, and what the tests compare with.

The storage ops here keep the identity of the StorageImpl, so every view still follows; what they
cannot do is share: the bytes are copied.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch import UntypedStorage as Storage


@dataclass
class Record:
    """What is known of a storage beyond what torch keeps, stored on the storage object itself."""

    nbytes: int = 0  # size before it was discarded
    lender: weakref.ref[Storage] | None = None  # the storage its bytes were shared from
    lender_id: int = 0  # and the id it had then: with another one it is a lender no more
    owner: Tensor | None = None  # holds the memory when several storages share it
    id: int = field(default_factory=itertools.count(1).__next__)


def record_of(storage: Storage) -> Record:
    """Return the record of a storage, made on first use."""
    found: Record = vars(storage).setdefault("_storage_ops", Record())
    return found


def bytes_reached(t: Tensor) -> int:
    """Bytes that a strided tensor reaches into its storage; 0 when it has no elements."""
    if t.is_nested:  # has a size per component; a lower bound is enough to tell whether it has any
        return t.numel() * t.element_size()
    if t.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return int(t.storage_offset() + last + 1) * t.element_size()


def is_discarded(self: Tensor) -> bool:
    """Whether the bytes of a tensor are gone."""
    return self.layout == torch.strided and self.untyped_storage().nbytes() < bytes_reached(self)


def is_lazy_copy(t: Tensor) -> bool:
    """Whether a tensor is copy-on-write."""
    try:
        return bool(torch._C._is_cow_tensor(t))  # type: ignore[attr-defined]
    except RuntimeError:  # torch >= 2.14 does not say for subclasses; `lacks_bytes` makes the copy
        return False


def lacks_bytes(t: Tensor) -> bool:
    """Whether a tensor has a size but no memory: torch's zero tensors, and what wraps others."""
    storage = t.untyped_storage()
    if storage.device.type == "meta" or storage.nbytes() == 0:
        return False
    try:
        return storage.data_ptr() == 0
    except RuntimeError:  # how torch answers for such a storage
        return True


def storage_of(op: str, name: str, t: Tensor) -> Storage:
    """Return the storage of an argument, or raise for one that the storage ops cannot handle."""
    if t.layout != torch.strided:
        raise RuntimeError(f"{op}: {name} has layout {t.layout}; expected a strided tensor")
    if t.is_nested:
        raise RuntimeError(
            f"{op}: {name} is a nested tensor with layout torch.strided; expected a plain tensor "
            "or layout torch.jagged"
        )
    if t.is_quantized:
        raise RuntimeError(f"{op}: {name} is quantized; expected a plain tensor")
    if is_lazy_copy(t):
        raise RuntimeError(
            f"{op}: {name} is a lazy copy (copy-on-write); expected a tensor that owns its storage"
        )
    if lacks_bytes(t):
        raise RuntimeError(
            f"{op}: {name} has no bytes of its own, it is a zero tensor or wraps others; expected "
            "a plain tensor"
        )
    return t.untyped_storage()


def check_may_lose_bytes(op: str, name: str, storage: Storage) -> None:
    """Raise for a storage whose bytes another library made or looks at."""
    if not storage.resizable() and record_of(storage).owner is None:
        raise RuntimeError(
            f"{op}: {name} has bytes that torch cannot resize, because numpy or another library "
            "looks at them or pin_memory() made them; expected a tensor whose bytes are its own"
        )


def leased_from(storage: Storage, source: Storage) -> bool:
    """Whether `storage` got the bytes it holds from `source`, directly or through others.

    Ends, since every record is younger than its lender's.
    """
    record = record_of(storage)
    while record.lender is not None:
        lender = record.lender()
        if lender is None or record_of(lender).id != record.lender_id:
            return False  # it is gone or holds other bytes by now
        if lender is source:
            return True
        record = record_of(lender)
    return False


def note_discard(storage: Storage) -> None:
    """Record that a storage is about to lose its bytes."""
    vars(storage)["_storage_ops"] = Record(nbytes=storage.nbytes())


def note_share(to: Storage, source: Storage) -> None:
    """Record that `to` has the bytes of `source` now."""
    record = record_of(source)
    vars(to)["_storage_ops"] = Record(0, weakref.ref(source), record.id, record.owner)


def check_discard(self: Tensor) -> Storage | None:
    """Check the argument of discard_storage; None when it has lost its bytes already."""
    storage = storage_of("discard_storage", "t", self)
    if storage.nbytes() == 0:
        return None
    check_may_lose_bytes("discard_storage", "t", storage)
    return storage


def check_alike(dst: Tensor, src: Tensor) -> None:
    """Raise unless both tensors have one dtype and one device."""
    if src.dtype != dst.dtype:
        raise RuntimeError(
            f"share_storage: src is {src.dtype}; expected {dst.dtype}, the dtype of dst. To bind "
            f"the bytes as they are, pass src.view({dst.dtype})"
        )
    if src.device != dst.device:
        raise RuntimeError(
            f"share_storage: src is on {src.device}; expected the device of dst, {dst.device}"
        )


def span_of(t: Tensor) -> tuple[int, int, bool]:
    """The elements of its storage that a tensor with elements reads.

    Returns:
        The first one, the end, and whether there are others in between.
    """
    begin = int(t.storage_offset())
    end, has_gaps = begin + 1, False
    dims = [(stride, size) for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1]
    for stride, size in sorted(dims):
        has_gaps |= bool(stride > end - begin)
        end += int((size - 1) * stride)
    return begin, end, has_gaps


def check_elements(dst: Tensor, src: Tensor) -> None:
    """Raise unless `src` has every element that `dst` reads from its storage, at the same place.

    That is the same index where the shapes are equal.
    """
    places = [(t.shape, t.stride(), t.storage_offset()) for t in (dst, src)]
    # Asked first: of symbolic sizes nothing else may be known.
    if places[0] == places[1] or dst.numel() == 0:
        return
    if dst.shape == src.shape:
        strides = zip(dst.shape, dst.stride(), src.stride(), strict=True)
        if dst.storage_offset() != src.storage_offset() or any(
            size > 1 and to != source for size, to, source in strides
        ):
            raise RuntimeError(
                f"share_storage: src has strides {list(src.stride())} and storage offset "
                f"{src.storage_offset()}; expected {list(dst.stride())} and "
                f"{dst.storage_offset()}, as dst of the same shape has"
            )
        return
    if src.numel() == 0:
        raise RuntimeError("share_storage: src has no elements; expected those that dst reads")
    (begin, end, _), (first, last, has_gaps) = span_of(dst), span_of(src)
    if first > begin or end > last or has_gaps:
        raise RuntimeError(
            f"share_storage: src has elements {first} to {last - 1} of its storage"
            f"{', with gaps' if has_gaps else ''}; expected all of elements {begin} to {end - 1}, "
            "which dst reads"
        )


def check_geometry(dst: Tensor, src: Tensor) -> None:
    """Raise what share_storage raises of tensors without bytes: fakes, and those of graphs."""
    if not (dst.layout == src.layout == torch.strided) or (
        dst.untyped_storage()._cdata != src.untyped_storage()._cdata
    ):
        check_alike(dst, src)
        if dst.layout == src.layout == torch.strided:
            check_elements(dst, src)


def check_share(dst: Tensor, src: Tensor, copies: bool = True) -> tuple[Storage, Storage] | None:
    """Check the arguments of share_storage; None when both are one storage already.

    Args:
        copies: whether the bytes are copied, for which dst may keep memory of the right size.
    """
    to, source = storage_of("share_storage", "dst", dst), storage_of("share_storage", "src", src)
    if to is source or to._cdata == source._cdata:
        return None
    check_alike(dst, src)
    if is_discarded(src) or (source.nbytes() == 0 and record_of(source).nbytes > 0):
        raise RuntimeError("share_storage: src is discarded; expected a tensor with bytes")
    needed = max(bytes_reached(dst), to.nbytes() or record_of(to).nbytes)
    if source.nbytes() < needed:
        raise RuntimeError(
            f"share_storage: src has {source.nbytes()} bytes of storage; "
            f"expected at least {needed}, the storage of dst"
        )
    check_elements(dst, src)
    if leased_from(source, to):
        raise RuntimeError(
            "share_storage: src shares the bytes of dst already; sharing them back would close a "
            "reference cycle"
        )
    if not (copies and to.nbytes() == source.nbytes()):
        check_may_lose_bytes("share_storage", "dst", to)
    return to, source


def check_storage(self: Tensor, src: Tensor | None, copies: bool = True) -> None:
    """Raise what share_storage(self, src) or, without src, discard_storage(self) would raise."""
    if src is None:
        check_discard(self)
    else:
        check_share(self, src, copies)


def discard_storage(self: Tensor, guard: str | None = None) -> None:
    """Free the bytes of the storage of `self`; shape, strides and version counter stay.

    Nothing in plain torch makes a read raise `guard`.
    """
    storage = check_discard(self)
    if storage is not None:
        note_discard(storage)
        storage.resize_(0)


def share_storage(dst: Tensor, src: Tensor) -> None:
    """Give the storage of `dst` the bytes of `src`, by a copy."""
    storages = check_share(dst, src)
    if storages is None:
        return
    to, source = storages
    if to.nbytes() != source.nbytes():
        to.resize_(source.nbytes())
    to.copy_(source)
    note_share(to, source)
