"""The pass: finds what to chunk in a joint graph, and chunks it or says why not."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import fx

from storage_ops.autochunk.edit import Undo
from storage_ops.autochunk.lattice import Conflict
from storage_ops.autochunk.log import log
from storage_ops.autochunk.op_plan import budget_of
from storage_ops.autochunk.passes import order
from storage_ops.autochunk.predict import peak, wide_sums
from storage_ops.autochunk.prepare import Mutations, new_values, owner, prepare, starts
from storage_ops.autochunk.program import Program
from storage_ops.autochunk.recognise import NOTHING, Recognised
from storage_ops.autochunk.rewrite import Limits, rewrite
from storage_ops.autochunk.run import in_body
from storage_ops.autochunk.spans import LARGE, TRIES, candidates, is_product, propagate
from storage_ops.autochunk.values import name_of, nbytes, numel, tangents_of
from storage_ops.quantities import readable


class ChunkError(RuntimeError):
    """A graph was to be chunked for certain (`strict=True`), and is not."""


@dataclass
class Report:
    """What became of one graph.

    Attributes:
        chunked: whether a span of it is evaluated in chunks.
        num_chunks: into how many; 0 if it is not.
        num_passes: how often the logits are formed.
        reason: why it is not; empty if it is.
        error: what was raised where nothing should be, and is the reason.
        peak_before: predicted bytes that are held at most above the inputs.
        peak_after: the same after chunking.
    """

    chunked: bool = False
    num_chunks: int = 0
    num_passes: int = 0
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
    recognised: Recognised = NOTHING,
) -> Report:
    """Chunk a joint graph in place.

    Whatever goes wrong, the graph computes what it did before, and the report has the reason.

    Args:
        visible: how many results its function has, if known.
        recognised: what it has become before autograd.
    """
    if in_body():
        return Report(reason="it is a chunk itself")
    report = Report()
    try:
        _chunk(graph, report, num_chunks, memory_budget, visible, recognised)
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
    visible: int | None, recognised: Recognised,
) -> None:  # fmt: skip
    graph.eliminate_dead_code()
    tangents = tangents_of(graph)
    work = _Work(graph, tangents, new_values(graph, visible), num_chunks, memory_budget)
    total.peak_after = peak(graph)
    total.peak_before = total.peak_after + recognised.saved
    total.num_chunks, largest = recognised.num_chunks, recognised.largest
    total.chunked = total.num_chunks > 0
    total.num_passes = int(total.chunked)
    tried: set[fx.Node] = set()
    while True:
        found = candidates(graph, set(tangents or starts(graph)), tried)
        largest = max([largest, *map(numel, found[:1])])
        found = [n for n in found if numel(n) * LARGE > largest
                 and (is_product(n) or not total.reason)]  # fmt: skip
        if not found or len(tried) == TRIES:
            break
        tried.add(found[0])
        outcome = work.chunk(found[0])
        if isinstance(outcome.error, Conflict):
            log.debug("%s: %s", found[0], describe(outcome.error))
            total.reason = total.reason or describe(outcome.error)
        elif outcome.error is not None:
            _fail(total, outcome.error)
        else:
            graph.eliminate_dead_code()
            total.chunked = True
            total.num_chunks = max([total.num_chunks, *outcome.counts])
            total.num_passes = max(total.num_passes, len(outcome.counts))
            total.peak_after = outcome.peak
    total.reason = total.reason or "no matrix product is larger than its input"


@dataclass
class _Outcome:
    """What became of an amplifier: the chunks of each pass and the peak, or an error, no change."""

    counts: Sequence[int] = ()
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

    def chunk(self, amplifier: fx.Node) -> _Outcome:
        """Chunk what an amplifier leads to."""
        undo, outcome = Undo(self.graph), _Outcome()
        try:
            self.check(amplifier)
            tangents = prepare(self.graph, amplifier, self.tangents)
            outcome.counts = self.rewrite(amplifier, tangents)
            self.graph.lint()
            if self.num_chunks is None:
                _check_saving(self.graph, amplifier)
            outcome.peak = peak(self.graph)
        except Exception as error:
            undo()
            outcome.error = error
        return outcome

    def check(self, amplifier: fx.Node) -> None:
        """Raise Conflict if there is nothing to gain."""
        size, budget = nbytes(amplifier), self.budget(amplifier)
        if size == 0:
            raise Conflict("is empty", amplifier)
        if self.num_chunks is None and size <= budget:
            raise Conflict(f"fits in the memory budget of {budget} bytes as a whole", amplifier)

    def budget(self, amplifier: fx.Node) -> int:
        return budget_of(nbytes(amplifier), self.memory_budget)

    def rewrite(self, amplifier: fx.Node, tangents: list[fx.Node]) -> list[int]:
        """Chunk what an amplifier leads to; into how many chunks, for each pass."""
        graph, budget = self.graph, self.budget(amplifier)
        mutations = Mutations(graph)
        wanted = max(2, -(-nbytes(amplifier) // max(budget, 1)))
        span = propagate(graph, amplifier, self.num_chunks or wanted)
        read = {arg for reads in span.reads.values() for arg, _ in reads}
        for arg in read:
            if owner(arg) in self.changed:
                raise Conflict("is changed in place by the function", arg)
        mutations.check_reads(read, span.layouts)
        ordered = order(graph, span, tangents)
        limits = Limits(self.num_chunks, budget)
        counts = rewrite(graph, span, ordered, limits)
        mutations.check_order(graph)
        return counts


def _check_saving(graph: fx.Graph, amplifier: fx.Node) -> None:
    """Raise if sums over chunks take more memory than the whole product does in fp32."""
    whole = 4 * numel(amplifier)
    for node in graph.nodes:
        if name_of(node) == "storage_ops._chunked_span.default":
            sums = wide_sums(node, Program.decode(str(node.args[4])))
            if sums > whole:
                raise Conflict(
                    f"has {readable(whole)} in fp32, less than chunks would take: their 16-bit "
                    f"gradients are summed in fp32, in {readable(sums)}",
                    amplifier,
                )
