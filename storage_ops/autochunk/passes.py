"""In what order a span's results can be had, and how they depend on the upstream gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import fx

from storage_ops.autochunk.lattice import Conflict
from storage_ops.autochunk.rules import Degree, rule_of
from storage_ops.autochunk.spans import Span
from storage_ops.autochunk.values import is_tensor, is_zero, reached, shape

PASSES = 2


@dataclass
class Passes:
    """A span in the order of its evaluation.

    Attributes:
        outputs: for every pass over the tokens, the nodes of the span that others read.
        tangent: the upstream gradient that the outputs are linear in, if there is one.
        scaled: outputs and outside values that carry it as a factor.
        dependent: all nodes after it.
    """

    outputs: list[list[fx.Node]]
    tangent: fx.Node | None = None
    scaled: set[fx.Node] = field(default_factory=set)
    dependent: set[fx.Node] = field(default_factory=set)


def order(graph: fx.Graph, span: Span, tangents: list[fx.Node]) -> Passes:
    """Passes of a span.

    Raises:
        Conflict: a result would be needed before it is there, or the dependence on the upstream
            gradient is not linear.
    """
    after = reached(span.amplifiers)
    outputs = _outputs(span, after)
    for node in outputs:
        if node in span.large:
            user = next(u for u in node.users if u not in span.layouts)
            if user.op == "output":
                raise Conflict("is returned, or kept for a backward that is not in the graph", node)
            raise Conflict("works on the whole of what should exist in chunks only", user)
    numbers = _numbers(graph, span, after)
    if max(numbers[node] for node in outputs) >= PASSES:
        late = next(node for node in outputs if numbers[node] >= PASSES)
        raise Conflict(f"needs more than {PASSES} passes over the tokens", late)
    grouped = [[n for n in outputs if numbers[n] == i] for i in range(PASSES)]
    result = Passes([group for group in grouped if group])
    _scale(span, result, outputs, tangents)
    return result


def _outputs(span: Span, after: set[fx.Node]) -> list[fx.Node]:
    """Nodes of the span that are read outside it, or inside in another form."""
    mismatched = {
        arg
        for reads in span.reads.values()
        for arg, layout in reads
        if arg in span.layouts and not span.reads_inside(arg, layout)
    }
    own = [n for n in span.layouts if n in after or n in span.amplifiers]
    return [
        n for n in own
        if n in mismatched or any(user not in span.layouts for user in n.users)
    ]  # fmt: skip


def _numbers(graph: fx.Graph, span: Span, after: set[fx.Node]) -> dict[fx.Node, int]:
    """The pass in which each node of the span can be evaluated."""
    inside: dict[fx.Node, int] = {}
    outside: dict[fx.Node, int] = {}  # the first pass that can read the whole of a value

    def first_pass(arg: fx.Node) -> int:
        return inside[arg] + 1 if arg in inside and arg not in outside else outside.get(arg, 0)

    for node in graph.nodes:
        if node in span.layouts:
            inside[node] = max(
                (
                    inside[arg] if span.reads_inside(arg, layout) else first_pass(arg)
                    for arg, layout in span.reads[node]
                ),
                default=0,
            )
        if node not in span.layouts or not (node in after or node in span.amplifiers):
            # What no amplifier leads to can also be had whole.
            outside[node] = max((first_pass(arg) for arg in node.all_input_nodes), default=0)
    return inside


def _scale(span: Span, result: Passes, outputs: list[fx.Node], tangents: list[fx.Node]) -> None:
    """Find the upstream gradient of the span and check that it is a mere factor."""
    read = {arg for reads in span.reads.values() for arg, _ in reads} - set(span.layouts)
    below = {t: reached([t]) | {t} for t in tangents}
    used = [t for t in tangents if below[t] & (read | set(span.layouts))]
    if not used:
        return
    if len(used) > 1:
        names = ", ".join(str(t) for t in used)
        raise Conflict(
            f"{len(used)} upstream gradients ({names}) meet in it: several losses", used[1]
        )
    (tangent,) = used
    if shape(tangent):
        sizes = tuple(shape(tangent))
        raise Conflict(f"the upstream gradient is not a scalar: its shape is {sizes}", tangent)
    result.tangent, result.dependent = tangent, below[tangent]
    degree = _degrees(tangent, result.dependent)
    result.scaled = {n for n in [*read, *outputs] if degree(n) == 1}


def _degrees(tangent: fx.Node, dependent: set[fx.Node]) -> Callable[[object], Degree]:
    known: dict[fx.Node, Degree] = {tangent: 1}

    def degree(item: object) -> Degree:
        if is_zero(item):
            return None
        if not isinstance(item, fx.Node) or item not in dependent:
            return 0
        stack = [item]
        while stack:  # without recursion: graphs are deep
            node = stack[-1]
            missing = [a for a in node.all_input_nodes if a in dependent and a not in known]
            if node in known or not missing:
                stack.pop()
                if node not in known:
                    known[node] = _law(node)
            else:
                stack.extend(missing)
        return known[item]

    def look_up(item: object) -> Degree:
        if is_zero(item):
            return None
        return known.get(item, 0) if isinstance(item, fx.Node) else 0

    def _law(node: fx.Node) -> Degree:
        if not is_tensor(node):
            raise Conflict("depends on the upstream gradient", node)
        try:
            return rule_of(node).degree(node, look_up)
        except Conflict as conflict:
            raise Conflict(str(conflict), conflict.node or node) from None

    return degree
