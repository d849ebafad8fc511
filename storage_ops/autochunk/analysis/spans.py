"""Finds the product that amplifies its input, and the layouts of later values in one chunk."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from storage_ops.autochunk.analysis import rules
from storage_ops.autochunk.analysis.layouts import (
    Layout,
    Partial,
    Regroup,
    Rows,
    Spread,
    Whole,
    canonical,
    equal,
    reshape,
    same,
)
from storage_ops.autochunk.analysis.rules import Labelled, rule_of
from storage_ops.autochunk.fx_graph.nodes import Size, hint, name_of, numel, reached, shape, tensors
from storage_ops.autochunk.reasons import Conflict, log

TRIES = 4  # the most products that are tried, the largest first
_INDICES = ("aten.index.Tensor", "aten._unsafe_index.Tensor")
LARGE = 4  # values with more than 1 / LARGE of the amplifier's elements exist only in chunks


@dataclass
class Span:
    """The nodes that are evaluated once per chunk, with their arguments and layouts.

    Attributes:
        amplifiers: the products whose results exist only in chunks, with their rows.
        tokens: the number of tokens.
        step: the number of tokens of a group, which a chunk does not cut.
        layouts: the layout of every node in the span.
        reads: for every node in the span, its arguments and the layouts in which it reads them.
        large: nodes that exist only in chunks.
    """

    amplifiers: dict[fx.Node, Rows]
    tokens: Size
    step: Size
    layouts: dict[fx.Node, Layout] = field(default_factory=dict)
    reads: dict[fx.Node, list[tuple[fx.Node, Layout]]] = field(default_factory=dict)
    large: set[fx.Node] = field(default_factory=set)

    @property
    def groups(self) -> Size:
        """Return the number of groups."""
        return self.tokens if same(self.step, 1) else self.tokens // self.step

    def reads_inside(self, arg: fx.Node, layout: Layout) -> bool:
        """Return True if a node of the span reads this argument from the same chunk."""
        layout_here = self.layouts.get(arg)
        return isinstance(layout_here, Rows) and equal(layout_here, layout)


def is_product(node: fx.Node) -> bool:
    """Return True if a node is a matrix product."""
    return node.op == "call_function" and name_of(node) in rules.PRODUCTS


def stops(node: fx.Node) -> bool:
    """Return True if values after this node cannot be in the span that the node belongs to."""
    return is_product(node) or name_of(node) == "storage_ops._chunked_span.default"


def amplifies(node: fx.Node, elements: int = 0) -> bool:
    """Return True if a product, or a value with `elements`, is larger than its left factor."""
    left: Any = node.args[1 if "addmm" in name_of(node) else 0]
    return max(elements, numel(node)) > numel(left)


def resampled(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return products whose results are interpolated to more elements, with these numbers."""
    factors: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if name_of(node) in _INDICES and "val" in node.meta:
            stack, seen = [node.args[0]], set[object]()
            if numel(node) <= numel(node.args[0]):
                continue
            while stack:
                source = stack.pop()
                if not isinstance(source, fx.Node) or source in seen:
                    continue
                seen.add(source)
                if is_product(source):
                    factors[source] = max(factors.get(source, 0), numel(node))
                elif source.op == "call_function" and name_of(source) in rules.RULES:
                    stack += source.all_input_nodes
    return factors


def candidates(graph: fx.Graph, tangents: set[fx.Node], tried: set[fx.Node]) -> list[fx.Node]:
    """Return the nodes that are larger than all their arguments, the largest first.

    Candidates are products that lead to a loss, and upstream gradients that are expanded or
    scattered. Such a gradient is outside every product's span if the loss is linear in the logits,
    such as their sum.
    """
    after, larger_results = reached(tangents), resampled(graph)
    upstream = after | tangents
    # For each node, the largest product that it is a factor of, in elements.
    results: dict[fx.Node, int] = {}
    for node in reversed(graph.nodes):
        sizes = [numel(u) if is_product(u) else results.get(u, 0) for u in node.users]
        results[node] = 0 if stops(node) else max(sizes, default=0)
    amplifying = []
    for node in graph.nodes:
        if node in tried:
            continue
        if is_product(node):
            larger = node not in after and amplifies(node, larger_results.get(node, 0))
        else:
            input_sizes = [numel(a) for a in node.all_input_nodes if a in upstream]
            larger = bool(input_sizes and results[node]) and numel(node) > max(
                *input_sizes, results[node]
            )
        if larger:
            amplifying.append(node)
    return sorted(amplifying, key=numel, reverse=True)


