"""Free the bytes of a storage, and bind other bytes into it in place.

`torch.ops.storage_ops.discard_storage` and `share_storage` have one of three kernels, named by
`storage_ops.info()["storage_path"]`: "binding" (native, for the exact torch minor), "alias" (a data
pointer swapped in by torch >= 2.12) and "copy" (plain torch, see `reference`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

_OPS = torch.ops.storage_ops
GUARD = (
    "this tensor was discarded by storage_ops.discard_storage and has no bytes to read; bind new "
    "ones with share_storage, or discard with guard=None to resize its storage yourself"
)
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
        inner = [getattr(t, attribute) for attribute in t.__tensor_flatten__()[0]]
        tensors = [part for part in inner if isinstance(part, Tensor)]
        return [leaf for part in tensors for leaf in _locals(op, name, part)]
    return [t]


def discard_storage(
    t: Tensor, *, guard: str | None = GUARD, streams: Iterable[torch.Stream] = ()
) -> None:
    """Free the bytes of a tensor's storage; every view of it loses them.

    Shape, strides, dtype and version counter stay. Discarding twice is fine. In compiled code this
    does nothing: the compiler plans memory itself.

    Args:
        t: a strided tensor of any shape and dtype. A DTensor or another wrapper subclass acts on
            the tensors it wraps.
        guard: the message of the RuntimeError that any read of the tensor raises until
            `share_storage` binds new bytes; resizing the storage by other means does not lift it.
            None arms no guard, and then reading is undefined, as it is where
            `storage_ops.info()["guard"]` is False; see `check_discarded`.
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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (func.is_view or func.namespace == "storage_ops"):
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and _OPS._is_discarded(leaf):
                    raise DiscardedTensorError(
                        f"{func} reads a tensor of shape {tuple(leaf.shape)} "
                        "whose bytes were discarded"
                    )
        return func(*args, **(kwargs or {}))
