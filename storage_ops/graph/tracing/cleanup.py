"""Removes redundant nodes from a new trace."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from storage_ops.graph.nodes import ALIASES, storages

aten = torch.ops.aten


def clean(gm: fx.GraphModule, lifted: Sequence[fx.Node]) -> list[bool]:
    """Remove aliases, needless copies of gradients, and inputs that no node reads.

    Args:
        gm: the graph, modified.
        lifted: inputs that may be removed.

    Returns:
        The lifted inputs that remain.
    """
    graph = gm.graph
    output = next(iter(reversed(graph.nodes)))
    for node in list(graph.nodes):
        if node.target in ALIASES and output not in node.users:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    _share_gradients(graph, output)
    has_users = [bool(node.users) for node in lifted]
    for node, keep in zip(lifted, has_users, strict=True):
        if not keep:
            graph.erase_node(node)
    gm.recompile()
    return has_users


def _share_gradients(graph: fx.Graph, output: fx.Node) -> None:
    """Drop the clone of a gradient that autograd makes in a trace, where it does not own it."""
    last: dict[int, fx.Node] = {}
    gradients = {
        key
        for node in graph.nodes
        if node.op in ("placeholder", "get_attr")
        for key, _ in storages(node.meta.get("val"))
    }
    for node in graph.nodes:
        for source in node.all_input_nodes:
            for key, _ in storages(source.meta.get("val")):
                last[key] = node
    for node in list(graph.nodes):
        if node.target is not aten.clone.default or output not in node.users:
            continue
        source, clone = node.args[0], node.meta["val"]
        assert isinstance(source, fx.Node)
        value = source.meta["val"]
        if value.layout != torch.strided:  # a sparse gradient has no storage to share
            continue
        (key, nbytes), *_ = storages(value)
        whole = nbytes == next(storages(clone))[1]
        same = value.stride() == clone.stride()
        if whole and same and key not in gradients and last[key] is node:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
