"""Recomputes the tensors of marked regions that backward needs, just before their first use."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import traceback as fx_traceback
from torch.utils.checkpoint import CheckpointPolicy

from storage_ops.foundation.regions import KEY, Mark, mark_of
from storage_ops.graph.nodes import (
    attribute,
    check_graph,
    compute_value,
    copy_of,
    fake_modes,
    has_tensor,
    is_effectful,
    item_of,
    makes_new,
    refresh_views,
    storages,
    tensors_of,
    written,
    written_at,
)
from storage_ops.graph.recompute import rng
from storage_ops.graph.recompute.functionalize import FILLS, KEPT, functionalize, reinplace
from storage_ops.graph.recompute.repair import repair
from storage_ops.graph.recompute.tags import PHASE_KEYS, TAG, mark_tagged, raise_items
from storage_ops.graph.recompute.verify import verify_equal

BEFORE = "storage_ops_before"
# Ops that read the storage of their argument, whatever the shape and strides.
_BY_STORAGE = (torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_scatter.default)
_SAVED = {CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE}


def remat(gm: fx.GraphModule, verify: bool = False) -> fx.GraphModule:
    """Recompute marked regions in the backward passes of a traced step.

    A tensor of a region that a backward pass reads is recomputed just before its first read. The
    recompute starts from the region's inputs and from the tensors that its policy saves. So the
    forward's copy is freed in the forward. Random ops run again with the same numbers, and numbers
    drawn later do not change.

    Communication and ops with side effects run once and are kept, unless a policy says
    MUST_RECOMPUTE. In-place ops on a region's own tensors become out-of-place ops. In-place ops on
    tensors from outside run once. Overwritten values are kept if they are read again.

    A graph from `trace_step` has been through this pass and is returned unchanged. In a graph of
    make_fx, regions of `CheckpointWrapper`, `OutputDiscardCheckpoint` and
    `storage_ops.graph.regions` carry marks. For torch.utils.checkpoint under make_fx, the ops that
    selective checkpointing tagged are recomputed, and random ops of a recompute get the numbers of
    the forward. If the graph lacks information for that, one warning says so and recommends
    `trace_step`.

    torch.compile tags the tensors that each backward pass recomputes, also in a step that calls
    `torch.autograd.grad`. Such a graph becomes the same as with torch's own pass. Any number of
    backward passes and random ops are supported.

    Args:
        gm: a graph of forward and backward. It is not modified.
        verify: run the original graph as eager mode would, and the new graph, on the same random
            inputs. Compare results, modified inputs and the state of the random-number generator.

    Returns:
        A new graph, with the inputs and outputs of `gm`.

    Raises:
        TypeError: `gm` is no GraphModule. ValueError: its nodes have no values.
        RuntimeError: a region modifies in place the output of a region that discards it, the graphs
            differ, or `verify` cannot determine the behaviour of eager mode.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> def loss(x):
        ...     y = storage_ops.graph.regions.mark(lambda x: x.sin().sin(), (x,))
        ...     return torch.autograd.grad(y.sum(), x)
        >>> gm = make_fx(loss)(torch.randn(3, requires_grad=True))
        >>> gm = storage_ops.graph.remat(gm, verify=True)
    """
    check_graph("remat", gm)
    forget_tags()
    if BEFORE not in gm.meta:
        gm = recompute(gm, foreign=not any(KEY in node.meta for node in gm.graph.nodes))
    if verify:
        verify_equal(gm.meta[BEFORE], gm)
    return gm


def recompute(before: fx.GraphModule, foreign: bool) -> fx.GraphModule:
    """Do the work of `remat`.

    A `foreign` graph has no marks, only traces of torch's own checkpoints.
    """
    gm = copy_of(before)
    mode = _one_mode(gm)
    tagged = foreign and mark_tagged(gm.graph)
    if foreign and not tagged:
        before = repair(gm, mode)
    remove_dead(gm.graph)  # unread nodes need no recompute
    functionalize(gm, mode)
    if not tagged:  # tags decide for each node whether it is kept
        _include_views(gm.graph)
    while any(mark_of(node).path for node in gm.graph.nodes):
        _Rewrite(gm.graph, mode, tagged).run()
    remove_dead(gm.graph)
    if tagged:
        raise_items(gm.graph)
    refresh_views(gm.graph, mode)
    reinplace(gm.graph)
    refresh_views(gm.graph, mode)
    for node in gm.graph.nodes:
        node.meta.pop(KEY, None)
    gm.graph.lint()
    gm.recompile()
    gm.meta[BEFORE] = before
    return gm


def forget_tags() -> None:
    """Drop the metadata that tracing a selective checkpoint with make_fx leaves in torch.

    The next torch.compile would read this metadata as its own tags.
    """
    for name in ("recompute", "ac_graph_id"):
        fx_traceback.current_meta.pop(name, None)


class _Rewrite:
    """Recomputes the outermost regions of a graph. The other marks belong to inner regions.

    With torch.compile's tags, each backward pass recomputes its own tensors in the order of the
    forward, like torch's pass and eager mode.
    """

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode, tagged: bool) -> None:
        self._graph = graph
        self._mode = mode
        self._tagged = tagged
        self._order = {node: at for at, node in enumerate(graph.nodes)}
        self._copies: dict[fx.Node, fx.Node] = {}
        self._randoms: dict[fx.Node, list[fx.Node]] = {}
        self._writes = written_at(self._order)
        self._nodes = list(self._order)
        self._snapshots: dict[tuple[fx.Node, int], fx.Node] = {}

    def run(self) -> None:
        place, step, backward = None, (-1, -1), -1
        for reader in self._order:
            mark = mark_of(reader)
            if place is None or mark.step == -1 or (mark.backward, mark.step) != step:
                # Before any allocation of the same backward step, as in eager mode.
                place, step = reader, (mark.backward, mark.step)
            if mark.backward == -1:
                continue
            if self._tagged and mark.backward != backward:
                self._copies = {}
            backward = mark.backward
            wanted = [s for s in reader.all_input_nodes if _is_recomputed_for(s, reader)]
            for sources in [wanted] if self._tagged else [[source] for source in wanted]:
                self._copy(sources, place)
            for source in wanted:
                reader.replace_input_with(source, self._copies[source])
        for node in self._order:
            mark = mark_of(node)
            if mark.path or mark.owner:
                rest = () if mark.path and _is_saved(node) else mark.path[1:]
                node.meta[KEY] = replace(mark, path=rest, owner=mark.owner[1:])
        for node, copies in self._randoms.items():
            rng.replay(self._graph, node, copies, self._mode)

    def _copy(self, wanted: list[fx.Node], place: fx.Node) -> None:
        """Copy nodes, and their arguments inside their regions, to just before `place`."""
        needed, stack = set(), wanted[:]
        while stack:
            node = stack.pop()
            if node not in self._copies and node not in needed:
                needed.add(node)
                stack += [n for n in node.all_input_nodes if _is_recomputed_with(n, node)]
        for node in sorted(needed, key=self._order.__getitem__):
            args, kwargs = rng.without_side_effects(node)
            modified = tensors_of(written(node))

            def moved(
                n: fx.Node, node: fx.Node = node, modified: Collection[fx.Node] = modified
            ) -> fx.Node:
                if _is_recomputed_with(n, node):
                    return self._copies[n]
                read = self._as_read(n, node, place)
                return self._clone(read, place) if n in modified else read

            args, kwargs = fx.node.map_arg((args, kwargs), moved)
            with self._graph.inserting_before(place):
                assert callable(node.target)
                copied = self._graph.call_function(node.target, args, kwargs)
            own_meta = {key: place.meta[key] for key in PHASE_KEYS if key in place.meta}
            if self._tagged:
                own_meta[TAG] = mark_of(node).path[0].decision
            copied.meta = {**node.meta, **own_meta, KEY: Mark(mark_of(node).path[1:])}
            compute_value(copied, self._mode)
            self._copies[node] = copied
            if rng.must_replay(node):
                self._randoms.setdefault(node, []).append(copied)

    def _as_read(self, source: fx.Node, node: fx.Node, place: fx.Node) -> fx.Node:
        """Return the value of `source` that `node` read, or a copy if it changes before `place`."""
        first, last = self._order[node], self._order[place]
        writes = [self._writes.get(key, ()) for key, _ in storages(source.meta.get("val"))]
        at = min((at for places in writes for at in places if first <= at < last), default=None)
        if at is None:
            return source
        if (source, at) not in self._snapshots:
            self._snapshots[source, at] = self._clone(source, self._nodes[at])
        copied = self._snapshots[source, at]
        if node.target in _BY_STORAGE and _geometry(copied) != _geometry(source):
            raise RuntimeError(
                f"remat: {node.target} ({node.name}) must be recomputed from {source.name}, which "
                f"{self._nodes[at].target} ({self._nodes[at].name}) modifies in place before. "
                "Modify it after the region's backward, or have the region read it by another op."
            )
        return copied

    def _clone(self, source: fx.Node, place: fx.Node) -> fx.Node:
        with self._graph.inserting_before(place):
            copied = self._graph.call_function(torch.ops.aten.clone.default, (source,))
        compute_value(copied, self._mode)
        return copied


def _include_views(graph: fx.Graph) -> None:
    """Treat views of a discarded output, created outside its region, as part of the region.

    Otherwise a view that a consumer saves would keep bytes that should be freed.
    """
    for node in graph.nodes:
        mark = mark_of(node)
        if mark.backward != -1 or node.op != "call_function":
            continue
        own = {key for key, _ in storages(node.meta.get("val"))}
        for source in node.all_input_nodes:
            path = mark_of(source).path
            outside = len(mark.path)
            if len(path) <= outside or not path[outside].discards or path[:outside] != mark.path:
                continue
            if own.intersection(key for key, _ in storages(source.meta.get("val"))):
                node.meta[KEY] = Mark((*mark.path, path[outside]))
                break


def _is_recomputed_for(source: fx.Node, reader: fx.Node) -> bool:
    """Return True if a node of a backward pass must not read the forward's copy of `source`."""
    path, mark = mark_of(source).path, mark_of(reader)
    if not path or _is_inside(reader, path[0].region) or _is_saved(source):
        return False
    return path[0].discards or mark.owner[:1] == (path[0].region,)


