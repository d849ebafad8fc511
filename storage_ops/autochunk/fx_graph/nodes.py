"""Facts about a node: its op, its value and the sizes of the value, its arguments and readers."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import fx

Size: TypeAlias = Any  # int, or torch.SymInt
_UNBOUNDED = 8192  # replaces a size that is unknown before the graph runs


def name_of(node: fx.Node) -> str:
    """Return the name of a node's op in the table."""
    return "getitem" if node.target is operator.getitem else str(node.target)


def short_name(node: Any) -> str:
    """Return the name of an op without library and overload."""
    return name_of(node).split(".")[-2:][0]


def shape(node: fx.Node) -> list[Any]:
    """Return the sizes of a node's value."""
    value = node.meta["val"]
    return list((value[0] if isinstance(value, (tuple, list)) else value).shape)


def is_tensor(item: object) -> bool:
    """Return True if an argument is a node whose value is one tensor or several."""
    if not isinstance(item, fx.Node):
        return False
    value = item.meta.get("val")
    return hasattr(value, "shape") or (
        isinstance(value, (tuple, list)) and bool(value) and hasattr(value[0], "shape")
    )


def tensors(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that are tensors, each once."""
    return [a for a in node.all_input_nodes if is_tensor(a)]


def argument(node: fx.Node, index: int, name: str, default: object) -> Any:
    """Return an argument by position or by name."""
    if len(node.args) > index:
        return node.args[index]
    return node.kwargs.get(name, default)


def is_zero(node: object) -> bool:
    """Return True if a value is certainly zero. A product with zero counts as zero."""
    if isinstance(node, (int, float)):
        return node == 0
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    name = name_of(node)
    filled = {"aten.full.default": 1, "aten.scalar_tensor.default": 0, "aten.full_like.default": 1}
    if name in filled:
        value = node.args[filled[name]]
        return isinstance(value, (int, float)) and value == 0
    if name in ("aten.zeros.default", "aten.zeros_like.default"):
        return True
    base = viewed(node)
    return base is not None and is_zero(base)


def viewed(node: fx.Node) -> fx.Node | None:
    """Return the node that a node's value is a view of, or None if the value is not a view.

    A node with several views as results counts as a view.
    """
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    if node.target is operator.getitem:
        return node.args[0] if viewed(node.args[0]) is not None else None
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.returns:
        return None
    alias = schema.returns[0].alias_info
    fresh_by_name = "_unsafe_view" in name_of(
        node
    )  # it returns a view, although its schema does not say so
    return node.args[0] if fresh_by_name or (alias is not None and not alias.is_write) else None


def owner(node: fx.Node) -> fx.Node:
    """Return the node whose memory a node's value views, or the node itself if it is no view."""
    while (base := viewed(node)) is not None:
        node = base
    return node


def ends(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes for which a graph is evaluated: its output, and ops with side effects."""
    return [n for n in graph.nodes if n.op == "output" or n.is_impure()]


def returned(graph: fx.Graph) -> list[Any]:
    """Return the values that a graph returns, one or several."""
    (outputs,) = next(n for n in graph.nodes if n.op == "output").args
    return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]


def leading_to(
    nodes: Iterable[fx.Node], replaced: Mapping[fx.Node, fx.Node] | None = None
) -> set[fx.Node]:
    """Return nodes with all their direct and indirect arguments.

    `replaced` maps a node to its replacement.
    """
    before = set(nodes)
    stack = list(before)
    while stack:
        for arg in stack.pop().all_input_nodes:
            now = (replaced or {}).get(arg, arg)
            if now not in before:
                before.add(now)
                stack.append(now)
    return before


def is_hinted(size: Size) -> bool:
    """Return True if a size is known, at least for an example.

    The number of elements that a mask selects is unknown.
    """
    return isinstance(size, int) or bool(size.node.has_hint())


def hint(size: Size) -> int:
    """Return a size as a number: the example's if it is symbolic, or the largest possible."""
    if is_hinted(size):
        return size if isinstance(size, int) else int(size.node.hint)
    most = size.node.shape_env.bound_sympy(size.node.expr).upper  # a mask may select all tokens
    return int(most) if most.is_Integer else _UNBOUNDED


def values_of(node: fx.Node) -> list[torch.Tensor]:
    """Return the fake tensors of a node's value, in a graph of ATen ops or of Dynamo."""
    value = node.meta.get("val", node.meta.get("example_value"))
    values = value if isinstance(value, (tuple, list)) else [value]
    return [v for v in values if isinstance(v, torch.Tensor)]


def elements(value: torch.Tensor) -> int:
    """Return the number of elements of a value. Symbols count as their hints."""
    sizes: list[int] = [hint(s) for s in value.shape]
    return math.prod(sizes)


def numel(node: fx.Node) -> int:
    """Return the number of elements of all values of a node."""
    return sum(elements(v) for v in values_of(node))


def nbytes(node: fx.Node) -> int:
    """Return the bytes of all values of a node."""
    return sum(elements(v) * v.element_size() for v in values_of(node))


def are_one(value: torch.Tensor, lo: int, hi: int) -> bool:
    """Return True if dimensions lo to hi - 1 can be merged without a copy."""
    sizes, strides = map(hint, value.shape[lo:hi]), map(hint, value.stride()[lo:hi])
    kept = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size != 1]
    return all(one[1] == size * step for one, (size, step) in itertools.pairwise(kept))


def tangents_of(graph: fx.Graph) -> list[fx.Node]:
    """Return the upstream gradients among the inputs of a joint graph of forward and backward."""
    return [n for n in graph.nodes if n.op == "placeholder" and "tangents" in str(n.target)]


def reached(
    starts: Iterable[fx.Node], through: Callable[[fx.Node], bool] = lambda node: True
) -> set[fx.Node]:
    """Return all direct and indirect users of nodes. Users that fail `through` end the search."""
    after: set[fx.Node] = set()
    stack = list(starts)
    while stack:
        for user in stack.pop().users:
            if user not in after:
                after.add(user)
                if through(user):
                    stack.append(user)
    return after
