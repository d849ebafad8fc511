"""Leaves tokens out before a product where the forward leaves them out after it.

Causal losses often form the logits of all tokens and then drop some of every sequence:
`logits[:, :-1]`. Chunks would have to be whole sequences. But a row of a product needs one row of
its input: `(x @ w)[:, a:b] = x[:, a:b] @ w`, so the slice moves up to the input, through what works
on each token alone. So does a mask of tokens, as in `logits[mask]`. Autograd then puts the zeros
around the small gradient of the input. The result differs only where a dropped token is not finite:
zero times that is zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from storage_ops.autochunk.edit import Builder, sort
from storage_ops.autochunk.lattice import Conflict, Rows, canonical, equal, reshape, same
from storage_ops.autochunk.log import log
from storage_ops.autochunk.rules import rule_of
from storage_ops.autochunk.spans import LARGE, follow, is_product, labels_of
from storage_ops.autochunk.values import (
    Size,
    argument,
    ends,
    is_tensor,
    leading_to,
    name_of,
    numel,
    reached,
    shape,
)

_ATEN = torch.ops.aten


@dataclass
class Dropped:
    """What has become of a product that leads to slices of tokens.

    Attributes:
        amplifier: the product of the tokens that are kept; as it was if they all are.
        replaced: for slices of tokens what has taken their place.
        complete: whether no slice of tokens is left, as where dropped tokens are read elsewhere.
    """

    amplifier: fx.Node
    replaced: dict[fx.Node, fx.Node]
    complete: bool = True


def drop(graph: fx.Graph, amplifier: fx.Node) -> Dropped:
    """Move slices of tokens up to the input of a product, in a forward graph."""
    done = Dropped(amplifier, {})
    try:
        while (kept := (reach := _Reach(graph, done.amplifier)).kept) is not None:
            done.amplifier, new = _Moving(graph, reach, kept).run()
            done.replaced |= new
    except Conflict as conflict:
        log.debug("%s: tokens stay, %s: %s", done.amplifier, conflict.node, conflict)
        done.complete = False
    graph.eliminate_dead_code()
    return done


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


@dataclass(frozen=True)
class _Masked:
    """Tokens for which a mask is true: `count` of them, in the last dimension that tokens have."""

    mask: fx.Node
    count: Size

    def sizes(self, sizes: Sequence[Size], rows: Rows) -> list[Size]:
        """The sizes of what is kept of a value of these sizes."""
        if not same(rows.per, 1):
            raise Conflict("keeps parts of groups")
        return [*sizes[: rows.lo], *[1] * (rows.hi - rows.lo - 1), self.count, *sizes[rows.hi :]]


class _Reach:
    """What a product leads to, up to the slices.

    Attributes:
        rows: where the tokens are, of every node that has all of them.
        kept: which of them are kept.
        slices: nodes that keep those.
    """

    def __init__(self, graph: fx.Graph, amplifier: fx.Node):
        self.amplifier = amplifier
        self.rows: dict[fx.Node, Rows] = {amplifier: Rows(0, 1)}
        self.kept: _Kept | _Masked | None = None
        self.slices: list[fx.Node] = []
        after = reached([amplifier])
        for node in graph.nodes:
            known = [a for a in node.all_input_nodes if a in self.rows]
            if node not in after or not is_tensor(node) or not known:
                continue
            if self.take_mask(node) or self.take_slice(node):
                continue
            try:
                found = follow(node, known[0], self.rows[known[0]])
            except Conflict:
                continue
            if isinstance(found, Rows):
                self.rows[node] = found

    def take_mask(self, node: fx.Node) -> bool:
        """Whether a node keeps the tokens of a mask; the first one says which."""
        if name_of(node) != "aten.index.Tensor":
            return False
        given: Any = node.args[:2]
        source, (mask, *others) = given
        rows = self.rows.get(source)
        if rows is None or others or mask is None or mask.meta["val"].dtype != torch.bool:
            return False
        every = same(math.prod(shape(mask)), shape(self.amplifier)[0])
        if rows.hi != len(shape(mask)) or not every:
            raise Conflict("drops parts of tokens", node)
        self.kept = self.kept or _Masked(mask, shape(node)[0])
        if not isinstance(self.kept, _Masked) or self.kept.mask is not mask:
            raise Conflict("keeps other tokens", node)
        self.slices.append(node)
        return True

    def take_slice(self, node: fx.Node) -> bool:
        """Whether a node drops tokens; the first one says which."""
        if name_of(node) != "aten.slice.Tensor":
            return False
        source: Any = node.args[0]
        sizes, rows = shape(source), self.rows[source]
        given = {"dim": 0, "start": 0, "end": None, "step": 1}
        dim, *bounds = (argument(node, 1 + i, *item) for i, item in enumerate(given.items()))
        dim %= len(sizes)
        if not rows.lo <= dim < rows.hi or same(shape(node)[dim], sizes[dim]):
            return False
        if not same(math.prod(sizes[rows.lo : rows.hi]), shape(self.amplifier)[0]):
            raise Conflict("drops parts of tokens", node)
        if self.kept is None:
            outer, inner = sizes[rows.lo : dim], sizes[dim + 1 : rows.hi]
            self.kept = _Kept(
                math.prod(outer), sizes[dim], math.prod(inner), shape(node)[dim], tuple(bounds)
            )
            if same(self.kept.count, 0):
                raise Conflict("keeps no tokens", node)
        if (
            not isinstance(self.kept, _Kept)
            or tuple(bounds) != self.kept.bounds
            or self.kept.place(sizes, rows) != dim
        ):
            raise Conflict("keeps other tokens", node)
        self.slices.append(node)
        return True


class _Moving:
    """Moves slices up."""

    def __init__(self, graph: fx.Graph, reach: _Reach, kept: _Kept | _Masked):
        self.graph, self.reach, self.kept = graph, reach, kept
        self.amplifier = reach.amplifier
        # Sizes come from what the product is made of: all else may come later where this is put.
        made_of = [self.amplifier, *([kept.mask] if isinstance(kept, _Masked) else [])]
        later = set(graph.nodes) - leading_to(made_of)
        self.builder = Builder(graph, [self.amplifier], later)
        self.call = self.builder.call
        self.parts: dict[fx.Node, fx.Node] = {}
        self.slices: dict[tuple[fx.Node, int, int], fx.Node] = {}

    def run(self) -> tuple[fx.Node, dict[fx.Node, fx.Node]]:
        """The product of the tokens that are kept, and what takes the place of the slices."""
        replaced = {
            node: self.of_shape(self.part(node.args[0]), node) for node in self.reach.slices
        }
        if self.amplifier in leading_to(ends(self.graph), replaced):
            raise Conflict("is read for tokens that are dropped elsewhere", self.amplifier)
        for node, value in replaced.items():
            node.replace_all_uses_with(value)
        sort(self.graph)
        return self.part(self.amplifier), replaced

    def part(self, node: Any) -> fx.Node:
        """The kept tokens of a value that the product leads to."""
        if node not in self.parts:
            self.parts[node] = self.form(node, self.reach.rows[node])
        return self.parts[node]

    def form(self, node: fx.Node, rows: Rows) -> fx.Node:
        rule = rule_of(node)
        if rule.labels is None:
            source: Any = node.args[0]
            given = reshape(rows, shape(node), shape(source))
            return self.reshape(self.take(node, source, given), self.kept.sizes(shape(node), rows))
        labelled, new = labels_of(node), {}
        labels = labelled.out[rows.lo : rows.hi]
        for arg, each in labelled.args.items():
            places = [[i for i, label in enumerate(own) if label in labels] for own in each]
            if any(p != places[0] for p in places):
                raise Conflict(f"reads {arg} in two ways", node)
            if not places[0]:
                continue
            lo, hi = places[0][0], places[0][-1] + 1
            if each[0][lo:hi] != labels:
                raise Conflict(f"reads {arg} along some dimensions of the tokens", node)
            new[arg] = self.take(node, arg, canonical(Rows(lo, hi), shape(arg)))
        args = [
            self.numbers(self.kept.sizes(shape(node), rows)) if i == rule.sizes
            else fx.map_arg(a, lambda a: new.get(a, a))
            for i, a in enumerate(node.args)
        ]  # fmt: skip
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
        if arg.op == "call_function" and numel(arg) * LARGE > numel(self.amplifier):
            if is_product(arg) or rule_of(arg).kind == "getitem":
                raise Conflict("would be read whole", arg)
            return self.form(arg, rows)
        sizes, kept = shape(arg), self.kept
        if isinstance(kept, _Masked):
            # Indexed by the mask itself: what else the function indexes by it has as many tokens.
            split = [*sizes[: rows.lo], *shape(kept.mask), *sizes[rows.hi :]]
            whole = arg if split == sizes else self.reshape(arg, split)
            part = self.call(_ATEN.index.Tensor, whole, [None] * rows.lo + [kept.mask])
            self.builder.size.known.setdefault(str(kept.count), (part, rows.lo))
            return self.reshape(part, kept.sizes(sizes, rows))
        dim = kept.place(sizes, rows)
        if dim is not None:
            return self.call(_ATEN.slice.Tensor, arg, dim, *kept.bounds)
        split = [*sizes[: rows.lo], kept.outer, kept.tokens, kept.inner, *sizes[rows.hi :]]
        part = self.call(_ATEN.slice.Tensor, self.reshape(arg, split), rows.lo + 1, *kept.bounds)
        return self.reshape(part, kept.sizes(sizes, rows))

    def of_shape(self, part: fx.Node, node: fx.Node) -> fx.Node:
        """A value in the shape of a node: a mask makes one dimension of all that tokens have."""
        if len(shape(part)) == len(shape(node)):
            return part
        return self.reshape(part, [-1, *shape(node)[1:]])

    def reshape(self, node: fx.Node, sizes: list[Size]) -> fx.Node:
        return self.call(_ATEN.reshape.default, node, self.numbers(sizes))

    def numbers(self, sizes: list[Size]) -> list[int | fx.Node]:
        """Sizes as arguments of a call."""
        return [self.builder.size(s) for s in sizes]
