"""Moves the classes of logits into the last dimension, in all values that depend on the logits.

A product has its classes last: (N, H, W, C). A loss of images permutes the logits to (N, C, H, W),
where tokens are not contiguous, so a chunk would be whole images. An op on (N, C, H, W) is the same
op on (N, H, W, C) with other dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from storage_ops.autochunk.analysis.layouts import same
from storage_ops.autochunk.analysis.rules import RULES, dims_of, permuting
from storage_ops.autochunk.analysis.spans import LARGE, stops
from storage_ops.autochunk.fx_graph.edit import Builder, retire, sort
from storage_ops.autochunk.fx_graph.nodes import (
    Size,
    argument,
    is_tensor,
    name_of,
    numel,
    reached,
    shape,
    short_name,
    tensors,
)

_ATEN = torch.ops.aten
_DIMENSION = {  # ops along one dimension, with the position of that argument
    "_softmax": 1, "_log_softmax": 1, "_softmax_backward_data": 2, "_log_softmax_backward_data": 2,
    "gather": 1, "scatter": 1, "scatter_add": 1,
}  # fmt: skip
_KINDS = {"elementwise", "reduce", "sum", "softmax", "gather", "scatter", "expand", "view",
          "permute", "getitem", "create"}  # fmt: skip


def move_classes_last(graph: fx.Graph, product: fx.Node) -> None:
    """Move the classes to the last dimension in all values that a product leads to.

    Raises:
        Conflict: a value needs a size that no node has.
    """
    _Moving(graph, product).run()


class _Moving:
    """Moves one dimension of values to the end.

    Attributes:
        places: the class dimension of each value that the product leads to.
        unchanged: values of `places` that do not depend on the place of the classes.
        moved: new nodes, by value and dimension.
    """

    def __init__(self, graph: fx.Graph, product: fx.Node):
        self.graph, self.product = graph, product
        self.builder = Builder(graph, [product])
        self.places = {product: len(shape(product)) - 1}
        self.unchanged = {product}
        self.moved: dict[tuple[fx.Node, int], fx.Node] = {}

    def run(self) -> None:
        """Replace the values whose classes are last again, or that have no classes any more."""
        after = reached([self.product], lambda n: not stops(n))
        nodes = [n for n in self.graph.nodes if n in after]
        for node in nodes:
            inputs = self.arguments_with_classes(node)
            place = self.place(node) if inputs and _is_known(node) else None
            if place is not None:
                self.places[node] = place
                if place == len(shape(node)) - 1 and self.unchanged.issuperset(inputs):
                    self.unchanged.add(node)
        if len(self.unchanged) == len(self.places):
            return
        for node in nodes:
            if node in self.places:
                self.last(node, self.places[node])
            elif not self.unchanged.issuperset(inputs := self.arguments_with_classes(node)):
                new = self.apply(node, self.places[inputs[0]]) if _is_known(node) else None
                if new is not None:
                    node.replace_all_uses_with(new)
                    continue
                for arg in inputs:
                    node.replace_input_with(arg, self.first(arg))
        retire(self.graph)
        sort(self.graph)

    def arguments_with_classes(self, node: fx.Node) -> list[fx.Node]:
        """Return the arguments of a node that have a class dimension."""
        return [a for a in node.all_input_nodes if a in self.places]

    def place(self, node: fx.Node) -> int | None:
        """Return the class dimension of a node's value, or None if it has none."""
        arg, kind = self.arguments_with_classes(node)[0], _kind(node)
        place, added = self.places[arg], len(shape(node)) - len(shape(arg))
        if kind in ("reduce", "sum"):
            dims = dims_of(argument(node, 1, "dim", None), len(shape(arg)))
            if argument(node, 2, "keepdim", False):
                return place
            return None if place in dims else place - sum(d < place for d in dims)
        if kind == "view":
            return _seen(shape(arg), place, shape(node))
        if kind == "permute":
            moved_place: int = permuting(node).out.index(place)
            return moved_place
        return place + added

    def last(self, node: fx.Node, dim: int) -> fx.Node:
        """Return a value with a dimension moved to the end."""
        key = node, dim
        if dim == len(shape(node)) - 1 and (node in self.unchanged or node not in self.places):
            return node
        if key not in self.moved:
            moved = self.apply(node, dim) if self.is_made_again(node) else None
            if moved is None:
                source = self.first(node) if node in self.places else node
                moved = self.to_end(source, dim)
            self.moved[key] = moved
        return self.moved[key]

    def to_end(self, node: fx.Node, dim: int) -> fx.Node:
        """Move a dimension of a value to the end. A single element needs no permutation."""
        if same(shape(node)[dim], 1):
            return self.reshaped(node, _to_end(shape(node), dim))
        return self.permuted(node, _to_end(range(len(shape(node))), dim))

    def reshaped(self, node: fx.Node, sizes: list[Size]) -> fx.Node:
        call, size = self.builder.call, self.builder.size
        return call(_ATEN.reshape.default, node, list(map(size, sizes)))

    def is_made_again(self, node: fx.Node) -> bool:
        """Return True if a value is computed with other dimensions instead of being permuted.

        A chunk computes its part of a large value, and of a small value that depends on large ones.
        """
        large = any(numel(n) * LARGE > numel(self.product) for n in (node, *tensors(node)))
        return _is_known(node) and (node in self.places or large)

    def first(self, node: fx.Node) -> fx.Node:
        """Return a value that the product leads to, with its original order of dimensions."""
        if (node, self.places[node]) not in self.moved:
            return node
        order = list(range(len(shape(node)) - 1))
        order.insert(self.places[node], len(order))
        return self.permuted(self.moved[node, self.places[node]], order)

    def permuted(self, node: fx.Node, order: list[int]) -> fx.Node:
        if order == sorted(order):
            return node
        return self.builder.call(_ATEN.permute.default, node, order)

    def apply(self, node: fx.Node, dim: int) -> fx.Node | None:
        """Apply the op of a node to arguments with a dimension moved to the end.

        `dim` counts in the result, or in the argument if the result has no such dimension. Returns
        None if the op cannot be applied that way.
        """
        kind, args = _kind(node), list[Any](node.args)
        kwargs = {k: v for k, v in node.kwargs.items() if k != "memory_format"}
        call = self.builder.call
        if kind in ("view", "permute"):
            return self.seen(node, args[0], dim)
        if kind == "create":
            return call(node.target, _to_end(args[0], dim), *args[1:], **kwargs)
        if kind in ("reduce", "sum"):
            x, rank = args[0], len(shape(args[0]))
            dims_arg = argument(node, 1, "dim", None)
            dims = dims_of(dims_arg, rank)
            if dims_arg is None and short_name(node) in ("argmax", "argmin"):
                return None  # an index of the elements in memory order
            if node in self.places and not argument(node, 2, "keepdim", False):
                dim = next(d for d in range(rank)
                           if d not in dims and d - sum(e < d for e in dims) == dim)  # fmt: skip
            if len(args) > 1:
                new = [_moved_dim(d, dim, rank) for d in dims]
                args[1] = new[0] if isinstance(dims_arg, int) else new
            elif dims_arg is not None:
                return None
            return call(node.target, self.last(x, dim), *args[1:], **kwargs)
        rank = len(shape(node))
        if short_name(node) in _DIMENSION:
            place = _DIMENSION[short_name(node)]
            args[place] = _moved_dim(args[place] % rank, dim, rank)
        elif kind == "expand":
            args[1] = _to_end(args[1], dim)
        elif kind == "softmax":
            return None
        args = fx.map_arg(args, lambda a: self.aligned(a, dim, rank))
        return call(node.target, *args, **kwargs)

    def aligned(self, arg: fx.Node, dim: int, rank: int) -> fx.Node:
        """Return an argument of a broadcasting op, with one dimension of the result last."""
        if not is_tensor(arg) or not shape(arg):
            return arg
        place = dim - (rank - len(shape(arg)))
        if place < 0:
            return self.builder.call(_ATEN.unsqueeze.default, arg, -1)
        return self.last(arg, place)

    def seen(self, node: fx.Node, x: fx.Node, dim: int) -> fx.Node | None:
        """Return another view of an argument, with a dimension moved to the end."""
        if _kind(node) == "permute":
            order = permuting(node).out
            source = order[dim]
            rest = [d - (d > source) for d in order if d != source]
            return self.permuted(self.last(x, source), [*rest, len(rest)])
        if node in self.places or x not in self.places:
            seen_dim = _seen(shape(node), dim, shape(x))
            if seen_dim is None:
                return None
            sizes = _to_end(shape(node), dim)
            x = self.last(x, seen_dim)
        elif same(shape(x)[dim], 1):  # it may be anywhere
            sizes, x = shape(node), self.last(x, dim)
        else:
            return None
        return self.reshaped(x, sizes)


def _kind(node: fx.Node) -> str:
    return RULES[name_of(node)].kind


def _is_known(node: fx.Node) -> bool:
    """Return True if the op of a node supports its dimensions in another order."""
    return (
        node.op == "call_function"
        and name_of(node) in RULES
        and _kind(node) in _KINDS
        and not any(is_tensor(a) for a in node.kwargs.values())
    )


def _moved_dim(dim: int, moved: int, rank: int) -> int:
    """Return the place of a dimension after another one was moved to the end."""
    return rank - 1 if dim == moved else dim - (dim > moved)


def _to_end(sizes: Sequence[Any], dim: int) -> list[Any]:
    return [*sizes[:dim], *sizes[dim + 1 :], sizes[dim]]


def _seen(old: list[Size], dim: int, new: list[Size]) -> int | None:
    """Return the dimension of a view that equals a dimension of its argument, or None."""
    if same(old[dim], 1):
        return None
    before = math.prod(old[:dim])
    for place, size in enumerate(new):
        if same(size, old[dim]) and same(math.prod(new[:place]), before):
            return place
    return None
