"""Replaces a span of a graph by ops that evaluate it chunk by chunk."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

import storage_ops.autochunk.runtime.chunk_op  # noqa: F401  registers the op
from storage_ops.autochunk.analysis.layouts import Partial, Rows
from storage_ops.autochunk.analysis.passes import Passes
from storage_ops.autochunk.analysis.predict import evaluated_once, fusion_kind, peak
from storage_ops.autochunk.analysis.spans import Span, is_product
from storage_ops.autochunk.fx_graph.edit import Builder, sort
from storage_ops.autochunk.fx_graph.nodes import (
    are_one,
    hint,
    leading_to,
    nbytes,
    numel,
    shape,
    short_name,
    values_of,
)
from storage_ops.autochunk.rewrite.body import Body, share
from storage_ops.autochunk.rewrite.joint_sums import Term
from storage_ops.autochunk.runtime.program import Program, encode, encode_graph

_ATEN = torch.ops.aten


@dataclass(frozen=True)
class Limits:
    """A limit on chunks: their number, or their bytes."""

    num_chunks: int | None
    chunk_bytes: int


class _Outside:
    """The arguments of the span, with a constant in place of the upstream gradient."""

    def __init__(self, builder: Builder, passes: Passes, seed: float):
        self.builder, self.passes, self.seed = builder, passes, seed
        self.copies: dict[fx.Node, fx.Node] = {}

    def __call__(self, node: fx.Node) -> fx.Node:
        if node not in self.passes.dependent or node in self.copies:
            return self.copies.get(node, node)
        graph, needed = self.builder.graph, leading_to([node], self.copies) & self.passes.dependent
        tangent = self.passes.tangent
        if tangent in needed and tangent is not None:
            value = tangent.meta["val"]
            options = {"dtype": value.dtype, "device": value.device}
            self.copies[tangent] = self.builder.call(_ATEN.full.default, [], self.seed, **options)
        for needed_node in [n for n in graph.nodes if n in needed and n is not tangent]:
            self.copies[needed_node] = graph.node_copy(needed_node, lambda a: self.copies.get(a, a))
        return self.copies[node]


def rewrite(
    graph: fx.Graph, span: Span, passes: Passes, limits: Limits, terms: list[Term]
) -> list[int]:
    """Replace a span by one op per pass over the tokens. Return the number of chunks of each op.

    The sums over tokens among the results are added to `terms`.
    """
    builder = Builder(graph, span.amplifiers, span.layouts)
    seed = 1.0
    if any(v.dtype == torch.float16 for n in span.large for v in values_of(n)):
        # In fp16, gradients of a mean would vanish, but those of a sum over tokens do not.
        seed = 2.0 ** math.floor(math.log2(max(hint(span.tokens), 1)))
    outside = _Outside(builder, passes, seed)
    nodes = [n for n in graph.nodes if n in span.layouts]
    result: list[int] = []
    for outputs in passes.outputs:
        body = Body(span, builder)
        specs = body.run(nodes, outputs)
        formed, over = share(body)
        program = Program(
            tuple(body.slice(layout) for _, layout, _ in body.inputs),
            tuple(s._replace(place=i) for i, s in enumerate(specs)),
            limits.num_chunks,
            limits.chunk_bytes,
            0,
            0,
            not isinstance(span.tokens, int),
            encode_graph(body.graph),
            formed,
            over,
        )
        live_bytes, inside = group_bytes(span, body, program)
        program = program._replace(group_bytes=live_bytes, block_bytes=inside)
        sizes = [builder.size(s) for n in outputs for s in shape(n)]
        call = builder.call(
            torch.ops.storage_ops._chunked_span.default,
            body.sources(outside), body.ints, sizes, [builder.size(span.groups)], encode([program]),
        )  # fmt: skip
        for index, node in enumerate(outputs):
            raw = builder.call(operator.getitem, call, index)
            new = _replace(builder, span, passes, outside, node, raw)
            layout = span.layouts[node]
            if isinstance(layout, Partial) and not layout.mean:
                tangent = passes.tangent if node in passes.scaled else None
                terms.append(Term(call, index, raw, new, (tangent, seed)))
        result.append(program.count(hint(span.groups)))
    sort(graph)
    return result


def group_bytes(span: Span, body: Body, program: Program) -> tuple[int, int]:
    """Return the bytes of a group in a chunk, and in a block if the body works on blocks."""
    products = {n for n in body.env if n in span.large and is_product(n)}
    products |= {n for i, n in enumerate(body.values) if n in span.large and i not in program.over}
    whole = peak(body.graph, of_chunk=True)
    inside = whole if program.in_blocks else 0
    if not program.in_blocks:  # a block is small, and its sums fit into a cache
        exps = [n for n in body.env if n in span.large and short_name(n) == "exp"]
        products |= {
            n for n in exps if evaluated_once(n) and "sum" not in map(fusion_kind, n.users)
        }
    products |= {
        arg
        for arg, layout, _ in body.inputs  # each chunk copies its rows of these inputs
        if isinstance(layout, Rows) and not are_one(arg.meta["val"], layout.lo, layout.hi)
    }
    groups, live_bytes = max(hint(span.groups), 1), sum(map(nbytes, products))
    largest = max(map(numel, span.amplifiers))
    if not program.in_blocks and any(numel(n) > largest for n in body.env if n in span.large):
        live_bytes = max(live_bytes, whole)  # interpolated logits are no product
    return -(-live_bytes // groups), -(-inside // groups)


def _replace(
    builder: Builder, span: Span, passes: Passes, outside: _Outside, node: fx.Node, new: fx.Node
) -> fx.Node:
    """Let the users of an output read the op's result, times the upstream gradient if necessary."""
    layout, dtype = span.layouts[node], node.meta["val"].dtype
    if isinstance(layout, Partial) and layout.mean:
        source: Any = node.args[0]
        total = math.prod(shape(source)) // math.prod(shape(node))
        new = builder.call(_ATEN.div.Tensor, new, builder.size(total))
    raw = new
    if node in passes.scaled:
        assert passes.tangent is not None
        factor = passes.tangent
        if outside.seed != 1:
            factor = builder.call(_ATEN.mul.Tensor, factor, 1 / outside.seed)
        new = builder.call(_ATEN.mul.Tensor, new, factor)
    if new.meta["val"].dtype != dtype:
        new = builder.call(torch.ops.prims.convert_element_type.default, new, dtype)
    outside.copies[new] = raw  # a later pass reads it without the factor
    passes.dependent.add(new)
    outside.copies[node] = raw
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user not in span.layouts)
    return new
