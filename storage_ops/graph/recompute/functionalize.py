"""Rewrites in-place ops inside regions so that a region can be recomputed in part."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from storage_ops.foundation.op_names import is_view
from storage_ops.foundation.regions import KEY, mark_of
from storage_ops.graph.nodes import (
    argument,
    compute_value,
    refresh_views,
    storage_of,
    storages,
    tensors_of,
    updates_statistics,
    written,
    written_at,
)
from storage_ops.graph.recompute import rng

aten = torch.ops.aten
_IN_PLACE = "storage_ops_in_place"
FILLS = "storage_ops_fills"
KEPT = "storage_ops_kept"
_EMPTY = (
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)


class _Contents:
    """The versions of a storage's contents, for a storage that a region creates and modifies."""

    def __init__(self, base: fx.Node) -> None:
        self.base = base
        t = base.meta["val"]
        self.geometry, self.dtype = _geometry(t), t.dtype
        self.version = 0
        if t.storage_offset() != 0 or t.untyped_storage().nbytes() != t.numel() * t.element_size():
            raise RuntimeError(
                f"remat: {base.name}, computed by {base.target} in a region that modifies it in "
                "place, does not cover its storage. Modify a clone instead."
            )

    def check(self, view: fx.Node) -> None:
        """Raise an error for a view whose elements are not those of the storage."""
        t = view.meta["val"]
        if t.itemsize != self.dtype.itemsize or t.is_conj() or t.is_neg():
            raise RuntimeError(
                f"remat: {view.name}, computed by {view.target} in a region that modifies "
                f"{self.base.name} in place, is a view with other elements. Modify a clone instead."
            )


def functionalize(gm: fx.GraphModule, mode: FakeTensorMode) -> None:
    """Replace in-place ops on a region's own tensors by ops that return the modified tensor.

    Raises:
        RuntimeError: a region modifies in place the output of a region that discards it, or an
            op has no out-of-place form.
    """
    graph = gm.graph
    creator_of: dict[int, fx.Node] = {}
    version_of: dict[fx.Node, int] = {}
    tracked: dict[int, _Contents] = {}
    replaced: list[fx.Node] = []
    for node in list(graph.nodes):
        key = storage_of(node)
        if key is not None:
            creator_of.setdefault(key, node)
        targets = tensors_of(written(node)) if mark_of(node).path else []
        if targets and _is_local(creator_of.get(storage_of(targets[0]) or 0, targets[0]), node):
            view = _functional(node.target)
            if view is not None and is_view(view):  # of `squeeze_`, which writes no number
                node.target, targets = view, []
        for source in list(node.all_input_nodes):
            contents = tracked.get(storage_of(source) or 0)
            if contents is not None and version_of.get(source, -1) < contents.version:
                node.replace_input_with(source, _view(graph, contents, source, node, mode))
        if key in tracked:
            version_of[node] = tracked[key].version
        creators = [creator_of.get(storage_of(target) or 0, target) for target in targets]
        for creator in creators:
            if not _is_local(creator, node) and any(p.discards for p in mark_of(creator).path):
                raise _escapes(node, creator)
        if not any(_is_local(creator, node) for creator in creators):
            continue  # the op runs once, so it can stay in place
        if updates_statistics(node):
            for creator in creators:
                creator.meta[KEPT] = True
            continue
        if len(targets) > 1:
            raise RuntimeError(
                f"remat: {node.target} ({node.name}) in a region modifies several tensors at once. "
                "Expected an op that modifies one tensor."
            )
        (target,), (creator,) = targets, creators
        where = storage_of(target)
        assert where is not None
        if where not in tracked:
            tracked[where] = _Contents(creator)
        _write(graph, tracked[where], node, target, mode)
        version_of[tracked[where].base] = tracked[where].version
        version_of[node] = -1
        replaced.append(node)
    for node in reversed(replaced):
        graph.erase_node(node)
    if replaced:
        refresh_views(graph, mode)
    _keep_views(graph)


