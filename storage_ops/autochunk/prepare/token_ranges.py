"""The places of a product's tokens in later values, and the begins of ranges of tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch import fx

from storage_ops.autochunk.analysis.layouts import (
    Partial,
    Rows,
    Spread,
    canonical,
    equal,
    less,
    quotient,
    reshape,
    same,
)
from storage_ops.autochunk.analysis.rules import rule_of
from storage_ops.autochunk.analysis.spans import LARGE, follow, is_product, read, stops
from storage_ops.autochunk.fx_graph.nodes import (
    Size,
    ends,
    hint,
    is_tensor,
    leading_to,
    name_of,
    numel,
    reached,
    shape,
    tensors,
)
from storage_ops.autochunk.prepare.selections import Link, choice_of, mask_of
from storage_ops.autochunk.reasons import Conflict, log

_MOST = 64  # most ranges of a value


class TokenRanges:
    """The tokens of a product along one of its dimensions.

    Attributes:
        after: the nodes after the product, up to the next product.
        rows: the tokens' dimensions in values after the product, and in other wide values.
        sums: sums over tokens, and their arguments.
        links: ops that select tokens, and their links.
        mask: the mask that selects tokens, or None. The `kept` tokens are the first range.
        cuts: the begins of all ranges except the first.
    """

    def __init__(
        self, graph: fx.Graph, product: fx.Node, first: Rows, small: bool, stacks: bool
    ) -> None:
        """Find the tokens after a product.

        `small`: also cut values that are not wide. `stacks`: a concatenation along another
        dimension puts tokens next to others, and adds no tokens.
        """
        self.graph, self.product, self.small, self.stacks = graph, product, small, stacks
        self.after = reached([product], lambda n: not stops(n)) & leading_to(ends(graph))
        self.width = numel(product) // max(hint(shape(product)[first.lo]), 1)
        self.sums: dict[fx.Node, fx.Node] = {}
        self.links: dict[fx.Node, tuple[Rows, list[Link]]] = {}
        self.cuts: dict[fx.Node, list[Size]] = {}
        self.mask: fx.Node | None = None
        self.kept: Size = 0
        self.sliced = False  # set before a mask was found
        self.aside: dict[fx.Node, fx.Node] = {}  # arguments of masks, for a later attempt
        self.outer: Size = 1
        self.rows = {product: first}
        self._follow(link=False)
        self.rows, known = {product: replace(first, outer=self.outer)}, 0
        while known < len(self.rows):
            known = len(self.rows)
            self._follow(link=True)
            self._pull()

    @property
    def chosen(self) -> bool:
        """Return True if ops select among these tokens.

        Slices of the product's input do not count.
        """
        return any(len(links) > 1 or links[0].source in self.rows
                   for _, links in self.links.values())  # fmt: skip

    def _follow(self, link: bool) -> None:
        """Find the tokens in the values that a product leads to.

        Without `link`, only find the dimension of the tokens along which ops select, by default the
        last.
        """
        for node in self.graph.nodes:
            known = [a for a in node.all_input_nodes
                     if a in self.rows and (a is self.product or not stops(a))]  # fmt: skip
            if node not in self.after or node in self.rows or not is_tensor(node):
                continue
            source = self.aside.get((mask_of(node) or (0, node))[1])
            if source is not None and source in self.rows and shape(node) == shape(source):
                self.rows[node] = self.rows[source]
            if node in self.rows or not known:
                continue
            rows = self.rows[known[0]]
            try:
                chosen = self._choice(node, known[0], rows)
                if chosen is None:
                    arg_rows = self._masked(node, known[0]) or follow(node, known[0], rows)
                elif self.mask is not None:
                    continue  # left to a later attempt
                elif not (self.small or self.is_wide(known[0], rows)):
                    continue  # it reads all tokens
                elif link:
                    arg_rows = self._linked(node, *chosen)
                else:
                    self.sliced = True
                    rows, dim, _ = chosen
                    outer = math.prod(shape(known[0])[rows.lo : dim])
                    self.outer = max(self.outer, outer, key=hint)
                    arg_rows = canonical(rows, shape(node))
            except Conflict as conflict:
                log.debug("%s: %s", node, conflict)
                continue
            if isinstance(arg_rows, Rows):
                self.rows[node] = arg_rows
            elif isinstance(arg_rows, Partial) and link:
                self.sums[node] = known[0]

    def _pull(self) -> None:
        """Find the tokens in other wide values that ops read, except for factors of products."""
        for node in reversed(self.graph.nodes):
            if is_product(node) or (node not in self.rows and node not in self.sums):
                continue
            try:
                for arg, rows in self.reads(node).items():
                    if arg in self.rows or arg.op != "call_function" or isinstance(rows, Spread):
                        continue
                    if self.is_wide(arg, rows):
                        chosen, arg_rows = self._choice(arg, arg, rows), canonical(rows, shape(arg))
                        if chosen and self.mask is not None:
                            continue
                        self.rows[arg] = self._linked(arg, *chosen) if chosen else arg_rows
            except Conflict as conflict:
                log.debug("%s: %s", node, conflict)

    def _choice(
        self, node: fx.Node, arg: fx.Node, rows: Rows
    ) -> tuple[Rows, int, list[Link]] | None:
        """Return the tokens of an argument that an op selects, the dimension, and the links."""
        choice = choice_of(node)
        if choice is None or rows.lo <= choice[0] < rows.hi:
            return choice and (rows, *choice)
        dim, sizes = choice[0], shape(arg)
        if name_of(node) == "aten.cat.default" and self.stacks:
            return None
        if dim < rows.lo and all(same(s, 1) for s in sizes[dim : rows.lo]):
            return replace(rows, lo=dim), *choice  # one sequence among several
        if same(sizes[dim], 1) and same(length(arg, rows), 1):
            return replace(rows, lo=dim, hi=dim + 1), *choice  # one token
        return None

    def _masked(self, node: fx.Node, arg: fx.Node) -> Rows | None:
        """Return the tokens' dimensions after an op selects by a mask, or undoes a selection."""
        masked = mask_of(node)
        if masked is None or self.product in leading_to([masked[1]]):
            return None
        (lo, mask), rows = masked, self.rows[arg]
        if self.sliced:
            self.aside[mask] = arg
            return None
        every, selected = Rows(lo, lo + len(shape(mask))), Rows(lo, lo + 1)
        selects = name_of(node) == "aten.index.Tensor"
        count = shape(node if selects else arg)[lo]
        if self.mask is None and selects:
            self.mask, self.kept = mask, count
        mask_rows = canonical(every if selects else selected, shape(arg))
        if mask is not self.mask or not equal(canonical(rows, shape(arg)), mask_rows):
            raise Conflict("keeps other tokens, or parts of them", node)
        end = math.prod(shape(mask))
        links = [Link(0, count, arg, 0), *([] if selects else [Link(count, end, None, 0)])]
        self.links[node] = mask_rows, links
        return canonical(selected if selects else every, shape(node))

    def _linked(self, node: fx.Node, rows: Rows, dim: int, links: list[Link]) -> Rows:
        if dim > rows.lo or not same(rows.outer, 1):
            raise Conflict("selects along another dimension")
        if not links:
            raise Conflict("works on no tokens")
        inner = math.prod(shape(node)[dim + 1 : rows.hi])

        def token(index: Size) -> Size:
            token_index = quotient(index * inner, rows.per)
            if not same(token_index * rows.per, index * inner):
                raise Conflict("drops parts of tokens")
            return token_index

        self.links[node] = (
            replace(rows, lo=dim),
            [
                Link(token(begin), token(end), source, token(shift))
                for begin, end, source, shift in links
            ],
        )
        return canonical(replace(rows, lo=dim), shape(node))

    def reads(self, node: fx.Node) -> dict[fx.Node, Rows | Spread]:
        """Return the tokens' dimensions in each argument of a node that has tokens."""
        if node in self.links:
            rows, links = self.links[node]
            return {x.source: rows for x in links if x.source is not None}
        rule, own = rule_of(node), self.sums.get(node)
        rows = self.rows[node if own is None else own]
        if rule.labels is None:
            (source,) = tensors(node)
            return {source: self.rows.get(source) or reshape(rows, shape(node), shape(source))}
        labelled, layout_of = rule.labels(node), dict[fx.Node, Rows | Spread]()
        labels = (labelled.out if own is None else labelled.args[own][0])[rows.lo : rows.hi]
        for arg, arg_labels in labelled.args.items():
            layouts = [read(node, arg, row, labels, rows) for row in arg_labels]
            if any(not equal(x, layouts[0]) for x in layouts[1:]):
                raise Conflict(f"reads {arg} with two layouts", node)
            if isinstance(layouts[0], (Rows, Spread)):
                layout_of[arg] = layouts[0]
        return layout_of

    def is_wide(self, node: fx.Node, rows: Rows) -> bool:
        """Return True if a value has many numbers for each token."""
        return numel(node) * LARGE > self.width * hint(rows.outer * length(node, rows))

    def intervals(self, node: fx.Node) -> Iterator[tuple[Size, Size]]:
        """Return the begin and end of each range of a value, or of a sum's argument."""
        of = self.sums.get(node, node)
        return itertools.pairwise([0, *self.cuts.get(node, ()), length(of, self.rows[of])])

    def cut(self) -> None:
        """Apply every cut to all values with the same tokens."""
        together: list[tuple[fx.Node, Link]] = []
        for node in [*self.rows, *self.sums]:
            if node in self.links:
                links = self.links[node][1]
                self._add(node, (p for link in links for p in (link.begin, link.end)))
                together += [(node, link) for link in links if link.source in self.rows]
                continue
            of = self.sums.get(node, node)
            end = length(of, self.rows[of])
            together += [(node, Link(0, end, a, 0)) for a in node.all_input_nodes
                         if a in self.rows and same(length(a, self.rows[a]), end)]  # fmt: skip
        grown = True
        while grown:
            grown = False
            for node, (begin, end, source, shift) in together:
                assert source is not None
                known = [begin, *self.cuts.get(node, ()), end]
                grown |= self._add(source, (p + shift for p in known if _within(p, begin, end)))
                read = [p - shift for p in self.cuts.get(source, ())]
                grown |= self._add(node, (p for p in read if _within(p, begin, end)))

    def _add(self, node: fx.Node, positions: Iterable[Size]) -> bool:
        """Cut at these positions. Return True if one of them is new."""
        cuts, of = self.cuts.setdefault(node, []), self.sums.get(node, node)
        before, end = len(cuts), length(of, self.rows[of])
        for new in positions:
            place = sum(less(old, new) for old in cuts)
            if same(new, 0) or same(new, end) or any(same(new, old) for old in cuts):
                continue
            known = less(0, new) and less(new, end) and all(less(new, p) for p in cuts[place:])
            if not known and self.mask is None:
                raise Conflict("is split into ranges in an unknown order", node)
            cuts.insert(place, new)
        if len(cuts) >= _MOST:
            raise Conflict(f"is split into more than {_MOST} ranges", node)
        return len(cuts) > before


def length(node: fx.Node, rows: Rows) -> Size:
    """Return the number of tokens of a value. Repeated tokens count once."""
    return quotient(quotient(math.prod(shape(node)[rows.lo : rows.hi]), rows.outer), rows.per)


def _within(position: Size, begin: Size, end: Size) -> bool:
    """Return True if a position is inside a range or at its ends."""
    return not less(position, begin) and not less(end, position)
