"""Replaces a span of a graph by ops that evaluate it chunk by chunk."""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

import storage_ops.autochunk.runtime  # noqa: F401  registers the op
from storage_ops.autochunk.buffer import share
from storage_ops.autochunk.nodes import is_tensor, name_of, shape
from storage_ops.autochunk.passes import Passes
from storage_ops.autochunk.program import Factor, Output, Program, Slice, encode_graph
from storage_ops.autochunk.propagate import (
    Span,
    hint,
    is_product,
    nbytes,
    reached,
    tangents_of,
    values_of,
)
from storage_ops.autochunk.rules import is_transposition, rule_of
from storage_ops.autochunk.sizes import Sizes
from storage_ops.autochunk.state import Conflict, Layout, Partial, Rows, Size, Spread, same

_ATEN = torch.ops.aten


@dataclass(frozen=True)
class Limits:
    """How many chunks: a number, or as many as keep to some bytes."""

    num_chunks: int | None
    chunk_bytes: int


class Builder:
    """Adds nodes with values to a graph."""

    def __init__(self, graph: fx.Graph, span: Span):
        self.graph = graph
        self.mode = next(iter(span.amplifiers)).meta["val"].fake_mode
        # What needs the span's results cannot give it sizes, nor can the backward to the forward.
        tangents = tangents_of(graph)
        after = {*tangents, *reached([*span.amplifiers, *tangents])}
        self.size = Sizes(
            self.call, [n for n in graph.nodes if n not in after and n not in span.layouts]
        )

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call with the value that it would have."""
        node = self.graph.call_function(target, args, kwargs)
        values = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode:
            node.meta["val"] = target(*values[0], **values[1])
        return node


class Body:
    """One pass over the tokens: the body's graph, and the op that runs it."""

    def __init__(self, span: Span, builder: Builder, outside: Callable[[fx.Node], fx.Node]):
        self.span, self.builder, self.outside = span, builder, outside
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.inputs: list[tuple[fx.Node, Layout, fx.Node]] = []
        self.ints: list[Any] = []
        self.int_nodes: list[fx.Node] = []
        self.values: list[fx.Node] = []
        self.tokens: fx.Node | None = None

    def run(
        self, nodes: list[fx.Node], outputs: list[fx.Node]
    ) -> tuple[list[Output], list[fx.Node]]:
        """Copy the nodes that the outputs need; how the outputs come together, and those nodes."""
        outer = [n for n in outputs if self._formed_outside(n)]
        needed: set[fx.Node] = set()
        stack = [n for n in outputs if n not in outer]
        for n in outer:
            stack += [a for a, _ in (self._peel(n, arg) for arg in n.args) if self._inside(n, a)]
        while stack:
            node = stack.pop()
            if node not in needed:
                needed.add(node)
                stack += [a for a, lay in self.span.reads[node] if self.span.reads_inside(a, lay)]
        # All inputs first: placeholders must precede what uses them, and sizes come from tensors.
        for node in nodes:
            if node in needed or node in outer:
                for arg, layout in self.span.reads[node]:
                    if not self.span.reads_inside(arg, layout):
                        self._input(arg, layout)
        for node in nodes:
            if node in needed:
                self._collect_ints(node)
        placed = [n for n in nodes if n in needed]
        for node in placed:
            self._copy(node)
        specs = [self._output(n, n in outer) for n in outputs]
        self.graph.output([self.env[v] for v in self.values])
        return specs, placed

    def _inside(self, user: fx.Node, arg: fx.Node) -> bool:
        return isinstance(self.span.layouts.get(arg), Rows)

    def _formed_outside(self, node: fx.Node) -> bool:
        """Whether a product is made into the result at once, in place."""
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

    def _peel(self, user: fx.Node, arg: Any) -> tuple[fx.Node, bool]:
        """A factor without the transpositions inside the span."""
        transposed = False
        while isinstance(self.span.layouts.get(arg), Rows) and is_transposition(arg):
            arg, transposed = arg.args[0], not transposed
        return arg, transposed

    def _input(self, arg: fx.Node, layout: Layout) -> fx.Node:
        for node, other, placeholder in self.inputs:
            if node is arg and str(other) == str(layout):
                return placeholder
        last = self.inputs[-1][2] if self.inputs else None
        with self.graph.inserting_after(last) if last else self.graph.inserting_before():
            placeholder = self.graph.placeholder(f"x{len(self.inputs)}")
        self.inputs.append((arg, layout, placeholder))
        return placeholder

    def _int(self, value: Any) -> int | fx.Node:
        """A number for the body: itself, or a placeholder."""
        if isinstance(value, int):
            return value
        if value not in self.ints:
            self.ints.append(value)
            after = [*(p for _, _, p in self.inputs), *self.int_nodes]
            with self.graph.inserting_after(after[-1]):
                self.int_nodes.append(self.graph.placeholder(f"i{len(self.int_nodes)}"))
        return self.int_nodes[self.ints.index(value)]

    def _collect_ints(self, node: fx.Node) -> None:
        if isinstance(self.span.layouts[node], Rows):
            self._sizes(node, dry=True)
        rule = rule_of(node)
        own = [a for i, a in enumerate(node.args) if i != rule.sizes and rule.kind != "view"]
        found: list[fx.Node] = []
        fx.map_arg((own, dict(node.kwargs)), found.append)
        for arg in found:
            if not is_tensor(arg):
                if not isinstance(arg.meta.get("val"), (int, torch.SymInt)):
                    raise Conflict(f"reads {arg}, which is no tensor and no size", node)
                self._int(arg)

    def _sizes(self, node: fx.Node, dry: bool = False) -> list[Any]:
        """The sizes of a node's value for a chunk."""
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
                result.append(None if dry else self._rows(layout.per))
        return result

    def _rows(self, per: Size) -> Any:
        """The number of rows of a chunk, from an input that has some."""
        for _, layout, placeholder in self.inputs:
            rows = layout.rows if isinstance(layout, Spread) else layout
            if not isinstance(rows, Rows):
                continue
            found = self.graph.call_method("size", (placeholder, rows.hi - 1))
            if same(rows.per, per):
                return found
            if not same(rows.per, 1):
                divisor = self._int(self.builder.size(rows.per))
                found = self.graph.call_function(operator.floordiv, (found, divisor))
            if not same(per, 1):
                factor = self._int(self.builder.size(per))
                found = self.graph.call_function(operator.mul, (found, factor))
            return found
        raise Conflict("no input has rows")

    def _copy(self, node: fx.Node) -> None:
        rule, layout = rule_of(node), self.span.layouts[node]
        reads = dict(self.span.reads[node])

        def take(arg: fx.Node) -> Any:
            if not is_tensor(arg):
                return self._int(arg)
            if self.span.reads_inside(arg, reads[arg]):
                return self.env[arg]
            return self._input(arg, reads[arg])

        if rule.kind == "view":
            self.env[node] = self.graph.call_function(
                _ATEN.reshape.default,
                (take(node.args[0]), self._sizes(node)),  # type: ignore[arg-type]
            )
            return
        target: Any = node.target
        args = list(node.args)
        if rule.sizes is not None:
            args[rule.sizes] = None  # the body's own
        if isinstance(layout, Partial) and layout.mean:
            target = _ATEN.sum.default if len(args) == 1 else _ATEN.sum.dim_IntList
        args = [fx.map_arg(arg, take) for arg in args]
        kwargs = fx.map_arg(dict(node.kwargs), take)
        if rule.sizes is not None:
            args[rule.sizes] = self._sizes(node)
        self.env[node] = self.graph.call_function(target, tuple(args), kwargs)

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
        bare, transposed = self._peel(node, arg)
        if isinstance(self.span.layouts.get(bare), Rows):
            return Factor("value", self._value(bare), transposed)
        layout = next(lay for a, lay in self.span.reads[node] if a is arg)
        wanted = self._input(arg, layout)
        return Factor("input", [p for _, _, p in self.inputs].index(wanted), False)

    def reference(self, size: Size) -> int:
        """A number of the program: itself, or which of the op's integers it is."""
        if isinstance(size, int):
            return size
        number = self.builder.size(size)
        if isinstance(number, int):  # a symbol that has one value only
            return number
        self._int(number)
        return -1 - self.ints.index(number)

    def slice(self, layout: Layout) -> Slice | None:
        """Rows as the program has them."""
        rows = layout.rows if isinstance(layout, Spread) else layout
        if not isinstance(rows, Rows):
            return None
        return Slice(rows.lo, rows.hi, self.reference(rows.per))

    def sources(self) -> list[fx.Node]:
        """The tensors that the op reads."""
        result = []
        for arg, layout, _ in self.inputs:
            node = self.outside(arg)
            if isinstance(layout, Spread):
                sizes = [self.builder.size(s) for s in layout.sizes]
                node = self.builder.call(_ATEN.expand.default, node, sizes)
            result.append(node)
        return result


