"""Free the bytes of a storage, and bind other bytes into it in place.

Three kernels exist for `torch.ops.storage_ops.discard_storage` and `share_storage`.
`storage_ops.info()["storage_path"]` names the one in use: "binding" (native, for the exact torch
minor), "alias" (a data pointer swapped in by torch >= 2.12) or "copy" (plain torch, see
`reference`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from storage_ops.foundation.eager import force_eager
from storage_ops.foundation.ops import Args, Kwargs
from storage_ops.storage.reference import can_resize

_OPS = torch.ops.storage_ops
GUARD = (
    "This tensor was discarded by storage_ops.discard_storage and has no bytes to read. Bind new "
    "bytes with share_storage, or discard with guard=None to resize its storage yourself."
)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_WORK: Any = (torch.distributed.Work,) if torch.distributed.is_available() else ()


class DiscardedTensorError(RuntimeError):
    """A tensor was read after its bytes were discarded."""


def locals_of(op: str, name: str, t: object) -> list[Tensor]:
    """Return the tensors with their own storages in an argument. Raise an error if it has none."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{op}: `{name}` is {type(t).__name__}. Expected a torch.Tensor.")
    if isinstance(t, FakeTensor) and torch._guards.detect_fake_mode() is None:
        raise RuntimeError(
            f"{op}: `{name}` is a FakeTensor, which has no bytes. Expected a real tensor."
        )
    if is_traceable_wrapper_subclass(t):
        # Its offsets belong to every nested tensor with the same lengths.
        if t.layout == torch.jagged:
            return locals_of(op, name, t._values)
        inner = [getattr(t, attribute) for attribute in t.__tensor_flatten__()[0]]
        tensors = [part for part in inner if isinstance(part, Tensor)]
        return [leaf for part in tensors for leaf in locals_of(op, name, part)]
    return [t]


def is_own(t: Tensor) -> bool:
    """Return True if torch allocated the bytes of a tensor, and no other code uses them."""
    if is_traceable_wrapper_subclass(t):
        inner = (getattr(t, attribute) for attribute in t.__tensor_flatten__()[0])
        return all(is_own(part) for part in inner if isinstance(part, Tensor))
    return can_resize(t.untyped_storage())


def wait_for(value: object) -> None:
    """Wait until all collectives that write to a tensor are done.

    The result of a collective has `trigger_wait`, as torch's AsyncCollectiveTensor does. It may be
    inside another tensor, such as a DTensor. A handle of `torch.distributed` is waited for, too.
    """
    if type(value) in _PLAIN:
        return
    if isinstance(value, Tensor) and is_traceable_wrapper_subclass(value):
        if hasattr(value, "trigger_wait"):
            value.trigger_wait()
        else:
            for attribute in value.__tensor_flatten__()[0]:
                wait_for(getattr(value, attribute))
    elif isinstance(value, _WORK):
        value.wait()


def _on_subclasses(
    op: str, kernel: Callable[..., Any], external: bool = False, **arguments: object
) -> list[Any]:
    """Call a kernel on the tensors in its arguments, some of which may be subclasses.

    This skips their `__torch_function__`, because nothing is computed. A class that wraps tensors
    without naming them in `__tensor_flatten__` must unwrap them in its `__torch_dispatch__`.
    """
    with torch._C.DisableTorchFunctionSubclass():
        for t in arguments.values():
            wait_for(t)
        behind = [locals_of(op, name, t) for name, t in arguments.items()]
        if len({len(tensors) for tensors in behind}) > 1:
            raise RuntimeError(
                f"{op}: `src` holds {len(behind[1])} tensors. Expected {len(behind[0])}, the "
                "number of tensors in `dst`."
            )
        calls = list(zip(*behind, strict=True))
        try:
            if len(calls) > 1 and op != "is_discarded" and not torch.compiler.is_compiling():
                for t, *src in calls:  # check all of them before any changes
                    _OPS._check_storage(t, *src or (None,), external)
            return [kernel(*tensors) for tensors in calls]
        except (TypeError, NotImplementedError) as error:
            name, kind = next((n, type(t)) for n, t in arguments.items() if type(t) not in _PLAIN)
            raise RuntimeError(
                f"{op}: `{name}` is a {kind.__name__}, which does not let the op through. Expected "
                "a class with __tensor_flatten__, or whose __torch_dispatch__ applies storage_ops "
                "to the tensors that it wraps."
            ) from error


def _is_parameter(t: Tensor) -> bool:
    # Compare the class first, because isinstance of Parameter runs slow code of its metaclass.
    return type(t) is not Tensor and isinstance(t, torch.nn.Parameter)


def _refuse_leaf(t: Tensor) -> None:
    """Raise an error for a tensor whose values training keeps, such as the weight of a layer."""
    base = t._base
    # A view of a tensor that needs no grad can be a leaf itself.
    for root, view in ((t, ""),) if base is None else ((base, "view of a "), (t, "")):
        if _is_parameter(root):
            _fail_leaf(f"{view}Parameter", t)
        if root.requires_grad and root.is_leaf:
            _fail_leaf(f"{view}leaf tensor that requires grad", t)


