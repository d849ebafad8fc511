"""What the plan of linear cross-entropy's op depends on where it takes the place of a loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from storage_ops.autochunk.propagate import hint
from storage_ops.loss import plan_memory, planner, tile_memory
from storage_ops.loss import tokens as loss_rows
from storage_ops.matmul import products

OP = "storage_ops.linear_cross_entropy.default"


def _problem(tensors: Sequence[Any], grads: list[bool]) -> plan_memory.Problem:
    """Of (input, weight, target, bias, classes, token_weight) as values."""
    x, weight, target, bias, classes, token_weight = tensors
    wide = loss_rows.arithmetic(x.dtype)
    dense = target.is_floating_point()
    copies = loss_rows.copy_elements(bias, x.dtype) * x.element_size()
    copies += loss_rows.copy_elements(classes, wide) * wide.itemsize
    return plan_memory.Problem(
        hint(x.shape[0]), hint(x.shape[1]), hint(weight.shape[0]), x.element_size(),
        (grads[0], grads[1], grads[2]),
        **products.traits(x.dtype, x.device.type),
        gather=not dense,
        rescale=not dense,
        masked=dense and token_weight is not None,
        threads=torch.get_num_threads(),
        cast_bytes=wide.itemsize if dense and target.dtype != wide else 0,
        fixed_bytes=hint(copies),
    )  # fmt: skip


def plan_of(
    tensors: Sequence[Any], grads: list[bool], num_chunks: int | None, budget: int | None
) -> tuple[int | None, planner.Plan]:
    """The op's memory_budget (given, that of so many chunks, or its own default), and its plan."""
    p = _problem(tensors, grads)
    least, rates = planner.smallest_budget(p), products.rates_of(tensors[0].device)
    if num_chunks is not None:
        # A chunk of tokens, padding and products included; the few numbers per token on top.
        share = tile_memory.parts(p.tokens, num_chunks) * tile_memory.padded(p.vocab)
        budget = share * p.itemsize * 51 // 50 + plan_memory.token_bytes(p)
    budget = budget if budget is None else max(budget, least)
    return budget, planner.choose(p, budget, rates)


def scratch(node: fx.Node) -> int:
    """What a call of the op holds besides its arguments and results, as planned."""
    args: Any = node.args
    given = [None if n is None else n.meta["val"] for n in args[:6]]
    p = _problem(given, args[20])
    least = planner.smallest_budget(p)
    return planner.choose(p, None if args[16] is None else max(args[16], least)).peak_bytes
