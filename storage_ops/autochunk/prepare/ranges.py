"""Computes a product in ranges if the ops after it use ranges of its tokens.

`z[:256]`, `z.chunk(2)`, `for l in z` and `torch.cat([z, y])` only select tokens of their arguments.
So do the gradients of such ops, which put ranges into zeros or next to each other. Any other op
maps a range of tokens to the same range of its result. So a product is computed in ranges that no
op cuts, from ranges of its input: `z[:256] = x[:256] @ w`. The values after it are computed in
these ranges, too. Then no large value is cut along its tokens any more.

A range that no op reads is not computed. An example is the last token of every sequence if the loss
only reads `logits[:, :-1]`. Tokens that a mask leaves out are not computed, either. Their gradient
is zero, and zero times any number counts as zero. So the result differs only if a token that is
left out is not finite.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import SequenceKey

from storage_ops.autochunk.analysis.layouts import (
    Rows,
    Spread,
    canonical,
    equal,
    less,
    quotient,
    same,
)
from storage_ops.autochunk.analysis.rules import rule_of
from storage_ops.autochunk.analysis.spans import is_product, rows_of, stops
from storage_ops.autochunk.fx_graph.edit import Builder, Undo, retire, sort
from storage_ops.autochunk.fx_graph.nodes import Size, ends, is_zero, leading_to, name_of, shape
from storage_ops.autochunk.prepare.decompose import Mutations, own_sizes
from storage_ops.autochunk.prepare.selections import mask_of
from storage_ops.autochunk.prepare.token_ranges import TokenRanges, length
from storage_ops.autochunk.reasons import Conflict, log

_ATEN = torch.ops.aten


def take_apart(graph: fx.Graph, product: fx.Node) -> list[fx.Node]:
    """Compute a product in ranges that no op cuts. Return the products.

    A value with a few numbers for each token is not cut, unless the cut leaves tokens out.
    """
    done, waiting = [], [product]
    while waiting:
        part = waiting.pop(0)
        rewritten = _attempt(graph, part, small=True) or _attempt(graph, part, small=False)
        if rewritten is None:
            done.append(part)
        else:
            waiting[:0] = rewritten
    return done


def _attempt(graph: fx.Graph, product: fx.Node, small: bool) -> list[fx.Node] | None:
    """Return the products after one more cut, or None if nothing changes.

    `small`: also cut small values, but only if the result is one product that leaves tokens out.
    """
    for first, stacks in itertools.product(rows_of(product), (True, False)):
        undo, mutations = Undo(graph), Mutations(graph)
        try:
            tokens = TokenRanges(graph, product, first, small, stacks)
            if not tokens.chosen:
                return None
            rewritten = _Parts(graph, tokens).run()
            mutations.check_order(graph)
            if not small or (len(rewritten) == 1 and not _has_sizes(rewritten[0], shape(product))):
                return rewritten
            undo()  # all tokens are read
            return None
        except Conflict as conflict:
            undo()
            log.debug("%s: not split, %s: %s", product, conflict.node, conflict)
    return None


class _Parts:
    """Computes ranges of all values that a product leads to.

    Attributes:
        parts: ranges of values, by their begin. None means zeros.
        products: the products that replace the original one.
        vectors: indices of the tokens that a mask selects.
    """

    def __init__(self, graph: fx.Graph, tokens: TokenRanges):
        self.graph, self.tokens, self.rows = graph, tokens, tokens.rows
        self.builder = Builder(graph, [tokens.product])
        self.call = self.builder.call
        self.parts: dict[tuple[fx.Node, str], fx.Node | None] = {}
        self.products: list[fx.Node] = []
        self.vectors: list[fx.Node] = []

    def run(self) -> list[fx.Node]:
        """Compute all values in ranges. Return the products that replace the original one."""
        tokens = self.tokens
        tokens.cut()
        if tokens.mask is not None:
            self.vectors = self.find(tokens.mask)
            sort(self.graph)
            own_sizes(self.graph, tokens.product)
            self.builder = Builder(self.graph, [tokens.product])
            self.call = self.builder.call
        nodes = [n for n in self.graph.nodes if n in tokens.after]
        for node in nodes:  # this order avoids a deep recursion
            try:
                for begin, end in tokens.intervals(node) if node in self.rows else ():
                    self.part(node, begin, end)
            except Conflict as conflict:
                log.debug("%s: %s", node, conflict)
        for node in nodes:
            if node not in self.rows and node not in tokens.sums:
                for arg in [a for a in node.all_input_nodes if a in self.rows]:
                    node.replace_input_with(arg, self.whole(arg, node))
            if node in tokens.sums:
                node.replace_all_uses_with(self.total(node))
            elif node in self.rows and stops(node):
                node.replace_all_uses_with(self.whole(node))
        retire(self.graph)
        sort(self.graph)
        alive = leading_to(ends(self.graph))
        if tokens.product in alive and tokens.product not in self.products:
            raise Conflict("is read whole", tokens.product)
        return [n for n in self.products if n in alive]

    def part(self, node: fx.Node, begin: Size, end: Size) -> fx.Node | None:
        """Return a range of a value, or None for zeros."""
        key = node, str(begin)
        if is_zero(node):
            return None
        if key not in self.parts:
            if node not in self.tokens.links:
                self.parts[key] = self.form(node, self.rows[node], begin, end)
            else:
                rows, links = self.tokens.links[node]
                link = next(x for x in links if same(begin, x.begin)
                            or (less(x.begin, begin) and less(begin, x.end)))  # fmt: skip
                first, last, source = begin + link.shift, end + link.shift, link.source
                if source is None:
                    self.parts[key] = None
                elif source in self.rows:
                    part = self.part(source, first, last)
                    sizes = self.sizes(node, self.rows[node], begin, end)
                    self.parts[key] = part and self.reshaped(part, sizes)
                else:
                    self.parts[key] = self.outside(node, source, rows, first, last)
        return self.parts[key]

    def take(
        self, node: fx.Node, arg: fx.Node, rows: Rows | Spread, begin: Size, end: Size
    ) -> fx.Node | None:
        """Return a range of an argument of a node, or None for zeros."""
        if isinstance(rows, Spread):
            whole = self.whole(arg, node) if arg in self.rows else arg
            spread = self.call(_ATEN.expand.default, whole, self.numbers(rows.sizes))
            return self.sliced(spread, rows.rows, begin, end)
        if arg not in self.rows:
            return self.outside(node, arg, rows, begin, end)
        if equal(*(canonical(r, shape(arg)) for r in (self.rows[arg], rows))):
            return self.part(arg, begin, end)
        return self.sliced(self.whole(arg, node), rows, begin, end)

    def outside(
        self, node: fx.Node, arg: fx.Node, rows: Rows, begin: Size, end: Size
    ) -> fx.Node | None:
        """Return a range of an argument that the product does not lead to, or None for zeros."""
        if is_zero(arg):
            return None
        if (
            not _is_all(arg, rows, begin, end)
            and not is_product(node)  # hidden states are in memory, however wide they are
            and arg.op == "call_function"
            and self.tokens.is_wide(arg, rows)
        ):
            raise Conflict("would be read whole", arg)
        key = arg, f"{begin} of {rows}"
        if key not in self.parts:
            self.parts[key] = self.sliced(arg, rows, begin, end)
        return self.parts[key]

    def form(self, node: fx.Node, rows: Rows, begin: Size, end: Size) -> fx.Node | None:
        """Return the result of a node's op on ranges of its arguments, or None for zeros."""
        if mask_of(node) is not None and _is_all(node, rows, begin, end):
            return node
        rule, reads, new = rule_of(node), self.tokens.reads(node), dict[fx.Node, Any]()
        zeros: list[fx.Node] = []
        for arg in sorted(reads, key=lambda a: a not in self.rows):
            new[arg] = self.take(node, arg, reads[arg], begin, end)
            if new[arg] is None:
                zeros.append(arg)
                if rule.degree(node, lambda a: None if a in zeros or is_zero(a) else 0) is None:
                    return None
        total = node in self.tokens.sums
        sizes = shape(node) if total else self.sizes(node, rows, begin, end)
        if len(zeros) == 1 and name_of(node) == "aten.add.Tensor" and not node.kwargs:
            (left,) = [value for value in new.values() if value is not None] or [None]
            like = node.meta["val"].dtype
            if left and _has_sizes(left, sizes) and left.meta["val"].dtype == like:
                return left  # type: ignore[no-any-return]
        for arg in zeros:
            layout = reads[arg]
            assert isinstance(layout, Rows)
            new[arg] = self.zeros(arg, self.sizes(arg, layout, begin, end))
        part_node = node
        if rule.labels is None:
            (source,) = new
            part_node = self.reshaped(new[source], sizes)
        elif any(a is not value for a, value in new.items()) or not _has_sizes(node, sizes):
            part_node = self.call(
                self.target(node),
                *(self.numbers(sizes) if i == rule.sizes else fx.map_arg(a, lambda a: new.get(a, a))
                  for i, a in enumerate(node.args)),
                **node.kwargs,
            )  # fmt: skip
        if not _has_sizes(part_node, sizes):
            raise Conflict("is not a range of its own value", node)
        part_node.meta["stack_trace"] = node.meta.get("stack_trace")
        if node is self.tokens.product:
            self.products.append(part_node)
        return part_node

    def target(self, node: fx.Node) -> Any:
        """Return the op to call for a range. A mean becomes a sum."""
        if node in self.tokens.sums and "mean" in name_of(node):
            return _ATEN.sum.default if len(node.args) == 1 else _ATEN.sum.dim_IntList
        return node.target

    def total(self, node: fx.Node) -> fx.Node:
        """Return a sum over tokens as a sum of the sums over ranges."""
        rows = self.rows[self.tokens.sums[node]]
        terms = [self.form(node, rows, *interval) for interval in self.tokens.intervals(node)]
        nonzero = [term for term in terms if term is not None]
        if not nonzero:
            return self.zeros(node, shape(node))
        new = nonzero[0]
        for term in nonzero[1:]:
            new = self.call(_ATEN.add.Tensor, new, term)
        if "mean" in name_of(node) and new is not node:
            source: Any = node.args[0]
            count = math.prod(shape(source)) // math.prod(shape(node))
            new = self.call(_ATEN.div.Tensor, new, self.builder.size(count))
        return new

    def whole(self, node: fx.Node, reader: fx.Node | None = None) -> fx.Node:
        """Return a value from all its ranges."""
        rows, intervals = self.rows[node], [*self.tokens.intervals(node)]
        if self.tokens.is_wide(node, rows) and len(intervals) > 1 and reader is not None:
            raise Conflict("needs all tokens at once, but would exist in ranges only", reader)
        if self.tokens.mask is not None and len(intervals) > 1:
            return self.put_back(node, rows)
        sizes, dim, places = _in_one_dimension(node, rows, [0, *(end for _, end in intervals)])
        parts = []
        for (begin, end), (first, last) in zip(intervals, itertools.pairwise(places), strict=True):
            part = self.part(node, begin, end)
            part = part or self.zeros(node, self.sizes(node, rows, begin, end))
            parts.append(self.reshaped(part, [*sizes[:dim], last - first, *sizes[dim + 1 :]]))
        joined = parts[0] if len(parts) == 1 else self.call(_ATEN.cat.default, parts, dim)
        return self.reshaped(joined, shape(node))

    def put_back(self, node: fx.Node, rows: Rows) -> fx.Node:
        """Return the tokens that a mask selects at their original places, between zeros."""
        (begin, end), left_out = self.tokens.intervals(node)
        part, sizes = self.part(node, begin, end), shape(node)
        if self.part(node, *left_out) is not None:
            raise Conflict("is read where a mask drops tokens", node)
        whole = self.zeros(node, self.seen(node, rows))
        if part is not None:
            part = self.reshaped(part, [*sizes[: rows.lo], end, *sizes[rows.hi :]])
            whole = self.call(_ATEN.index_put.default, whole, self.indices(rows), part)
        return self.reshaped(whole, sizes)

    def seen(self, node: fx.Node, rows: Rows) -> list[Size]:
        """Return the sizes of a value whose tokens have the dimensions of the mask."""
        sizes, mask = shape(node), self.tokens.mask
        if mask is None or not same(rows.per * rows.outer, 1):
            raise Conflict("keeps parts of groups of tokens", node)
        return [*sizes[: rows.lo], *shape(mask), *sizes[rows.hi :]]

    def indices(self, rows: Rows) -> list[fx.Node | None]:
        return [*[None] * rows.lo, *self.vectors]

    def find(self, mask: fx.Node) -> list[fx.Node]:
        """Return the indices at which a mask is true, one vector per dimension.

        All ops that index with the mask then read these vectors.
        """
        call, value, symbols = self.graph.call_function, mask.meta["val"], dict[Any, Any]()
        places = call(_ATEN.nonzero.default, (mask,))
        with value.fake_mode:
            places.meta["val"] = value.new_empty(self.tokens.kept, value.dim(), dtype=torch.int64)
        vectors = [self.call(_ATEN.select.int, places, 1, i) for i in range(value.dim())]
        for user in [u for u in mask.users if name_of(u).startswith("aten.index")]:
            indices: Any = user.args[1]
            index_lists = (vectors if index is mask else [index] for index in indices)
            user.update_arg(1, list(itertools.chain(*index_lists)))
            symbols |= user.meta.pop("unbacked_bindings", {})
        if symbols:  # a size that is only known at run time is known from this node on
            from torch.fx.experimental.symbolic_shapes import CallMethodKey  # imports sympy

            path: tuple[Any, ...] = CallMethodKey("size"), SequenceKey(0)
            places.meta["unbacked_bindings"] = dict.fromkeys(symbols, path)
        return vectors

    def zeros(self, like: fx.Node, sizes: list[Size]) -> fx.Node:
        value = like.meta["val"]
        options = {"dtype": value.dtype, "device": value.device}
        return self.call(_ATEN.full.default, self.numbers(sizes), 0, **options)

    def sizes(self, node: fx.Node, rows: Rows, begin: Size, end: Size) -> list[Size]:
        """Return the sizes of a range of a value, with all its tokens in one dimension."""
        sizes, count = shape(node), rows.outer * (end - begin) * rows.per
        return [*sizes[: rows.lo], *[1] * (rows.hi - rows.lo - 1), count, *sizes[rows.hi :]]

    def sliced(self, node: fx.Node, rows: Rows, begin: Size, end: Size) -> fx.Node:
        part = node
        if not _is_all(node, rows, begin, end):
            if self.tokens.mask is not None:
                if not same(begin, 0):
                    raise Conflict("is read where a mask drops tokens", node)
                split = self.reshaped(node, self.seen(node, rows))
                part = self.call(_ATEN.index.Tensor, split, self.indices(rows))
            else:
                sizes, dim, places = _in_one_dimension(node, rows, [begin, end])
                bounds = self.numbers(places)
                part = self.call(_ATEN.slice.Tensor, self.reshaped(node, sizes), dim, *bounds)
        return self.reshaped(part, self.sizes(node, rows, begin, end))

    def reshaped(self, node: fx.Node, sizes: list[Size]) -> fx.Node:
        if _has_sizes(node, sizes):
            return node
        return self.call(_ATEN.reshape.default, node, self.numbers(sizes))

    def numbers(self, sizes: Iterable[Size]) -> list[int | fx.Node]:
        """Return sizes as arguments of a call."""
        return [self.builder.size(s) for s in sizes]


def _has_sizes(node: fx.Node, sizes: list[Size]) -> bool:
    return len(shape(node)) == len(sizes) and all(map(same, shape(node), sizes))


def _is_all(node: fx.Node, rows: Rows, begin: Size, end: Size) -> bool:
    """Return True if a range has all tokens."""
    return same(begin, 0) and same(end, length(node, rows))


def _in_one_dimension(
    node: fx.Node, rows: Rows, tokens: list[Size]
) -> tuple[list[Size], int, list[Size]]:
    """Return sizes with a value's tokens in one dimension, this dimension, and its positions.

    The sizes are the value's own if each token begins an index of the first token dimension.
    """
    sizes = shape(node)
    inner = math.prod(sizes[rows.lo + 1 : rows.hi])
    places = [quotient(token * rows.per, inner) for token in tokens]
    whole = (same(p * inner, t * rows.per) for p, t in zip(places, tokens, strict=True))
    if same(rows.outer, 1) and all(whole):
        return sizes, rows.lo, places
    split = [*sizes[: rows.lo], rows.outer, length(node, rows) * rows.per, *sizes[rows.hi :]]
    return split, rows.lo + 1, [token * rows.per for token in tokens]