class _Outside:
    """What the span reads, with the upstream gradient taken for a constant."""

    def __init__(self, builder: Builder, passes: Passes, seed: float):
        self.builder, self.passes, self.seed = builder, passes, seed
        self.copies: dict[fx.Node, fx.Node] = {}

    def __call__(self, node: fx.Node) -> fx.Node:
        stack = [node]
        while stack:
            top = stack[-1]
            if top in self.copies or top not in self.passes.dependent:
                stack.pop()
                continue
            if top is self.passes.tangent:
                value = top.meta["val"]
                self.copies[top] = self.builder.call(
                    _ATEN.full.default, [], self.seed, dtype=value.dtype, device=value.device
                )
                continue
            missing = [a for a in top.all_input_nodes
                       if a in self.passes.dependent and a not in self.copies]  # fmt: skip
            if missing:
                stack.extend(missing)
                continue
            copy = self.builder.graph.node_copy(top, lambda a: self.copies.get(a, a))
            self.copies[top] = copy
        return self.copies.get(node, node)


def rewrite(graph: fx.Graph, span: Span, passes: Passes, limits: Limits) -> list[int]:
    """Replace a span by one op per pass over the tokens; in how many chunks each of them works."""
    builder = Builder(graph, span)
    seed = 1.0
    if any(v.dtype == torch.float16 for n in span.large for v in values_of(n)):
        # Gradients of a mean would vanish in fp16: those of the sum over tokens do not.
        seed = 2.0 ** math.floor(math.log2(max(hint(span.tokens), 1)))
    outside = _Outside(builder, passes, seed)
    nodes = [n for n in graph.nodes if n in span.layouts]
    result: list[int] = []
    for outputs in passes.outputs:
        one = Body(span, builder, outside)
        specs, placed = one.run(nodes, outputs)
        formed, over = share(span, one)
        program = Program(
            tuple(one.slice(layout) for _, layout, _ in one.inputs),
            tuple(specs),
            limits.num_chunks,
            limits.chunk_bytes,
            group_bytes(span, placed, one.values, over),
            not isinstance(span.tokens, int),
            encode_graph(one.graph),
            formed,
            over,
        )
        sizes = [builder.size(s) for n in outputs for s in shape(n)]
        call = builder.call(
            torch.ops.storage_ops._chunked_span.default,
            one.sources(), one.ints, sizes, builder.size(span.groups), program.encode(),
        )  # fmt: skip
        for index, node in enumerate(outputs):
            _replace(
                builder, span, passes, outside, node, builder.call(operator.getitem, call, index)
            )
        result.append(program.count(hint(span.groups)))
    sort(graph)
    return result