def _keep_views(graph: fx.Graph) -> None:
    """Keep views from a region if their base is kept and modified while the view is in use.

    A recomputed view would show the base's contents at the first run of the view.
    """
    order = {node: at for at, node in enumerate(graph.nodes)}
    writes = written_at(order)
    creator_of: dict[int, fx.Node] = {}
    for node, at in order.items():
        key = storage_of(node)
        if key is None:
            continue
        creator = creator_of.setdefault(key, node)
        if key not in writes or not mark_of(node).path or creator is node:
            continue
        if _is_local(creator, node) and KEPT not in creator.meta:
            continue
        last = max((order[user] for user in node.users), default=at)
        if any(at < place < last for place in writes[key]):
            node.meta[KEPT] = True


def reinplace(graph: fx.Graph) -> None:
    """Make ops in-place again if no node reads the overwritten values afterwards."""
    fixed: set[int] = set()
    last: dict[int, fx.Node] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            fixed.update(key for key, _ in storages(node.meta.get("val")))
        for source in node.all_input_nodes:
            for key, _ in storages(source.meta.get("val")):
                last[key] = node
    for node in graph.nodes:
        op = node.meta.pop(_IN_PLACE, None)
        if op is None or not isinstance(node.target, OpOverload):
            continue
        source = node.args[0]
        place, overwritten = storage_of(source), storage_of(node)
        assert place is not None and overwritten is not None
        same = _geometry(source.meta["val"]) == _geometry(node.meta["val"])
        if place in fixed or last[place] is not node or not same or not _same_type(source, node):
            continue
        node.target = op
        last[place] = last.get(overwritten, node)
        node.meta["val"] = source.meta["val"]


def _write(
    graph: fx.Graph, contents: _Contents, node: fx.Node, target: fx.Node, mode: FakeTensorMode
) -> None:
    """Replace an in-place op by an op that returns the next version of the storage's contents."""
    contents.check(target)
    geometry = _geometry(target.meta["val"])
    if rng.is_random(node) and next(written(node)) is node.args[0]:
        result = _fill(graph, node, mode)
    else:
        result = _functional_call(graph, node, mode)
    with graph.inserting_before(node):
        if isinstance(result.meta["val"], tuple):
            # The functional op returns the result of the op, and then the modified tensors.
            value, result = (_item(graph, result, place) for place in (0, -1))
            node.replace_all_uses_with(value)
        elif not any(written(result)):
            result.meta[_IN_PLACE] = node.target
        if result.meta["val"].dtype != target.meta["val"].dtype:
            result = graph.call_function(
                aten._to_copy.default, (result,), {"dtype": target.meta["val"].dtype}
            )
            result.meta = dict(node.meta)
            compute_value(result, mode)
        if result.meta["val"].dtype != contents.dtype:
            result = graph.call_function(aten.view.dtype, (result, contents.dtype))
            result.meta = dict(node.meta)
            compute_value(result, mode)
        if geometry != contents.geometry or result.meta["val"].stride() != geometry[1]:
            size, stride, offset = geometry
            result = graph.call_function(
                aten.as_strided_scatter.default,
                (contents.base, result, list(size), list(stride), offset),
            )
            result.meta = dict(node.meta)
            compute_value(result, mode)
    contents.base = result
    contents.version += 1


def _functional_call(graph: fx.Graph, node: fx.Node, mode: FakeTensorMode) -> fx.Node:
    """Add the functional form of an in-place op before it."""
    op = _functional(node.target)
    if op is None:
        raise RuntimeError(
            f"remat: {node.target} modifies a tensor of a region in place and has no functional "
            "form. Expected an op that can be run again."
        )
    # `node.args` omits default values, but the functional op may have no defaults. So pass all.
    values = {a.name: argument(node, a.name) for a in op._schema.arguments}
    positional = [values[a.name] for a in op._schema.arguments if not a.kwarg_only]
    options = {a.name: values[a.name] for a in op._schema.arguments if a.kwarg_only}
    with graph.inserting_before(node):
        result = graph.call_function(op, tuple(positional), options)
    result.meta = dict(node.meta)
    compute_value(result, mode)
    return result


