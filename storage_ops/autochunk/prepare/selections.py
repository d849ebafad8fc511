"""Finds ops that only select ranges along one dimension, from arguments or zeros.

A mask also selects. Its tokens count as the first range of tokens in another order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from storage_ops.autochunk.analysis.layouts import same
from storage_ops.autochunk.fx_graph.nodes import Size, argument, is_zero, name_of, shape


class Link(NamedTuple):
    """Elements begin to end - 1 of a value are those of a source, from begin + shift on."""

    begin: Size
    end: Size
    source: fx.Node | None  # None: zeros
    shift: Size


def choice_of(node: fx.Node) -> tuple[int, list[Link]] | None:
    """Return the dimension along which an op selects, and the links. None for any other op."""
    args: Any = node.args
    choice: tuple[int, list[Link]] | None = None
    if name_of(node) == "aten.cat.default":
        choice = _put_together(node, args[0])
    elif name_of(node) == "aten.constant_pad_nd.default":
        choice = _padded(node, *args[:2])
    elif name_of(node) in ("aten.slice.Tensor", "aten.slice_scatter.default"):
        choice = _cut_out(node, args[0])
    return choice and (choice[0], [x for x in choice[1] if not same(x.begin, x.end)])


def mask_of(node: fx.Node) -> tuple[int, fx.Node] | None:
    """Return the mask and first dimension of an op that selects by a mask, or undoes it."""
    args: Any = node.args
    if name_of(node) == "aten.index_put.default":
        known = is_zero(args[0])
    else:
        known = name_of(node) == "aten.index.Tensor"
    if not known or any(index is not None for index in args[1][:-1]):
        return None
    mask = args[1][-1]
    return (len(args[1]) - 1, mask) if mask.meta["val"].dtype == torch.bool else None


def _put_together(node: fx.Node, sources: list[fx.Node]) -> tuple[int, list[Link]]:
    dim, end, links = argument(node, 1, "dim", 0) % len(shape(node)), 0, []
    for source in sources:
        begin, end = end, end + shape(source)[dim]
        links.append(Link(begin, end, source, -begin))
    return dim, links


def _padded(node: fx.Node, x: fx.Node, pads: list[Any]) -> tuple[int, list[Link]] | None:
    pairs = list(zip(pads[::2], pads[1::2], strict=True))  # pairs start at the last dimension
    padded = [i for i, pair in enumerate(pairs) if any(pair)]
    if len(padded) != 1 or min(pairs[padded[0]]) < 0 or not is_zero(argument(node, 2, "value", 0)):
        return None
    dim, before = len(shape(node)) - 1 - padded[0], pairs[padded[0]][0]
    end = before + shape(x)[dim]
    zeros = Link(0, before, None, 0), Link(end, shape(node)[dim], None, 0)
    return dim, [zeros[0], Link(before, end, x, -before), zeros[1]]


def _cut_out(node: fx.Node, x: fx.Node) -> tuple[int, list[Link]] | None:
    """Return the links of a slice, or of an op that replaces a slice of an argument."""
    scattered: Any = node.args[1] if "scatter" in name_of(node) else None
    place, sizes = (1 if scattered is None else 2), shape(x)
    dim = argument(node, place, "dim", 0) % len(sizes)
    part = shape(node if scattered is None else scattered)[dim]
    start = argument(node, place + 1, "start", 0) or 0
    begin = start.meta["val"] if isinstance(start, fx.Node) else start
    if argument(node, place + 3, "step", 1) != 1 or same(part, sizes[dim]):
        return None
    begin = begin + sizes[dim] if isinstance(begin, int) and begin < 0 else begin
    if scattered is None:
        return dim, [Link(0, part, x, begin)]
    end = begin + part
    return dim, [Link(0, begin, x, 0), Link(begin, end, scattered, -begin),
                 Link(end, sizes[dim], x, 0)]  # fmt: skip
