"""Takes a product apart where what comes after it works on ranges of its tokens.

`z[:256]`, `z.chunk(2)`, `for l in z` and `torch.cat([z, y])` only choose tokens: each of theirs is
one of an argument. So do the gradients of such ops, which put ranges into zeros or side by side.
What any other op makes of a range of tokens is a range of what it makes of all. So a product is
formed in ranges that nothing cuts, from ranges of its input, `z[:256] = x[:256] @ w`, and all that
it leads to as well. Then nothing large is cut along its tokens any more.

A range that nobody reads, such as the last token of every sequence where `logits[:, :-1]` is all
that is used, is not formed. Its gradient is zero, and zero times anything is taken for zero: the
result differs only where a token that is left out is not finite.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx

from storage_ops.autochunk.edit import Builder, Undo, retire, sort
from storage_ops.autochunk.lattice import (
    Conflict,
    Partial,
    Rows,
    canonical,
    equal,
    less,
    quotient,
    reshape,
    same,
)
from storage_ops.autochunk.log import log
from storage_ops.autochunk.prepare import Mutations
from storage_ops.autochunk.rules import rule_of
from storage_ops.autochunk.spans import LARGE, axes_of, follow, is_product, stops
from storage_ops.autochunk.values import (
    Size,
    argument,
    ends,
    hint,
    is_tensor,
    is_zero,
    leading_to,
    name_of,
    numel,
    reached,
    shape,
    tensors,
)

_ATEN = torch.ops.aten
_MOST = 64  # ranges of a value


class _Link(NamedTuple):
    """Tokens begin to end - 1 of a value are those of a source, from begin + shift on."""

    begin: Size
    end: Size
    source: fx.Node | None  # None: zeros
    shift: Size


def take_apart(graph: fx.Graph, product: fx.Node) -> list[fx.Node]:
    """Form a product in ranges, so that nothing large is cut along its tokens; the products.

    What has a few numbers for each token is not cut, unless that leaves tokens out.
    """
    done, waiting = [], [product]
    while waiting:
        each = waiting.pop(0)
        found = _attempt(graph, each, small=True) or _attempt(graph, each, small=False)
        if found is None:
            done.append(each)
        else:
            waiting[:0] = found
    return done


def leave_out(graph: fx.Graph, product: fx.Node) -> fx.Node:
    """Leave tokens out of a product that nobody reads; the product of the others."""
    while (found := _attempt(graph, product, small=True)) is not None:
        (product,) = found
    return product


def _attempt(graph: fx.Graph, product: fx.Node, small: bool) -> list[fx.Node] | None:
    """The products of one more cut, of which there is one if `small`; None: nothing is changed."""
    for axis, stacks in itertools.product(axes_of(product), (True, False)):
        undo, mutations = Undo(graph), Mutations(graph)
        try:
            ranges = _Ranges(graph, product, axis, small, stacks)
            if not ranges.links:
                return None
            found = ranges.run()
            mutations.check_order(graph)
            if not small or (len(found) == 1 and found != [product]):
                return found
            undo()  # all tokens are read
            return None
        except Conflict as conflict:
            undo()
            log.debug("%s: stays in one, %s: %s", product, conflict.node, conflict)
    return None


class _Ranges:
    """A product, and one of the dimensions that its tokens are.

    Attributes:
        rows: where the tokens are, in all that has them up to the next product.
        links: of each op that chooses tokens, where it takes them from.
        cuts: where ranges begin, after the first.
        parts: ranges of values, by where they begin; None: zeros.
    """

    def __init__(
        self, graph: fx.Graph, product: fx.Node, axis: int, small: bool, stacks: bool
    ) -> None:
        self.graph, self.product, self.small, self.stacks = graph, product, small, stacks
        self.after = reached([product], lambda n: not stops(n)) & leading_to(ends(graph))
        self.width = numel(product) // max(hint(shape(product)[axis]), 1)
        self.links: dict[fx.Node, tuple[Rows, list[_Link]]] = {}
        self.sums: dict[fx.Node, fx.Node] = {}  # over tokens, and what is summed
        self.cuts: dict[fx.Node, list[Size]] = {}
        self.parts: dict[tuple[fx.Node, str], fx.Node | None] = {}
        self.products: list[fx.Node] = []
        first = Rows(axis, axis + 1)
        self.finest: Size = 1
        self.rows = {product: first}
        self._follow(link=False)
        self.rows, found = {product: replace(first, outer=self.finest)}, 0
        while found < len(self.rows):
            found = len(self.rows)
            self._follow(link=True)
            self._pull()

    def _follow(self, link: bool) -> None:
        """Find where tokens are; with `link` also where ops that choose some take them from."""
        rows = self.rows
        for node in self.graph.nodes:
            known = [a for a in node.all_input_nodes
                     if a in rows and (a is self.product or not stops(a))]  # fmt: skip
            if node not in self.after or node in rows or not known or not is_tensor(node):
                continue
            try:
                chosen = self._choice(node, known[0], rows[known[0]])
                if chosen is None:
                    found = follow(node, known[0], rows[known[0]])
                elif not (self.small or self.is_wide(known[0], rows[known[0]])):
                    continue  # it reads all
                elif link:
                    found = self._linked(node, rows[known[0]], *chosen)
                else:
                    lo, given = chosen[0], rows[known[0]]
                    outer = math.prod(shape(known[0])[given.lo : lo])
                    self.finest = outer if hint(outer) > hint(self.finest) else self.finest
                    found = canonical(replace(given, lo=min(lo, given.lo)), shape(node))
            except Conflict as conflict:
                log.debug("%s: %s", node, conflict)
                continue
            if isinstance(found, Rows):
                rows[node] = found
            elif isinstance(found, Partial) and link:
                self.sums[node] = known[0]

    def _pull(self) -> None:
        """Find the tokens in what is large and read beside them."""
        for node in reversed(self.graph.nodes):
            if node in self.links:
                rows, links = self.links[node]
                reads = [(link.source, rows) for link in links if link.source is not None]
            elif node in self.rows or node in self.sums:
                given = self.rows.get(node) or self.rows[self.sums[node]]
                try:
                    reads = [(a, r) for a, (r, unit) in self.reads(node, given).items() if unit == 1]
                except Conflict:
                    continue
            else:
                continue
            for arg, rows in reads:
                if arg in self.rows or arg.op != "call_function" or not self.is_wide(arg, rows):
                    continue
                try:
                    chosen = self._choice(arg, arg, rows)
                    found = canonical(rows, shape(arg))
                    self.rows[arg] = self._linked(arg, rows, *chosen) if chosen else found
                except Conflict as conflict:
                    log.debug("%s: %s", arg, conflict)

    def _choice(self, node: fx.Node, arg: fx.Node, rows: Rows) -> tuple[int, list[_Link]] | None:
        """The dimension of the tokens along which an op chooses, and what."""
        found, lo = _choice_of(node), rows.lo
        if found is None:
            return None
        stacks = name_of(node) == "aten.cat.default" and self.stacks
        while lo and same(shape(arg)[lo - 1], 1) and not stacks:  # one sequence among several
            lo -= 1
        return found if lo <= found[0] < rows.hi else None

    def _linked(self, node: fx.Node, rows: Rows, dim: int, links: list[_Link]) -> Rows:
        if dim > rows.lo or not same(rows.outer, 1):
            raise Conflict("chooses along another dimension")
        if not links:
            raise Conflict("works on no tokens")
        inner = math.prod(shape(node)[dim + 1 : rows.hi])

        def token(index: Size) -> Size:
            return _exactly(index * inner, rows.per)

        self.links[node] = (
            replace(rows, lo=dim),
            [
                _Link(token(begin), token(end), source, token(shift))
                for begin, end, source, shift in links
            ],
        )
        return canonical(replace(rows, lo=dim), shape(node))

    def is_wide(self, node: fx.Node, rows: Rows) -> bool:
        """Whether a value has many numbers for each token."""
        return numel(node) * LARGE > self.width * hint(rows.outer * self.length(node, rows))

    def length(self, node: fx.Node, rows: Rows) -> Size:
        """How many tokens there are."""
        return quotient(quotient(math.prod(shape(node)[rows.lo : rows.hi]), rows.outer), rows.per)

    def run(self) -> list[fx.Node]:
        """Form everything in ranges; the products that take the place of this one."""
        self._cut()
        self.builder = Builder(self.graph, [self.product])
        self.call = self.builder.call
        nodes = [n for n in self.graph.nodes if n in self.after]
        for node in nodes:  # in this order, or the recursion were deep
            for begin, end in self.intervals(node) if node in self.rows else ():
                try:
                    self.part(node, begin, end)
                except Conflict as conflict:
                    log.debug("%s from %s to %s: %s", node, begin, end, conflict)
        for node in nodes:
            known = [a for a in node.all_input_nodes if a in self.rows]
            if node in self.rows and node is not self.product and stops(node):
                new = self.whole(node)
            elif node in self.sums:
                new = self.total(node)
            elif node in self.rows or not known:
                continue
            else:
                whole = {a: self.whole(a, node) for a in known}
                node.args, node.kwargs = fx.map_arg(
                    (node.args, node.kwargs), lambda a, whole=whole: whole.get(a, a)
                )
                continue
            if new is not node:
                node.replace_all_uses_with(new)
        retire(self.graph)
        sort(self.graph)
        alive = leading_to(ends(self.graph))
        if self.product in alive and self.product not in self.products:
            raise Conflict("is read whole", self.product)
        return [n for n in self.products if n in alive]

    def _cut(self) -> None:
        """Carry every cut to all that is made of the same tokens."""
        if not self.links:
            raise Conflict("chooses no tokens")
        together: list[tuple[fx.Node, _Link]] = []
        for node, (_, links) in self.links.items():
            self._add(node, (p for link in links for p in (link.begin, link.end)))
            together += [(node, link) for link in links]
        for node in [*self.rows, *self.sums]:
            if node not in self.links:
                given = self.rows.get(node) or self.rows[self.sums[node]]
                length = self.length(node if node in self.rows else self.sums[node], given)
                together += [
                    (node, _Link(0, length, a, 0))
                    for a in node.all_input_nodes
                    if a in self.rows and same(self.length(a, self.rows[a]), length)
                ]
        together = [(node, link) for node, link in together if link.source in self.rows]
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
        """Cut at these places; whether there is a new one among them."""
        cuts, rows = self.cuts.setdefault(node, []), self.rows.get(node)
        before = len(cuts)
        length = None if rows is None else self.length(node, rows)
        for new in positions:
            if same(new, 0) or (length is not None and same(new, length)):
                continue
            place = sum(less(old, new) for old in cuts)
            if place < len(cuts) and same(cuts[place], new):
                continue
            if place < len(cuts) and not less(new, cuts[place]):
                raise Conflict("is cut into ranges whose order is not known", node)
            cuts.insert(place, new)
        if len(cuts) >= _MOST:
            raise Conflict(f"is cut into more than {_MOST} ranges", node)
        return len(cuts) > before

    def intervals(self, node: fx.Node) -> Iterable[tuple[Size, Size]]:
        """Where the ranges of a value, or of a sum, begin and end."""
        of = self.sums.get(node, node)
        return itertools.pairwise([0, *self.cuts.get(node, ()), self.length(of, self.rows[of])])

    def part(self, node: fx.Node, begin: Size, end: Size) -> fx.Node | None:
        """A range of a value."""
        key = node, str(begin)
        if key not in self.parts:
            if is_zero(node):
                return None
            rows, links = self.links.get(node, (self.rows[node], None))
            if links is None:
                self.parts[key] = self.form(node, rows, begin, end)
            else:
                link = next(x for x in links if _within(begin, x.begin, x.end - 1))
                first, last, source = begin + link.shift, end + link.shift, link.source
                if source in self.rows:
                    self.parts[key] = self.part(source, first, last)
                else:
                    self.parts[key] = source and self.outside(source, rows, first, last)
        return self.parts[key]

    def take(self, node: fx.Node, arg: fx.Node, rows: Rows, begin: Size, end: Size) -> Any:
        """A range of an argument of a node; None: zeros."""
        if arg not in self.rows:
            return self.outside(arg, rows, begin, end)
        if not equal(canonical(self.rows[arg], shape(arg)), canonical(rows, shape(arg))):
            return self.sliced(self.whole(arg, node), rows, begin, end)
        return self.part(arg, begin, end)

    def outside(self, arg: fx.Node, rows: Rows, begin: Size, end: Size) -> fx.Node | None:
        """A range of what the product does not lead to."""
        if is_zero(arg):
            return None
        if same(begin, 0) and same(end, self.length(arg, rows)):
            return arg
        if arg.op == "call_function" and self.is_wide(arg, rows):
            raise Conflict("would be read whole", arg)
        key = arg, f"{begin} of {rows}"
        if key not in self.parts:
            self.parts[key] = self.sliced(arg, rows, begin, end)
        return self.parts[key]

    def form(self, node: fx.Node, rows: Rows, begin: Size, end: Size) -> fx.Node | None:
        """What an op makes of a range of its arguments; None: zeros."""
        rule, reads, new = rule_of(node), self.reads(node, rows), {}
        for arg, (given, unit) in reads.items():
            first, last = (_exactly(p, unit) for p in (begin, end))
            new[arg] = self.take(node, arg, given, first, last)
        zeros = [a for a, value in new.items() if value is None]
        if zeros and rule.degree(node, lambda a: None if a in zeros or is_zero(a) else 0) is None:
            return None
        if name_of(node) == "aten.add.Tensor" and zeros and not node.kwargs:
            left = [new.get(a, a) for a in node.args if a not in zeros]
            if left and isinstance(left[0], fx.Node) and shape(left[0]) == self.sizes(
                node, rows, begin, end
            ) and left[0].meta["val"].dtype == node.meta["val"].dtype:  # fmt: skip
                return left[0]
        for arg in zeros:
            new[arg] = self.zeros(arg, self.sizes(arg, reads[arg][0], begin, end))
        if all(arg is value for arg, value in new.items()):
            self.products += [node] if node is self.product else []
            return node
        if rule.labels is None:
            made = self.reshaped(*new.values(), self.sizes(node, rows, begin, end))
        else:
            sizes = rule.sizes is not None and self.sizes(node, rows, begin, end)
            args = [
                self.numbers(sizes) if i == rule.sizes else fx.map_arg(a, lambda a: new.get(a, a))
                for i, a in enumerate(node.args)
            ]
            target: Any = node.target
            if node in self.sums and "mean" in name_of(node):
                target = _ATEN.sum.default if len(args) == 1 else _ATEN.sum.dim_IntList
            made = self.call(target, *args, **node.kwargs)
        made.meta["stack_trace"] = node.meta.get("stack_trace")
        if is_product(node) and node is self.product:
            self.products.append(made)
        return made

    def reads(self, node: fx.Node, rows: Rows) -> dict[fx.Node, tuple[Rows, Size]]:
        """Where tokens are in the arguments of a node, and how many of them are one there."""
        rule, own = rule_of(node), self.sums.get(node)
        if rule.labels is None:
            (source,) = tensors(node)
            return {source: (self.rows.get(source) or reshape(rows, shape(node), shape(source)), 1)}
        labelled, found = rule.labels(node), {}
        labels = (labelled.out if own is None else labelled.args[own][0])[rows.lo : rows.hi]
        if any(label is None for label in labels):
            raise Conflict("mixes tokens", node)
        for arg, each in labelled.args.items():
            places = [[i for i, label in enumerate(row) if label in labels] for row in each]
            if any(p != places[0] for p in places):
                raise Conflict(f"reads {arg} in two ways", node)
            if [each[0][i] for i in places[0]] == labels:
                lo = places[0][0]
                found[arg] = replace(rows, lo=lo, hi=lo + len(labels)), 1
            elif labels[0] in each[0]:  # it is the same along the other dimensions of the tokens
                lo, sizes = each[0].index(labels[0]), shape(own or node)
                unit = quotient(math.prod(sizes[rows.lo + 1 : rows.hi]), rows.per)
                found[arg] = Rows(lo, lo + 1), unit
        return found

    def total(self, node: fx.Node) -> fx.Node:
        """A sum over tokens, of sums over ranges of them."""
        rows = self.rows[self.sums[node]]
        terms = [self.form(node, rows, begin, end) for begin, end in self.intervals(node)]
        left = [t for t in terms if t is not None]
        if not left:
            return self.zeros(node, shape(node))
        new = left[0]
        for term in left[1:]:
            new = self.call(_ATEN.add.Tensor, new, term)
        if "mean" in name_of(node) and new is not node:
            source: Any = node.args[0]
            count = math.prod(shape(source)) // math.prod(shape(node))
            new = self.call(_ATEN.div.Tensor, new, self.builder.size(count))
        return new

    def whole(self, node: fx.Node, reader: fx.Node | None = None) -> fx.Node:
        """All ranges side by side."""
        rows, parts = self.rows[node], []
        for begin, end in self.intervals(node):
            part = self.part(node, begin, end)
            sizes = self.sizes(node, rows, begin, end)
            parts.append((part or self.zeros(node, sizes), end - begin))
        if len(parts) == 1:
            return parts[0][0]
        if self.is_wide(node, rows) and reader is not None:
            raise Conflict("works on all of what should exist in ranges only", reader)
        if same(rows.outer, 1):
            return self.call(_ATEN.cat.default, [p for p, _ in parts], rows.lo)
        sizes = shape(node)
        split = [
            self.reshaped(p, [*sizes[: rows.lo], rows.outer, n * rows.per, *sizes[rows.hi :]])
            for p, n in parts
        ]
        return self.reshaped(self.call(_ATEN.cat.default, split, rows.lo + 1), sizes)

    def zeros(self, like: fx.Node, sizes: list[Size]) -> fx.Node:
        value = like.meta["val"]
        options = {"dtype": value.dtype, "device": value.device}
        return self.call(_ATEN.full.default, self.numbers(sizes), 0, **options)

    def sizes(self, node: fx.Node, rows: Rows, begin: Size, end: Size) -> list[Size]:
        """The sizes of a range of a value."""
        sizes = shape(node)
        first, last = _place(sizes, rows, begin), _place(sizes, rows, end)
        sizes[rows.lo] = rows.outer * (last - first)
        return sizes

    def sliced(self, node: fx.Node, rows: Rows, begin: Size, end: Size) -> fx.Node:
        sizes = shape(node)
        first, last = (self.builder.size(_place(sizes, rows, p)) for p in (begin, end))
        if same(rows.outer, 1):
            return self.call(_ATEN.slice.Tensor, node, rows.lo, first, last)
        length = quotient(sizes[rows.lo], rows.outer)
        split = self.reshaped(node, [*sizes[: rows.lo], rows.outer, length, *sizes[rows.hi :]])
        part = self.call(_ATEN.slice.Tensor, split, rows.lo + 1, first, last)
        return self.reshaped(part, self.sizes(node, rows, begin, end))

    def reshaped(self, node: fx.Node, sizes: list[Size]) -> fx.Node:
        return self.call(_ATEN.reshape.default, node, self.numbers(sizes))

    def numbers(self, sizes: Iterable[Size]) -> list[int | fx.Node]:
        """Sizes as arguments of a call."""
        return [self.builder.size(s) for s in sizes]


def _place(sizes: list[Size], rows: Rows, token: Size) -> Size:
    """Where a token begins, in indices of the first dimension of the tokens."""
    if rows.hi - rows.lo > 1 and not same(rows.outer, 1):
        raise Conflict("has its tokens in several dimensions")
    return _exactly(token * rows.per, math.prod(sizes[rows.lo + 1 : rows.hi]))


def _exactly(size: Size, divisor: Size) -> Size:
    """A quotient; raises Conflict if there is something left over."""
    found = quotient(size, divisor)
    if not same(found * divisor, size):
        raise Conflict("has its tokens in several dimensions")
    return found


def _within(position: Size, begin: Size, end: Size) -> bool:
    return not less(position, begin) and not less(end, position)


def _choice_of(node: fx.Node) -> tuple[int, list[_Link]] | None:
    """Along which dimension an op puts ranges side by side, and which; None: it does not."""
    name, args = name_of(node), node.args
    given: Any = args
    if name == "aten.cat.default":
        dim, end = argument(node, 1, "dim", 0) % len(shape(node)), 0
        links = []
        for source in given[0]:
            begin, end = end, end + shape(source)[dim]
            links.append(_Link(begin, end, source, -begin))
    elif name == "aten.constant_pad_nd.default":
        pads = given[1]
        padded = [i // 2 for i in range(0, len(pads), 2) if any(pads[i : i + 2])]
        if len(padded) != 1 or not is_zero(argument(node, 2, "value", 0)):
            return None
        dim, before = len(shape(node)) - 1 - padded[0], pads[2 * padded[0]]
        end, size = before + shape(given[0])[dim], shape(node)[dim]
        if min(pads[2 * padded[0] :][:2]) < 0:
            return None
        links = [_Link(0, before, None, 0), _Link(before, end, given[0], -before),
                 _Link(end, size, None, 0)]  # fmt: skip
    elif name in ("aten.slice.Tensor", "aten.slice_scatter.default"):
        place = 1 if name == "aten.slice.Tensor" else 2
        x, sizes = given[0], shape(given[0])
        dim = argument(node, place, "dim", 0) % len(sizes)
        size = sizes[dim]
        part = shape(node if place == 1 else given[1])[dim]
        begin = argument(node, place + 1, "start", 0) or 0
        begin = begin.meta["val"] if isinstance(begin, fx.Node) else begin
        if argument(node, place + 3, "step", 1) != 1 or same(part, size):
            return None
        if isinstance(begin, int) and begin < 0:
            begin = begin + size
        end = begin + part
        if place == 1:
            links = [_Link(0, part, x, begin)]
        else:
            links = [_Link(0, begin, x, 0), _Link(begin, end, given[1], -begin),
                     _Link(end, size, x, 0)]  # fmt: skip
    else:
        return None
    return dim, [link for link in links if not same(link.begin, link.end)]