def _is_recomputed_with(source: fx.Node, node: fx.Node) -> bool:
    """Return True if the value of `source` must be recomputed when `node` is."""
    path = mark_of(source).path
    if not path or _is_saved(source):
        return False
    return path[0].discards or _is_inside(node, path[0].region)


def _is_inside(node: fx.Node, region: int) -> bool:
    path = mark_of(node).path
    return bool(path) and path[0].region == region


def _geometry(node: fx.Node) -> tuple[Any, ...]:
    t = node.meta["val"]
    return t.stride(), t.storage_offset(), t.untyped_storage().nbytes()


def _is_saved(node: fx.Node) -> bool:
    """Return True if the forward's value of a node in a region is kept for backward."""
    if KEPT in node.meta:
        return True
    source = item_of(node)
    if source is not None and mark_of(source).path:
        return _is_saved(source)
    if not has_tensor(node):  # sizes and numbers take no memory
        return True
    decision, *inner = (level.decision for level in mark_of(node).path)
    if decision == CheckpointPolicy.MUST_RECOMPUTE:
        return False
    if decision in _SAVED or rng.has_own_generator(node):
        return True
    if any(written(node)) and FILLS not in node.meta and not makes_new(node):
        return True
    if not is_effectful(node) or CheckpointPolicy.MUST_RECOMPUTE in inner:
        return False
    # The wait for a repeated communication is part of it.
    waited = [n for n in node.all_input_nodes if is_effectful(n) and mark_of(n).path]
    return all(_is_saved(n) for n in waited)


