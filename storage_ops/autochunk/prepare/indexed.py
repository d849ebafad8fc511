"""Rewrites indexing by a range in each dimension but the last as a gather along the last one.

`x[arange(N), t]` and `x[arange(B)[:, None], arange(T), t]` read one class of each token. As an
index they mix tokens, and as a gather they do not.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx

from storage_ops.autochunk.analysis.layouts import same
from storage_ops.autochunk.fx_graph.edit import Calls, SizeNodes
from storage_ops.autochunk.fx_graph.nodes import Size, is_tensor, is_zero, name_of, shape
from storage_ops.autochunk.reasons import Conflict

_ATEN = torch.ops.aten
_VIEWS = {"aten.unsqueeze.default", "aten.view.default", "aten.reshape.default",
          "aten._unsafe_view.default"}  # fmt: skip


def by_ranges(graph: fx.Graph, node: fx.Node, size_nodes: list[fx.Node]) -> bool:
    """Rewrite such an index as a gather, and its gradient as a scatter.

    Return False if `node` is another op. `size_nodes`: nodes that provide sizes.
    """
    name = name_of(node)
    if name not in ("aten.index.Tensor", "aten.index_put.default"):
        return False
    args: Any = node.args
    x, index = args[0], args[1]
    last, tokens = len(shape(x)) - 1, shape(x)[:-1]
    if last < 1 or len(index) != last + 1 or not all(is_tensor(i) for i in index):
        return False
    *ranges, columns = index
    if not all(_is_range(r, dim, tokens) for dim, r in enumerate(ranges)):
        return False
    if columns.meta["val"].dtype != torch.int64:
        return False
    if not _broadcasts(shape(columns), tokens):  # a range of one token may be repeated
        return False

    call = Calls(graph, node)
    try:
        *sizes, classes = map(SizeNodes(call, size_nodes), shape(x))
    except Conflict:
        return False
    # A negative index counts from the end, but a gather's does not.
    is_negative = call(_ATEN.lt.Scalar, columns, 0)
    columns = call(_ATEN.where.self, is_negative, call(_ATEN.add.Tensor, columns, classes), columns)
    if shape(columns) != tokens:
        columns = call(_ATEN.expand.default, columns, sizes)
    column = call(_ATEN.unsqueeze.default, columns, last)
    if name == "aten.index.Tensor":
        result = call(_ATEN.squeeze.dim, call(_ATEN.gather.default, x, last, column), last)
    else:
        values = args[2]
        added = len(args) > 3 and args[3]  # each row has one index, so no element is written twice
        if not added and is_zero(values):
            result = call(_ATEN.scatter.value, x, last, column, 0)
        else:
            if shape(values) != tokens:  # one number for all rows
                values = call(_ATEN.expand.default, values, sizes)
            op = _ATEN.scatter_add.default if added else _ATEN.scatter.src
            result = call(op, x, last, column, call(_ATEN.unsqueeze.default, values, last))
    node.replace_all_uses_with(result)
    return True


def _is_range(node: fx.Node, dim: int, sizes: list[Size]) -> bool:
    """Return True if a node is 0, 1, ..., sizes[dim] - 1 along `dim` of a tensor of `sizes`."""
    while name_of(node) == "aten.expand.default":  # torch.meshgrid
        node = _source(node)
    own = [1] * (len(sizes) - len(shape(node))) + shape(node)
    expected = [size if d == dim else 1 for d, size in enumerate(sizes)]
    if len(own) != len(sizes) or not all(map(same, own, expected)):
        return False
    while name_of(node) in _VIEWS or _is_whole(node):
        node = _source(node)  # one dimension has all elements, so their order is the same
    if name_of(node) == "prims.iota.default":
        return (node.kwargs.get("start"), node.kwargs.get("step")) == (0, 1)
    if name_of(node) in ("aten.arange.default", "aten.arange.start"):
        return bool(len(node.args) == 1 or node.args[0] == 0)
    return False


def _is_whole(node: fx.Node) -> bool:
    """Return True if a node is a slice with all elements. `[:, None]` has one if sizes vary."""
    if name_of(node) != "aten.slice.Tensor":
        return False
    return all(map(same, shape(node), shape(_source(node))))


def _source(node: fx.Node) -> fx.Node:
    return cast(fx.Node, node.args[0])


def _broadcasts(own: list[Size], sizes: list[Size]) -> bool:
    """Return True if a tensor of size `own` can be expanded to `sizes`."""
    if len(own) > len(sizes):
        return False
    pairs = zip(reversed(own), reversed(sizes), strict=False)
    return all(same(a, b) or same(a, 1) for a, b in pairs)
