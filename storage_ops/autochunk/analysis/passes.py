"""The order in which a span computes its results, and their dependence on the upstream gradient.

A result may be linear in one number, the upstream gradient of a loss. The forward computes it with
1 in place of this number, and a multiplication afterwards corrects it. Other results must wait for
upstream gradients: if they depend on several, on one per token, or on a square. The backward
computes these results, in passes that compute the logits again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import fx

from storage_ops.autochunk.analysis.rules import Degree, rule_of
from storage_ops.autochunk.analysis.spans import Span
from storage_ops.autochunk.fx_graph.nodes import (
    hint,
    is_tensor,
    is_zero,
    leading_to,
    numel,
    reached,
    shape,
)
from storage_ops.autochunk.reasons import Conflict, log


class Turn(NamedTuple):
    """A pass over the tokens. Backward passes come last, and see all results of the forward."""

    backward: bool
    number: int


@dataclass
class Passes:
    """A span in the order of its evaluation.

    Attributes:
        outputs: for every pass, the nodes of the span that are read outside the pass.
        tangent: the upstream gradient that is assumed to be 1, or None.
        scaled: nodes of the span, and arguments of the span, that have `tangent` as a factor.
        dependent: all nodes after `tangent`.
    """

    outputs: list[list[fx.Node]]
    tangent: fx.Node | None = None
    scaled: set[fx.Node] = field(default_factory=set)
    dependent: set[fx.Node] = field(default_factory=set)


def order(graph: fx.Graph, span: Span, tangents: list[fx.Node]) -> Passes:
    """Return the passes of a span, as few as possible.

    A result that would need one more pass is computed outside the span.

    Raises:
        Conflict: a result would be needed before it exists.
    """
    after = reached(span.amplifiers)
    for node in _outputs(span, after):
        if node in span.large:
            user = next(u for u in node.users if u not in span.layouts)
            if user.op == "output":
                raise Conflict("is returned, or kept for a backward that is not in the graph", node)
            raise Conflict("needs all tokens at once, but would exist in chunks only", user)
    result, late = Passes([]), set[fx.Node]()
    try:
        _scale(graph, span, result, tangents)
    except Conflict as conflict:
        log.debug("gradients wait for the backward, for %s: %s", conflict.node, conflict)
        late = reached(tangents)
    turns = _turns(graph, span, after, late)
    outputs = _outputs(span, after)
    groups = {turn: [n for n in outputs if turns[n] == turn] for turn in turns.values()}
    result.outputs = [groups[turn] for turn in sorted(groups) if groups[turn]]
    return result


def _outputs(span: Span, after: set[fx.Node]) -> list[fx.Node]:
    """Return the nodes of the span that are read outside it, or inside with another layout."""
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


def _turns(
    graph: fx.Graph, span: Span, after: set[fx.Node], late: set[fx.Node]
) -> dict[fx.Node, Turn]:
    """Return the pass in which each node of the span can be evaluated.

    Nodes in `late` are evaluated only in the backward. A small value that depends only on small
    values leaves the span if it can be computed outside as early as in a chunk. For example, a mask
    by a quantile of all tokens, and its sum, need no pass.
    """
    inside: dict[fx.Node, Turn] = {}
    outside: dict[fx.Node, Turn] = {}  # the first pass that can read a whole value

    def whole(arg: fx.Node) -> Turn:
        if arg in inside and arg not in outside:
            return inside[arg]._replace(number=inside[arg].number + 1)
        return outside.get(arg, Turn(False, 0))

    for node in graph.nodes:
        start = Turn(node in late, 0)
        alone = max([start, *map(whole, node.all_input_nodes)])
        led_to = node in after or node in span.amplifiers
        if node in span.layouts:
            reads = span.reads[node]
            inside[node] = max(
                [start, *(inside[a] if span.reads_inside(a, lay) else whole(a) for a, lay in reads)]
            )
            small = node not in span.large and not any(a in span.large for a, _ in reads)
            if led_to and small and alone <= inside[node]:
                del inside[node], span.layouts[node], span.reads[node]
        if node not in span.layouts or not led_to:
            outside[node] = alone  # a value that no amplifier leads to is whole, too
    for node in reversed(graph.nodes):
        if node in span.layouts and node in after and _can_leave(span, node, inside):
            del inside[node], span.layouts[node], span.reads[node]
    return inside


def _can_leave(span: Span, node: fx.Node, turns: dict[fx.Node, Turn]) -> bool:
    """Return True if a node depends on a few numbers per token, and its own pass does not read it.

    Chunks then end at these numbers. Chunks of several losses become equal, so only one is
    compiled.
    """
    if node in span.large or any(
        a in span.large or (a in span.layouts and numel(a) > hint(span.tokens))
        for a, _ in span.reads[node]
    ):
        return False
    users = [u for u in node.users if u in span.layouts]
    return all(span.reads[u] and turns[u] > turns[node] for u in users)


def _scale(graph: fx.Graph, span: Span, result: Passes, tangents: list[fx.Node]) -> None:
    """Find the upstream gradient that can be assumed to be 1, if one is read.

    Raises:
        Conflict: there are several, or the gradient is not only a factor.
    """
    inputs = {arg for reads in span.reads.values() for arg, _ in reads} - set(span.layouts)
    below = {t: reached([t]) | {t} for t in tangents}
    used = [t for t in tangents if below[t] & (inputs | set(span.layouts))]
    if not used:
        return
    if len(used) > 1:
        raise Conflict(f"combines {len(used)} upstream gradients", used[1])
    (tangent,) = used
    if shape(tangent):
        sizes = tuple(shape(tangent))
        raise Conflict(f"the upstream gradient is not a scalar: its shape is {sizes}", tangent)
    of_interest = [n for n in [*inputs, *span.layouts] if n in below[tangent]]
    degrees = _degrees(graph, tangent, leading_to(of_interest) & below[tangent])
    result.scaled = {n for n in of_interest if degrees[n] == 1}
    result.tangent, result.dependent = tangent, below[tangent]


def _degrees(graph: fx.Graph, tangent: fx.Node, dependent: set[fx.Node]) -> dict[fx.Node, Degree]:
    """Return the degree of each node in the upstream gradient.

    Nodes that are not in the result have degree 0.
    """
    degrees: dict[fx.Node, Degree] = {tangent: 1}

    def degree(item: object) -> Degree:
        if is_zero(item):
            return None
        return degrees.get(item, 0) if isinstance(item, fx.Node) else 0

    for node in graph.nodes:
        if node not in dependent or node is tangent:
            continue
        if not is_tensor(node):
            raise Conflict("depends on the upstream gradient", node)
        try:
            degrees[node] = None if is_zero(node) else rule_of(node).degree(node, degree)
        except Conflict as conflict:
            raise Conflict(str(conflict), conflict.node or node) from None
    return degrees
