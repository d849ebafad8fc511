"""The plan of the linear cross-entropy op for a loss that it replaces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from storage_ops.autochunk.fx_graph.nodes import hint, name_of
from storage_ops.loss.call import Call, tensors_of, with_tensors
from storage_ops.loss.engine.head import problem_of
from storage_ops.loss.engine.ranks import ranks_of
from storage_ops.loss.engine.tokens import tokens_of
from storage_ops.loss.op import call_of_backward
from storage_ops.loss.planning import budgets, cost, planner
from storage_ops.loss.planning.devices import rates_of
from storage_ops.loss.planning.problem import Problem, padded, parts

EVERY = -(1 << 62)  # no class: with this ignore_index, no token is ignored


def budget_of(size: int, memory_budget: int | None, device: torch.device) -> int:
    """Return the most bytes for chunks of a product of `size` bytes on a device.

    The default is a quarter of the product, in the bounds of `loss.planning.budgets`.
    """
    if memory_budget is not None:
        return memory_budget
    return budgets.bounded(size // 4, budgets.most(rates_of(device)))


def _problem(call: Call) -> Problem:
    """Return the planner's problem for a call with fake tensors.

    Symbolic sizes count as their hints.
    """
    with call.input.fake_mode:  # type: ignore[attr-defined]
        call = with_tensors(call, tuple(map(_hinted, tensors_of(call))))
        classes = len(call.weight)
        tokens = tokens_of(call, ranks_of(call.group), 0, classes)
        # It is unknown which tokens are ignored, so assume that some are.
        gathers = not tokens.probabilities and call.ignore_index != EVERY
        return replace(problem_of(call, tokens, classes), gathers=gathers)


def _hinted(value: torch.Tensor | None) -> torch.Tensor | None:
    if value is None:
        return None
    sizes, strides = ([hint(s) for s in numbers] for numbers in (value.shape, value.stride()))
    return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)


def plan_of(
    call: Call, num_chunks: int | None, budget: int | None
) -> tuple[int | None, planner.Plan]:
    """Return the op's memory_budget and its plan.

    The budget is `budget`, the budget of `num_chunks` chunks, or the op's default. It is raised if
    no plan fits it, or if the plan would have more tiles than there are tokens.
    """
    p, rates = _problem(call), rates_of(call.input.device)
    if num_chunks is None and (budget is None or budget >= planner.smallest_budget(p)):
        return budget, planner.choose(p, budget, rates)
    tokens = max(p.tokens, 1)
    count = tokens if num_chunks is None else min(num_chunks, tokens)
    while True:
        # A chunk of tokens with padding and products, and the few numbers per token.
        share = parts(p.tokens, count) * padded(p.vocab)
        budget = share * p.itemsize * 51 // 50 + cost.token_bytes(p)
        budget = max(budget, planner.smallest_budget(p))
        plan = planner.choose(p, budget, rates)
        if count == 1 or plan.num_chunks * plan.num_slices <= tokens:
            return budget, plan
        count = -(-count // 2)


def scratch(node: fx.Node) -> int:
    """Return the scratch bytes that the op, or its backward, plans besides its results."""
    values: Any = [a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args]
    call = call_of_backward(values) if "backward" in name_of(node) else Call(*values)
    return plan_of(call, None, call.memory_budget)[1].peak_bytes
