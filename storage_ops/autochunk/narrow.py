"""Leaves tokens out before a product where the graph leaves them out after it.

Causal losses often form the logits of all tokens and then drop some of every sequence:
`logits[:, :-1]`. Chunks would have to be whole sequences. But a row of a product needs one row of
its input: `(x @ w)[:, a:b] = x[:, a:b] @ w`, so the slice moves up to the input, through what works
on each token alone. In the backward the gradient is zeros around that of the slice. They move down,
through what makes zeros of zeros, until a sum over the tokens drops them, or to the small gradient
of the input. The result differs only where a dropped token is not finite: zero times that is zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from storage_ops.autochunk.degrees import Degree
from storage_ops.autochunk.log import log
from storage_ops.autochunk.mutation import Mutations
from storage_ops.autochunk.nodes import (
    argument,
    ends,
    is_tensor,
    is_zero,
    leading_to,
    name_of,
    shape,
)
from storage_ops.autochunk.propagate import (
    LARGE,
    Span,
    follow,
    is_product,
    labels_of,
    numel,
    reached,
)
from storage_ops.autochunk.rewrite import Builder, sort
from storage_ops.autochunk.rules import rule_of
from storage_ops.autochunk.state import (
    Conflict,
    Partial,
    Rows,
    Size,
    canonical,
    equal,
    reshape,
    same,
)

_ATEN = torch.ops.aten


def narrow(graph: fx.Graph, amplifier: fx.Node) -> fx.Node:
    """The product of those tokens alone that the graph keeps, in the place of an amplifier.

    The amplifier itself if the graph keeps all tokens, reads dropped ones elsewhere, or drops them
    in a way that is not understood. What is replaced stays in the graph, without arguments.
    """
    while name_of(amplifier) != "aten.bmm.default":
        try:
            reach = _Reach(graph, amplifier)
            if reach.kept is None:
                break
            amplifier = _Narrowing(graph, reach, reach.kept).run()
        except Conflict as conflict:
            log.debug("%s: all tokens stay: %s, %s", amplifier, conflict.node, conflict)
            break
    return amplifier


@dataclass(frozen=True)
class _Kept:
    """Of `outer` x `tokens` x `inner` those with the middle index in `bounds`: `count` of them.

    Attributes:
        bounds: start, end and step of the slice.
    """

    outer: Size
    tokens: Size
    inner: Size
    count: Size
    bounds: tuple[Any, ...]

    def place(self, sizes: Sequence[Size], rows: Rows) -> int | None:
        """The dimension that the slice is of; None if all dimensions of the tokens are one."""
        for dim in range(rows.lo, rows.hi):
            if (
                same(math.prod(sizes[rows.lo : dim]), self.outer)
                and same(sizes[dim], self.tokens)
                and same(math.prod(sizes[dim + 1 : rows.hi]), self.inner)
            ):
                return dim
        if rows.hi - rows.lo > 1 or not same(rows.per, 1):
            raise Conflict("has its tokens in several dimensions")
        return None

    def sizes(self, sizes: Sequence[Size], rows: Rows) -> list[Size]:
        """The sizes of what is kept of a value of these sizes."""
        dim, result = self.place(sizes, rows), list(sizes)
        if dim is None:
            result[rows.lo] = self.outer * self.count * self.inner
        else:
            result[dim] = self.count
        return result

    def split(self, sizes: Sequence[Size], rows: Rows, middle: Size) -> list[Size]:
        """Those sizes with three dimensions for the tokens, which are one."""
        return [*sizes[: rows.lo], self.outer, middle, self.inner, *sizes[rows.hi :]]


class _Reach:
    """What a product leads to.

    Attributes:
        rows: where the tokens are, of every node that has all of them.
        kept: which of them are kept.
        slices: nodes that keep those.
        scatters: nodes that put zeros around them.
        zeros: what is zero for the other tokens: the scatters, and what is made of them.
    """

    def __init__(self, graph: fx.Graph, amplifier: fx.Node):
        self.amplifier = amplifier
        self.rows: dict[fx.Node, Rows] = {amplifier: Rows(0, 1)}
        self.kept: _Kept | None = None
        self.slices: list[fx.Node] = []
        self.scatters: set[fx.Node] = set()
        self.zeros: dict[fx.Node, None] = {}
        # Also what meets the logits later: the gradient of a gather does not depend on them.
        related = leading_to(reached([amplifier])) - leading_to([amplifier])
        for node in graph.nodes:
            if node not in related or not is_tensor(node):
                continue
            name = name_of(node)
            if (name == "aten.slice.Tensor" and self.take_slice(node)) or (
                name == "aten.slice_scatter.default" and self.take_scatter(node)
            ):
                continue
            known = [a for a in node.all_input_nodes if a in self.rows and not self.ends(a)]
            if known:
                self.visit(node, known)

    def ends(self, node: fx.Node) -> bool:
        """Whether what comes after a node has no logits."""
        return is_product(node) and node is not self.amplifier

    def visit(self, node: fx.Node, known: list[fx.Node]) -> None:
        try:
            found = follow(node, known[0], self.rows[known[0]])
        except Conflict:
            return
        if isinstance(found, Rows):
            self.rows[node] = found
            if not self.zeros.keys().isdisjoint(known) and self.is_zero(node):
                self.zeros[node] = None

    def is_zero(self, node: fx.Node) -> bool:
        """Whether a value is zero for the dropped tokens, as some of its arguments are."""

        def degree(item: Any) -> Degree:
            return None if item in self.zeros or is_zero(item) else 0

        try:
            return rule_of(node).degree(node, degree) is None
        except Conflict:
            return False

    def take_slice(self, node: fx.Node) -> bool:
        """Whether a node drops tokens; the first one says which."""
        source: Any = node.args[0]
        sizes, rows = shape(source), self.rows.get(source)
        dim, bounds = _bounds(node, 1, len(sizes))
        if rows is None or self.ends(source) or not rows.lo <= dim < rows.hi:
            return False
        if same(shape(node)[dim], sizes[dim]):
            return False
        if not same(math.prod(sizes[rows.lo : rows.hi]), shape(self.amplifier)[0]):
            raise Conflict("drops parts of tokens", node)
        if self.kept is None:
            outer, inner = sizes[rows.lo : dim], sizes[dim + 1 : rows.hi]
            self.kept = _Kept(
                math.prod(outer), sizes[dim], math.prod(inner), shape(node)[dim], bounds
            )
            if same(self.kept.count, 0):
                raise Conflict("keeps no tokens", node)
        if bounds != self.kept.bounds or self.kept.place(sizes, rows) != dim:
            raise Conflict("keeps other tokens", node)
        self.slices.append(node)
        return True

    def take_scatter(self, node: fx.Node) -> bool:
        """Whether a node puts zeros around the tokens that are kept."""
        source, small, sizes = node.args[0], node.args[1], shape(node)
        dim, bounds = _bounds(node, 2, len(sizes))
        kept = self.kept
        if kept is None or not is_zero(source) or bounds != kept.bounds:
            return False
        places = range(dim + 1, len(sizes) + 1)
        hi = [i for i in places if same(math.prod(sizes[dim + 1 : i]), kept.inner)]
        if not hi or not same(shape(small)[dim], kept.count):  # type: ignore[arg-type]
            return False
        rows = canonical(Rows(0, hi[0]), sizes)
        if rows.lo > dim or kept.place(sizes, rows) != dim:
            return False
        self.rows[node], self.zeros[node] = rows, None
        self.scatters.add(node)
        return True


class _Narrowing:
    """Moves slices up and zeros down."""

    def __init__(self, graph: fx.Graph, reach: _Reach, kept: _Kept):
        self.graph, self.reach, self.kept = graph, reach, kept
        self.amplifier = reach.amplifier
        span = Span({self.amplifier: reach.rows[self.amplifier]}, kept.tokens, 1)
        self.builder = Builder(graph, span)
        self.call = self.builder.call
        self.parts: dict[fx.Node, fx.Node] = {}
        self.slices: dict[tuple[fx.Node, int, int], fx.Node] = {}
        self.read: set[fx.Node] = set()

    def run(self) -> fx.Node:
        """The product of the tokens that are kept, which takes the place of the other."""
        old = list(self.graph.nodes)
        try:
            replaced = self.plan()
            new = self.part(self.amplifier)
            moved = {**self.reach.rows, **replaced}
            Mutations(self.graph).check_reads(self.read, moved)
            live = leading_to(ends(self.graph), replaced)
            if self.amplifier in live:
                raise Conflict("is read for tokens that are dropped elsewhere", self.amplifier)
        except Conflict:
            for node in reversed(list(self.graph.nodes)[len(old) :]):
                self.graph.erase_node(node)
            raise
        for node, value in replaced.items():
            node.replace_all_uses_with(value)
        sort(self.graph)
        for node in moved:
            if node not in live:  # what it reads has one user less; it goes with the dead code
                node.args, node.kwargs = (), {}
        log.debug("%s: the tokens that are dropped after it are dropped before", self.amplifier)
        return new

    def plan(self) -> dict[fx.Node, fx.Node]:
        """What takes the place of what: slices, sums over tokens, small values with zeros."""
        reach = self.reach
        replaced = {node: self.part(node.args[0]) for node in reach.slices}
        for node in reach.zeros:
            users = [u for u in node.users if u not in reach.zeros]
            sums = [u for u in users if self.sums(u, node)]
            replaced |= {u: self.rebuild(u, labels_of(u).sums) for u in sums}
            if len(users) > len(sums):
                if self.is_large(node):
                    raise Conflict("reads the gradient of dropped tokens", users[0])
                replaced[node] = self.spread(node)
        return replaced

    def is_large(self, node: fx.Node) -> bool:
        return numel(node) * LARGE > numel(self.amplifier)

    def sums(self, user: fx.Node, arg: fx.Node) -> bool:
        """Whether a node sums an argument over the tokens."""
        try:
            found = follow(user, arg, self.reach.rows[arg])
        except Conflict:
            return False
        return isinstance(found, Partial) and not found.mean

    def part(self, node: Any) -> fx.Node:
        """The kept tokens of a value that the product leads to."""
        if node not in self.parts:
            self.parts[node] = self.form(node, self.reach.rows[node])
        return self.parts[node]

    def form(self, node: fx.Node, rows: Rows) -> fx.Node:
        if node in self.reach.scatters:
            return node.args[1]  # type: ignore[return-value]
        if rule_of(node).labels is not None:
            return self.rebuild(node, tuple(labels_of(node).out[rows.lo : rows.hi]), rows)
        source: Any = node.args[0]
        given = reshape(rows, shape(node), shape(source))
        return self.reshape(self.take(node, source, given), self.kept.sizes(shape(node), rows))

    def rebuild(self, node: fx.Node, labels: tuple[Any, ...], rows: Rows | None = None) -> fx.Node:
        """A node that works on the kept tokens, whose dimensions have these labels.

        Args:
            node: the node for all tokens.
            labels: those of the tokens' dimensions.
            rows: where these are in its value; None if it sums over them.
        """
        rule, new = rule_of(node), {}
        for arg, given in labels_of(node).args.items():
            places = [[i for i, label in enumerate(own) if label in labels] for own in given]
            self.read.add(arg)
            if any(p != places[0] for p in places):
                raise Conflict(f"reads {arg} in two ways", node)
            if not places[0]:
                continue
            lo, hi = places[0][0], places[0][-1] + 1
            if tuple(given[0][lo:hi]) != labels:
                raise Conflict(f"reads {arg} along some dimensions of the tokens", node)
            new[arg] = self.take(node, arg, canonical(Rows(lo, hi), shape(arg)))
        args = [
            None if i == rule.sizes else fx.map_arg(a, lambda a: new.get(a, a))
            for i, a in enumerate(node.args)
        ]
        if rule.sizes is not None:
            assert rows is not None
            args[rule.sizes] = self.numbers(self.kept.sizes(shape(node), rows))
        return self.call(node.target, *args, **node.kwargs)

    def take(self, node: fx.Node, arg: fx.Node, rows: Rows) -> fx.Node:
        """The kept tokens of an argument of a node."""
        if not equal(self.reach.rows.get(arg, rows), rows):
            raise Conflict(f"reads {arg} in another way", node)
        if arg in self.reach.rows:
            return self.part(arg)
        place = (arg, rows.lo, rows.hi)
        if place not in self.slices:
            self.slices[place] = self.outside(arg, rows)
        return self.slices[place]

    def outside(self, arg: fx.Node, rows: Rows) -> fx.Node:
        """The kept tokens of what the product does not lead to; large values have no others."""
        self.read.add(arg)
        if arg.op == "call_function" and self.is_large(arg):
            if is_product(arg) or rule_of(arg).kind == "getitem":
                raise Conflict("would be read whole", arg)
            return self.form(arg, rows)
        return self.slice(arg, rows)

    def slice(self, arg: fx.Node, rows: Rows) -> fx.Node:
        sizes, kept = shape(arg), self.kept
        dim = kept.place(sizes, rows)
        if dim is not None:
            return self.call(_ATEN.slice.Tensor, arg, dim, *kept.bounds)
        split = self.reshape(arg, kept.split(sizes, rows, kept.tokens))
        part = self.call(_ATEN.slice.Tensor, split, rows.lo + 1, *kept.bounds)
        return self.reshape(part, kept.sizes(sizes, rows))

    def spread(self, node: fx.Node) -> fx.Node:
        """A small value of the kept tokens, with zeros for the others."""
        rows, sizes, kept, value = self.reach.rows[node], shape(node), self.kept, node.meta["val"]
        part, whole, dim = self.part(node), sizes, kept.place(sizes, rows)
        if dim is None:
            whole, dim = kept.split(sizes, rows, kept.tokens), rows.lo + 1
            part = self.reshape(part, kept.split(sizes, rows, kept.count))
        options = {"dtype": value.dtype, "device": value.device}
        zeros = self.call(_ATEN.full.default, self.numbers(whole), 0, **options)
        put = self.call(_ATEN.slice_scatter.default, zeros, part, dim, *kept.bounds)
        return put if whole is sizes else self.reshape(put, sizes)

    def reshape(self, node: fx.Node, sizes: list[Size]) -> fx.Node:
        return self.call(_ATEN.reshape.default, node, self.numbers(sizes))

    def numbers(self, sizes: list[Size]) -> list[int | fx.Node]:
        """Sizes as arguments of a call."""
        return [self.builder.size(s) for s in sizes]


def _bounds(node: fx.Node, at: int, rank: int) -> tuple[int, tuple[Any, ...]]:
    """Dimension, and start, end and step of a slice."""
    given = {"dim": 0, "start": 0, "end": None, "step": 1}
    dim, *rest = (argument(node, at + i, *item) for i, item in enumerate(given.items()))
    return int(dim) % rank, tuple(rest)
