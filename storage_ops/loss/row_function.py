"""The rows of cross-entropy: the row kernel, picked classes, and the results from the state."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from storage_ops.loss import formulas
from storage_ops.loss.call import Call, arithmetic
from storage_ops.loss.engine.head import Head, bias_dtype
from storage_ops.loss.engine.run import RowFunction, Run
from storage_ops.loss.engine.selection import Gather
from storage_ops.loss.engine.sums import Sums
from storage_ops.loss.picked import Picked
from storage_ops.loss.planning import planner
from storage_ops.loss.planning.cost import PIECE, STATE_ROWS
from storage_ops.loss.planning.devices import rates_of
from storage_ops.loss.planning.schedule import (
    EXPONENTIALS,
    GRADIENT,
    SLOPE,
    UPDATE,
    Schedule,
    Step,
    slices,
)

_OPS = torch.ops.storage_ops


class CrossEntropyRows(RowFunction):
    """Computes statistics and gradients of the rows of a tile by the row kernel.

    Attributes:
        state: (STATE_ROWS, n) statistics of the rows; see csrc/rows/row_math.h.
        argmax: (n,) classes of the largest logits, or None.
        picked: the classes whose log-probabilities are requested, or None.
        upstream: rows of upstream gradient for the row kernel, or None.
    """

    def __init__(self, head: Head, state: Tensor | None):
        """Prepare for a forward, or for a backward with the `state` that the forward returned."""
        self._head, call, tokens = head, head.call, head.tokens
        x = tokens.x
        self.bias = call.bias
        if call.bias is not None:
            self.bias = call.bias[: len(head.weight)].to(bias_dtype(call)).contiguous()
        if state is None:
            self.state = x.new_zeros(STATE_ROWS, tokens.count, dtype=arithmetic(x.dtype))
        else:
            self.state = tokens.collect_state(state)
        if head.ranks.agree is not None:
            self.state = self.state + head.ranks.agree
        self.argmax = x.new_zeros(tokens.count, dtype=torch.int64) if call.wants[3] else None
        picks = call.selected_ids is not None or call.top_k
        self.picked = Picked(head, self.state, self.bias) if picks else None
        if self.picked is not None and state is None:
            self.picked.check()
        self.upstream: Tensor | None = None

    def work(self, step: Step, tile: Tensor) -> Tensor | None:
        """See `RowFunction`."""
        picked, products = self.picked, None
        if picked is not None and step.phases & UPDATE:
            picked.read(step, tile)
        elif picked is not None and step.phases & GRADIENT:
            products = picked.products(step, tile)
        before = self.state[0, step.rows].clone() if step.phases & EXPONENTIALS else None
        self._row_kernel(step, tile)
        if picked is not None and products is not None and self.upstream is not None:
            picked.write(step, tile, products, self.upstream)
        return None if before is None else before - self.state[0, step.rows]

    def mass_sums(
        self, step: Step, tile: Tensor, factors: Tensor | None, out: Tensor, buckets: Tensor | None
    ) -> None:
        """See `RowFunction`. The mass of a class is its probability, or its absolute gradient."""
        call = self._head.call
        bias = None if self.bias is None else self.bias[step.classes]
        of_gradient = buckets is None
        weight = factors.abs() if factors is not None and of_gradient else None
        _OPS._tile_sums(
            out, tile, self._lse(step.rows), weight, bias, buckets, call.softcap, call.logit_scale,
            slope=of_gradient,
        )  # fmt: skip

    def gather_gradient(self, step: Step, tile: Tensor) -> Gather:
        """See `RowFunction`."""
        head, call, rows = self._head, self._head.call, step.rows
        lse, factors = self._lse(rows), self.factors(step)
        target = head.tokens.target[rows] - (head.first_class + step.classes.start)
        hit = self._upstream(1)[0].expand(head.tokens.count)[rows] * call.logit_scale
        bias = None if self.bias is None else self.bias[step.classes]

        def gather(out: Tensor, sums: Tensor | None, *places: Tensor) -> None:
            _OPS._gather_gradient(
                out, sums, tile, *places, lse, factors, target, hit, bias, call.softcap,
                call.logit_scale,
            )  # fmt: skip

        return gather

    def _lse(self, rows: slice) -> Tensor:
        """Return the log-sum-exps of some rows' logits, and +inf if the target is ignored."""
        shift, total = self.state[0, rows], self.state[1, rows]
        ignored = self._head.tokens.target[rows] == self._head.call.ignore_index
        return (shift + total.log()).masked_fill_(ignored, math.inf)

    def needed_classes(self, step: Step) -> Tensor:
        """See `RowFunction`."""
        return self._head.targets_within(step.rows, step.classes)

    def _row_kernel(self, step: Step, tile: Tensor) -> None:
        head, rows, classes, phases = self._head, step.rows, step.classes, step.phases
        tokens, call = head.tokens, head.call
        target, upstream = tokens.target[rows], None
        if tokens.probabilities:
            target = target[:, classes]
            if tokens.casts():
                target = target.new_empty(target.shape, dtype=self.state.dtype).copy_(target)
        if phases & GRADIENT:
            upstream = self.upstream
            if upstream is not None and upstream.shape[1] > 1:
                upstream = upstream[:, rows]
        argmax = self.argmax if phases & UPDATE else None
        _OPS._cross_entropy_rows(
            tile,
            target,
            None if self.bias is None else self.bias[classes],
            None if tokens.class_weight is None else tokens.class_weight[classes],
            upstream,
            self.state[:, rows],
            None if argmax is None else argmax[rows],
            head.first_class + classes.start,
            head.vocabulary,
            call.ignore_index,
            call.softcap,
            call.logit_scale,
            call.label_smoothing,
            phases | (SLOPE if phases & UPDATE and call.wants[2] else 0),
        )

    def merging(self, rows: slice) -> Iterator[None]:
        """See `RowFunction`."""
        head, target = self._head, self._head.tokens.target[rows]
        ignored = target == head.call.ignore_index
        if head.tokens.probabilities:
            ignored = torch.zeros(len(target), dtype=torch.bool, device=target.device)
        part = None if self.argmax is None else self.argmax[rows]
        state = self.state[:, rows]
        yield from head.ranks.merge(state, part, ignored, head.call, head.vocabulary)
        if self.picked is not None:
            self.picked.merge(rows)

    def factors(self, step: Step) -> Tensor:
        """See `RowFunction`."""
        return self._of_probabilities(step.rows) * self._head.call.logit_scale

    def _of_probabilities(self, rows: slice) -> Tensor:
        """Return the factor (rows,) from a token's probabilities to its gradient; 0 if ignored.

        It does not include the slope of the soft-cap and the target's part.
        """
        shift, total, _, _, mass, _ = self.state[:, rows].unbind(0)
        target, spread, lse, _, square = (
            row if len(row) == 1 else row[rows] for row in self._upstream(5)
        )
        factor = target + spread * mass + lse + square * (shift + total.log())
        ignored = self._head.tokens.target[rows] == self._head.call.ignore_index
        return factor.masked_fill(ignored, 0)

    def _upstream(self, count: int) -> list[Tensor]:
        """Return the first rows of upstream gradients, (n,) or (1,). Missing rows are 0.

        They are in the order of `formulas.upstream_of`.
        """
        assert self.upstream is not None
        missing = self.upstream.new_zeros(1)
        return [self.upstream[k] if k < len(self.upstream) else missing for k in range(count)]

    def free(self) -> None:
        """See `RowFunction`. There is no such memory here."""

    def finish_rescaled(self, sums: Sums) -> None:
        """See `RowFunction`.

        The gradient of a row is (sum_j exp(z_j - lse) C_j w_j - the target's part) * upstream.
        """
        head, state, total = self._head, self.state, sums.input
        call, tokens, weight = head.call, head.tokens, head.weight
        wide = state.dtype
        assert total is not None
        exponentials, logit = state[1], state[5]
        target, spread = (row.expand(tokens.count) for row in self._upstream(2))
        valid = tokens.target != call.ignore_index
        factor = self._of_probabilities(slice(0, tokens.count)) / exponentials
        cap = logit / call.softcap if call.softcap else torch.zeros_like(logit)
        hit = torch.where(valid, target * call.logit_scale * (1 - cap * cap), 0)
        smooth = None
        if call.label_smoothing:
            class_weight = tokens.class_weight
            class_weight = (
                total.new_ones(len(weight), dtype=wide) if class_weight is None else class_weight
            )
            smooth = total.new_zeros(1, total.shape[1], dtype=wide)
            for part in slices(len(weight), PIECE):
                smooth.addmm_(class_weight[part].unsqueeze(0), weight[part].to(wide))
            smooth *= call.logit_scale * call.label_smoothing / head.vocabulary
        classes = tokens.target.clamp(0, max(len(weight) - 1, 0))
        for part in slices(tokens.count, PIECE):
            place = sums.place(part)
            value = total[place].to(wide).mul_(factor[part].unsqueeze(1))
            value -= weight[classes[part]].to(wide).mul_(hit[part].unsqueeze(1))
            if smooth is not None:
                value.addcmul_(torch.where(valid[part], spread[part], 0).unsqueeze(1), -smooth)
            total[place] = value.to(total.dtype)

    def reduced(self, loss: Tensor) -> Tensor:
        """Return the loss of the call from the losses of tokens."""
        head = self._head
        call, tokens, target = head.call, head.tokens, head.tokens.target
        if not call.adds_losses:
            return formulas.reduce(loss, tokens, call)
        local = target - head.first_class
        in_slice = (local >= 0) & (local < len(head.weight))
        # A rank has the losses of its own targets, and every rank the loss nan of an invalid
        # target.
        in_slice |= (target < 0) | (target >= head.vocabulary)
        own = formulas.reduce(torch.where(in_slice, loss, 0), tokens, call)
        return head.ranks.add_up(own)


