"""The pass: finds what to chunk in a joint graph, and chunks it or says why not."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import fx

from storage_ops.autochunk import narrow, nodes, passes, predict, propagate, rewrite
from storage_ops.autochunk.decompose import decompose, detach, starts
from storage_ops.autochunk.log import log
from storage_ops.autochunk.mutation import Mutations, new_values, owner
from storage_ops.autochunk.program import Program
from storage_ops.autochunk.runtime import in_body
from storage_ops.autochunk.state import Conflict
from storage_ops.ops.sizes import readable

MIB, GIB = 1 << 20, 1 << 30
TRIES = 4  # products that are tried, the largest first


class ChunkError(RuntimeError):
    """A graph was to be chunked for certain (`strict=True`), and is not."""


@dataclass
class Report:
    """What became of one graph.

    Attributes:
        chunked: whether a span of it is evaluated in chunks.
        num_chunks: into how many; 0 if it is not.
        reason: why it is not; empty if it is.
        error: what was raised where nothing should be, and is the reason.
        peak_before: predicted bytes that are held at most above the inputs.
        peak_after: the same after chunking.
    """

    chunked: bool = False
    num_chunks: int = 0
    reason: str = ""
    error: Exception | None = None
    peak_before: int = 0
    peak_after: int = 0


def describe(conflict: Conflict) -> str:
    """A conflict with its node and where in the user's code that comes from."""
    node = conflict.node
    if node is None:
        return str(conflict)
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    places = [i for i, line in enumerate(lines[:-1]) if line.startswith("File ")]
    where = f" ({lines[places[-1]]}: {lines[places[-1] + 1]})" if places else ""
    return f"{node.name} = {node.target}: {conflict}{where}"


