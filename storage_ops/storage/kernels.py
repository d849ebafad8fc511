"""Kernels of the storage ops in Python: the alias path, the behaviour in traced graphs, and fakes.

The copy path is in `reference`. The native binding, csrc/storage/storage_binding.cpp, overrides
both.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch import UntypedStorage as Storage
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.library import Library, fallthrough_kernel, register_fake, register_vmap

from storage_ops import _library, _schemas
from storage_ops.storage import reference

_OPS = torch.ops.storage_ops


def _swap(to: Storage, other: Storage) -> None:
    to._swap_data_ptr_(other)  # type: ignore[attr-defined]


def _bytes_of(storage: Storage) -> Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))


def _alias_discard(self: Tensor, guard: str | None = None, allow_external: bool = False) -> None:
    with reference.lock:
        storage = reference.check_discard(self, allow_external)
        if storage is not None:
            reference.note_discard(storage)
            _swap(storage, Storage(0, device=storage.device))


def _alias_share(dst: Tensor, src: Tensor, allow_external: bool = False) -> None:
    with reference.lock:
        storages = reference.check_share(dst, src, allow_external, copies=False)
        if storages is None:
            return
        to, source = storages
        record = reference.record_of(source)
        if record.owner is None:
            # A hidden storage takes over the memory. `source` and `dst` share it, so either may be
            # discarded first. Aliases of aliases would form an endless chain. `source` keeps a
            # valid address at every moment, for threads that read it.
            record.external = not reference.can_resize(source)
            hidden = _OPS._alias_bytes(_bytes_of(source)).untyped_storage()
            _swap(source, hidden)
            record.owner = _bytes_of(hidden)
            _swap(source, _OPS._alias_bytes(record.owner).untyped_storage())
        if to.nbytes() > 0:
            _swap(to, Storage(0, device=to.device))
        _swap(to, _OPS._alias_bytes(record.owner).untyped_storage())
        reference.note_share(to, source)


def _record_stream(self: Tensor, id: int, device_index: int, device_type: int) -> None:
    stream = torch.Stream(stream_id=id, device_index=device_index, device_type=device_type)
    if self.device.type == stream.device.type and not reference.is_discarded(self):
        owner = reference.record_of(self.untyped_storage()).owner
        (self if owner is None else owner).record_stream(stream)


def _nothing(self: Tensor, *rest: object) -> None:
    """Do nothing, for discard_storage in a traced graph.

    A graph of torch.compile has no storages, and its compiler frees unused memory. A graph of
    torch.jit.trace has no hooks to bind the bytes back before its backward.
    """


def _stored(t: Tensor) -> Tensor:
    """Return a view of the stored values, without conjugate and negative bits."""
    t = t.conj() if t.is_conj() else t
    return torch._neg_view(t) if t.is_neg() else t


def _functional_share(dst: Tensor, src: Tensor, allow_external: bool = False) -> None:
    """Copy the values that dst would read from the storage of src, without a version bump."""
    dst, src = _stored(dst), _stored(src)
    reference.check_geometry(dst, src)
    geometry = (dst.shape, dst.stride(), dst.storage_offset())
    same = geometry == (src.shape, src.stride(), src.storage_offset())
    with _unsafe_preserve_version_counter(dst):
        torch.ops.aten.copy_(dst, src if same else src.as_strided(*geometry))


_PYTHON_KERNELS: dict[str, dict[str, Callable[..., Any]]] = {
    "copy": {
        "discard_storage": reference.discard_storage,
        "share_storage": reference.share_storage,
        "_check_storage": reference.check_storage,
    },
    "alias": {
        "discard_storage": _alias_discard,
        "share_storage": _alias_share,
        "_check_storage": functools.partial(reference.check_storage, copies=False),
    },
}
_COMMON_KERNELS: dict[str, Callable[..., Any]] = {
    "_is_discarded": reference.is_discarded,
    "_record_stream": _record_stream,
}


# Fallbacks of these keys would pass the kernel another tensor than the one with the storage: a
# clone of a conjugate or negative view, or zeros for a zero tensor. Autograd has nothing to track,
# because binding changes no value that autograd has seen.
_PASSED = ("Conjugate", "Negative", "ZeroTensor", "Autograd")


def _batched(name: str) -> Callable[..., tuple[Any, None]]:
    """Return the vmap rule of an op. Samples are slices of one tensor, which has the storage."""

    def rule(info: object, in_dims: tuple[int | None, ...], *args: object) -> tuple[Any, None]:
        if name == "share_storage" and in_dims[0] != in_dims[1]:
            raise RuntimeError(
                f"share_storage: `src` is batched by vmap along dimension {in_dims[1]} of the "
                f"tensor that holds the samples. Expected dimension {in_dims[0]}, as `dst` is."
            )
        return getattr(_OPS, name)(*args), None

    return rule


def register(status: _library.Status) -> None:
    """Register the Python kernels of the storage ops. Native ones override them on CPU and CUDA."""

    def alias_bytes(owner: Tensor) -> Tensor:
        raise RuntimeError(f"_alias_bytes: {status.why_missing(_library.ALIAS)}")

    if status.storage_path == "binding":
        raise_from_is_shared()
    python = _PYTHON_KERNELS.get(status.storage_path, _PYTHON_KERNELS["copy"])
    for name, kernel in {**python, **_COMMON_KERNELS, "_alias_bytes": alias_bytes}.items():
        _schemas.library.impl(name, kernel, "CompositeExplicitAutograd")
    for name, kernel in {**python, **_COMMON_KERNELS}.items():
        for key in _PASSED:
            _schemas.library.impl(name, fallthrough_kernel, key)
        # Nested tensors have a backend of their own, which has no native kernel.
        _schemas.library.impl(name, kernel, "NestedTensorCPU")
        _schemas.library.impl(name, kernel, "NestedTensorCUDA")
        register_vmap(f"storage_ops::{name}", _batched(name), lib=_schemas.library)
    for key in ("Functionalize", "Tracer"):
        _schemas.library.impl("discard_storage", _nothing, key)
    _schemas.library.impl("share_storage", _functional_share, "Functionalize")
    for name in ("_check_storage", "_record_stream"):
        _schemas.library.impl(name, _nothing, "Tracer")
    _schemas.library.impl("_is_discarded", fallthrough_kernel, "Tracer")


def raise_from_is_shared() -> None:
    """Make `UntypedStorage.is_shared` raise an error for a discarded storage.

    torch's own method lets no exception out, so the guard's error would end the process.
    """

    def is_shared(self: Storage) -> bool:
        if self.nbytes() == 0:
            self.data_ptr()  # raises the message of the guard
        return bool(shows_shared(self))

    shows_shared = Storage.is_shared
    is_shared.__doc__ = shows_shared.__doc__
    Storage.is_shared = is_shared  # type: ignore[assignment, method-assign]


@contextlib.contextmanager
def storage_path(path: str) -> Iterator[None]:
    """Use the Python path "copy" or "alias" of the storage ops in a with block, for tests."""
    override = Library("storage_ops", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about the first overridden kernel
            for name, kernel in {**_PYTHON_KERNELS[path], **_COMMON_KERNELS}.items():
                for key in ("CPU", "CUDA"):
                    override.impl(name, kernel, key)
        yield
    finally:
        override._destroy()


@register_fake("storage_ops::discard_storage", lib=_schemas.library)
def _(self: Tensor, guard: str | None = None, allow_external: bool = False) -> None:
    return None


@register_fake("storage_ops::share_storage", lib=_schemas.library)
def _(dst: Tensor, src: Tensor, allow_external: bool = False) -> None:
    reference.check_geometry(dst, src)


@register_fake("storage_ops::_is_discarded", lib=_schemas.library)
def _(self: Tensor) -> bool:
    return False


@register_fake("storage_ops::_check_storage", lib=_schemas.library)
def _(self: Tensor, src: Tensor | None, allow_external: bool = False) -> None:
    return None


@register_fake("storage_ops::_record_stream", lib=_schemas.library)
def _(self: Tensor, id: int, device_index: int, device_type: int) -> None:
    return None


@register_fake("storage_ops::_alias_bytes", lib=_schemas.library)
def _(owner: Tensor) -> Tensor:
    return torch.empty_like(owner)
