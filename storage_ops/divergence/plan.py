"""Chooses schedules for the divergence of two heads, from shapes and a memory budget."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from storage_ops.divergence.rows import COPIES, piece_elements
from storage_ops.loss.planning import budgets, cost, planner
from storage_ops.loss.planning.devices import Rates
from storage_ops.loss.planning.problem import Problem, padded
from storage_ops.loss.planning.schedule import TOKEN_CHUNKED, VOCAB_SLICED, Schedule
from storage_ops.matmul import Kind, Matmul
from storage_ops.quantities import readable


@dataclass(frozen=True)
class Teacher:
    """The teacher's part of the problem that a plan is made for.

    Attributes:
        hidden: the hidden size of the teacher; 0 for a stored teacher.
        matmul: the teacher's matrix products, with the size of an element; None for a stored
            teacher.
        copies: the most copies of a piece of rows that are in memory at a time.
        targets: whether the call has targets.
        copied: whether targets need a copy of the student's tile.
        plain: whether the row kernel of targets is plain torch.
    """

    hidden: int = 0
    matmul: Matmul | None = None
    copies: int = COPIES
    targets: bool = False
    copied: bool = False
    plain: bool = False

    def beside(self, p: Problem, rows: int, columns: int) -> int:
        """Return the bytes in memory besides a student's tile of this size."""
        copies = self.copies * p.arithmetic
        size = copies * max(columns, min(rows * columns, piece_elements(p.matmul.cuda)))
        if self.targets:
            copied = rows * padded(columns) * p.itemsize * (self.copied and any(p.grads))
            copy_bytes = cost.PLAIN_COPIES * p.arithmetic * cost.plain_elements(rows, columns)
            size = copied + max(size, copy_bytes * self.plain)
        m = self.matmul
        if m is None:
            return size
        size = max(size, m.scratch_bytes(Kind.LOGITS, rows, columns, self.hidden, False))
        return size + rows * m.itemsize * (padded(columns) + p.gathers * self.hidden)


@dataclass(frozen=True)
class DivergencePlan:
    """The schedule of a divergence, and its cost.

    Attributes:
        whole: chunks of tokens with whole rows of logits, for the statistics.
        sliced: slices of the vocabulary for the gradients, from the statistics. None if `whole`
            computes the gradients too, or if no gradients are needed.
        peak_bytes: scratch memory beyond inputs, outputs and returned gradients.
        seconds: predicted time of the products.
    """

    whole: Schedule
    sliced: Schedule | None
    peak_bytes: int
    seconds: float

    def with_classes(self, classes: int) -> DivergencePlan:
        """Return the same steps over the classes of a rank, which may be fewer."""

        def cut(s: Schedule) -> Schedule:
            if classes == s.problem.vocab:
                return s
            p = s.problem_of_rank(classes)
            return planner.schedule(p, s.strategy, s.rows, s.columns)

        sliced = None if self.sliced is None else cut(self.sliced)
        return replace(self, whole=cut(self.whole), sliced=sliced)


def peak_of(s: Schedule, t: Teacher) -> int:
    """Return the peak scratch memory of a schedule for both heads."""
    return cost.peak(s, t.beside(s.problem, s.rows, s.columns))


@functools.lru_cache(maxsize=256)
def default_budget(p: Problem, t: Teacher, rates: Rates) -> int:
    """Return bytes for a quarter of both heads' logits (on a GPU all), and for float32 sums.

    `loss.planning.budgets` has the bounds for the logits of one head. Chunks of tokens take the
    sums, for the gradient of a 16-bit weight. The budget has room for the smallest plan.
    """
    part = p.tokens * padded(p.vocab) * p.itemsize // (1 if p.matmul.cuda else 4)
    sums = p.vocab * p.hidden * 4 if p.mixed and p.in_forward and p.grads[1] else 0
    least = _smallest_budget(p, t, rates)

    def budget(most: int) -> int:
        return max(sums + 2 * budgets.bounded(part, most), least)

    def seconds(budget: int) -> float:
        return _fastest(p, t, budget, rates).seconds

    return budgets.larger_if_worth(budget, seconds, budgets.most(rates))


@functools.lru_cache(maxsize=256)
def choose(p: Problem, t: Teacher, memory_budget: int | None, rates: Rates) -> DivergencePlan:
    """Return the plan with the fastest products that keeps to the budget.

    Raises:
        ValueError: no plan keeps to the budget. The error has the smallest possible budget.
    """
    budget = default_budget(p, t, rates) if memory_budget is None else memory_budget
    return _fastest(p, t, budget, rates)


def _smallest_budget(p: Problem, t: Teacher, rates: Rates) -> int:
    return min(plan.peak_bytes for plan in _candidates(p, t, rates, None))


def _fastest(p: Problem, t: Teacher, budget: int, rates: Rates) -> DivergencePlan:
    plans = [plan for plan in _candidates(p, t, rates, budget) if plan.peak_bytes <= budget]
    if not plans:
        least = _smallest_budget(p, t, rates)
        raise ValueError(
            f"linear_kl_div: `memory_budget` is {budget} bytes. Expected at least {least} "
            f"({readable(least, up=True)}) for {p.tokens} tokens, hidden sizes {p.hidden} and "
            f"{t.hidden}, vocabulary {p.vocab} and {p.itemsize} bytes per element."
        )
    return min(plans, key=lambda plan: (plan.seconds, plan.peak_bytes))


def _candidates(p: Problem, t: Teacher, rates: Rates, budget: int | None) -> list[DivergencePlan]:
    """Return plans with the largest tiles that fit, or the smallest tiles without a budget."""
    alone, tokens, vocab = replace(p, grads=(False,) * 3), max(p.tokens, 1), max(p.vocab, 1)

    def sized(p: Problem, strategy: str, rows: int, columns: int) -> Schedule:
        return planner.schedule(p, strategy, rows, columns)

    def largest(limit: int, schedule_of: Callable[[int], Schedule]) -> Schedule:
        if budget is None:
            return schedule_of(1)
        return schedule_of(
            planner.largest(limit, lambda size: peak_of(schedule_of(size), t), budget) or 1
        )

    teacher = 0.0
    if t.matmul is not None:
        own = replace(alone, hidden=t.hidden, matmul=t.matmul)
        teacher = cost.predict(sized(own, TOKEN_CHUNKED, tokens, vocab), rates)[2]

    def plan(whole: Schedule, sliced: Schedule | None) -> DivergencePlan:
        peak, seconds = peak_of(whole, t), cost.predict(whole, rates)[2] + teacher
        if sliced is not None:
            peak = max(peak, peak_of(sliced, t))
            seconds = cost.predict(sliced, rates)[2] + 2 * teacher
        return DivergencePlan(whole, sliced, peak, seconds)

    statistics = largest(tokens, lambda rows: sized(alone, TOKEN_CHUNKED, rows, vocab))
    if not any(p.grads):
        return [plan(statistics, None)]
    plans = []
    if p.in_forward:
        plans.append(plan(largest(tokens, lambda rows: sized(p, TOKEN_CHUNKED, rows, vocab)), None))
    # With all tokens in one tile the gradient of the weight is written once, without a sum.
    chunks = (1, tokens) if budget is None else (1, 2, 4, 8, tokens)
    for rows in sorted({-(-tokens // k) for k in chunks}):
        schedule_of = functools.partial(sized, p, VOCAB_SLICED, rows)
        plans.append(plan(statistics, largest(vocab, schedule_of)))
    return plans