def _fail_leaf(kind: str, t: Tensor) -> NoReturn:
    raise RuntimeError(
        f"discard_storage: `t` is a {kind}, of shape {tuple(t.shape)}, and nothing recomputes its "
        "values. Expected an activation. Pass allow_leaf=True to discard it anyway."
    )


def _checked(streams: Iterable[torch.Stream]) -> tuple[torch.Stream, ...]:
    """Return streams as a tuple, because a class may wrap several tensors."""
    found: tuple[object, ...] = tuple(streams) if isinstance(streams, Iterable) else (streams,)
    for stream in found:
        if not isinstance(stream, torch.Stream):
            raise TypeError(
                f"discard_storage: `streams` has {stream!r}. Expected a list of torch.Stream."
            )
    return found  # type: ignore[return-value]


def _discard(
    t: Tensor, guard: str | None, streams: tuple[torch.Stream, ...], external: bool
) -> None:
    if t.is_cuda and t.layout == torch.strided:  # other tensors raise an error below
        for stream in (torch.cuda.current_stream(t.device), *streams):
            _OPS._record_stream(t, stream.stream_id, stream.device_index, stream.device_type)
    _OPS.discard_storage(t, guard, external)


def discard_storage(
    t: Tensor,
    *,
    guard: str | None = GUARD,
    streams: Iterable[torch.Stream] = (),
    allow_leaf: bool = False,
    allow_external: bool = False,
) -> None:
    """Free the bytes of a tensor's storage. Every view of it loses them.

    Shape, strides, dtype and version counter stay. Discarding twice is fine. In compiled code this
    does nothing, because the compiler plans memory itself. It also does nothing while
    `torch.jit.trace` records.

    Args:
        t: a strided tensor of any shape and dtype. For a DTensor or another wrapper subclass, the
            wrapped tensors are discarded. For a jagged nested tensor these are its values, for a
            batched tensor of torch.func.vmap all samples, and for a dual tensor of forward-mode AD
            the primal.
        guard: the message of the RuntimeError for any read of the tensor, until `share_storage`
            binds new bytes. Resizing the storage by other means does not remove the guard. With
            None, reading is undefined, as it is if `storage_ops.info()["guard"]` is False; see
            `check_discarded`.
        streams: CUDA streams that may still be using the bytes. The current stream is included.
        allow_leaf: whether `t` may be a Parameter, a leaf that requires grad, or a view of one.
            Nothing recomputes the values of these, so the caller binds new bytes.
        allow_external: whether to free bytes that other code may use. torch did not allocate them:
            `torch.from_numpy`, `from_dlpack`, `frombuffer`, `from_file`, `torch.load`, shared
            memory, a CUDA graph, another library. Or torch marked them: `Tensor.numpy()`,
            `pin_memory()`. A read by other code after that can end the process. Torch does not
            mark a tensor that another library reads through DLPack: do not discard one.

    Raises:
        TypeError: `t`, `guard` or one of `streams` is of another type.
        RuntimeError: `t` is a Parameter, a leaf that requires grad or a view of one, without
            `allow_leaf`. A `detach()` of one is not recognised, and in compiled code only a
            Parameter is. Other code may use the bytes, without `allow_external`. `t` is sparse,
            quantized, a lazy copy, fake, a zero tensor, nested with layout torch.strided, or of a
            class that does not let the op through. Nothing has changed.

    Example:
        >>> h = torch.ones(1024)
        >>> storage_ops.discard_storage(h)
        >>> storage_ops.is_discarded(h), h.shape, h.untyped_storage().nbytes()
        (True, torch.Size([1024]), 0)
    """
    if torch.compiler.is_compiling() and isinstance(t, Tensor):
        # Dynamo would record a read of `_base` or `is_leaf` as a node of the graph, so only the
        # class is read. Compiled code frees nothing anyway.
        if not allow_leaf and _is_parameter(t):
            _fail_leaf("Parameter", t)
        return
    if guard is not None and not isinstance(guard, str):
        raise TypeError(f"discard_storage: `guard` is {guard!r}. Expected a string or None.")
    all_streams = _checked(streams) if streams != () else ()
    if type(t) in _PLAIN:
        if not allow_leaf:
            _refuse_leaf(t)
        _discard(t, guard, all_streams, allow_external)
        return
    if not allow_leaf and isinstance(t, Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            for part in (t, *locals_of("discard_storage", "t", t)):
                _refuse_leaf(part)
    _on_subclasses(
        "discard_storage",
        lambda part: _discard(part, guard, all_streams, allow_external),
        allow_external,
        t=t,
    )


def share_storage(dst: Tensor, src: Tensor, *, allow_external: bool = False) -> None:
    """Bind the bytes of `src` into the storage of `dst`, without a copy.

    Every tensor that shares the storage of `dst` sees the bytes of `src`. Both tensors see each
    other's writes, and no version counter changes. The memory lives until the last user of either
    is gone. If both share a storage already, nothing happens. In compiled code, which has no
    storages, the values are copied.

    Only bytes are bound. A conjugate or negative view still applies its flag to the new bytes, and
    forward-mode AD keeps the tangent of `dst`.

    Args:
        dst: a strided tensor, discarded or not, any shape and dtype.
        src: a strided tensor of the same device and dtype. Its storage has at least as many bytes
            as the storage of `dst` (before it was discarded). Storages are bound whole: an element
            of `dst` reads the bytes at its own offset. So a `src` of the same shape has the strides
            and the storage offset of `dst`. A `src` of another shape has no gaps, and has every
            element of its storage that `dst` reads. To bind the bytes of another dtype, pass a
            view: `src.view(dst.dtype)`, or `torch.view_as_real(src)` of complex numbers.
        allow_external: whether `dst` may lose bytes that other code may use, as in
            `discard_storage`.

    Raises:
        TypeError: an argument is not a tensor.
        RuntimeError: dtypes or devices differ, or `src` is too small or discarded. Or `dst` would
            read elements that `src` does not have, or has at another index. Or `src` got the bytes
            of `dst` later than `dst` did. Or other code may use the bytes of `dst`. Or vmap batches
            them along different dimensions. Or `discard_storage` does not support an argument.
            Nothing has changed.

    Example:
        >>> h, new = torch.zeros(4), torch.arange(4.0)
        >>> storage_ops.discard_storage(h)
        >>> storage_ops.share_storage(h, new)
        >>> h, h.data_ptr() == new.data_ptr()
        (tensor([0., 1., 2., 3.]), True)
    """
    if type(dst) in _PLAIN and type(src) in _PLAIN:
        _OPS.share_storage(dst, src, allow_external)
        return
    _on_subclasses(
        "share_storage",
        lambda to, source: _OPS.share_storage(to, source, allow_external),
        allow_external,
        dst=dst,
        src=src,
    )


def is_discarded(t: Tensor) -> bool:
    """Return True if a tensor has no bytes, after `discard_storage` or a resize to 0.

    Example:
        >>> storage_ops.is_discarded(torch.ones(2))
        False
    """
    if type(t) in _PLAIN:
        return bool(_OPS._is_discarded(t))
    return any(_on_subclasses("is_discarded", _OPS._is_discarded, t=t))


def _refuse_discarded(name: object, arguments: object) -> bool:
    """Raise an error if a tensor is discarded. Return False for a class that does not tell."""
    for leaf in tree_leaves(arguments):
        if not isinstance(leaf, Tensor) or isinstance(leaf, FakeTensor):
            continue
        try:
            discarded = is_discarded(leaf)
        except RuntimeError:
            return False
        if discarded:  # a nested tensor may have no shape
            what = "nested tensor" if leaf.is_nested else f"tensor of shape {tuple(leaf.shape)}"
            raise DiscardedTensorError(
                f"{name} reads a {what} whose bytes were discarded. Bind new bytes with "
                "share_storage first."
            )
    return True


_READ_PAST_DISPATCH: dict[Any, str] = {
    getattr(Tensor, name): f"Tensor.{name}"
    for name in (
        "__repr__",
        "__format__",
        "tolist",
        "numpy",
        "__array__",
        "__dlpack__",
        "apply_",
        "map_",
        "map2_",
    )
}


class _CheckPastDispatch(TorchFunctionMode):
    """Raises an error before a method reads the bytes of a discarded tensor without an op."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Any:
        if func in _READ_PAST_DISPATCH:
            _refuse_discarded(_READ_PAST_DISPATCH[func], args)
        return func(*args, **(kwargs or {}))


class check_discarded(TorchDispatchMode):
    """Context manager that raises `DiscardedTensorError` before an op reads a discarded tensor.

    For debugging where `storage_ops.info()["guard"]` is False: it takes Python time for each op.
    Functions under `torch.compile` run uncompiled, so that each op is checked.

    Example:
        >>> h = torch.ones(2)
        >>> storage_ops.discard_storage(h)
        >>> with storage_ops.check_discarded():
        ...     h + 1
        Traceback (most recent call last):
        storage_ops.storage.storage.DiscardedTensorError: aten.add.Tensor reads a tensor \
of shape (2,) whose bytes were discarded. Bind new bytes with share_storage first.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._past_dispatch = _CheckPastDispatch()
        self._entered: list[ExitStack] = []  # one for each active block

    def __enter__(self) -> Any:
        with ExitStack() as stack:
            stack.enter_context(force_eager())
            stack.enter_context(self._past_dispatch)
            result = super().__enter__()  # type: ignore[no-untyped-call]
            self._entered.append(stack.pop_all())
        return result

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._entered.pop().close()

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload[..., Any] | torch._ops.HigherOrderOperator,
        types: Sequence[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Any:
        is_view = isinstance(func, torch._ops.OpOverload) and func.is_view
        if not (is_view or func.namespace == "storage_ops") and not _refuse_discarded(
            func, (args, kwargs)
        ):
            # Let the class run the op, so that its inner tensors come here, too.
            return NotImplemented
        return func(*args, **(kwargs or {}))