def internal(error: Exception) -> str:
    """The reason that an unexpected error is: what to report, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return (
        f"internal error of the auto-chunker, {type(error).__name__}: {error}{place}; the graph is "
        "unchanged. Please report this with the output of STORAGE_OPS_LOGS=autochunk"
    )


def chunk_graph(
    graph: fx.Graph,
    num_chunks: int | None = None,
    memory_budget: int | None = None,
    visible: int | None = None,
) -> Report:
    """Chunk a joint graph in place; `visible`: how many results its function has, if known.

    Whatever goes wrong, the graph computes what it did before, and the report has the reason.
    """
    if in_body():
        return Report(reason="it is a chunk itself")
    report = Report()
    try:
        _chunk(graph, report, num_chunks, memory_budget, visible)
    except Exception as error:
        _fail(report, error)
    if report.chunked:
        report.reason = ""
    return report


def _fail(report: Report, error: Exception) -> None:
    log.debug("internal error", exc_info=error)
    report.error = report.error or error
    report.reason = report.reason or internal(error)


def _chunk(
    graph: fx.Graph, total: Report, num_chunks: int | None, memory_budget: int | None,
    visible: int | None,
) -> None:  # fmt: skip
    graph.eliminate_dead_code()
    tangents = [n for n in graph.nodes if n.op == "placeholder" and "tangents" in str(n.target)]
    changed = new_values(graph, visible)
    total.peak_before = total.peak_after = predict.peak(graph)
    largest = 0
    tried: set[fx.Node] = set()
    while True:
        found = propagate.candidates(graph, propagate.reached(tangents or starts(graph)) | tried)
        largest = max([largest, *map(propagate.numel, found[:1])])
        found = [n for n in found if propagate.numel(n) * propagate.LARGE > largest]
        if not found or len(tried) == TRIES:
            break
        tried.add(found[0])
        undo = Undo(graph)
        try:
            count = _chunk_at(graph, found[0], tangents, changed, num_chunks, memory_budget)
            graph.lint()
            if num_chunks is None:
                _check_saving(graph, found[0])
        except Conflict as conflict:
            undo()
            log.debug("%s: %s", found[0], describe(conflict))
            total.reason = total.reason or describe(conflict)
            continue
        except Exception as error:
            undo()
            _fail(total, error)
            continue
        graph.eliminate_dead_code()
        total.chunked, total.num_chunks = True, max(count, total.num_chunks)
    if total.chunked:
        total.peak_after = predict.peak(graph)
    total.reason = total.reason or "no matrix product is larger than its input"


class Undo:
    """What a graph is before it is rewritten; calling it brings that back, the same nodes."""

    def __init__(self, graph: fx.Graph):
        self.graph = graph
        self.nodes = [(node, node.args, node.kwargs) for node in graph.nodes]

    def __call__(self) -> None:
        """Undo all changes of arguments and of the order, and drop nodes that are new."""
        for node, args, kwargs in self.nodes:
            node.args, node.kwargs = args, kwargs
        known = {node for node, *_ in self.nodes}
        unused = [n for n in self.graph.nodes if n not in known and not n.users]
        while unused:
            node = unused.pop()
            read = node.all_input_nodes
            self.graph.erase_node(node)
            unused += [a for a in read if a not in known and not a.users]
        rewrite.place([node for node, *_ in self.nodes])


def _own_sizes(graph: fx.Graph, amplifier: fx.Node) -> None:
    """Take sizes of what an amplifier leads to from other tensors of that size."""
    after = propagate.reached([amplifier]) | {amplifier}
    asked = [n for n in graph.nodes if nodes.name_of(n) == "aten.sym_size.int"
             and n.args[0] in after]  # fmt: skip
    if not asked:
        return
    others: dict[str, tuple[fx.Node, int]] = {}
    for node in graph.nodes:
        if node not in after and isinstance(node.meta.get("val"), torch.Tensor):
            for dim, size in enumerate(nodes.shape(node)):
                others.setdefault(str(size), (node, dim))
    for node in asked:
        found = others.get(str(node.meta["val"]))
        if found is not None:
            node.args = found
    rewrite.sort(graph)


def _narrow(graph: fx.Graph, amplifier: fx.Node) -> fx.Node:
    """The product without the tokens that are dropped after it, likewise others of its size."""
    least = propagate.numel(amplifier)
    for product in propagate.candidates(graph, set()):
        if propagate.numel(product) * propagate.LARGE <= least:
            break
        undo = Undo(graph)
        try:
            new = narrow.narrow(graph, product)
        except Conflict as conflict:
            undo()
            log.debug("%s: %s", product, describe(conflict))
            continue
        amplifier = new if product is amplifier else amplifier
    return amplifier


def _chunk_at(
    graph: fx.Graph, amplifier: fx.Node, tangents: list[fx.Node], changed: set[fx.Node],
    num_chunks: int | None, memory_budget: int | None,
) -> int:  # fmt: skip
    mutations = Mutations(graph)
    _own_sizes(graph, amplifier)
    if propagate.numel(amplifier) == 0:
        raise Conflict("is empty", amplifier)
    budget = memory_budget if memory_budget is not None else default_budget(amplifier)
    size = propagate.nbytes(amplifier)
    if num_chunks is None and size <= budget:
        raise Conflict(f"fits in the memory budget of {budget} bytes as a whole", amplifier)
    after = propagate.reached([amplifier], lambda n: not propagate.ends(n))
    limit = propagate.numel(amplifier)
    for node in reversed(
        graph.nodes
    ):  # what is large and read there may be evaluated in chunks too
        large = propagate.numel(node) * propagate.LARGE > limit and not propagate.is_product(node)
        if large and any(user in after for user in node.users):
            after.add(node)
    for node in decompose(graph, after):
        node.args, node.kwargs = (), {}  # nothing leads to it any more; it goes with the dead code
    tangents = tangents or [detach(graph, start) for start in starts(graph)]
    amplifier = _narrow(graph, amplifier)
    span = propagate.propagate(graph, amplifier, num_chunks or max(2, -(-size // max(budget, 1))))
    read = {arg for reads in span.reads.values() for arg, _ in reads}
    for arg in read:
        if owner(arg) in changed:
            raise Conflict("is changed in place by the function", arg)
    mutations.check_reads(read, span.layouts)
    ordered = passes.order(graph, span, tangents)
    counts = rewrite.rewrite(
        graph, span, ordered, rewrite.Limits(num_chunks, memory_budget, budget)
    )
    mutations.check_order(graph)
    return max(counts)


def _check_saving(graph: fx.Graph, amplifier: fx.Node) -> None:
    """Raise if sums over chunks take more memory than the whole product does in fp32."""
    whole = 4 * propagate.numel(amplifier)
    for node in graph.nodes:
        if nodes.name_of(node) == "storage_ops._chunked_span.default":
            sums = predict.wide_sums(node, Program.decode(str(node.args[4])))
            if sums > whole:
                raise Conflict(
                    f"has {readable(whole)} in fp32, less than chunks would take: their 16-bit "
                    f"gradients are summed in fp32, in {readable(sums)}",
                    amplifier,
                )


def default_budget(amplifier: fx.Node) -> int:
    """A quarter of the product, at least 32 MiB and at most 1 GiB, as the loss's planner has it."""
    size = propagate.nbytes(amplifier)
    return int(min(max(size // 4, 32 * MIB), GIB))
