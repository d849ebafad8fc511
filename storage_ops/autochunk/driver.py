"""The pass: finds spans in a joint graph, and chunks them or gives a reason why not."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import zip_longest

from torch import fx

from storage_ops.autochunk.analysis.layouts import same
from storage_ops.autochunk.analysis.op_plan import budget_of
from storage_ops.autochunk.analysis.passes import Passes, order
from storage_ops.autochunk.analysis.predict import peak
from storage_ops.autochunk.analysis.spans import (
    LARGE,
    TRIES,
    Span,
    candidates,
    is_product,
    propagate,
    resampled,
)
from storage_ops.autochunk.cross_entropy.recognise import NOTHING, Recognised
from storage_ops.autochunk.fx_graph.edit import Undo, retire
from storage_ops.autochunk.fx_graph.joint_graph import connect, disconnect
from storage_ops.autochunk.fx_graph.nodes import (
    ends,
    hint,
    leading_to,
    name_of,
    nbytes,
    numel,
    owner,
    tangents_of,
)
from storage_ops.autochunk.prepare.class_dimension import move_classes_last
from storage_ops.autochunk.prepare.decompose import (
    Mutations,
    join_batches,
    new_values,
    prepare,
    starts,
)
from storage_ops.autochunk.prepare.ranges import take_apart
from storage_ops.autochunk.reasons import Conflict, describe, internal, log
from storage_ops.autochunk.rewrite.joint_sums import Term, add_up
from storage_ops.autochunk.rewrite.replace import Limits, rewrite
from storage_ops.autochunk.runtime.chunk_op import in_body
from storage_ops.quantities import readable


@dataclass
class Report:
    """The effect of the pass on one graph.

    Attributes:
        chunked: whether a span of the graph is evaluated in chunks.
        num_chunks: the number of chunks, or 0 if the graph is not chunked.
        num_passes: how often the logits are computed.
        reason: why the graph is not chunked, or an empty string.
        error: the unexpected exception that prevented chunking, or None.
        peak_before: predicted peak bytes above the inputs.
        peak_after: predicted peak bytes above the inputs after chunking.
    """

    chunked: bool = False
    num_chunks: int = 0
    num_passes: int = 0
    reason: str = ""
    error: Exception | None = None
    peak_before: int = 0
    peak_after: int = 0

    def decline(self, error: Exception) -> None:
        """Record why a graph is not chunked. The first of several reasons is reported."""
        if isinstance(error, Conflict):
            reason = describe(error)
            log.debug("%s", reason)
        else:
            reason, self.error = internal(error), self.error or error
            log.debug("internal error", exc_info=error)
        self.reason = self.reason or reason


def chunk_graph(
    graph: fx.Graph,
    num_chunks: int | None = None,
    memory_budget: int | None = None,
    visible: int | None = None,
    recognised: Recognised = NOTHING,
) -> Report:
    """Chunk a joint graph in place.

    If an error occurs, the graph computes the same as before, and the report has the reason.

    Args:
        visible: the number of results of the function, if known.
        recognised: the result of the rewrite before autograd.
    """
    if in_body():
        return Report(reason="it is itself a chunk")
    connected = disconnect(graph)
    graph.eliminate_dead_code()
    report, undo = Report(), Undo(graph)
    try:
        tangents, changed = tangents_of(graph), new_values(graph, visible)
        work = _Work(graph, report, tangents, changed, num_chunks, memory_budget)
        work.run(recognised)
    except Exception as error:
        report.decline(error)
    if report.chunked:
        report.reason = ""
    else:
        undo()
    if report.chunked or connected:
        connect(graph)
    return report


@dataclass
class _Work:
    """A graph and the requested number of chunks, or their budget.

    Attributes:
        changed: inputs that the function changes, and the values written to them.
        parts: the ranges of each product that was split into ranges, and of each range.
        resampled: products whose results are interpolated, with their number of elements.
    """

    graph: fx.Graph
    report: Report
    tangents: list[fx.Node]
    changed: set[fx.Node]
    num_chunks: int | None
    memory_budget: int | None
    parts: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    resampled: dict[fx.Node, int] = field(default_factory=dict)

    def run(self, recognised: Recognised) -> None:
        """Chunk the spans of the largest products."""
        graph, report, tried = self.graph, self.report, join_batches(self.graph)
        report.peak_after = peak(graph)
        report.peak_before = report.peak_after + recognised.saved
        report.num_chunks, largest = recognised.num_chunks, recognised.largest
        report.chunked, report.num_passes = report.num_chunks > 0, recognised.num_passes
        for _ in range(TRIES):
            self.resampled = resampled(graph)
            amplifiers = candidates(graph, set(self.tangents or starts(graph)), tried)
            amplifiers.sort(key=self.whole, reverse=True)
            largest = max([largest, *map(self.whole, amplifiers[:1])])
            amplifiers = [n for n in amplifiers if self.whole(n) * LARGE > largest
                     and (is_product(n) or not report.reason)]  # fmt: skip
            if not amplifiers:
                break
            # Products come first. A spread gradient is in the span of a product, or is tried later.
            amplifiers.sort(key=is_product, reverse=True)
            undo, parts = Undo(graph), dict(self.parts)
            try:
                counts = self.chunk(amplifiers)
                after = peak(graph)
                if self.num_chunks is None:  # otherwise the caller asked for chunks
                    _check_saving(report.peak_after, after)
                report.peak_after = after
            except Exception as error:
                undo()
                self.parts = parts
                report.decline(error)
            else:
                graph.eliminate_dead_code()
                report.chunked = True
                report.num_chunks = max([report.num_chunks, *counts])
                report.num_passes = max(report.num_passes, len(counts))
            tried |= {amplifiers[0], *self.parts.get(amplifiers[0], ())}
        report.reason = report.reason or _nothing_amplifies(graph)

    def whole(self, amplifier: fx.Node) -> int:
        """Return the elements of a product with all its ranges, before or after interpolation."""
        elements = sum(map(numel, self.parts.get(amplifier, [amplifier])))
        return max(elements, self.resampled.get(amplifier, 0))

    def chunk(self, amplifiers: list[fx.Node]) -> list[int]:
        """Chunk the span of the first of some products. Return the number of chunks of each pass.

        If a product was split into ranges, the span of each range is chunked. The other products
        are split too, because their spans may overlap.
        """
        amplifier, tangents, total = amplifiers[0], list[fx.Node](), list[int]()
        self.check(amplifier)
        for product in amplifiers:
            tangents = prepare(self.graph, product, self.tangents) or tangents
            if is_product(product):
                move_classes_last(self.graph, product)
            if product not in self.parts and is_product(product):
                parts = take_apart(self.graph, product)
                self.parts.update(dict.fromkeys([product, *parts], parts))
        terms: list[Term] = []
        for part in self.parts.get(amplifier, [amplifier]):
            if part in leading_to(ends(self.graph)):
                counts = self.rewrite(part, tangents, terms)
                total = list(map(sum, zip_longest(total, counts, fillvalue=0)))
                retire(self.graph)
        add_up(self.graph, terms)
        self.graph.lint()
        return total

    def check(self, amplifier: fx.Node) -> None:
        """Raise Conflict if chunks would save nothing."""
        size, budget = self.bytes_of(amplifier), self.budget(amplifier)
        if size == 0:
            raise Conflict("is empty", amplifier)
        if self.num_chunks is None and size <= budget:
            raise Conflict(f"fits in the memory budget of {readable(budget)} as a whole", amplifier)

    def budget(self, amplifier: fx.Node) -> int:
        device = amplifier.meta["val"].device
        return budget_of(self.bytes_of(amplifier), self.memory_budget, device)

    def bytes_of(self, amplifier: fx.Node) -> int:
        """Return the bytes of the product that `whole` counts."""
        itemsize: int = amplifier.meta["val"].element_size()
        return self.whole(amplifier) * itemsize

    def count(self, amplifiers: Collection[fx.Node]) -> int:
        """Return the number of chunks for products or ranges."""
        if self.num_chunks is None:
            budget = max(self.budget(next(iter(amplifiers))), 1)
            sizes = (max(nbytes(n), self.bytes_of(n)) for n in amplifiers)
            return max(2, -(-sum(sizes) // budget))
        known = [self.parts.get(n, [n]) for n in amplifiers]
        whole = sum(sum(map(numel, parts)) for parts in {id(p): p for p in known}.values())
        return -(-self.num_chunks * sum(map(numel, amplifiers)) // whole)

    def in_order(self, amplifier: fx.Node, tangents: list[fx.Node]) -> tuple[Span, Passes]:
        """Return the span of an amplifier and its passes.

        Chunks may cut groups of tokens, unless that needs another pass.
        """
        planned, error = list[tuple[Span, Passes]](), None
        for cut in (False, True):
            if not planned or (len(planned[0][1].outputs) > 1 and not same(planned[0][0].step, 1)):
                try:
                    span = propagate(self.graph, amplifier, self.count, cut)
                    planned.append((span, order(self.graph, span, tangents)))
                except Conflict as conflict:
                    error = error or conflict
        if not planned:
            assert error is not None
            raise error
        return min(planned, key=lambda plan: (len(plan[1].outputs), hint(plan[0].step)))

    def rewrite(self, amplifier: fx.Node, tangents: list[fx.Node], terms: list[Term]) -> list[int]:
        """Chunk the span of an amplifier. Return the number of chunks of each pass.

        The sums of the span join `terms`.
        """
        graph, budget = self.graph, self.budget(amplifier)
        mutations = Mutations(graph)
        span, ordered = self.in_order(amplifier, tangents)
        inputs = {arg for reads in span.reads.values() for arg, _ in reads}
        for arg in inputs:
            if owner(arg) in self.changed:
                raise Conflict("is changed in place by the function", arg)
        mutations.check_reads(inputs, span.layouts)
        count = None if self.num_chunks is None else self.count(span.amplifiers)
        counts = rewrite(graph, span, ordered, Limits(count, budget), terms)
        mutations.check_order(graph)
        return counts


def _nothing_amplifies(graph: fx.Graph) -> str:
    """Return why a graph is not chunked in which no product is larger than its input."""
    for node in graph.nodes:
        if name_of(node) == "aten.convolution.default" and numel(node) > numel(node.args[0]):
            reason = "a convolution is not a matrix product: use F.linear with the channels last"
            return describe(Conflict(reason, node))
    return "no matrix product is larger than its input"


def _check_saving(whole: int, in_chunks: int) -> None:
    """Raise Conflict if the predicted peak of a graph is larger with chunks than without.

    Possible causes are targets that only chunks need in memory, and gradients that chunks sum in
    fp32.
    """
    if in_chunks > whole:
        raise Conflict(
            f"takes {readable(whole)} as a whole, less than the {readable(in_chunks)} in chunks"
        )
