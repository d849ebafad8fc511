"""Identify the storage of an output, and explain reads of a discarded output."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from storage_ops import _library
from storage_ops.foundation.ops import Args, Kwargs
from storage_ops.storage.reference import lacks_bytes
from storage_ops.storage.storage import DiscardedTensorError

_PACKAGE = Path(__file__).parents[2]
LIBRARIES = (
    str(_PACKAGE / "checkpoint"),
    str(_PACKAGE / "foundation"),
    str(Path(torch.__file__).parent),
)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_native: Any = sys.modules.get(_library.SAVED_TENSORS)
_STRIDED = torch.strided


def storage_key(value: Any) -> int | None:
    """Return a number that identifies the storage of a strided tensor; None if it has no storage.

    Nested tensors, tensors that torch.func wraps, and wrapper subclasses without
    `__tensor_flatten__` have no storage. Their bytes cannot be freed and restored.
    """
    if _native is not None and (key := _native.storage_key(value)) is not None:
        return int(key)
    if type(value) not in _PLAIN:
        if not isinstance(value, Tensor) or value.layout is not _STRIDED:
            return None
        if is_traceable_wrapper_subclass(value):
            inner = with_bytes(value)
            return None if inner is value else storage_key(inner)
        if _has_no_bytes(value):
            return None
    if value.layout is not _STRIDED or value.is_nested:
        return None
    try:
        return int(value.untyped_storage()._cdata)
    except NotImplementedError:  # raised for torch.func's wrappers; a test for them costs more
        return None


def with_bytes(t: Tensor) -> Tensor:
    """Return the tensor whose storage `storage_key` identifies: the first one inside a wrapper.

    A wrapper subclass such as DTensor has a storage of its own, which has no bytes.
    """
    if not is_traceable_wrapper_subclass(t):
        return t
    inner = (with_bytes(getattr(t, name)) for name in t.__tensor_flatten__()[0])
    return next((each for each in inner if storage_key(each) is not None), t)


def by_storage(values: Iterable[object]) -> dict[int, Any]:
    """Return a tensor for each storage among `values`. Tensors without a storage are left out."""
    return {key: t for t in values if (key := storage_key(t)) is not None}


def _has_no_bytes(value: Tensor) -> bool:
    """Return True if a tensor of a subclass wraps other tensors, or has no elements."""
    if isinstance(value, FakeTensor):  # the number of its elements may be a symbol
        return False
    return value.numel() == 0 or lacks_bytes(value)


def where() -> str:
    """Return "file:line" of the innermost running code that is not of this package or torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def message(region: str) -> str:
    """Return the error for a read of an output of `region` that is discarded now."""
    return (
        f"The output of the region {region} was discarded by OutputDiscardCheckpoint at {where()} "
        "and is read before the recompute. Run its consumers before the discard, inside "
        "consumer(). Or pass a hook tensor whose gradient comes before every other use in "
        "backward."
    )


_messages: Any = WeakIdKeyDictionary()  # the error message of each discarded output
# Functions that do not read the bytes of a tensor. Reads of attributes are always allowed.
_HARMLESS = {"size", "dim", "stride", "numel", "storage_offset", "untyped_storage", "register_hook",
             "is_floating_point", "element_size", "__hash__", "__len__", "type"}  # fmt: skip


class _Watched(Tensor):
    """Class of a discarded output in debug mode. Python functions that read its bytes raise."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        is_own_op = str(func).startswith("storage_ops.")
        if not (is_own_op or name == "__get__" or name in _HARMLESS):
            for leaf in tree_leaves((args, kwargs)):
                if type(leaf) is cls:
                    raise DiscardedTensorError(
                        _messages.get(leaf, "A tensor was discarded and has no bytes to read.")
                    )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def watch(output: Tensor | None, message: str) -> None:
    """Let Python functions that read the bytes of `output` raise a DiscardedTensorError."""
    if type(output) is Tensor:
        _messages[output] = message
        output.__class__ = _Watched


def unwatch(output: Tensor | None) -> None:
    """Undo `watch`."""
    if output is not None and type(output) is _Watched:
        _messages.pop(output, None)
        output.__class__ = Tensor  # type: ignore[assignment]
