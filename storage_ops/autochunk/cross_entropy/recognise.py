"""Recognises forward code that is linear cross-entropy, and replaces it by the op.

A loss has two parts. The first goes from the hidden states to a few numbers per token, its *rows*.
The *reduction* goes from the rows to one number, with masks, weights and counts.

The first part is evaluated in float64 on a few random tokens. Every row must be a linear
combination of the terms of linear cross-entropy. If the reduction is linear in the rows, except for
the square of lse, its gradient with respect to the rows is traced. This gradient is the weight of
each token, and includes all masks and means. The loss is then the op's loss with these weights,
plus the reduction of zeros. Any other reduction stays unchanged, and the op only computes its rows.
Examples are policy losses, preferences, ratios and entropies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from storage_ops.autochunk.analysis.op_plan import budget_of
from storage_ops.autochunk.analysis.spans import LARGE, TRIES, is_product, propagate
from storage_ops.autochunk.cross_entropy.classes_last import classes_last
from storage_ops.autochunk.cross_entropy.dynamo_slice import (
    ForwardSlice,
    forget_bounds,
    join_sizes,
    products,
    slice_of,
    sweep,
)
from storage_ops.autochunk.cross_entropy.emit import Emitted, Emitter
from storage_ops.autochunk.cross_entropy.per_token import PerToken
from storage_ops.autochunk.cross_entropy.reduction import Reduction
from storage_ops.autochunk.fx_graph.edit import Undo
from storage_ops.autochunk.fx_graph.nodes import name_of, nbytes, numel
from storage_ops.autochunk.prepare.class_dimension import move_classes_last
from storage_ops.autochunk.prepare.decompose import join_batches, own_sizes
from storage_ops.autochunk.prepare.ranges import take_apart
from storage_ops.autochunk.reasons import Conflict, log
from storage_ops.autochunk.runtime.chunk_op import in_body
from storage_ops.loss.planning.budgets import LEAST


@dataclass
class Recognised:
    """The result of rewriting a graph of Dynamo before autograd.

    Attributes:
        num_chunks: tiles of the op of linear cross-entropy, or 0 if the graph has no such op.
        num_passes: how often the op computes the logits.
        largest: elements of the largest logits of a replaced loss.
        saved: bytes of the logits that are not allocated.
    """

    num_chunks: int = 0
    num_passes: int = 0
    largest: int = 0
    saved: int = 0


NOTHING = Recognised()


def recognise(
    gm: fx.GraphModule, num_chunks: int | None = None, memory_budget: int | None = None
) -> Recognised:
    """Let a graph of Dynamo use the op of linear cross-entropy.

    If an error occurs, the graph computes the same as before.
    """
    recognised, largest, graph = Recognised(), 0, gm.graph
    if in_body():
        return recognised
    forget_bounds(graph)
    join_sizes(graph)
    least = LEAST if memory_budget is None else memory_budget
    least = 0 if num_chunks is not None else least
    try:
        classes_last(gm, least)
    except Exception as error:
        log.debug("classes are left in dimension 1", exc_info=error)
    for product in products(graph)[:TRIES]:
        size, largest = numel(product), max(largest, numel(product))
        budget = budget_of(nbytes(product), memory_budget, product.meta["example_value"].device)
        small = num_chunks is None and nbytes(product) <= budget
        # A transform of torch.func wraps its tensors, so the joint pass handles such a graph.
        wrapped = not isinstance(product.meta["example_value"], FakeTensor)
        if small or wrapped or size * LARGE <= largest or not size:
            continue
        with _tried(graph, product):
            forward = slice_of(gm, product)
            join_batches(forward.graph)
            amplifier = _amplifier(forward)
            own_sizes(forward.graph, amplifier)
            move_classes_last(forward.graph, amplifier)
            ranges = per_token_of(forward, take_apart(forward.graph, amplifier))
            emitted = emit(forward, ranges, num_chunks, memory_budget)
            graph.lint()
            sweep(forward)
            recognised.num_chunks = max(recognised.num_chunks, emitted.num_chunks)
            recognised.num_passes = max(recognised.num_passes, emitted.num_passes)
            recognised.largest = max(recognised.largest, size)
            recognised.saved += nbytes(product)
    gm.recompile()
    return recognised


def _amplifier(forward: ForwardSlice) -> fx.Node:
    size = numel(forward.product)
    matching: list[fx.Node] = [n for n in forward.graph.nodes if is_product(n) and numel(n) == size]
    if not matching:
        raise Conflict("is not a matrix product", forward.product)
    return matching[0]


@contextmanager
def _tried(graph: fx.Graph, product: fx.Node) -> Iterator[None]:
    """Undo changes of a graph if the block raises an error."""
    undo = Undo(graph)
    sizes = product.meta["example_value"].fake_mode.shape_env
    try:
        # Masks create symbolic sizes during an attempt, which the graph must not keep.
        with sizes.ignore_fresh_unbacked_symbols() if sizes else nullcontext():
            yield
    except Conflict as conflict:
        undo()
        log.debug("%s: not a linear cross-entropy, %s: %s", product, conflict.node, conflict)
    except Exception as error:
        undo()
        log.debug("%s: not recognised", product, exc_info=error)


def per_token_of(forward: ForwardSlice, amplifiers: list[fx.Node]) -> list[PerToken]:
    """Return ranges of one product's tokens in the form that the op needs.

    Raises:
        Conflict: they are not linear cross-entropy, or this is uncertain.
    """
    ranges = []
    for amplifier in amplifiers:
        # In float16 the op computes the logits twice, because unscaled gradients might overflow.
        # The general rewrite chooses a factor, and needs three products instead of four.
        dtype = amplifier.meta["val"].dtype
        if name_of(amplifier) == "aten.bmm.default" or dtype == torch.float16:
            raise Conflict("is a product of another kind")
        with _at_random():
            per_token = PerToken(forward, propagate(forward.graph, amplifier, lambda _: 1))
            with _on_numbers():
                per_token.fit()
            ranges.append(per_token)
    return ranges


def _on_numbers() -> AbstractContextManager[Any]:
    """Create tensors with values, although Dynamo would create them without."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily  # imports sympy

    return unset_fake_temporarily()


@contextmanager
def _at_random() -> Iterator[None]:
    """Fix the random numbers. Raise Conflict if random tokens are no valid input of the block."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            yield
        except (RuntimeError, IndexError, TypeError) as error:
            raise Conflict(str(error)) from error


def _reduction_of(ranges: list[PerToken]) -> Reduction:
    """Return the reduction of a loss that is linear cross-entropy.

    Raise Conflict for another loss.
    """
    if len(ranges) > 1:
        raise Conflict("is cut into ranges of tokens")
    with _at_random():
        reduction = Reduction(ranges[0])
        with _on_numbers():
            reduction.fit()
    return reduction


def emit(
    forward: ForwardSlice, ranges: list[PerToken], num_chunks: int | None, memory_budget: int | None
) -> Emitted:
    """Replace a product by the op: for the loss if possible, otherwise for the rows."""
    emitter = Emitter(forward, ranges, num_chunks, memory_budget)
    try:
        reduction = _reduction_of(ranges)
    except Conflict as conflict:
        log.debug("%s: not a sum of cross-entropies, it %s", forward.product, conflict)
        return emitter.rows()
    return emitter.loss(reduction)