CrossEntropyRun = Run[CrossEntropyRows]


def run_of(
    call: Call,
    state: Tensor | None = None,
    kept: tuple[Tensor | None, Tensor | None] = (None, None),
) -> CrossEntropyRun:
    """Return the run of a call, with the `state` and `kept` logits that its forward returned."""
    head = Head.of(call, compare=state is None)
    schedule = _schedule(head, *kept)
    return Run(head, CrossEntropyRows(head, state), schedule, kept=kept)


def _schedule(head: Head, tile: Tensor | None, parked: Tensor | None) -> Schedule:
    """Return the schedule of the call's plan, or of the plan for its budget.

    If the forward kept a tile but no other logits, the plan continues with this tile.
    """
    call, p, key = head.call, head.problem, head.call.plan
    if not planner.keeping(key, False):
        budget, rates = call.memory_budget, rates_of(call.input.device)
        if tile is not None and parked is None:
            key = planner.resumed(p, (tile.shape[0], tile.shape[1]), budget, rates)
        else:
            key = planner.choose(p, budget, rates).key
    schedule, classes = planner.schedule_of(p, key), len(head.weight)
    if classes == p.vocab:
        return schedule
    return planner.schedule_of(schedule.problem_of_rank(classes), key)


def target_gradient(run: CrossEntropyRun) -> Tensor:
    """Return the gradient with respect to targets that are distributions, in their shape.

    d loss_i / d q_ij = (1 - smoothing) C_j (lse_i - z_ij) times the upstream gradient.
    """
    call, tokens, state = run.head.call, run.head.tokens, run.rows.state
    bias, upstream = run.rows.bias, run.rows.upstream
    result = torch.zeros_like(call.target, memory_format=torch.contiguous_format)
    flat = result.view(-1, len(call.weight))[call.shift :]
    assert upstream is not None
    spread = upstream[1] if len(upstream) > 1 else upstream.new_zeros(1)
    factor = (spread * (1 - call.label_smoothing)).expand(tokens.count).unsqueeze(1)
    lse = (state[0] + state[1].log()).unsqueeze(1)
    for step, tile in run.tiles():
        rows, classes = step.rows, step.classes
        z = flat[rows, classes].to(state.dtype).copy_(tile)
        z = z if bias is None else z.add_(bias[classes])
        z.mul_(call.logit_scale)
        if call.softcap:
            z.div_(call.softcap).tanh_().mul_(call.softcap)
        z.neg_().add_(lse[rows])
        if tokens.class_weight is not None:
            z.mul_(tokens.class_weight[classes])
        flat[rows, classes] = z.mul_(factor[rows])
        del z  # free the cast tile: only one at a time is counted
    return result
