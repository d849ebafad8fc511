"""Prepares a graph for chunking: ops without a rule are replaced by ops with a rule.

It also records in-place changes, because the rewrite must not move readers past such changes.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from storage_ops.autochunk.analysis.layouts import same
from storage_ops.autochunk.analysis.rules import RULES
from storage_ops.autochunk.analysis.spans import LARGE, is_product, stops
from storage_ops.autochunk.fx_graph.edit import Builder, Calls, SizeNodes, retire, sort
from storage_ops.autochunk.fx_graph.nodes import (
    argument,
    ends,
    is_tensor,
    leading_to,
    name_of,
    numel,
    owner,
    reached,
    returned,
    shape,
    tangents_of,
)
from storage_ops.autochunk.prepare.indexed import by_ranges
from storage_ops.autochunk.prepare.reorder import reorder_sources
from storage_ops.autochunk.prepare.split_reductions import by_classes
from storage_ops.autochunk.reasons import Conflict, log

_ATEN = torch.ops.aten


def prepare(graph: fx.Graph, amplifier: fx.Node, tangents: list[fx.Node]) -> list[fx.Node]:
    """Replace ops that an amplifier leads to by ops with a rule, and with sizes from outside.

    Return the tangents. A graph of a whole step has none, so ones where its backward passes start
    are replaced by constants, which are returned.
    """
    own_sizes(graph, amplifier)
    after = reached([amplifier], lambda n: not stops(n))
    least = numel(amplifier) // LARGE
    for node in reversed(graph.nodes):  # large values that they read may be in chunks, too
        large = numel(node) > least and not is_product(node)
        if large and any(user in after for user in node.users):
            after.add(node)
    decompose(graph, after)
    reorder_sources(graph, amplifier, least)
    retire(graph)
    return tangents or [detach(graph, start) for start in starts(graph)]


def join_batches(graph: fx.Graph) -> set[fx.Node]:
    """Replace a batch of products by one matrix by a single product. Return the replaced nodes.

    torch computes `x[:, :-1] @ w` as a batch of products if w needs no gradient, like a teacher's
    weight. In one product (b n, k) x (k, m), the tokens of all sequences are rows. An einsum is a
    batch of one product.
    """
    joined = set[fx.Node]()
    for node in [n for n in graph.nodes if name_of(n) == "aten.bmm.default" and _values(n)]:
        x, repeated = node.args
        matrix, turned = _repeated(repeated)
        single = matrix is None and same(shape(node)[0], 1)
        if matrix is None and not single:
            continue
        call = Calls(graph, node, before=node)
        size = SizeNodes(call, _with_sizes(graph, node))
        try:
            sizes = [size(s) for s in shape(node)]
            hidden = size(shape(x)[2])
        except Conflict:
            continue
        if single:
            matrix = call(_ATEN.squeeze.dim, repeated, 0)
        elif turned:
            matrix = call(_ATEN.permute.default, matrix, [1, 0])
        product = call(_ATEN.mm.default, call(_ATEN.reshape.default, x, [-1, hidden]), matrix)
        node.replace_all_uses_with(call(_ATEN.reshape.default, product, sizes))
        joined.add(node)
    retire(graph)
    return joined


def _repeated(node: object) -> tuple[Any, bool]:
    """Return the matrix that a batch repeats, or None, and whether it is transposed."""
    turned = False
    while isinstance(node, fx.Node) and node.op == "call_function" and node.args:
        name, (base, *dims) = name_of(node), list[Any](node.args)
        if name == "aten.expand.default":
            return base if len(shape(base)) == 2 else None, turned
        if (name == "aten.permute.default" and dims == [[0, 2, 1]]) or (
            name == "aten.transpose.int" and {d % 3 for d in dims} == {1, 2}
        ):
            turned = not turned
        elif name != "aten.view.default" or shape(base) != shape(node):
            break
        node = base
    return None, turned


def decompose(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Replace nodes without a rule by torch's decompositions.

    Inductor has already decomposed most ops before the pass runs. Graphs of `make_fx` have all ops.
    """
    chosen = set(nodes)
    for node in [n for n in graph.nodes if n in chosen]:
        if node.op != "call_function" or not _values(node):
            continue
        with graph.inserting_before(node):
            written = any(f(graph, node) for f in _WRITERS)
            if not written and name_of(node) not in RULES:
                _inline(graph, node)


