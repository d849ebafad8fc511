"""The body of a pass: a graph with the nodes of a span, for one chunk."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from storage_ops.autochunk.analysis.layouts import Layout, Partial, Rows, Spread, equal, same
from storage_ops.autochunk.analysis.rules import is_transposition, rule_of
from storage_ops.autochunk.analysis.spans import Span
from storage_ops.autochunk.fx_graph.edit import Builder
from storage_ops.autochunk.fx_graph.nodes import Size, is_tensor, name_of, shape, viewed
from storage_ops.autochunk.reasons import Conflict
from storage_ops.autochunk.runtime.program import Factor, Output, Slice

_ATEN = torch.ops.aten


class Body:
    """The body of one pass over the tokens.

    Attributes:
        graph: takes a slice of every input, then sizes, and returns the values. Fake values of its
            nodes have the sizes for all tokens.
        env: maps nodes of the span to nodes of the body.
        inputs: the nodes that the body reads, their layouts and their placeholders.
        ints, int_nodes: sizes that the body takes as arguments, and their placeholders.
        values: the nodes of the span that the body returns.
    """

    def __init__(self, span: Span, builder: Builder):
        self.span, self.builder = span, builder
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.inputs: list[tuple[fx.Node, Layout, fx.Node]] = []
        self.ints: list[Any] = []
        self.int_nodes: list[fx.Node] = []
        self.values: list[fx.Node] = []

    def run(self, nodes: list[fx.Node], outputs: list[fx.Node]) -> list[Output]:
        """Copy the nodes that the outputs need. Return how to assemble the outputs."""
        outer = [n for n in outputs if self._formed_outside(n)]
        needed: set[fx.Node] = set()
        stack = [n for n in outputs if n not in outer]
        for n in outer:
            stack += [a for a, _ in map(self._peel, n.args) if self._has_rows(a)]
        while stack:
            node = stack.pop()
            if node not in needed:
                needed.add(node)
                stack += [a for a, lay in self.span.reads[node] if self.span.reads_inside(a, lay)]
        # All inputs come first, because the sizes of a chunk come from them.
        for node in nodes:
            if node in needed or node in outer:
                for arg, layout in self.span.reads[node]:
                    if not self.span.reads_inside(arg, layout):
                        self._input(arg, layout)
        for node in nodes:
            if node in needed:
                self._copy(node)
        specs = [self._output(n, n in outer) for n in outputs]
        self.graph.output([self.env[v] for v in self.values])
        return specs

    def _has_rows(self, node: Any) -> bool:
        return isinstance(self.span.layouts.get(node), Rows)

    def _formed_outside(self, node: fx.Node) -> bool:
        """Return True if a product is computed outside of the body, directly into its result."""
        layout = self.span.layouts[node]
        return (
            name_of(node) == "aten.mm.default"
            and node not in self.span.amplifiers
            and (isinstance(layout, Partial) or (isinstance(layout, Rows) and layout.hi == 1))
            and all(
                self.span.reads_inside(a, lay) or a not in self.span.large
                for a, lay in self.span.reads[node]
            )
        )

    def _peel(self, arg: Any) -> tuple[fx.Node, bool]:
        """Return a factor below its transpositions in the span, and whether it is transposed."""
        transposed = False
        while self._has_rows(arg) and is_transposition(arg):
            arg, transposed = arg.args[0], not transposed
        return arg, transposed

    def _input(self, arg: fx.Node, layout: Layout) -> fx.Node:
        for node, other, placeholder in self.inputs:
            if node is arg and str(other) == str(layout):
                return placeholder
        last = self.inputs[-1][2] if self.inputs else None
        with self.graph.inserting_after(last) if last else self.graph.inserting_before():
            placeholder = self.graph.placeholder(f"x{len(self.inputs)}")
        placeholder.meta["val"] = arg.meta["val"]
        self.inputs.append((arg, layout, placeholder))
        return placeholder

    def _int(self, value: object) -> int | fx.Node:
        """Return a number for the body, as a constant or a placeholder."""
        if isinstance(value, int):
            return value
        if value not in self.ints:
            self.ints.append(value)
            after = [*(p for _, _, p in self.inputs), *self.int_nodes]
            with self.graph.inserting_after(after[-1]):
                self.int_nodes.append(self.graph.placeholder(f"i{len(self.int_nodes)}"))
        return self.int_nodes[self.ints.index(value)]

    def _sizes(self, node: fx.Node) -> list[Any]:
        """Return the sizes of a node's value for a chunk."""
        layout, sizes = self.span.layouts[node], shape(node)
        assert isinstance(layout, Rows)
        rows = range(layout.lo, layout.hi)
        result: list[Any] = []
        for dim, size in enumerate(sizes):
            if dim not in rows:
                result.append(self._int(self.builder.size(size)))
            elif dim < layout.hi - 1:
                result.append(1)
            else:
                result.append(self._rows(layout.per))
        return result

    def _rows(self, per: Size) -> Any:
        """Return the number of rows of a chunk, from an input that has rows."""
        for _, layout, placeholder in self.inputs:
            rows = layout.rows if isinstance(layout, Spread) else layout
            if not isinstance(rows, Rows):
                continue
            size_node = self.graph.call_method("size", (placeholder, rows.hi - 1))
            if same(rows.per, per):
                return size_node
            if not same(rows.per, 1):
                divisor = self._int(self.builder.size(rows.per))
                size_node = self.graph.call_function(operator.floordiv, (size_node, divisor))
            if not same(per, 1):
                factor = self._int(self.builder.size(per))
                size_node = self.graph.call_function(operator.mul, (size_node, factor))
            return size_node
        raise Conflict("none of its inputs has a dimension of tokens")

    def _copy(self, node: fx.Node) -> None:
        rule, layout = rule_of(node), self.span.layouts[node]
        reads = dict(self.span.reads[node])

        def take(arg: fx.Node) -> Any:
            if not is_tensor(arg):
                if not isinstance(arg.meta.get("val"), (int, torch.SymInt)):
                    raise Conflict(f"reads {arg}, which is neither a tensor nor a size", node)
                return self._int(arg)
            if self.span.reads_inside(arg, reads[arg]):
                return self.env[arg]
            return self._input(arg, reads[arg])

        target: Any = node.target
        args, sizes = list(node.args), rule.sizes
        if rule.kind == "view":
            target, args, sizes = _ATEN.reshape.default, [*args[:1], None], 1
        elif sizes is not None:
            args[sizes] = None  # computed by the body itself
        if isinstance(layout, Partial) and layout.mean:
            target = _ATEN.sum.default if len(args) == 1 else _ATEN.sum.dim_IntList
        args = [fx.map_arg(arg, take) for arg in args]
        kwargs = fx.map_arg(dict(node.kwargs), take)
        if sizes is not None:
            args[sizes] = self._sizes(node)
        self.env[node] = self.graph.call_function(target, tuple(args), kwargs)
        self.env[node].meta["val"] = node.meta["val"]

    def _value(self, node: fx.Node) -> int:
        if node not in self.values:
            self.values.append(node)
        return self.values.index(node)

    def _output(self, node: fx.Node, outer: bool) -> Output:
        layout = self.span.layouts[node]
        value = node.meta["val"]
        dtype = value.dtype
        if isinstance(layout, Partial) and dtype == torch.float16:
            dtype = torch.float32  # until it is multiplied by the upstream gradient
        rows = self.slice(layout)
        name = str(dtype).removeprefix("torch.")
        if not outer:
            return Output(rows, value.dim(), name, self._value(node))
        left, right = (self._factor(node, arg) for arg in node.args)
        return Output(rows, value.dim(), name, None, (left, right))

    def _factor(self, node: fx.Node, arg: Any) -> Factor:
        bare, transposed = self._peel(arg)
        if self._has_rows(bare):
            return Factor("value", self._value(bare), transposed)
        layout = next(lay for a, lay in self.span.reads[node] if a is arg)
        wanted = self._input(arg, layout)
        return Factor("input", [p for _, _, p in self.inputs].index(wanted), False)

    def reference(self, size: Size) -> int:
        """Return a number for the program: the number itself, or -1 - i for the i-th integer."""
        if isinstance(size, int):
            return size
        number = self.builder.size(size)
        if isinstance(number, int):  # a symbol with only one possible value
            return number
        self._int(number)
        return -1 - self.ints.index(number)

    def slice(self, layout: Layout) -> Slice | None:
        """Return a layout in the form of the program."""
        rows = layout.rows if isinstance(layout, Spread) else layout
        if not isinstance(rows, Rows):
            return None
        return Slice(rows.lo, rows.hi, self.reference(rows.per))

    def sources(self, outside: Callable[[fx.Node], fx.Node]) -> list[fx.Node]:
        """Return the tensors that the op reads.

        `outside` maps a node to its replacement.
        """
        result = []
        for arg, layout, _ in self.inputs:
            node = outside(arg)
            if isinstance(layout, Spread):
                sizes = [self.builder.size(s) for s in layout.sizes]
                node = self.builder.call(_ATEN.expand.default, node, sizes)
            result.append(node)
        return result