def _item(graph: fx.Graph, node: fx.Node, place: int) -> fx.Node:
    place %= len(node.meta["val"])
    item = graph.call_function(operator.getitem, (node, place))
    item.meta = {**node.meta, "val": node.meta["val"][place]}
    return item


def is_new(node: fx.Node) -> bool:
    """Return True if a node creates an uninitialised tensor for the one op that reads it."""
    return node.op == "call_function" and node.target in _EMPTY and len(node.users) == 1


def _fill(graph: fx.Graph, node: fx.Node, mode: FakeTensorMode) -> fx.Node:
    """Add a copy of a random in-place op before it, which writes to a tensor of its own.

    The copy stays in place, because the layout of the tensor determines where each number goes.
    """
    target = node.args[0]
    assert isinstance(target, fx.Node) and callable(node.target)
    with graph.inserting_before(node):
        if not is_new(target):
            target = graph.call_function(aten.clone.default, (target,))
            target.meta = dict(node.meta)
            compute_value(target, mode)
        result = graph.call_function(node.target, (target, *node.args[1:]), dict(node.kwargs))
    # The tensor is created again whenever the op runs again, under every policy.
    mark = mark_of(node)
    path = tuple(replace(level, decision=None) for level in mark.path)
    target.meta[KEY] = replace(mark, path=path)
    result.meta = {**node.meta, FILLS: True}
    compute_value(result, mode)
    return result


def _view(
    graph: fx.Graph, contents: _Contents, stale: fx.Node, reader: fx.Node, mode: FakeTensorMode
) -> fx.Node:
    """Return the view of the version that `reader` reads, in place of the outdated view `stale`."""
    contents.check(stale)
    size, stride, offset = geometry = _geometry(stale.meta["val"])
    calls: list[tuple[OpOverload, Any]] = []
    if geometry != contents.geometry:
        calls.append((aten.as_strided.default, (list(size), list(stride), offset)))
    if stale.meta["val"].dtype != contents.dtype:
        calls.append((aten.view.dtype, (stale.meta["val"].dtype,)))
    view = contents.base
    for op, args in calls:
        with graph.inserting_before(reader):
            view = graph.call_function(op, (view, *args))
        view.meta = {KEY: mark_of(reader)}
        compute_value(view, mode)
    return view


def _functional(op: Any) -> OpOverload | None:
    """Return the functional form of an in-place op, or None."""
    namespace, name = op._schema.name.split("::")
    renamed = name[:-1] if name.endswith("_") else f"{name}_functional"
    packet = getattr(getattr(torch.ops, namespace), renamed, None)
    overloads = [] if packet is None else packet.overloads()
    for overload in sorted(overloads, key=lambda o: (o != op._overloadname, o != "default")):
        candidate: OpOverload = getattr(packet, overload)
        if not candidate._schema.is_mutable and _parameters(candidate) == _parameters(op):
            return candidate
    return None


def _same_type(one: fx.Node, other: fx.Node) -> bool:
    a, b = one.meta["val"], other.meta["val"]
    return bool(a.dtype == b.dtype and a.device == b.device and not a.is_sparse)


def _parameters(op: OpOverload) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in op._schema.arguments]


def _geometry(t: Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...], Any]:
    return tuple(t.shape), tuple(t.stride()), t.storage_offset()


def _is_local(creator: fx.Node, node: fx.Node) -> bool:
    path = mark_of(creator).path
    return bool(path) and path[0].region == mark_of(node).path[0].region


def _escapes(node: fx.Node, target: fx.Node) -> RuntimeError:
    return RuntimeError(
        f"remat: {node.target} ({node.name}) in a checkpointed region modifies {target.name} in "
        "place. It is the output of another region, which discards and recomputes it. Use the op "
        "that is not in place, or modify a clone inside the region."
    )
