"""Free the bytes of a storage, and bind other bytes into it in place.

`torch.ops.storage_ops.discard_storage` and `share_storage` have one of three kernels, named by
`storage_ops.info()["storage_path"]`: "binding" (native, for the exact torch minor), "alias" (a data
pointer swapped in by torch >= 2.12) and "copy" (plain torch, see `reference`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.library import Library, fallthrough_kernel, register_fake
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from storage_ops import _schemas
from storage_ops.ops import reference

_OPS = torch.ops.storage_ops
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class DiscardedTensorError(RuntimeError):
    """A tensor was read after its bytes were discarded."""


def _locals(op: str, name: str, t: object) -> list[Tensor]:
    """Return the plain tensors behind an argument; raise for what has no bytes."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{op}: {name} is {type(t).__name__}; expected a torch.Tensor")
    if isinstance(t, FakeTensor) and torch._guards.detect_fake_mode() is None:
        raise RuntimeError(f"{op}: {name} is a FakeTensor, which has no bytes; expected a tensor")
    if is_traceable_wrapper_subclass(t):
        names, _ = t.__tensor_flatten__()
        return [inner for n in names for inner in _locals(op, f"{name}.{n}", getattr(t, n))]
    return [t]


def discard_storage(
    t: Tensor, *, guard: str | None = None, streams: Iterable[torch.Stream] = ()
) -> None:
    """Free the bytes of a tensor's storage; every view of it loses them.

    Shape, strides, dtype and version counter stay. Discarding twice is fine. In compiled code this
    does nothing: the compiler plans memory itself.

    Args:
        t: a strided tensor of any shape and dtype. A DTensor or another wrapper subclass acts on
            the tensors it wraps.
        guard: a message; any later read of the tensor raises a RuntimeError with it, until
            `share_storage` binds new bytes. Where `storage_ops.info()["guard"]` is False torch has
            no such guard and reading is undefined; see `check_discarded`.
        streams: CUDA streams that may still be using the bytes. The current stream is one already.

    Raises:
        TypeError: `t` is not a tensor.
        RuntimeError: `t` is sparse, quantized, a lazy copy or fake; nothing has changed.

    Example:
        >>> h = torch.ones(1024)
        >>> storage_ops.discard_storage(h)
        >>> storage_ops.is_discarded(h), h.shape, h.untyped_storage().nbytes()
        (True, torch.Size([1024]), 0)
    """
    locals_ = [t] if type(t) in _PLAIN else _locals("discard_storage", "t", t)
    for local in locals_:
        if local.is_cuda and not torch.compiler.is_compiling():
            for stream in (torch.cuda.current_stream(local.device), *streams):
                _OPS._record_stream(
                    local, stream.stream_id, stream.device_index, stream.device_type
                )
        _OPS.discard_storage(local)
        if guard is not None and not torch.compiler.is_compiling():
            _OPS._arm_guard(local, guard)


def share_storage(dst: Tensor, src: Tensor) -> None:
    """Bind the bytes of `src` into the storage of `dst`, without a copy.

    Every tensor that shares the storage of `dst` sees them, writes through one are seen through the
    other, and no version counter moves. The memory lives until the last user of either is gone;
    discarding, resizing or deleting one of them does not touch the other. `dst` is `src`: nothing
    happens. In compiled code, where storages do not exist, the values are copied.

    Args:
        dst: a strided tensor, discarded or not, any shape and dtype.
        src: a strided tensor on the same device whose storage has at least as many bytes as the
            storage of `dst` (before it was discarded). Storages are bound whole: an element of
            `dst` reads the byte at its own offset.

    Raises:
        TypeError: an argument is not a tensor.
        RuntimeError: different devices; `src` too small or discarded; an argument is sparse,
            quantized, a lazy copy or fake; `src` got its bytes from `dst`. Nothing has changed.

    Example:
        >>> h, again = torch.zeros(4), torch.arange(4.0)
        >>> storage_ops.discard_storage(h)
        >>> storage_ops.share_storage(h, again)
        >>> h, h.data_ptr() == again.data_ptr()
        (tensor([0., 1., 2., 3.]), True)
    """
    if type(dst) in _PLAIN and type(src) in _PLAIN:
        _OPS.share_storage(dst, src)
        return
    to, source = _locals("share_storage", "dst", dst), _locals("share_storage", "src", src)
    if len(to) != len(source):
        raise RuntimeError(
            f"share_storage: src holds {len(source)} tensors; expected {len(to)}, as dst does"
        )
    for d, s in zip(to, source, strict=True):
        _OPS.share_storage(d, s)


def is_discarded(t: Tensor) -> bool:
    """Whether the bytes of a tensor are gone, by `discard_storage` or by resizing its storage to 0.

    Example:
        >>> storage_ops.is_discarded(torch.ones(2))
        False
    """
    return any(_OPS._is_discarded(local) for local in _locals("is_discarded", "t", t))


class check_discarded(TorchDispatchMode):
    """Context manager that raises `DiscardedTensorError` before an op reads a discarded tensor.

    For debugging where `storage_ops.info()["guard"]` is False: it costs Python time per op.

    Example:
        >>> h = torch.ones(2)
        >>> storage_ops.discard_storage(h)
        >>> with storage_ops.check_discarded():
        ...     h + 1
        Traceback (most recent call last):
        storage_ops.ops.storage.DiscardedTensorError: aten.add.Tensor reads a tensor of shape (2,) \
whose bytes were discarded
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not (func.is_view or func.namespace == "storage_ops"):
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and _OPS._is_discarded(leaf):
                    raise DiscardedTensorError(
                        f"{func} reads a tensor of shape {tuple(leaf.shape)} "
                        "whose bytes were discarded"
                    )
        return func(*args, **(kwargs or {}))


def _alias_discard(self: Tensor) -> None:
    storage = reference.storage_of("discard_storage", "self", self)
    if storage.nbytes() == 0:
        return
    record = reference.record_of(storage)
    record.nbytes, record.lender, record.owner = storage.nbytes(), None, None
    storage._swap_data_ptr_(torch.UntypedStorage(0, device=storage.device))


def _alias_share(dst: Tensor, src: Tensor) -> None:
    storages = reference.check_share(dst, src)
    if storages is None:
        return
    to, source = storages
    record = reference.record_of(source)
    if record.owner is None:
        # An owner that no user sees takes over the memory; source and dst become aliases of it, so
        # that either may be discarded first. Aliases of aliases would form an endless chain.
        owner = torch.empty(0, dtype=torch.uint8, device=source.device)
        owner.untyped_storage()._swap_data_ptr_(source)
        nbytes = owner.untyped_storage().nbytes()
        record.owner = owner.set_(owner.untyped_storage(), 0, (nbytes,), (1,))  # type: ignore[call-overload]
        source._swap_data_ptr_(_OPS._alias_bytes(record.owner).untyped_storage())
    if to.nbytes() > 0:
        to._swap_data_ptr_(torch.UntypedStorage(0, device=to.device))
    to._swap_data_ptr_(_OPS._alias_bytes(record.owner).untyped_storage())
    reference.record_of(to).owner = record.owner
    reference.record_of(to).lender = weakref.ref(source)


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
    with torch.autograd._unsafe_preserve_version_counter(dst):
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


def register(path: str) -> None:
    """Attach the Python kernels of the storage ops; a native binding outranks them on CPU, CUDA."""
    python = _PYTHON_KERNELS.get(path, _PYTHON_KERNELS["copy"])
    for name, kernel in {**python, **_COMMON_KERNELS}.items():
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