def remove_dead(graph: fx.Graph) -> None:
    """Erase nodes that no node reads and that have no side effects."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not _acts(node):
            graph.erase_node(node)


def _acts(node: fx.Node) -> bool:
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return bool(node.target.name() != "run_with_rng_state")
    return is_effectful(node) or any(written(node)) or rng.is_random(node) or node.is_impure()


def _one_mode(gm: fx.GraphModule) -> FakeTensorMode:
    """Return the fake tensor mode of all nodes' values, after computing missing values."""
    modes = fake_modes(gm.graph)
    if len(modes) == 1:
        return next(iter(modes))
    bare = next((n for n in gm.graph.nodes if n.op == "placeholder" and "val" not in n.meta), None)
    if bare is not None and bare.users:
        raise ValueError(
            f"remat: node.meta of the input {bare.name} has no 'val'. Expected a graph of "
            "trace_step or make_fx, whose nodes have values."
        )
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for node in gm.graph.nodes:
        if node.op == "call_function":
            compute_value(node, mode)
        elif node.op == "get_attr":
            node.meta["val"] = _stand_in(attribute(gm, str(node.target)), mode)
        elif node.op == "placeholder":
            node.meta["val"] = _stand_in(node.meta.get("val"), mode)
    return mode


def _stand_in(value: object, mode: FakeTensorMode) -> Any:
    if not isinstance(value, Tensor):
        return value
    with mode:
        return torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )
