"""Values that are changed in place: the rewrite must not move what reads them past the change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx

from storage_ops.autochunk.nodes import ends, leading_to, viewed
from storage_ops.autochunk.state import Conflict


def owner(node: fx.Node) -> fx.Node:
    """The node whose memory a node is a view of: itself, if it is none."""
    while (base := viewed(node)) is not None:
        node = base
    return node


def new_values(graph: fx.Graph, visible: int | None) -> set[fx.Node]:
    """Inputs that the function of a joint graph changes, and what is written to them.

    They are written at the end of the forward, or by the code around the graph: then they come
    before the `visible` results of the function.
    """
    inputs = [n for n in graph.nodes if n.op == "placeholder" and "primals" in str(n.target)]
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if _written(node) & set(inputs):
            found.update(node.all_input_nodes)
    outputs = list(next(n for n in graph.nodes if n.op == "output").args[0])
    if visible is not None and inputs:
        new = max(len(outputs) - len(inputs) - visible, 0)
        found.update(n for n in outputs[:new] if isinstance(n, fx.Node))
    return found


class Mutations:
    """The in-place changes within a graph, and where they stand before it is rewritten."""

    def __init__(self, graph: fx.Graph):
        self.place = {node: i for i, node in enumerate(graph.nodes)}
        self.changes = {node: written for node in self.place if (written := _written(node))}

    def check_reads(self, read: Iterable[fx.Node], span: Iterable[fx.Node]) -> None:
        """Raise Conflict if something that a span reads is changed before its last node."""
        if not self.changes:
            return
        end, bases = max(self.place.get(n, 0) for n in span), {owner(n) for n in read}
        for node, written in self.changes.items():
            if self.place[node] < end and written & bases:
                raise Conflict("changes in place what is read in chunks", node)

    def check_order(self, graph: fx.Graph) -> None:
        """Raise Conflict if a reader has come to the other side of a change."""
        if not self.changes:
            return
        now = {node: i for i, node in enumerate(graph.nodes)}
        alive = leading_to(ends(graph))
        for change, written in self.changes.items():
            for node in alive:
                if node is change or not any(owner(a) in written for a in node.all_input_nodes):
                    continue
                before = self.place.get(node, -1) < self.place[change]  # the new ones came before
                if before != (now[node] < now[change]):
                    raise Conflict(f"would be read on the other side of {change}", node)


def _written(node: fx.Node) -> set[fx.Node]:
    """What an op writes to, without views of it."""
    schema: Any = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return set()
    found: list[fx.Node] = []
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            fx.map_arg(given, found.append)
    return {owner(n) for n in found}
