"""Reorders tokens while they are small, before an op makes them large.

Mixup adds targets to the same targets in another order, `q.flip(0)` or `q[order]`. A chunk cannot
read its part of such a tensor. But reordering commutes with all ops that work on each token
separately. So `one_hot(t)[order]` is `one_hot(t[order])`, of which a chunk computes its part. A
large tensor that is in memory anyway, such as an argument of the function, is indexed by each
chunk.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from storage_ops.autochunk.analysis.layouts import Rows, reshape, same
from storage_ops.autochunk.analysis.rules import RULES
from storage_ops.autochunk.analysis.spans import is_product
from storage_ops.autochunk.fx_graph.edit import Calls, retire, sort
from storage_ops.autochunk.fx_graph.nodes import is_tensor, name_of, numel, reached, shape
from storage_ops.autochunk.reasons import Conflict

_ATEN = torch.ops.aten
_FLIPS = {"prims.rev.default", "aten.flip.default"}


def reorder_sources(graph: fx.Graph, amplifier: fx.Node, least: int) -> None:
    """Apply flips and permutations of large tensors to the small tensors that they depend on.

    Args:
        amplifier: tensors that depend on it, or on another matrix product, keep their order.
        least: tensors with more elements than this are large.
    """
    starts = [amplifier, *(n for n in graph.nodes if is_product(n))]
    after, moved = {*starts, *reached(starts)}, list[fx.Node]()
    done: dict[tuple[fx.Node, int, str], fx.Node] = {}
    for node in list(graph.nodes):
        if node not in after and numel(node) > least and _is_order(node):
            moved += _each_alone(graph, node)
    if not moved:
        return
    while moved:
        node = moved.pop()
        source, dim, order = _order(node)
        sources = _sources(source, dim)
        if sources is None:
            if not isinstance(order, fx.Node):
                _index(graph, node, source, dim)
            continue
        call, new = Calls(graph, node, before=node), dict[fx.Node, fx.Node]()
        for arg, arg_dim in sources.items():
            key = arg, arg_dim, str(order)
            if key not in done:
                done[key] = _reordered(call, node, arg, arg_dim)
                if numel(arg) > least:
                    moved.append(done[key])
            new[arg] = done[key]
        call_args: Any = fx.map_arg((source.args, source.kwargs), functools.partial(_replaced, new))
        node.replace_all_uses_with(call(source.target, *call_args[0], **call_args[1]))
    retire(graph)
    sort(graph)


def _replaced(new: dict[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    return new.get(node, node)


def _is_order(node: fx.Node) -> bool:
    """Return True if an op reorders elements along dimensions."""
    if node.op != "call_function" or not node.args or not is_tensor(node):
        return False
    args: Any = node.args
    if name_of(node) in _FLIPS:
        return shape(node) == shape(args[0])
    if name_of(node) != "aten.index.Tensor" or shape(node) != shape(args[0]):
        return False
    index_list = [index for index in args[1] if index is not None]
    return (
        len(index_list) == 1
        and len(shape(index_list[0])) == 1
        and index_list[0].meta["val"].dtype.is_signed
    )


def _each_alone(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    """Return ops that each reorder one dimension, in place of a flip of several."""
    x, dims = node.args[:2]
    if name_of(node) not in _FLIPS or len(dims) == 1:  # type: ignore[arg-type]
        return [node]
    call, reordered = Calls(graph, node, before=node), list[fx.Node]()
    for dim in dims:  # type: ignore[union-attr]
        reordered.append(call(node.target, reordered[-1] if reordered else x, [dim]))
    if reordered:
        node.replace_all_uses_with(reordered[-1])
    return reordered


def _order(node: fx.Node) -> tuple[fx.Node, int, Any]:
    """Return the reordered value, its dimension, and the indices, or the op itself for a flip."""
    x, indices = list[Any](node.args)[:2]
    if name_of(node) in _FLIPS:
        return x, indices[0] % len(shape(x)), node.target
    (dim,) = (d for d, index in enumerate(indices) if index is not None)
    return x, dim, indices[dim]


def _sources(node: fx.Node, dim: int) -> dict[fx.Node, int] | None:
    """Return the arguments to reorder in place of the result, each with its dimension.

    Return None if the op does not work on each element of the dimension separately.
    """
    rule = RULES.get(name_of(node)) if node.op == "call_function" else None
    if rule is None or rule.kind == "getitem" or any(is_tensor(a) for a in node.kwargs.values()):
        return None
    if rule.labels is None:
        (arg,) = node.all_input_nodes[:1]
        try:
            rows = reshape(Rows(dim, dim + 1), shape(node), shape(arg))
        except Conflict:
            return None
        alone = rows.hi == rows.lo + 1 and same(rows.per, 1) and same(rows.outer, 1)
        return {arg: rows.lo} if alone else None
    try:
        labelled = rule.labels(node)
    except Conflict:
        return None
    label, sources = labelled.out[dim], dict[fx.Node, int]()
    if label is None:
        return None
    for arg, arg_labels in labelled.args.items():
        arg_dim, *other_dims = [row.index(label) if label in row else None for row in arg_labels]
        if any(other != arg_dim for other in other_dims):
            return None
        if arg_dim is not None:
            sources[arg] = arg_dim
    return sources


def _reordered(call: Calls, node: fx.Node, arg: fx.Node, dim: int) -> fx.Node:
    """Return an argument, reordered along a dimension as op `node` reorders its input."""
    _, _, order = _order(node)
    if isinstance(order, fx.Node):
        return call(_ATEN.index.Tensor, arg, [*[None] * dim, order])
    return call(order, arg, [dim])


def _index(graph: fx.Graph, node: fx.Node, x: fx.Node, dim: int) -> None:
    """Rewrite a flip as an index, so that each chunk can read the rows of `x` that it needs."""
    size, call = shape(x)[dim], Calls(graph, node, before=node)
    if not isinstance(size, int):
        return
    options = {"device": node.meta["val"].device, "requires_grad": False}
    order = call(
        torch.ops.prims.iota.default, size, start=size - 1, step=-1, dtype=torch.int64, **options
    )
    node.replace_all_uses_with(call(_ATEN.index.Tensor, x, [*[None] * dim, order]))
