"""Symbolic sizes as arguments of calls."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from storage_ops.autochunk.nodes import shape
from storage_ops.autochunk.state import Conflict, Size

_OPERATORS = {"Add": operator.add, "Mul": operator.mul, "FloorDiv": operator.floordiv}


class Sizes:
    """Sizes as numbers, or as nodes: those that have them already, or sums and products of them."""

    def __init__(self, call: Callable[..., fx.Node], nodes: Iterable[fx.Node]):
        """Take sizes from nodes; `call` adds one."""
        self.call = call
        # Dead nodes have lost their arguments, and are no source.
        given = [n for n in nodes if n.op != "call_function" or n.args]
        self.known = _sizes_of(n for n in given if n.op == "placeholder")
        self.others = _sizes_of(given)

    def __call__(self, size: Size) -> int | fx.Node:
        """A size as a number or as a node.

        Raises:
            Conflict: it is made of what no node has.
        """
        number = size if isinstance(size, int) else size.node.maybe_as_int()
        if number is not None:  # also a symbol that was found to have one value only
            return int(number)
        return self._of(size.node.expr)

    def _of(self, expression: Any) -> int | fx.Node:
        name = str(expression)
        found = self.known.get(name)
        if found is None:
            if expression.is_Integer:
                return int(expression)
            found = self._combined(expression)
        if isinstance(found, tuple):
            found = self.call(torch.ops.aten.sym_size.int, *found)
        self.known[name] = found
        return found

    def _combined(self, expression: Any) -> fx.Node | tuple[fx.Node, int]:
        """A sum or product of sizes of inputs; where that cannot be, the size of another value."""
        law = _OPERATORS.get(expression.func.__name__)
        try:
            if law is None:
                raise Conflict(f"the size {expression} is not that of an input")
            parts: list[Any] = [self._of(part) for part in expression.args]
            node: fx.Node = functools.reduce(functools.partial(self.call, law), parts)
            return node
        except Conflict:
            found = self.others.get(str(expression))
            if found is None:
                raise
            return found


def _sizes_of(nodes: Iterable[fx.Node]) -> dict[str, fx.Node | tuple[fx.Node, int]]:
    """Sizes that nodes are, or that they have."""
    found: dict[str, fx.Node | tuple[fx.Node, int]] = {}
    given = [(n, n.meta.get("val")) for n in nodes]
    for node, value in given:
        if isinstance(value, torch.SymInt):
            found.setdefault(str(value), node)
    for node, value in given:
        if isinstance(value, torch.Tensor):
            for dim, size in enumerate(shape(node)):
                if not isinstance(size, int):
                    found.setdefault(str(size), (node, dim))
    return found