def own_sizes(graph: fx.Graph, amplifier: fx.Node) -> None:
    """Take sizes from tensors outside of the span, for values after an amplifier."""
    after = reached([amplifier]) | {amplifier}
    size_nodes = [n for n in graph.nodes if name_of(n) == "aten.sym_size.int"
             and n.args and n.args[0] in after]  # fmt: skip
    if not size_nodes:
        return
    builder = Builder(graph, [amplifier])
    for node in size_nodes:
        try:
            size_node = builder.size(node.meta["val"])
        except Conflict:
            continue
        if isinstance(size_node, fx.Node):
            node.replace_all_uses_with(size_node)
    retire(graph)
    sort(graph)


def starts(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes where backward passes start in a graph of a whole step: ones like a loss."""
    return [
        n for n in graph.nodes
        if name_of(n) == "aten.ones_like.default" and "val" in n.meta and not shape(n)
    ]  # fmt: skip


def detach(graph: fx.Graph, start: fx.Node) -> fx.Node:
    """Replace ones like a loss by a constant that does not depend on the loss. Return it."""
    value = start.meta["val"]
    call = Calls(graph, start, before=start)
    one = call(_ATEN.full.default, [], 1.0, dtype=value.dtype, device=value.device)
    start.replace_all_uses_with(one)
    return one


def _values(node: fx.Node) -> bool:
    return all("val" in a.meta for a in (node, *node.all_input_nodes))


def _decomposition(target: object) -> Any:
    from torch._inductor.decomposition import select_decomp_table

    # A decomposed random op would draw other random numbers. An op that works in place, such as
    # that of an optimizer, would stay in the graph and change its tensor twice.
    if not isinstance(target, torch._ops.OpOverload) or (
        torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable
    ):
        return None
    return select_decomp_table().get(target) or _core().get(target)


@functools.cache
def _core() -> dict[Any, Any]:
    from torch._decomp import core_aten_decompositions

    return {**core_aten_decompositions()}


def _inline(graph: fx.Graph, node: fx.Node) -> None:
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    decomposition = _decomposition(node.target)
    if decomposition is None:
        return
    tensors = [a for a in node.all_input_nodes if is_tensor(a)]

    def run(*values_of_tensors: Any) -> Any:
        env = dict(zip(tensors, values_of_tensors, strict=True))
        args, kwargs = fx.map_arg(
            (node.args, node.kwargs), lambda a: env[a] if a in env else a.meta["val"]
        )
        return decomposition(*args, **kwargs)

    if any(isinstance(a.meta["val"], torch.SymInt) for a in node.all_input_nodes):
        return
    values = [a.meta["val"] for a in tensors]
    try:
        with values[0].fake_mode:
            small = make_fx(run, decomposition_table=select_decomp_table())(*values)
    except Exception as error:  # the op then has no rule
        log.debug("%s is not decomposed: %s", node, error)
        return
    if any(n.op not in ("placeholder", "call_function", "output") for n in small.graph.nodes):
        return
    placeholders = (n for n in small.graph.nodes if n.op == "placeholder")
    env: dict[fx.Node, Any] = dict(zip(placeholders, tensors, strict=True))
    result: Any = None
    for inner in small.graph.nodes:
        if inner.op == "call_function" and isinstance(inner.target, type):
            # The named tuple of several results is created in the graph.
            env[inner] = tuple(env[a] for a in inner.args)
        elif inner.target is operator.getitem and isinstance(env[inner.args[0]], tuple):
            env[inner] = env[inner.args[0]][inner.args[1]]
        elif inner.op == "call_function":
            env[inner] = graph.node_copy(inner, env.__getitem__)
            env[inner].meta["stack_trace"] = node.meta.get("stack_trace")
        elif inner.op == "output":
            result = fx.map_arg(inner.args[0], env.__getitem__)
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
        return
    for user in [u for u in node.users if u.target is operator.getitem]:
        user.replace_all_uses_with(result[user.args[1]])


def _indexed(graph: fx.Graph, node: fx.Node) -> bool:
    return by_ranges(graph, node, _with_sizes(graph, node))


def _copied(graph: fx.Graph, node: fx.Node) -> bool:
    """Replace a copy by its source. Return False for another op."""
    if name_of(node) != "aten.copy.default":
        return False
    source: Any = node.args[1]
    value, call = node.meta["val"], Calls(graph, node)
    if shape(source) != shape(node):
        try:
            sizes = list(map(SizeNodes(call, _with_sizes(graph, node)), shape(node)))
        except Conflict:
            return False
        source = call(_ATEN.expand.default, source, sizes)
    if source.meta["val"].dtype != value.dtype:
        source = call(torch.ops.prims.convert_element_type.default, source, value.dtype)
    node.replace_all_uses_with(source)
    return True


def _reduced(graph: fx.Graph, node: fx.Node) -> bool:
    return by_classes(graph, node, _with_sizes(graph, node))


def _selected(graph: fx.Graph, node: fx.Node) -> bool:
    """Rewrite x[i] as a slice without its dimension, and its gradient as a slice put into zeros."""
    name = name_of(node)
    if name not in ("aten.select.int", "aten.select_scatter.default"):
        return False
    args: Any = node.args
    x, (dim, index), call = args[0], args[-2:], Calls(graph, node)
    if not isinstance(dim, int) or not isinstance(index, int) or same(shape(x)[dim], 1):
        return False
    end = sys.maxsize if index == -1 else index + 1
    if name == "aten.select.int":
        result = call(_ATEN.squeeze.dim, call(_ATEN.slice.Tensor, x, dim, index, end), dim)
    else:
        part = call(_ATEN.unsqueeze.default, args[1], dim)
        result = call(_ATEN.slice_scatter.default, x, part, dim, index, end)
    node.replace_all_uses_with(result)
    return True


def _taken(graph: fx.Graph, node: fx.Node) -> bool:
    """Rewrite a part of a split as a slice, and a strided slice as an index of a new dimension."""
    call, args = Calls(graph, node), list[Any](node.args)
    size = SizeNodes(call, _with_sizes(graph, node))
    producer: Any = args[0]
    if name_of(node) == "getitem" and name_of(producer).startswith("aten.split"):
        x, dim = producer.args[0], argument(producer, 2, "dim", 0) % len(shape(node))
        before = [v.shape[dim] for v in producer.meta["val"][: args[1]]]
        begin = sum(before)
        try:
            ends = [size(begin), size(begin + shape(node)[dim])]
        except Conflict:
            return False
        new = call(_ATEN.slice.Tensor, x, dim, *ends)
    elif name_of(node) in ("aten.slice.Tensor", "aten.slice_scatter.default"):
        count = 1 + ("scatter" in name_of(node))
        operands, sizes = args[:count], shape(args[0])
        dim, begin, step = (argument(node, count + i, "", d) for i, d in ((0, 0), (1, 0), (3, 1)))
        whole = isinstance(sizes[dim], int) and step != 1 and sizes[dim] % step == 0
        taken = shape(operands[-1] if count > 1 else node)[dim]
        first = isinstance(begin, int) and 0 <= begin < step
        if not (whole and first and same(taken, sizes[dim] // step)):
            return False
        x = call(_ATEN.reshape.default, operands[0], [*sizes[:dim], -1, step, *sizes[dim + 1 :]])
        bounds = dim + 1, begin, begin + 1
        if name_of(node) == "aten.slice.Tensor":
            new = call(_ATEN.squeeze.dim, call(_ATEN.slice.Tensor, x, *bounds), dim + 1)
        else:
            part = call(_ATEN.unsqueeze.default, operands[1], dim + 1)
            new = call(_ATEN.slice_scatter.default, x, part, *bounds)
            new = call(_ATEN.reshape.default, new, sizes)
    else:
        return False
    node.replace_all_uses_with(new)
    return True


def _with_sizes(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    """Return the inputs that can provide sizes for a node."""
    tangents = tangents_of(graph)
    later = () if node in reached(tangents) else tangents
    return [n for n in graph.nodes if n.op == "placeholder" and n not in later]


def _stacked(graph: fx.Graph, node: fx.Node) -> bool:
    """Rewrite a stack whose result is viewed with a split dimension as a stack along it."""
    producer: Any = node.args[0] if node.args else None
    if RULES.get(name_of(node), RULES["getitem"]).labels is not None or not is_tensor(producer):
        return False
    if name_of(producer) != "aten.cat.default":
        return False
    parts: Any = producer.args[0]
    sizes, dim = shape(parts[0]), argument(producer, 1, "dim", 0) % len(shape(producer))
    if len(parts) < 2 or any(shape(p) != sizes for p in parts):
        return False
    if shape(node) != [*sizes[:dim], len(parts), *sizes[dim:]]:
        return False
    call = Calls(graph, node)
    unsqueezed = [call(_ATEN.unsqueeze.default, p, dim) for p in parts]
    node.replace_all_uses_with(call(_ATEN.cat.default, unsqueezed, dim))
    return True


_WRITERS = _indexed, _selected, _taken, _stacked, _copied, _reduced


def new_values(graph: fx.Graph, visible: int | None) -> set[fx.Node]:
    """Return inputs that a joint graph's function changes, and the values written to them.

    The writes are at the end of the forward, or in the code around the graph. In the second case,
    the values come before the `visible` results of the function.
    """
    inputs = [n for n in graph.nodes if n.op == "placeholder" and "primals" in str(n.target)]
    values: set[fx.Node] = set()
    for node in graph.nodes:
        if _written(node) & set(inputs):
            values.update(node.all_input_nodes)
    outputs = returned(graph)
    if visible is not None and inputs:
        new = max(len(outputs) - len(inputs) - visible, 0)
        values.update(n for n in outputs[:new] if isinstance(n, fx.Node))
    return values


class Mutations:
    """The in-place changes in a graph, and their places before the graph is rewritten."""

    def __init__(self, graph: fx.Graph):
        self.place = {node: i for i, node in enumerate(graph.nodes)}
        self.changes = {node: written for node in self.place if (written := _written(node))}

    def check_reads(self, nodes: Iterable[fx.Node], span: Iterable[fx.Node]) -> None:
        """Raise Conflict if a value that a span reads is changed before the span's last node."""
        if not self.changes:
            return
        end, bases = max(self.place.get(n, 0) for n in span), {owner(n) for n in nodes}
        for node, bases_written in self.changes.items():
            if self.place[node] < end and bases_written & bases:
                raise Conflict("changes in place a tensor that is read in chunks", node)

    def check_order(self, graph: fx.Graph) -> None:
        """Raise Conflict if a reader has moved across an in-place change."""
        if not self.changes:
            return
        now = {node: i for i, node in enumerate(graph.nodes)}
        alive = leading_to(ends(graph))
        for change, bases_written in self.changes.items():
            for node in alive:
                if node is change or not any(
                    owner(a) in bases_written for a in node.all_input_nodes
                ):
                    continue
                before = self.place.get(node, -1) < self.place[change]  # new nodes came before
                if before != (now[node] < now[change]):
                    raise Conflict(
                        f"would be read on the other side of the in-place {change}", node
                    )


def _written(node: fx.Node) -> set[fx.Node]:
    """Return the nodes that an op writes to, below all their views."""
    schema: Any = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return set()
    targets: list[fx.Node] = []
    for i, formal in enumerate(schema.arguments):
        if formal.alias_info is not None and formal.alias_info.is_write:
            fx.map_arg(argument(node, i, formal.name, None), targets.append)
    return {owner(n) for n in targets}