def group_bytes(span: Span, nodes: list[fx.Node], values: list[fx.Node], over: int | None) -> int:
    """What a group takes of a chunk: the products and the values that leave the compiled body."""
    kept = {n for n in nodes if n in span.large and is_product(n)}
    kept |= {n for i, n in enumerate(values) if n in span.large and i != over}
    total = sum(nbytes(n) for n in kept)
    return -(-total // max(hint(span.groups), 1))


def _replace(
    builder: Builder, span: Span, passes: Passes, outside: _Outside, node: fx.Node, new: fx.Node
) -> None:
    """Let the users of an output read the op's result, times the upstream gradient where due."""
    layout, dtype = span.layouts[node], node.meta["val"].dtype
    if isinstance(layout, Partial) and layout.mean:
        source: Any = node.args[0]
        total = math.prod(shape(source)) // math.prod(shape(node))
        new = builder.call(_ATEN.div.Tensor, new, builder.size(total))
    raw = new
    if node in passes.scaled:
        assert passes.tangent is not None
        factor = passes.tangent
        if outside.seed != 1:
            factor = builder.call(_ATEN.mul.Tensor, factor, 1 / outside.seed)
        new = builder.call(_ATEN.mul.Tensor, new, factor)
    if new.meta["val"].dtype != dtype:
        new = builder.call(torch.ops.prims.convert_element_type.default, new, dtype)
    outside.copies[new] = raw  # a later pass reads it without the factor
    passes.dependent.add(new)
    outside.copies[node] = raw
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user not in span.layouts)


def sort(graph: fx.Graph) -> None:
    """Put every node after its arguments, and otherwise keep the order.

    What was added at the end comes right after its arguments, before what may change them in place.
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


def place(nodes: list[fx.Node]) -> None:
    """Put nodes in this order."""
    last = nodes[0]
    for node in nodes[1:]:
        last.append(node)
        last = node