def share(body: Body) -> tuple[tuple[tuple[int, ...], ...], tuple[int | None, ...]]:
    """Let a pass take its products as arguments, and overwrite them with values of equal size.

    The products are then computed in the same memory for every chunk. A pass stays unchanged if it
    has a large product of its own values.

    Returns:
        The positions of each product's arguments among the inputs, and the position of the value
        that overwrites it among the values, or None.
    """
    inputs: list[Any] = [p for _, _, p in body.inputs]
    products = {n: body.env[n] for n in body.span.amplifiers if n in body.env}
    formed = {n: _formed(body, n, product, inputs) for n, product in products.items()}
    places = tuple(p for p in formed.values() if p is not None)
    if len(places) < len(products):
        return (), ()
    for amplifier, product in products.items():
        with body.graph.inserting_before(inputs[0]):
            body.env[amplifier] = body.graph.placeholder("product")
        body.env[amplifier].meta["val"] = amplifier.meta["val"]
        product.replace_all_uses_with(body.env[amplifier])
        body.graph.erase_node(product)
    over: list[int | None] = []
    for amplifier in products:
        over.append(_overwrite(body, amplifier, over))
    return places, tuple(over)


def _formed(
    body: Body, amplifier: fx.Node, product: fx.Node, inputs: list[Any]
) -> tuple[int, ...] | None:
    """Return the positions of a product's arguments among the inputs, or None if it has others."""
    plain = name_of(amplifier) in ("aten.mm.default", "aten.addmm.default") and not product.kwargs
    if not plain or amplifier in body.values or not all(a in inputs for a in product.args):
        return None
    places = tuple(map(inputs.index, product.args))
    *bias, left, _ = (body.inputs[i][1] for i in places)
    cut = isinstance(left, Rows) and not any(isinstance(layout, Rows) for layout in bias)
    return places if cut else None


