"""Recognises a forward that is linear cross-entropy, which has an op of its own.

A loss falls into the part from the hidden states to a few numbers per token, its *rows*, and the
*tail* that makes one number of the rows, with masks, weights and counts.

The part before is evaluated in float64 on a few random tokens: every row has to be a sum of the
terms that the loss has, each times a number. The tail has to be linear in the rows, but for the
square of lse. Then its gradient with respect to the rows, which is traced, is the weight of each
token, whatever masks and means it comes from, and the loss is that of the op with these weights,
plus what the tail makes of zeros.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from storage_ops.autochunk.edit import Builder, Undo
from storage_ops.autochunk.forward import (
    Forward,
    Splice,
    forget_bounds,
    products,
    slice_of,
    sweep,
)
from storage_ops.autochunk.head import Head
from storage_ops.autochunk.lattice import Conflict
from storage_ops.autochunk.log import log
from storage_ops.autochunk.op_plan import budget_of, plan_of
from storage_ops.autochunk.prepare import own_sizes
from storage_ops.autochunk.ranges import leave_out
from storage_ops.autochunk.run import in_body
from storage_ops.autochunk.spans import LARGE, TRIES, is_product, propagate
from storage_ops.autochunk.tail import Tail
from storage_ops.autochunk.values import name_of, nbytes, numel, shape
from storage_ops.loss.call import Call, arithmetic

_ATEN = torch.ops.aten


@dataclass
class Recognised:
    """What a graph of Dynamo has become before autograd.

    Attributes:
        num_chunks: tiles of the op of linear cross-entropy, where a loss is one; 0: none is.
        largest: elements of the largest logits of such a loss.
        saved: bytes of the logits that are not formed.
    """

    num_chunks: int = 0
    largest: int = 0
    saved: int = 0


NOTHING = Recognised()


def recognise(
    gm: fx.GraphModule, num_chunks: int | None = None, memory_budget: int | None = None
) -> Recognised:
    """Let a graph of Dynamo use the op of linear cross-entropy.

    Whatever goes wrong, the graph computes what it did before.
    """
    found, largest, graph = Recognised(), 0, gm.graph
    if in_body():
        return found
    forget_bounds(graph)
    for product in products(graph)[:TRIES]:
        size, largest = numel(product), max(largest, numel(product))
        small = num_chunks is None and nbytes(product) <= budget_of(nbytes(product), memory_budget)
        if small or size * LARGE <= largest or not size:
            continue
        with _tried(graph, product):
            forward = slice_of(gm, product)
            amplifier = _amplifier(forward)
            own_sizes(forward.graph, amplifier)
            head, tail = parts_of(forward, leave_out(forward.graph, amplifier))
            count = emit(forward, head, tail, num_chunks, memory_budget)
            graph.lint()
            sweep(forward)
            found.num_chunks = max(found.num_chunks, count)
            found.largest = max(found.largest, size)
            found.saved += nbytes(product)
    gm.recompile()
    return found


def _amplifier(forward: Forward) -> fx.Node:
    size = numel(forward.product)
    found: list[fx.Node] = [n for n in forward.graph.nodes if is_product(n) and numel(n) == size]
    if not found:
        raise Conflict("is no matrix product", forward.product)
    return found[0]


@contextmanager
def _tried(graph: fx.Graph, product: fx.Node) -> Iterator[None]:
    """Undo changes of a graph that fail."""
    undo = Undo(graph)
    sizes = product.meta["example_value"].fake_mode.shape_env
    try:
        # Masks make sizes in what is only tried, which the graph does not have.
        with sizes.ignore_fresh_unbacked_symbols() if sizes else nullcontext():
            yield
    except Conflict as conflict:
        undo()
        log.debug("%s: no linear cross-entropy, %s: %s", product, conflict.node, conflict)
    except Exception as error:
        undo()
        log.debug("%s: not recognised", product, exc_info=error)


def parts_of(forward: Forward, amplifier: fx.Node) -> tuple[Head, Tail]:
    """The cross-entropy that a forward computes.

    Raises:
        Conflict: it is something else, or that is not certain.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    if forward.loss is None or not forward.learns(amplifier):
        raise Conflict("leads to no loss")
    # In float16 the op forms the logits twice, for gradients without their factor might overflow.
    # The general rewrite picks a factor, and needs three products where the op needs four.
    dtype = amplifier.meta["val"].dtype
    if name_of(amplifier) == "aten.bmm.default" or dtype == torch.float16:
        raise Conflict("is a product of another kind")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            head = Head(forward, propagate(forward.graph, amplifier, lambda _: 1))
            with unset_fake_temporarily():
                head.fit()
            tail = Tail(forward, head)
            with unset_fake_temporarily():
                tail.fit()
        except (RuntimeError, IndexError, TypeError) as error:  # random tokens are no valid input
            raise Conflict(str(error)) from error
    return head, tail


def emit(
    forward: Forward, head: Head, tail: Tail, num_chunks: int | None, memory_budget: int | None
) -> int:
    """Write the op, and what the tail makes of zeros, in the place of the loss; its tiles."""
    assert forward.loss is not None
    splice = Splice(forward, forward.loss)
    call, copy = splice.call, splice.copy
    weight, target = copy(head.weight), copy(head.target)
    if head.transposed:
        weight = call(_ATEN.permute.default, weight, [1, 0])
    if not head.dense:
        target = call(_ATEN.reshape.default, target, [-1])
    classes = head.classes and call(_ATEN.reshape.default, copy(head.classes), [-1])
    # The weights of the tokens do not depend on the rows, of which only zeros are to be had here.
    builder = Builder(forward.graph, head.span.amplifiers, head.span.layouts)
    given = [copy(leaf) for leaf in tail.leaves]
    for row in head.rows:
        sizes = [n if isinstance(n, int) else copy(n) for n in map(builder.size, shape(row))]
        options = {"dtype": arithmetic(row.meta["val"].dtype), "device": row.meta["val"].device}
        given.append(call(_ATEN.full.default, sizes, 0.0, **options))
    splice.env.update(zip(tail.inputs, given, strict=True))
    token_weights, at_zero = copy(tail.weight), copy(tail.loss)
    arguments: list[Any] = [
        copy(head.input), weight, target, head.bias and copy(head.bias), classes,
        None if tail.uniform else token_weights,  # or else the op would look at each of them
    ]  # fmt: skip
    chosen: dict[str, Any] = {
        "reduction": "sum", "label_smoothing": tail.label_smoothing, "z_loss": tail.z_loss,
        "softcap": head.softcap, "logit_scale": head.logit_scale,
        "grad_mask": [bool(n and forward.learns(n)) for n in (head.input, head.weight, head.bias)],
        "wants": [False] * 4,
    }  # fmt: skip
    values: list[Any] = [a and a.meta["example_value"] for a in arguments]
    chosen["memory_budget"], plan = plan_of(Call(*values, **chosen), num_chunks, memory_budget)
    op = torch.ops.storage_ops.linear_cross_entropy.default
    made = call(op, *Call(*arguments, **chosen))
    new = call(operator.getitem, made, 0)
    if tail.uniform:
        new = call(_ATEN.mul.Tensor, new, call(_ATEN.select.int, token_weights, 0, 0))
    new = call(_ATEN.add.Tensor, new, at_zero)
    dtype = forward.loss.meta["example_value"].dtype
    if new.meta["example_value"].dtype != dtype:
        new = call(_ATEN._to_copy.default, new, dtype=dtype)
    forward.loss.replace_all_uses_with(new)
    log.debug("%s: it is linear cross-entropy, %s", forward.product, chosen)
    return plan.num_chunks * plan.num_slices
