"""Changes to a graph: adds nodes with values, puts nodes in order, and undoes changes."""

from __future__ import annotations

import functools
import heapq
import operator
from collections.abc import Callable, Container, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from storage_ops.autochunk.fx_graph.nodes import Size, ends, leading_to, reached, shape, tangents_of
from storage_ops.autochunk.reasons import Conflict

_OPERATORS = {"Add": operator.add, "Mul": operator.mul, "FloorDiv": operator.floordiv}


class Calls:
    """Adds calls to a graph, each with its fake value.

    Attributes:
        like: a node of the graph, or of its source. New nodes have its fake mode and its place in
            the user's code.
        before: the node before which calls are added. The default is the graph's current place of
            insertion.
        key: the key of values in the nodes' meta.
    """

    def __init__(
        self, graph: fx.Graph, like: fx.Node, before: fx.Node | None = None, key: str = "val"
    ):
        self.graph, self.like, self.before, self.key = graph, like, before, key

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call."""
        graph, before, key = self.graph, self.before, self.key
        with nullcontext() if before is None else graph.inserting_before(before):
            node = graph.call_function(target, args, kwargs)
        values = fx.map_arg((args, kwargs), lambda n: n.meta[key])
        with self.like.meta[key].fake_mode:
            node.meta[key] = target(*values[0], **values[1])
        node.meta["stack_trace"] = self.like.meta.get("stack_trace")
        return node


class SizeNodes:
    """Sizes as numbers or nodes. Existing nodes are used, or sums and products of them."""

    def __init__(self, call: Callable[..., fx.Node], nodes: Iterable[fx.Node]):
        """Find the sizes in nodes. `call` adds a node."""
        self.call = call
        # Dead nodes have lost their arguments, so they provide no sizes.
        sources = [n for n in nodes if n.op != "call_function" or n.args]
        self.known = _sizes_of(n for n in sources if n.op == "placeholder")
        self.others = _sizes_of(sources)

    def __call__(self, size: Size) -> int | fx.Node:
        """Return a size as a number or as a node.

        Raises:
            Conflict: the size depends on a symbol that no node has.
        """
        number = size if isinstance(size, int) else size.node.maybe_as_int()
        if number is not None:  # also a symbol that can have only one value
            return int(number)
        return self._of(size.node.expr)

    def _of(self, expression: Any) -> int | fx.Node:
        name = str(expression)
        size_node = self.known.get(name)
        if size_node is None:
            if expression.is_Integer:
                return int(expression)
            size_node = self._combined(expression)
        if isinstance(size_node, tuple):
            size_node = self.call(torch.ops.aten.sym_size.int, *size_node)
        self.known[name] = size_node
        return size_node

    def _combined(self, expression: Any) -> fx.Node | tuple[fx.Node, int]:
        """Return a sum or product of input sizes as a node, or an existing value of that size."""
        law = _OPERATORS.get(expression.func.__name__)
        try:
            if law is None:
                raise Conflict(f"the size {expression} is not that of an input")
            parts: list[Any] = [self._of(part) for part in expression.args]
            node: fx.Node = functools.reduce(functools.partial(self.call, law), parts)
            return node
        except Conflict:
            size_node = self.others.get(str(expression))
            if size_node is None:
                raise
            return size_node


def _sizes_of(nodes: Iterable[fx.Node]) -> dict[str, fx.Node | tuple[fx.Node, int]]:
    """Return the sizes that nodes are, or that their values have."""
    sources: dict[str, fx.Node | tuple[fx.Node, int]] = {}
    values = [(n, n.meta.get("val")) for n in nodes]
    for node, value in values:
        if isinstance(value, torch.SymInt):
            sources.setdefault(str(value), node)
    for node, value in values:
        if isinstance(value, torch.Tensor):
            for dim, size in enumerate(shape(node)):
                if not isinstance(size, int):
                    sources.setdefault(str(size), (node, dim))
    return sources


class Builder:
    """Adds nodes with values to a graph, for a span that starts at its amplifiers.

    Attributes:
        call: adds a call.
        size: returns sizes as arguments of calls, from nodes outside the span.
    """

    def __init__(
        self, graph: fx.Graph, amplifiers: Iterable[fx.Node], inside: Container[fx.Node] = ()
    ):
        self.graph, starts = graph, list(amplifiers)
        self.call = Calls(graph, starts[0])
        # Users of the span's results cannot provide sizes for it, nor can the backward for the
        # forward.
        tangents = tangents_of(graph)
        after = {*tangents, *reached([*starts, *tangents])}
        self.size = SizeNodes(
            self.call, [n for n in graph.nodes if n not in after and n not in inside]
        )


def sort(graph: fx.Graph) -> None:
    """Put every node after its arguments. Keep the order otherwise.

    A node that was added at the end moves right after its arguments, and so before ops that may
    change these in place.
    """
    nodes: list[fx.Node] = list(graph.nodes)
    order: dict[fx.Node, tuple[int, int]] = {}
    end = next(i for i, node in enumerate(nodes) if node.op == "output")
    for i, node in enumerate(nodes):
        last = max((order[a][0] for a in node.all_input_nodes if a in order), default=0)
        order[node] = (i if i <= end else last, i)
    waiting = {node: len(node.all_input_nodes) for node in graph.nodes}
    ready = [(i, node) for node, i in order.items() if not waiting[node]]
    heapq.heapify(ready)
    nodes = []
    while ready:
        _, node = heapq.heappop(ready)
        nodes.append(node)
        for user in node.users:
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(ready, (order[user], user))
    place(nodes)


def retire(graph: fx.Graph) -> None:
    """Remove the arguments of nodes that are not needed, so that they become dead code."""
    alive = leading_to(ends(graph))
    for node in graph.nodes:
        if node.op == "call_function" and node not in alive:
            node.args, node.kwargs = (), {}


def place(nodes: list[fx.Node]) -> None:
    """Put nodes in this order."""
    last = nodes[0]
    for node in nodes[1:]:
        last.append(node)
        last = node


class Undo:
    """A graph before a rewrite. A call restores its nodes."""

    def __init__(self, graph: fx.Graph):
        self.graph = graph
        self.nodes = [(node, node.args, node.kwargs, dict(node.meta)) for node in graph.nodes]

    def __call__(self) -> None:
        """Undo all changes of nodes and of their order, and drop new nodes."""
        for node, args, kwargs, meta in self.nodes:
            node.args, node.kwargs, node.meta = args, kwargs, meta
        known = {node for node, *_ in self.nodes}
        unused = [n for n in self.graph.nodes if n not in known and not n.users]
        while unused:
            node = unused.pop()
            read = node.all_input_nodes
            self.graph.erase_node(node)
            unused += [a for a in read if a not in known and not a.users]
        place([node for node, *_ in self.nodes])