def _overwrite(body: Body, amplifier: fx.Node, inputs: list[int | None]) -> int | None:
    """Let a value overwrite a product. Return the value's index, or None."""
    graph, layouts, overwritten = body.graph, body.span.layouts, None
    place = body.env[amplifier]
    for i, node in enumerate(body.values):
        value, like = node.meta["val"], amplifier.meta["val"]
        sized = value.dim() == 2 and all(map(same, shape(node), shape(amplifier)))
        sized = sized and equal(layouts[node], layouts[amplifier]) and i not in inputs
        if overwritten is None and sized and value.dtype == like.dtype:
            overwritten = i
        elif _is_view(body.env[node], place):
            return None  # the view would change with it
    if overwritten is None or any(_is_view(body.env[body.values[overwritten]], body.env[n])
                            for n in body.span.amplifiers if n in body.env):  # fmt: skip
        return None
    (end,) = (n for n in graph.nodes if n.op == "output")
    values: Any = end.args[0]
    with graph.inserting_before(end):
        copied = graph.call_function(torch.ops.aten.copy_.default, (place, values[overwritten]))
    copied.meta["val"] = place.meta["val"]
    end.args = ([copied if i == overwritten else v for i, v in enumerate(values)],)
    return overwritten


def _is_view(node: fx.Node, of: fx.Node) -> bool:
    """Return True if a value is a view of another."""
    base: fx.Node | None = node
    while base is not None and base is not of:
        base = viewed(base)
    return base is of