def rows_of(amplifier: fx.Node) -> list[Rows]:
    """Return the dimensions of an amplifier that may be its tokens."""
    last = len(shape(amplifier)) - 1
    return [Rows(1, 2), Rows(0, 1)] if "bmm" in name_of(amplifier) else [Rows(0, max(last, 1))]


def labels_of(node: fx.Node) -> Labelled:
    """Return the labels of a call of an op that is not a view."""
    labels = rule_of(node).labels
    assert labels is not None
    return labels(node)


def follow(node: fx.Node, arg: fx.Node, rows: Rows) -> Layout | None:
    """Return a node's layout from an argument's rows, or None if it mixes them.

    Raises:
        Conflict: the op has no rule.
    """
    if rule_of(node).labels is None:
        return reshape(rows, shape(arg), shape(node))
    labelled = labels_of(node)
    for labels in labelled.args[arg]:
        row_labels = labels[rows.lo : rows.hi]
        if all(label is not None and label in labelled.out for label in row_labels):
            lo = labelled.out.index(row_labels[0])
            if labelled.out[lo : lo + len(row_labels)] == row_labels:
                return canonical(replace(rows, lo=lo, hi=lo + len(row_labels)), shape(node))
        if all(label in labelled.sums for label in row_labels):
            return Partial(labelled.mean)
    return None


class _AnotherAmplifier(Exception):
    """Another product also amplifies tokens."""

    def __init__(self, node: fx.Node, rows: Rows):
        self.node, self.rows = node, rows


