"""The pass: finds what to chunk in a joint graph, and chunks it or says why not."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import Path

from torch import fx

from storage_ops.autochunk import narrow, nodes, passes, predict, propagate, rewrite
from storage_ops.autochunk.decompose import decompose, detach, starts
from storage_ops.autochunk.log import log
from storage_ops.autochunk.mutation import Mutations, new_values, owner
from storage_ops.autochunk.program import Program
from storage_ops.autochunk.runtime import in_body
from storage_ops.autochunk.state import Conflict, Rows
from storage_ops.quantities import readable

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
    tangents = propagate.tangents_of(graph)
    work = _Work(graph, tangents, new_values(graph, visible), num_chunks, memory_budget)
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
        outcome = work.chunk(found[0], total.peak_after)
        if isinstance(outcome.error, Conflict):
            log.debug("%s: %s", found[0], describe(outcome.error))
            total.reason = total.reason or describe(outcome.error)
        elif outcome.error is not None:
            _fail(total, outcome.error)
        else:
            graph.eliminate_dead_code()
            total.chunked, total.num_chunks = True, max(outcome.count, total.num_chunks)
            total.peak_after = outcome.peak
    total.reason = total.reason or "no matrix product is larger than its input"


@dataclass
class _Outcome:
    """What became of an amplifier: a number of chunks and the peak, or an error and no change."""

    undo: Undo
    narrowed: bool = False
    count: int = 0
    peak: int = 0
    error: Exception | None = None


@dataclass(frozen=True)
class _Work:
    """A graph and what is asked for."""

    graph: fx.Graph
    tangents: list[fx.Node]
    changed: set[fx.Node]
    num_chunks: int | None
    memory_budget: int | None

    def chunk(self, amplifier: fx.Node, before: int) -> _Outcome:
        """Chunk what an amplifier leads to, without dropped tokens where that takes less memory.

        `before`: the predicted peak of the graph as it is.
        """
        narrowed = self.attempt(amplifier, True)
        if narrowed.error is None:
            if not narrowed.narrowed or narrowed.peak < before:
                return narrowed
            narrowed.undo()
        elif isinstance(narrowed.error, Conflict) and not narrowed.narrowed:
            return narrowed
        plain = self.attempt(amplifier, False)
        if narrowed.error or (plain.error is None and plain.peak < narrowed.peak):
            return plain
        plain.undo()
        return self.attempt(amplifier, True)

    def attempt(self, amplifier: fx.Node, narrowing: bool) -> _Outcome:
        outcome = _Outcome(Undo(self.graph))
        try:
            tangents = self.prepare(amplifier)
            if narrowing:
                amplifier, outcome.narrowed = _narrow(self.graph, amplifier)
            outcome.count = self.rewrite(amplifier, tangents)
            self.graph.lint()
            if self.num_chunks is None:
                _check_saving(self.graph, amplifier)
            outcome.peak = predict.peak(self.graph)
        except Exception as error:
            outcome.undo()
            outcome.error = error
        return outcome

    def prepare(self, amplifier: fx.Node) -> list[fx.Node]:
        """Check that there is something to gain, decompose ops without a rule; the tangents."""
        graph, size = self.graph, propagate.nbytes(amplifier)
        _own_sizes(graph, amplifier)
        if size == 0:
            raise Conflict("is empty", amplifier)
        budget = self.budget(amplifier)
        if self.num_chunks is None and size <= budget:
            raise Conflict(f"fits in the memory budget of {budget} bytes as a whole", amplifier)
        after = propagate.reached([amplifier], lambda n: not propagate.ends(n))
        least = propagate.numel(amplifier) // propagate.LARGE
        for node in reversed(graph.nodes):  # what is large and read there may be in chunks too
            large = propagate.numel(node) > least and not propagate.is_product(node)
            if large and any(user in after for user in node.users):
                after.add(node)
        for node in decompose(graph, after):
            node.args, node.kwargs = (), {}  # it goes with the dead code
        return self.tangents or [detach(graph, start) for start in starts(graph)]

    def budget(self, amplifier: fx.Node) -> int:
        given = self.memory_budget
        return default_budget(amplifier) if given is None else given

    def rewrite(self, amplifier: fx.Node, tangents: list[fx.Node]) -> int:
        """Chunk what an amplifier leads to; into how many chunks."""
        graph, budget = self.graph, self.budget(amplifier)
        mutations = Mutations(graph)
        wanted = max(2, -(-propagate.nbytes(amplifier) // max(budget, 1)))
        span = propagate.propagate(graph, amplifier, self.num_chunks or wanted)
        read = {arg for reads in span.reads.values() for arg, _ in reads}
        for arg in read:
            if owner(arg) in self.changed:
                raise Conflict("is changed in place by the function", arg)
        mutations.check_reads(read, span.layouts)
        ordered = passes.order(graph, span, tangents)
        limits = rewrite.Limits(self.num_chunks, self.memory_budget, budget)
        counts = rewrite.rewrite(graph, span, ordered, limits)
        mutations.check_order(graph)
        return max(counts)


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
    builder = rewrite.Builder(graph, propagate.Span({amplifier: Rows(0, 1)}, 0, 1))
    for node in asked:
        try:
            found = builder.size(node.meta["val"])
        except Conflict:
            continue
        if isinstance(found, fx.Node):
            node.replace_all_uses_with(found)
            node.args = ()  # it goes with the dead code
    rewrite.sort(graph)


def _narrow(graph: fx.Graph, amplifier: fx.Node) -> tuple[fx.Node, bool]:
    """The product without the tokens that are dropped after it, likewise others of its size."""
    least, narrowed = propagate.numel(amplifier), False
    for product in propagate.candidates(graph, set()):
        if propagate.numel(product) * propagate.LARGE > least and product.args:
            new = narrow.narrow(graph, product)
            narrowed = narrowed or new is not product
            amplifier = new if product is amplifier else amplifier
    return amplifier, narrowed


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
