"""Predicts the peak memory of a compiled graph above its inputs, from the lifetimes of values."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import fx

from storage_ops.autochunk.analysis import op_plan
from storage_ops.autochunk.analysis.rules import RULES
from storage_ops.autochunk.fx_graph.nodes import (
    elements,
    ends,
    hint,
    leading_to,
    name_of,
    nbytes,
    numel,
    owner,
    reached,
    short_name,
    tangents_of,
    values_of,
)
from storage_ops.autochunk.runtime.program import Program, blocks, decode, results_of
from storage_ops.foundation.lifetimes import Moment, levels_during

_FUSED = ("elementwise", "create", "scatter", "gather", "along", "select", "pad", "softmax")
_REDUCTIONS = ("sum", "reduce")
# Ops with memory of their own for the result, on a CPU.
_WRITTEN = ("aten.cat.default", "aten.scatter_add.default")
_HEAVY = ("exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh")
_ALIASES = ("alias", "detach")  # like slices, these ops return a view in memory
_ELSEWHERE = {"sum", "along"}  # kinds of ops with loops that Inductor does not fuse
_APART = {*_ELSEWHERE, "gather", "reduce"}  # the same for a value that reads many others
_MANY = 4  # Inductor stores a value with several readers if it loads more values than this
_VIEWS = ("view", "expand", "permute", "getitem")


def fusion_kind(node: fx.Node) -> str:
    """Return the kind of a node's op.

    It is "opaque" if the op has no rule and is not elementwise.
    """
    rule = RULES.get(name_of(node)) if node.op == "call_function" else None
    if rule is not None:
        return "gather" if rule.kind == "index" and "put" not in name_of(node) else rule.kind
    tags = getattr(node.target, "tags", ())
    if name_of(node) == "aten.copy_.default":  # copies a chunk over its product
        return "elementwise"
    fused = torch.Tag.pointwise in tags or name_of(node) == "prims.iota.default"
    return "elementwise" if fused else "opaque"


def peak(graph: fx.Graph, of_chunk: bool = False) -> int:
    """Return the predicted peak bytes above the inputs, with the whole forward before the backward.

    `of_chunk`: on a CPU, Inductor makes one kernel of a chunk, which frees nothing before its end.
    Inductor fuses elementwise ops into the ops that read them. An elementwise value is stored only
    if a product, a reduction or the graph's end reads it. A value reuses the memory of an argument
    of its own size that no other node reads. It does not do so if the loop of the value also
    reduces that argument, or if another loop gathers from it.
    """
    backward = reached(tangents_of(graph))
    alive = leading_to(ends(graph))
    nodes = sorted((n for n in graph.nodes if n in alive), key=lambda n: n in backward)
    reads, stored = _reads(nodes, backward)
    not_reused = {
        (value, node in backward)
        for node in nodes
        if fusion_kind(node) in (*_REDUCTIONS, "gather")
        for value in reads[node]
    }
    moments = []
    for node in nodes:
        if node in stored:
            fused = fusion_kind(node) in _FUSED
            moments.append(Moment(
                node.name, {n: nbytes(n) for n in _results(node)}, reads[node], held_inside(node),
                [n for n in reads[node] if fused and (n, node in backward) not in not_reused],
            ))  # fmt: skip
        elif node.op == "output":
            moments.append(Moment(node.name, reads=reads[node]))
    if of_chunk and any(map(_on_cpu, stored)):
        moments[-1] = replace(moments[-1], reads={*moments[-1].reads, *_not_overwritten(moments)})
    return max(levels_during(moments), default=0)


def _not_overwritten(moments: list[Moment]) -> set[fx.Node]:
    """Return the values of these moments whose memory no later value reuses."""
    last = {n: i for i, moment in enumerate(moments) for n in (*moment.makes, *moment.reads)}
    sizes = {n: size for moment in moments for n, size in moment.makes.items()}
    for i, moment in enumerate(moments):
        size = sum(moment.makes.values())
        over = [n for n in moment.overwrites if last[n] == i and sizes.get(n) == size]
        for n in over[:1]:
            del sizes[n]
    return set(sizes)


def _reads(
    nodes: list[fx.Node], backward: Container[fx.Node]
) -> tuple[dict[fx.Node, set[fx.Node]], set[fx.Node]]:
    """Return the values in memory that each node reads through fused ones, and the stored nodes."""
    reads, stored = dict[fx.Node, set[fx.Node]](), set[fx.Node]()
    heavy, results = set[fx.Node](), set[fx.Node]()  # results of stored nodes
    loads, many = dict[fx.Node, set[object]](), set[fx.Node]()
    for node in nodes:
        kind = fusion_kind(node)
        if kind in (*_FUSED, *_VIEWS) and (
            short_name(node) in _HEAVY or not heavy.isdisjoint(node.all_input_nodes)
        ):
            heavy.add(node)
        values: set[fx.Node] = set()
        for arg in node.all_input_nodes:
            values |= {arg} if arg in results else reads[arg]
        reads[node] = values
        loads[node] = _loads(node, loads, results)
        if len(loads[node]) > _MANY:
            many.add(node)
        base = owner(node)
        exists = base is not node and (base.op == "placeholder" or base in stored)
        part = exists and (kind in ("along", "select") or short_name(node) in _ALIASES)
        if not part and _is_stored(node, backward, heavy, many):
            stored.add(node)
            results.update(_results(node))
            heavy.discard(node)
    return reads, stored


def _loads(
    node: fx.Node, known: Mapping[fx.Node, set[object]], stored: Container[fx.Node]
) -> set[object]:
    """Return the values that Inductor's loop for a value loads, through fused ops.

    Each index of the same value counts as a load. An interpolation counts as many loads, because it
    computes its indices. The largest of `x * number` in a softmax becomes three loads: Inductor
    takes the largest and the smallest of `x`, and tests for inf. Single numbers do not count.
    """
    if short_name(node) == "_unsafe_index":
        return {(node, i) for i in range(_MANY + 1)}
    loaded: set[object] = set()
    for arg in node.all_input_nodes:
        if arg not in stored and arg.op != "placeholder":
            loaded |= known[arg]
        elif short_name(arg) == "amax" and short_name(arg.args[0]) in ("mul", "div"):
            loaded |= {(arg, i) for i in range(3)}
        elif numel(arg) > 1:
            loaded.add(arg)
    return {(node, argument) for argument in loaded} if fusion_kind(node) == "gather" else loaded


def _results(node: fx.Node) -> list[fx.Node]:
    """Return the results of a node with several results, or else the node.

    Each result has its own lifetime.
    """
    return [u for u in node.users if name_of(u) == "getitem"] or [node]


def _is_stored(
    node: fx.Node, backward: Container[fx.Node], heavy: Container[fx.Node],
    many: Container[fx.Node],
) -> bool:  # fmt: skip
    kind = fusion_kind(node)
    if node.op != "call_function" or name_of(node) == "aten.copy_.default":
        return False
    if name_of(node) in _WRITTEN and _on_cpu(node):
        return True
    if kind in _FUSED or kind == "expand":
        readers = [fusion_kind(u) for u in _readers(node)]
        if kind == "expand":  # no product reads an expanded number as a matrix
            return "product" in readers and numel(node) > 1 == numel(node.all_input_nodes[0])
        apart = not _ELSEWHERE.isdisjoint(readers)
        once = apart and node in heavy and evaluated_once(node, backward)
        once = once or (node in many and not _APART.isdisjoint(readers) and _is_reused(node))
        return "product" in readers or "opaque" in readers or once
    return kind not in _VIEWS


def _on_cpu(node: fx.Node) -> bool:
    return any(value.device.type == "cpu" for value in values_of(node))


def evaluated_once(node: fx.Node, backward: Container[fx.Node] = ()) -> bool:
    """Return True if Inductor stores a costly value instead of computing it again in each loop.

    Inductor stores it on a CPU, in each of the graphs into which a joint graph is split.
    """
    late = [u in backward for u in _readers(node)]
    return _on_cpu(node) and (late.count(True) > 1 or late.count(False) > 1)


def _is_reused(node: fx.Node) -> bool:
    """Return True if several ops read a value, directly or through views."""
    return len(node.users) > 1


def _readers(node: fx.Node) -> set[fx.Node]:
    """Return the nodes that read a value, directly or through views of it."""
    readers: set[fx.Node] = set()
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if fusion_kind(user) in _VIEWS:
                stack.append(user)
            else:
                readers.add(user)
    return readers


def held_inside(node: fx.Node) -> int:
    """Return the bytes that an op of this package takes while it runs, besides its results."""
    if name_of(node) == "storage_ops._chunked_span.default":
        counts = [hint(_value(groups)) for groups in node.args[3]]  # type: ignore[union-attr]
        programs = zip(decode(str(node.args[4])), counts, strict=True)
        wide, late = _sums(node)
        chunk = max(_chunk(node, p, -(-n // p.count(n))) for p, n in programs)
        return wide + max(chunk - late, 0)
    if name_of(node).startswith("storage_ops.linear_cross_entropy"):
        return op_plan.scratch(node)
    return 0


def _chunk(node: fx.Node, program: Program, size: int) -> int:
    """Return the bytes of a chunk of `size` groups."""
    live_bytes, values = size * program.group_bytes, values_of(node)
    if program.in_blocks:
        live_bytes += blocks(size, program.group_bytes, values[0].device)[1] * program.block_bytes
    # Terms of sums in the body exist besides the sum.
    return live_bytes + sum(
        elements(values[spec.place]) * values[spec.place].element_size()
        for spec in program.outputs
        if spec.rows is None and spec.factors is None
    )


def _sums(node: fx.Node) -> tuple[int, int]:
    """Return the bytes of fp32 sums, and of results that exist only after the last chunk.

    A 16-bit result of a chunked span may be rounded from an fp32 sum after all chunks.
    """
    programs, values = decode(str(node.args[4])), values_of(node)
    wide, late_results = dict[int, int](), dict[int, int]()
    alone = {outputs[0].place for outputs in results_of(programs) if len(outputs) == 1}
    source: Any = node.args[0]
    tensors = iter([v for t in source for v in values_of(t)])
    for program in programs:
        inputs = [([hint(s) for s in v.shape], v.element_size())
                  for v in islice(tensors, len(program.inputs))]  # fmt: skip
        specs = [spec for spec in program.outputs if values[spec.place].element_size() == 2]
        sizes = {spec: [hint(s) for s in values[spec.place].shape] for spec in specs}
        waiting = [spec for spec in specs
                   if spec.place in alone and program.waits(spec, sizes[spec], inputs)]  # fmt: skip
        late = {program.holds_product(spec) for spec in waiting} - {None}
        for spec in specs:
            total = spec.rows is None and spec not in waiting
            if total or program.shares_factor(spec) in late:
                wide[spec.place] = 4 * elements(values[spec.place])
            if total:
                late_results[spec.place] = 2 * elements(values[spec.place])
    return sum(wide.values()), sum(late_results.values())


def _value(item: object) -> Any:
    return item.meta["val"] if isinstance(item, fx.Node) else item