class _Propagation:
    """One attempt to find a span, with these amplifiers and this step."""

    def __init__(self, graph: fx.Graph, amplifiers: dict[fx.Node, Rows], step: Size, cut: bool):
        first, rows = next(iter(amplifiers.items()))
        self.tokens = math.prod(shape(first)[rows.lo : rows.hi])
        self.span = Span(amplifiers, self.tokens, step)
        self.graph, self.cut = graph, cut
        self.limit = numel(first)

    def run(self) -> Span:
        span = self.span
        after = reached(span.amplifiers, lambda n: not stops(n))
        span.large.update(span.amplifiers)
        span.large.update(n for n in after if self.is_large(n) and not stops(n))
        large = set(span.large)
        for node in reversed(self.graph.nodes):
            if node in after and not stops(node) and any(
                user in large and user in after for user in node.users
            ):  # fmt: skip
                large.add(node)
        for node in span.large:
            large.update(node.users)
        for node in self.graph.nodes:  # each of several results has its own node
            if node in large and isinstance(node.meta.get("val"), (tuple, list)):
                large.update(node.users)
        waiting, done = [n for n in self.graph.nodes if n in large], -1
        while done != len(span.layouts):  # repeat if a reader added a value
            done = len(span.layouts)
            for node in waiting:
                self.visit(node)
            waiting = [n for n in waiting if n not in span.layouts]
        return span

    def is_large(self, node: fx.Node) -> bool:
        return numel(node) * LARGE > self.limit

    def visit(self, node: fx.Node) -> None:
        span = self.span
        known = [a for a in node.all_input_nodes if isinstance(span.layouts.get(a), Rows)]
        if node in span.amplifiers:
            rows = span.amplifiers[node]
            self.accept(node, canonical(Rows(rows.lo, rows.hi, span.step), shape(node)))
        elif known:
            must = node in span.large or any(a in span.large for a in known)
            if node.op == "output":
                self.refuse_output(node)
            try:
                self.accept(node, self.result(node, known))
            except Regroup:
                if must or not self.cut:
                    raise
                log.debug("%s: computed whole between two passes", node)
            except Conflict as conflict:
                if must:
                    raise Conflict(str(conflict), conflict.node or node) from None
                log.debug("%s: computed whole between two passes, because it %s", node, conflict)

    def refuse_output(self, node: fx.Node) -> None:
        for a in node.all_input_nodes:
            if a in self.span.large:
                raise Conflict("is returned, or kept for a backward that is not in the graph", a)

    def accept(self, node: fx.Node, out: Layout) -> None:
        """Add a node to the span, and its large arguments."""
        reads = self.needs(node, out)
        for _, layout in [(node, out), *reads]:
            if isinstance(layout, Rows) and not same(layout.outer, 1):
                raise Conflict("has several groups of tokens next to each other", node)
        for arg, layout in reads:
            self.take_results(node, arg, layout)
            inside = self.span.layouts.get(arg)
            if inside is not None and not equal(inside, layout) and arg in self.span.large:
                raise Conflict(f"needs {arg} split in another way", node)
        self.span.layouts[node] = out
        self.span.reads[node] = reads
        log.debug("%s = %s: %s", node, name_of(node), out)
        for arg, layout in reads:
            if (
                arg not in self.span.layouts
                and isinstance(layout, Rows)
                and arg.op == "call_function"
                and any(self.is_large(a) and a.op == "call_function" for a in (arg, *tensors(arg)))
            ):
                self.pull(arg, layout)

    def take_results(self, node: fx.Node, arg: fx.Node, layout: Layout) -> None:
        """Add a node with several results to the span. Raise Conflict if it is read as one."""
        if arg in self.span.layouts or not isinstance(arg.meta["val"], (tuple, list)):
            return
        if isinstance(layout, Rows):
            self.pull(arg, layout)
        if arg not in self.span.layouts:
            raise Conflict("is one of several results of an op that is not in chunks", node)

    def pull(self, node: fx.Node, rows: Rows) -> None:
        """Evaluate a large value in chunks, although no amplifier leads to it."""
        if is_product(node):
            if amplifies(node):
                raise _AnotherAmplifier(node, rows)
            return
        try:
            self.accept(node, rows)
        except Conflict as conflict:
            log.debug("%s: computed whole, because it %s", node, conflict)

    def result(self, node: fx.Node, known: list[fx.Node]) -> Layout:
        """Return the layout of a node, from the layouts of its arguments."""
        arg = known[0]
        rows = self.span.layouts[arg]
        assert isinstance(rows, Rows)
        layout = follow(node, arg, rows)
        if layout is None:
            raise self.mixing(node, arg, rows)
        return layout

    def mixing(self, node: fx.Node, arg: fx.Node, rows: Rows) -> Exception:
        """Return the error for an op that mixes tokens, perhaps only inside groups."""
        labelled = labels_of(node)
        labels = labelled.args[arg][0]
        kept = rows.lo
        first = labelled.out.index(labels[kept]) if labels[kept] in labelled.out else None
        while first is not None and kept < rows.hi and labels[kept] is not None:
            if labels[kept] not in labelled.out[first + kept - rows.lo :][:1]:
                break
            kept += 1
        if kept > rows.lo:
            mixed = math.prod(shape(arg)[kept : rows.hi])
            if same(mixed, 0):
                return Conflict("works on no tokens")
            shared = math.gcd(mixed, rows.per) if isinstance(mixed, int) else 1
            return Regroup(self.span.step * mixed // shared)
        return Conflict("mixes tokens")

    def needs(self, node: fx.Node, out: Layout) -> list[tuple[fx.Node, Layout]]:
        """Return the arguments of a node with the layouts in which it reads them."""
        rule = rule_of(node)
        if rule.labels is None:
            assert isinstance(out, Rows)
            (arg,) = tensors(node)
            return [(arg, reshape(out, shape(node), shape(arg)))]
        labelled = rule.labels(node)
        if isinstance(out, Rows):
            rows, row_labels = out, labelled.out[out.lo : out.hi]
        else:
            arg = next(a for a in labelled.args if isinstance(self.span.layouts.get(a), Rows))
            arg_rows = self.span.layouts[arg]
            assert isinstance(arg_rows, Rows)
            labels = next(x for x in labelled.args[arg] if x[arg_rows.lo] in labelled.sums)
            rows, row_labels = arg_rows, labels[arg_rows.lo : arg_rows.hi]
        reads: list[tuple[fx.Node, Layout]] = []
        for arg, arg_labels in labelled.args.items():
            for labels in arg_labels:
                layout = read(node, arg, labels, row_labels, rows)
                if any(a is arg and not equal(seen, layout) for a, seen in reads):
                    raise Conflict(f"reads {arg} with two layouts", node)
                reads.append((arg, layout))
        return reads


def read(
    node: fx.Node, arg: fx.Node, labels: list[object], row_labels: list[object], rows: Rows
) -> Layout:
    """Return the layout of an argument, from the labels of the rows."""
    if any(label is None for label in row_labels):
        raise Conflict("mixes tokens", node)
    present = [label for label in row_labels if label in labels]
    if not present:
        return Whole()
    lo = labels.index(present[0])
    if present == row_labels and labels[lo : lo + len(row_labels)] == row_labels:
        return canonical(replace(rows, lo=lo, hi=lo + len(row_labels)), shape(arg))
    if rule_of(node).labels is not rules.aligned:
        raise Conflict(f"mixes tokens of {arg}", node)
    # An argument of a broadcasting op may lack some of several row dimensions.
    out, own = shape(node), shape(arg)
    own = [1] * (len(out) - len(own)) + own
    first = int(row_labels[0])  # type: ignore[call-overload]
    end = first + len(row_labels)
    sizes = [*own[:first], *out[first:end], *own[end:]]
    return Spread(canonical(replace(rows, lo=first, hi=end), sizes), tuple(sizes))


def propagate(
    graph: fx.Graph, amplifier: fx.Node, chunks: Callable[[Collection[fx.Node]], int],
    cut: bool = False,
) -> Span:  # fmt: skip
    """Return the span of an amplifier.

    Args:
        chunks: returns the number of chunks for some products.
        cut: compute small values that mix tokens between two passes, instead of in groups.

    Raises:
        Conflict: there is no span. The error has the reason.
    """
    conflict: Conflict | None = None
    for rows in rows_of(amplifier):
        try:
            return _propagate_along(graph, {amplifier: rows}, chunks, cut)
        except Conflict as error:
            conflict = conflict or error
    assert conflict is not None
    raise conflict


def _propagate_along(
    graph: fx.Graph, amplifiers: dict[fx.Node, Rows],
    chunks: Callable[[Collection[fx.Node]], int], always: bool,
) -> Span:  # fmt: skip
    step: Size = 1
    cut, regrouped = always, 0
    while regrouped < 16:
        attempt = _Propagation(graph, amplifiers, step, cut)
        try:
            return attempt.run()
        except _AnotherAmplifier as found:
            if not same(
                attempt.tokens, math.prod(shape(found.node)[found.rows.lo : found.rows.hi])
            ):
                raise Conflict("is larger than its input, for other tokens", found.node) from None
            amplifiers, step, cut = {**amplifiers, found.node: found.rows}, 1, always
        except Regroup as group:
            regrouped += 1
            # Large groups make few chunks. So values that mix tokens are computed between two
            # passes.
            if not cut and hint(attempt.tokens) // hint(group.step) < chunks(amplifiers):
                cut = True
            elif same(step, group.step):
                raise Conflict(str(group)) from None
            else:
                step = group.step
    raise Conflict("needs ever larger groups of tokens in a chunk", next(iter(amplifiers)))
