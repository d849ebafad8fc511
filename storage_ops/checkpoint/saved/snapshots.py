"""Keep, under torch.compile, the contents that a region reads of an input before it modifies it.

AOTAutograd makes a region functional: the new contents of a buffer are written to it when the
forward graph ends. A recompute from the buffer would start from the new contents, for partitioners
assume that an input of the graph stays what it was. So if a region writes to an input, all ops that
read the input read a copy instead, which is saved.
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
    """Return a subclass of torch's caching mode that keeps copies of what ops overwrite."""

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
            _sync(t)  # the write may be pending, and reads the input
            _read_a_copy(node)

    body = {"__torch_dispatch__": dispatch, "__exit__": leave}
    # Torch registers its own mode, and no subclass, for each higher-order op that it knows.
    return type(mode.__name__, (mode,), {**body, "supports_higher_order_operators": True})


def _written(func: Op, args: Args, kwargs: Kwargs) -> Iterator[tuple[FunctionalTensor, fx.Node]]:
    """Yield the tensors that an op modifies and that are inputs of the graph, or views of one."""
    tracing = get_proxy_mode()
    if tracing is None or not isinstance(func, torch._ops.OpOverload):
        return
    for place, declared in enumerate(func._schema.arguments):
        if declared.alias_info is None or not declared.alias_info.is_write:
            continue
        argument = args[place] if place < len(args) else kwargs.get(declared.name)
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
    """Return True for the clone that stands for a parameter that the graph modifies.

    AOTAutograd makes it before any region, in place of an input that needs a gradient.
    """
    cloned = node.target is torch.ops.aten.clone.default and "recompute" not in node.meta
    return cloned and isinstance(node.args[0], fx.Node) and node.args[0].op == "placeholder"


def _read_a_copy(node: fx.Node) -> None:
    """Let all that reads an input so far read a copy of it, which is saved for backward."""
    copied = node.meta.get(_COPY)
    if copied is None:
        first = next(n for n in node.graph.nodes if n.op != "placeholder")
        # A copy by another name: Inductor takes aten.clone for nothing and removes it.
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
