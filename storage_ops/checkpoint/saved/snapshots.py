"""Under torch.compile, save the contents of an input that a region reads and then modifies.

AOTAutograd makes a region functional: the graph of the forward writes the new contents of a buffer
when it ends. A recompute would then read the new contents, because partitioners assume that inputs
of the graph do not change. So if a region writes to an input, all ops that read the input read a
copy instead, and the copy is saved for backward.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.fx.passes.shape_prop import _extract_tensor_metadata
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from storage_ops.foundation.op_names import Op, is_view
from storage_ops.foundation.ops import Args, Kwargs

_COPY = "storage_ops_copy"
_sync: Any = torch._sync  # type: ignore[attr-defined]


@functools.cache
def with_snapshots(mode: Any) -> Any:
    """Return a subclass of torch's caching mode that copies the inputs that ops overwrite."""

    def dispatch(
        self: object, func: Op, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        written = list(_written(func, args, kwargs or {}))
        result = mode.__torch_dispatch__(self, func, types, args, kwargs)
        vars(self).setdefault("_written", []).extend(written)
        return result

    def leave(self: object, *error: object) -> None:
        mode.__exit__(self, *error)
        for t, node in vars(self).pop("_written", ()):
            _sync(t)  # a pending write reads the input too
            _read_a_copy(node)

    body = {"__torch_dispatch__": dispatch, "__exit__": leave}
    # torch registers only its own mode for higher-order ops, so the subclass declares its support.
    return type(mode.__name__, (mode,), {**body, "supports_higher_order_operators": True})


def _written(func: Op, args: Args, kwargs: Kwargs) -> Iterator[tuple[FunctionalTensor, fx.Node]]:
    """Yield the graph inputs, and views of them, that an op modifies, with the input's node."""
    tracing = get_proxy_mode()
    if tracing is None or not isinstance(func, torch._ops.OpOverload):
        return
    for index, declared in enumerate(func._schema.arguments):
        if declared.alias_info is None or not declared.alias_info.is_write:
            continue
        argument = args[index] if index < len(args) else kwargs.get(declared.name)
        for t in tree_leaves(argument):
            if not isinstance(t, FunctionalTensor):
                continue
            _sync(t)
            slot: Any = get_proxy_slot(torch._from_functional_tensor(t.elem), tracing.tracer, None)
            node = None if slot is None else slot.proxy.node
            while node is not None and (_is_view(node) or _is_clone_of_input(node)):
                node = node.args[0]
            if node is not None and node.op == "placeholder":
                yield t, node


def _is_view(node: fx.Node) -> bool:
    return node.op == "call_function" and is_view(node.target)


def _is_clone_of_input(node: fx.Node) -> bool:
    """Return True for a clone of an input that needs a gradient and that the graph modifies.

    AOTAutograd adds the clone before any region, and the graph modifies the clone instead.
    """
    cloned = node.target is torch.ops.aten.clone.default and "recompute" not in node.meta
    return cloned and isinstance(node.args[0], fx.Node) and node.args[0].op == "placeholder"


def _read_a_copy(node: fx.Node) -> None:
    """Let all present readers of an input read a copy instead, which is saved for backward."""
    copied = node.meta.get(_COPY)
    if copied is None:
        first = next(n for n in node.graph.nodes if n.op != "placeholder")
        # Not aten.clone, because Inductor removes clones.
        with node.graph.inserting_before(first):
            copied = node.graph.call_function(torch.ops.aten.lift_fresh_copy.default, (node,))
        with _disable_current_modes():
            value = node.meta["val"].clone()
        copied.meta = {
            "val": value,
            "tensor_meta": _extract_tensor_metadata(value),
            "recompute": CheckpointPolicy.MUST_SAVE,
        }
        node.meta[_COPY] = copied
    node.replace_all_uses_with(copied, delete_user_cb=lambda user: user is not copied)
