"""Kernels of the storage ops in Python: the alias path, what a traced graph does, and the fakes.

The copy path is `reference`; the native binding is csrc/storage_binding.cpp and outranks them all.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor
from torch import UntypedStorage as Storage
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.library import Library, fallthrough_kernel, register_fake

from storage_ops import _library, _schemas
from storage_ops.ops import reference

_OPS = torch.ops.storage_ops


def _swap(to: Storage, other: Storage) -> None:
    to._swap_data_ptr_(other)  # type: ignore[attr-defined]


def _alias_discard(self: Tensor) -> None:
    storage = reference.storage_of("discard_storage", "self", self)
    if storage.nbytes() == 0:
        return
    reference.check_may_lose_bytes("discard_storage", "self", storage)
    reference.note_discard(storage)
    _swap(storage, Storage(0, device=storage.device))


def _alias_share(dst: Tensor, src: Tensor) -> None:
    storages = reference.check_share(dst, src)
    if storages is None:
        return
    to, source = storages
    reference.check_may_lose_bytes("share_storage", "dst", to)  # before anything changes
    record = reference.record_of(source)
    if record.owner is None:
        # An owner that no user sees takes over the memory; source and dst become aliases of it, so
        # that either may be discarded first. Aliases of aliases would form an endless chain.
        owner = torch.empty(0, dtype=torch.uint8, device=source.device)
        _swap(owner.untyped_storage(), source)
        nbytes = owner.untyped_storage().nbytes()
        record.owner = owner.set_(owner.untyped_storage(), 0, (nbytes,), (1,))
        _swap(source, _OPS._alias_bytes(record.owner).untyped_storage())
    if to.nbytes() > 0:
        _swap(to, Storage(0, device=to.device))
    _swap(to, _OPS._alias_bytes(record.owner).untyped_storage())
    reference.note_share(to, source)


def _record_stream(self: Tensor, id: int, device_index: int, device_type: int) -> None:
    if self.is_cuda:
        owner = reference.record_of(self.untyped_storage()).owner
        stream = torch.cuda.Stream(stream_id=id, device_index=device_index, device_type=device_type)
        (self if owner is None else owner).record_stream(stream)


def _no_guard(self: Tensor, message: str) -> bool:
    return False


def _functional_discard(self: Tensor) -> None:
    """Do nothing: a traced graph has no storages, and its compiler frees what is not used."""


def _functional_share(dst: Tensor, src: Tensor) -> None:
    """Copy the values that dst would read from the storage of src; no version counter moves."""
    if dst.dtype != src.dtype:
        raise RuntimeError(
            f"share_storage: src is {src.dtype} in compiled code; expected {dst.dtype}, as dst is"
        )
    geometry = (dst.shape, dst.stride(), dst.storage_offset())
    same = geometry == (src.shape, src.stride(), src.storage_offset())
    with _unsafe_preserve_version_counter(dst):
        torch.ops.aten.copy_(dst, src if same else src.as_strided(*geometry))


_PYTHON_KERNELS = {
    "copy": {
        "discard_storage": reference.discard_storage,
        "share_storage": reference.share_storage,
    },
    "alias": {"discard_storage": _alias_discard, "share_storage": _alias_share},
}
_COMMON_KERNELS = {
    "_is_discarded": reference.is_discarded,
    "_arm_guard": _no_guard,
    "_record_stream": _record_stream,
}


def register(status: _library.Status) -> None:
    """Attach the Python kernels of the storage ops; native ones outrank them on CPU and CUDA."""

    def alias_bytes(owner: Tensor) -> Tensor:
        raise RuntimeError(f"_alias_bytes: {status.why_missing(_library.ALIAS)}")

    python = _PYTHON_KERNELS.get(status.storage_path, _PYTHON_KERNELS["copy"])
    for name, kernel in {**python, **_COMMON_KERNELS, "_alias_bytes": alias_bytes}.items():
        _schemas.library.impl(name, kernel, "CompositeExplicitAutograd")
    for name in ("discard_storage", "share_storage"):
        # A binding changes no value that autograd has seen: nothing to track.
        _schemas.library.impl(name, fallthrough_kernel, "Autograd")
    _schemas.library.impl("discard_storage", _functional_discard, "Functionalize")
    _schemas.library.impl("share_storage", _functional_share, "Functionalize")


@contextlib.contextmanager
def storage_path(path: str) -> Iterator[None]:
    """Run the storage ops by the Python path "copy" or "alias" inside a with block, for tests."""
    override = Library("storage_ops", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch reports the first overridden kernel
            for name, kernel in {**_PYTHON_KERNELS[path], **_COMMON_KERNELS}.items():
                for key in ("CPU", "CUDA"):
                    override.impl(name, kernel, key)
        yield
    finally:
        override._destroy()


@register_fake("storage_ops::discard_storage", lib=_schemas.library)
def _(self: Tensor) -> None:
    return None


@register_fake("storage_ops::share_storage", lib=_schemas.library)
def _(dst: Tensor, src: Tensor) -> None:
    if dst.device != src.device:
        raise RuntimeError(
            f"share_storage: src is on {src.device}; expected the device of dst, {dst.device}"
        )


@register_fake("storage_ops::_is_discarded", lib=_schemas.library)
def _(self: Tensor) -> bool:
    return False


@register_fake("storage_ops::_arm_guard", lib=_schemas.library)
def _(self: Tensor, message: str) -> bool:
    return False


@register_fake("storage_ops::_record_stream", lib=_schemas.library)
def _(self: Tensor, id: int, device_index: int, device_type: int) -> None:
    return None


@register_fake("storage_ops::_alias_bytes", lib=_schemas.library)
def _(owner: Tensor) -> Tensor:
    return torch.empty_like(owner)
