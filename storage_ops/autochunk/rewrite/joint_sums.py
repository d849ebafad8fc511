"""Lets sums over tokens that are added to each other share memory.

Products that share a weight, or ranges of one product, each have a gradient of the weight. Ops that
do not need each other's results become one op, which adds all of these gradients in one place.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

from torch import fx

from storage_ops.autochunk.fx_graph.edit import Builder, retire, sort
from storage_ops.autochunk.fx_graph.nodes import ends, name_of, reached, shape
from storage_ops.autochunk.runtime.program import Program, decode, encode, results_of


class Term(NamedTuple):
    """A sum over tokens among the results of an op.

    Attributes:
        call, result: the op, and its result that is the sum.
        raw: the node of that result.
        value: the result as readers need it, in their dtype and times the upstream gradient.
        kind: the upstream gradient that multiplies the sum, and a scale. Only terms of one
            kind are added.
    """

    call: fx.Node
    result: int
    raw: fx.Node
    value: fx.Node
    kind: tuple[fx.Node | None, float]


def add_up(graph: fx.Graph, terms: list[Term]) -> None:
    """Let ops add up results that the graph adds to each other."""
    for sums in _connected(_sums(graph, terms)):
        calls = list(dict.fromkeys(t.call for group in sums.values() for t in group))
        after = [reached([call]) for call in calls]
        if not any(call in dependents for call in calls for dependents in after):
            _unite(Builder(graph, [next(iter(sums.values()))[0].raw]), calls, sums)
            retire(graph)
            sort(graph)


def _sums(graph: fx.Graph, terms: list[Term]) -> dict[fx.Node, list[Term]]:
    """Return the sums of terms that no other node reads."""
    known = {t.value: [t] for t in terms if shape(t.raw)}
    terms_of: dict[fx.Node, list[Term]] = {}
    for node in graph.nodes:
        if name_of(node) != "aten.add.Tensor" or node.kwargs:
            continue
        parts = [known.get(a, []) for a in node.all_input_nodes]
        group = [term for part in parts for term in part]
        alike = {(t.kind, t.raw.meta["val"].dtype, str(shape(t.raw))) for t in group}
        if len(parts) == 2 and all(parts) and len(alike) == 1 and len(set(group)) == len(group):
            known[node] = terms_of[node] = group
            for arg in node.all_input_nodes:
                terms_of.pop(arg, None)
    return {total: group for total, group in terms_of.items() if _only_read_by(total, group, graph)}


def _only_read_by(total: fx.Node, group: list[Term], graph: fx.Graph) -> bool:
    return not reached([t.raw for t in group], lambda n: n is not total) & set(ends(graph))


def _connected(sums: dict[fx.Node, list[Term]]) -> list[dict[fx.Node, list[Term]]]:
    """Group the sums of the same ops."""
    groups: list[dict[fx.Node, list[Term]]] = []
    for total, group in sums.items():
        calls = {t.call for t in group}
        near = [s for s in groups if calls & {t.call for g in s.values() for t in g}]
        groups = [s for s in groups if s not in near]
        groups.append({k: v for s in [*near, {total: group}] for k, v in s.items()})
    return groups


def _unite(builder: Builder, calls: list[fx.Node], sums: dict[fx.Node, list[Term]]) -> None:
    """Merge several ops into one, with one result for each sum."""
    places = {(t.call, t.result): i for i, group in enumerate(sums.values()) for t in group}
    sizes: dict[int, list[Any]] = {}
    programs: list[Program] = []
    for call in calls:
        call_args: Any = call.args
        flat, own = list(call_args[2]), decode(call_args[4])
        for index, (spec, *_) in enumerate(results_of(own)):
            place = places.setdefault((call, index), len({*places.values()}))
            sizes[place], flat = flat[: spec.rank], flat[spec.rank :]
        for program in own:
            outputs = (o._replace(place=places[call, o.place]) for o in program.outputs)
            programs.append(program._replace(outputs=tuple(outputs)))
    joined: list[Any] = [[x for call in calls for x in call.args[i]] for i in (0, 1, 3)]  # type: ignore[union-attr]
    flat = [s for place in range(len(sizes)) for s in sizes[place]]
    target: Any = calls[0].target
    united = builder.call(target, *joined[:2], flat, joined[2], encode(programs))
    results = {p: builder.call(operator.getitem, united, p) for p in sizes}
    for total, (first, *_) in sums.items():
        steps, node = [], first.value
        while node is not first.raw:
            steps.append(node)
            node = node.args[0]  # type: ignore[assignment]
        value = results[places[first.call, first.result]]
        for step in reversed(steps):
            value = builder.call(step.target, value, *step.args[1:], **step.kwargs)
        total.replace_all_uses_with(value)
    for call in calls:
        for user in list(call.users):
            user.replace_all_uses_with(results[places[call, user.args[1]]])  # type: ignore[index]
