"""Facts about single nodes of a graph."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

# Ops that return their argument as another tensor; torch 2.15 records .detach() as an alias.
ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
STATISTICS = ("running_mean", "running_var")
_BATCH_NORMS = (
    torch.ops.aten.native_batch_norm.default,
    torch.ops.aten.cudnn_batch_norm.default,
    torch.ops.aten.miopen_batch_norm.default,
)
# Namespaces of communication, and of ops that run for their side effects.
_EFFECTFUL = {
    "_c10d_functional", "_c10d_functional_autograd", "c10d", "c10d_functional", "symm_mem", "fsdp",
    "_dtensor", "inductor", "profiler",
}  # fmt: skip


def is_call(node: fx.Node, op: object) -> bool:
    """Return True if a node calls `op`."""
    return node.op == "call_function" and node.target is op


def is_effectful(node: fx.Node) -> bool:
    """Return True if running a node twice differs from running it once.

    Communication is effectful, and so are ops that return nothing. In-place ops do not count.
    """
    target = node.target
    if isinstance(target, HigherOrderOperator):
        return target.name() in ("with_effects", "print", "triton_kernel_wrapper_mutation")
    if not isinstance(target, OpOverload):
        return False
    return target.namespace in _EFFECTFUL or not target._schema.returns


def written(node: fx.Node) -> Iterator[Any]:
    """Yield the arguments that a node modifies: nodes, or lists of nodes."""
    if not isinstance(node.target, OpOverload):
        return
    if updates_statistics(node):  # its schema does not say so
        for name in STATISTICS:
            value = argument(node, name)
            if value is not None:
                yield value
        return
    if not node.target._schema.is_mutable:
        return
    for declared in node.target._schema.arguments:
        if declared.alias_info is not None and declared.alias_info.is_write:
            value = argument(node, declared.name)
            if value is not None:
                yield value


def written_at(order: Mapping[fx.Node, int]) -> dict[int, list[int]]:
    """Return the positions in `order` of the nodes that modify each modified storage."""
    writes: dict[int, list[int]] = {}
    for node, at in order.items():
        for t in tensors_of(written(node)):
            for key, _ in storages(t.meta.get("val")):
                writes.setdefault(key, []).append(at)
    return writes


def tensors_of(arguments: Iterable[Any]) -> list[fx.Node]:
    """Return the nodes among arguments. An argument may be a list of nodes."""
    return [t for a in arguments for t in (a if isinstance(a, (list, tuple)) else [a])]


def updates_statistics(node: fx.Node) -> bool:
    """Return True if a node is a batch norm in training."""
    return node.target in _BATCH_NORMS and bool(argument(node, "training"))


def makes_new(node: fx.Node) -> bool:
    """Return True if an op returns new tensors, besides those that it modifies."""
    target = node.target
    return isinstance(target, OpOverload) and any(
        returned.alias_info is None for returned in target._schema.returns
    )


def argument(node: fx.Node, name: str) -> Any:
    """Return the value of an op's argument by its name, or its default."""
    assert isinstance(node.target, OpOverload)
    for place, declared in enumerate(node.target._schema.arguments):
        if declared.name == name:
            if place < len(node.args):
                return node.args[place]
            default = declared.default_value if declared.has_default_value() else None
            return node.kwargs.get(name, default)
    return None


def has_tensor(node: fx.Node) -> bool:
    """Return True if a node's value is a tensor or contains one."""
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(node.meta.get("val")))


def item_of(node: fx.Node) -> fx.Node | None:
    """Return the node whose result a node takes one item of, or None."""
    if node.op == "call_function" and node.target is operator.getitem:
        source = node.args[0]
        return source if isinstance(source, fx.Node) else None
    return None


def fake_modes(graph: fx.Graph) -> set[FakeTensorMode]:
    """Return the fake tensor modes of the values of a graph's nodes."""
    return {
        leaf.fake_mode
        for node in graph.nodes
        for leaf in tree_leaves(node.meta.get("val"))
        if isinstance(leaf, FakeTensor)
    }


def compute_value(node: fx.Node, mode: FakeTensorMode) -> None:
    """Compute the value of a new node from the values of its arguments."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), _value)
    with mode, torch.no_grad():
        assert callable(node.target)
        node.meta["val"] = node.target(*args, **kwargs)


def _value(node: fx.Node) -> Any:
    """Return the value of a node. A graph that another graph calls is its own value."""
    if node.op == "get_attr" and "val" not in node.meta:
        return attribute(node.graph.owning_module, str(node.target))
    return node.meta["val"]


def attribute(module: object, target: str) -> Any:
    """Return the attribute of a module that a `get_attr` node refers to."""
    return operator.attrgetter(target)(module)


def refresh_views(graph: fx.Graph, mode: FakeTensorMode) -> None:
    """Compute the values of views again if their base has changed since tracing."""
    creator_of: dict[int, fx.Node] = {}
    for node in graph.nodes:
        keys = {key for key, _ in storages(node.meta.get("val"))}
        if node.op == "call_function" and keys & creator_of.keys():
            sources = {
                key
                for source in node.all_input_nodes
                for key, _ in storages(source.meta.get("val"))
            }
            if keys & creator_of.keys() - sources:
                compute_value(node, mode)
                keys = {key for key, _ in storages(node.meta["val"])}
        for key in keys:
            creator_of.setdefault(key, node)


def storages(value: object) -> Iterator[tuple[int, int]]:
    """Yield the key and the bytes of each storage of the tensors in a value."""
    for t in tree_leaves(value):
        if not isinstance(t, Tensor):
            continue
        if is_traceable_wrapper_subclass(t):
            for name in t.__tensor_flatten__()[0]:
                yield from storages(getattr(t, name))
        elif t.layout == torch.strided:
            storage = t.untyped_storage()
            nbytes = storage.nbytes()
            if isinstance(nbytes, torch.SymInt):
                nbytes = nbytes.node.hint or 0
            yield storage._cdata, int(nbytes)


def storage_of(node: fx.Node) -> int | None:
    """Return the key of the storage of a node's value, or None if the value is not a tensor."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return None
    return next((key for key, _ in storages(value)), None)


def check_graph(op: str, gm: object) -> None:
    """Raise a TypeError for an argument that is not a graph module."""
    if not isinstance(gm, fx.GraphModule):
        raise TypeError(f"{op}: `gm` is a {type(gm).__name__}. Expected a torch.fx.GraphModule.")


def copy_of(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph module that shares its tensors."""
    graph = fx.Graph()
    output = graph.graph_copy(gm.graph, {})
    graph.output(output)
    graph.set_codegen(copy.deepcopy(gm.graph._codegen))
    copied = fx.GraphModule(gm, graph, type(gm).__name__)
    copied.meta = dict(gm.meta)
    return copied
