"""One buffer for the large product of all chunks, which the chunk's gradient then overwrites."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from storage_ops.autochunk.nodes import name_of, shape, viewed
from storage_ops.autochunk.propagate import Span
from storage_ops.autochunk.state import Rows, equal, same


def share(span: Span, one: Any) -> tuple[tuple[int, ...] | None, int | None]:
    """Let a pass take its product as an argument, and write over it what has its size.

    The product is then formed in the same memory for every chunk. Passes with several large
    products, or with one of a value of their own, stay as they are.

    Returns:
        The places of the product's arguments among the inputs, and that of the value which is
        written over it among the values; None where there is no such thing.
    """
    body: fx.Graph = one.graph
    products = [n for n in span.amplifiers if n in one.env]
    inputs = [p for _, _, p in one.inputs]
    if len(products) != 1 or name_of(products[0]) not in ("aten.mm.default", "aten.addmm.default"):
        return None, None
    amplifier, product = products[0], one.env[products[0]]
    if product.kwargs or amplifier in one.values or not all(a in inputs for a in product.args):
        return None, None
    formed = tuple(inputs.index(a) for a in product.args)
    layouts = [one.inputs[i][1] for i in formed]
    if not isinstance(layouts[-2], Rows) or any(isinstance(lay, Rows) for lay in layouts[:-2]):
        return None, None
    with body.inserting_before(inputs[0]):
        place = body.placeholder("product")
    product.replace_all_uses_with(place)
    body.erase_node(product)
    one.env[amplifier] = place
    return formed, _overwrite(span, one, amplifier, place)


def _overwrite(span: Span, one: Any, amplifier: fx.Node, place: fx.Node) -> int | None:
    body: fx.Graph = one.graph
    found = None
    for i, node in enumerate(one.values):
        value, like = node.meta["val"], amplifier.meta["val"]
        sized = value.dim() == 2 and all(map(same, shape(node), shape(amplifier)))
        sized = sized and equal(span.layouts[node], span.layouts[amplifier])
        if found is None and sized and value.dtype == like.dtype:
            found = i
        elif _is_view(one.env[node], place):
            return None  # and would change with it
    if found is None or _is_view(one.env[one.values[found]], place):
        return None
    (end,) = (n for n in body.nodes if n.op == "output")
    values: Any = end.args[0]
    with body.inserting_before(end):
        written = body.call_function(torch.ops.aten.copy_.default, (place, values[found]))
    end.args = ([written if i == found else v for i, v in enumerate(values)],)
    return found


def _is_view(node: fx.Node, of: fx.Node) -> bool:
    """Whether a value shares memory with another."""
    base: fx.Node | None = node
    while base is not None and base is not of:
        base = viewed(base)
    return base is of
