"""What the plan of linear cross-entropy's op depends on where it takes the place of a loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from storage_ops import matmul
from storage_ops.autochunk.values import hint, name_of
from storage_ops.loss import cost, planner
from storage_ops.loss.call import Call, arithmetic
from storage_ops.loss.devices import has_row_kernel, rates_of
from storage_ops.loss.op import call_of_backward
from storage_ops.loss.problem import Problem, padded, parts
from storage_ops.loss.tokens import copy_elements

EVERY = -(1 << 62)  # no class: as ignore_index it says that no token is ignored


def budget_of(size: int, given: int | None) -> int:
    """Bytes for what a chunk holds of a product of so many.

    By default a quarter of them, at least 32 MiB and at most 1 GiB, as the loss's planner has it.
    """
    return planner.bounded(size // 4) if given is None else given


def _problem(call: Call) -> Problem:
    """What a call with fake tensors depends on; symbolic sizes count as their hints."""
    x, target = call.input, call.target
    wide, dense = arithmetic(x.dtype), target.is_floating_point()
    copies = copy_elements(call.bias, x.dtype) * x.element_size()
    copies += copy_elements(call.class_weight, wide) * wide.itemsize
    return Problem(
        hint(x.shape[0]),
        hint(x.shape[1]),
        hint(call.weight.shape[0]),
        matmul.of(x.dtype, x.device.type, torch.get_num_threads()),
        grads=(call.grad_mask[0], call.grad_mask[1], call.grad_mask[2]),
        in_forward=call.in_forward,
        picks=0 if call.selected_ids is None else call.selected_ids.shape[-1],
        gathers=not dense and call.ignore_index != EVERY,
        rescales=not dense and not (call.label_smoothing and call.softcap),
        masks=dense and call.token_weight is not None,
        plain=not has_row_kernel(x.device.type),
        cast_bytes=wide.itemsize if dense and target.dtype != wide else 0,
        fixed_bytes=hint(copies),
    )


def plan_of(
    call: Call, num_chunks: int | None, budget: int | None
) -> tuple[int | None, planner.Plan]:
    """The op's memory_budget (given, that of so many chunks, or its own default), and its plan."""
    p = _problem(call)
    if num_chunks is not None:
        # A chunk of tokens, padding and products included; the few numbers per token on top.
        share = parts(p.tokens, num_chunks) * padded(p.vocab)
        budget = share * p.itemsize * 51 // 50 + cost.token_bytes(p)
    budget = budget if budget is None else max(budget, planner.smallest_budget(p))
    return budget, planner.choose(p, budget, rates_of(call.input.device))


def scratch(node: fx.Node) -> int:
    """What the op, or its backward, holds besides its arguments and results, as planned."""
    values: Any = [a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args]
    call = call_of_backward(values) if "backward" in name_of(node) else Call(*values)
    return plan_of(call, None, call.memory_budget)[1].peak_bytes
