"""Carries out the steps of a schedule: products, the row kernel, and sums of the gradients."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from storage_ops.loss.call import Call, arithmetic
from storage_ops.loss.cost import STATE_ROWS
from storage_ops.loss.problem import padded
from storage_ops.loss.ranks import Ranks
from storage_ops.loss.schedule import (
    EXPONENTIALS,
    GRADIENT,
    MERGE,
    RUNNING_RESCALE,
    SLOPE,
    UPDATE,
    Place,
    Schedule,
    Step,
)
from storage_ops.loss.sums import Sums
from storage_ops.loss.tokens import Tokens

_OPS = torch.ops.storage_ops


@dataclass
class Operands:
    """A call as its kernels take it.

    Attributes:
        call: the arguments.
        tokens: those that are worked on, as rows.
        weight, bias: the classes of this rank, with strides that kernels take.
        ranks: who holds the other classes.
        vocabulary, first_class: the number of all classes, and the first one here.
        schedule: how to go through the logits.
    """

    call: Call
    tokens: Tokens
    weight: Tensor
    bias: Tensor | None
    ranks: Ranks
    vocabulary: int
    first_class: int
    schedule: Schedule


class Run:
    """The steps of a call, with the state of its rows.

    Attributes:
        state: (STATE_ROWS, n) statistics of the rows; see csrc/rows/row_math.h.
        argmax: (n,) classes of the largest logits, or None.
        upstream: rows of upstream gradient for the row kernel, or None.
        also: a phase of the row kernel that goes with every UPDATE.
    """

    def __init__(
        self, given: Operands, state: Tensor | None = None, upstream: Tensor | None = None
    ):
        x, call = given.tokens.x, given.call
        if state is None:
            state = x.new_zeros(STATE_ROWS, given.tokens.count, dtype=arithmetic(x.dtype))
        self.given, self.state, self.upstream = given, state, upstream
        self.argmax = x.new_zeros(given.tokens.count, dtype=torch.int64) if call.wants[3] else None
        self.also = SLOPE if call.wants[2] else 0
        self._tile: Tensor | None = None
        self._rows, self._x = slice(0, 0), x

    @functools.cached_property
    def sums(self) -> Sums:
        """Sums of the gradients; they take no memory before they are needed."""
        return Sums(self.given)

    def statistics(self) -> None:
        """The state of every row, and the class of its largest logit."""
        self._take(self.given.schedule.statistics())

    def gradients(self) -> list[Tensor]:
        """Gradients of input, weight and bias from the finished state; logits are formed again."""
        self._take(self.given.schedule.gradients())
        return self.sums.finish()

    def statistics_and_gradients(self) -> list[Tensor]:
        """Both in one go."""
        self._take(self.given.schedule.statistics_and_gradients())
        if self.given.schedule.strategy == RUNNING_RESCALE:
            self.sums.finish_rescaled(self.state, self.upstream)
        return self.sums.finish()

    def target_gradient(self) -> Tensor:
        """The gradient with respect to targets that are probabilities, in their shape.

        d loss_i / d q_ij = (1 - smoothing) C_j (lse_i - z_ij) times the upstream gradient.
        """
        given, call, state = self.given, self.given.call, self.state
        result = torch.zeros_like(call.target, memory_format=torch.contiguous_format)
        flat = result.view(-1, len(given.weight))[int(call.shift) :]
        assert self.upstream is not None
        spread = self.upstream[1] if len(self.upstream) > 1 else self.upstream.new_zeros(1)
        factor = (spread * (1 - call.label_smoothing)).expand(given.tokens.count).unsqueeze(1)
        lse = (state[0] + state[1].log()).unsqueeze(1)
        for step in given.schedule.logits():
            rows, classes = step.rows, step.classes
            z = flat[rows, classes].to(state.dtype).copy_(self._logits(step))
            z = z if given.bias is None else z.add_(given.bias[classes])
            z.mul_(call.logit_scale)
            if call.softcap:
                z.div_(call.softcap).tanh_().mul_(call.softcap)
            z.neg_().add_(lse[rows])
            if given.tokens.class_weight is not None:
                z.mul_(given.tokens.class_weight[classes])
            flat[rows, classes] = z.mul_(factor[rows])
        return result

    def _take(self, steps: Iterable[Step]) -> None:
        try:
            for step in steps:
                self._step(step)
        finally:
            self._tile, self._x = None, self.given.tokens.x  # before sums are rounded

    def _step(self, step: Step) -> None:
        if step.phases == MERGE:
            self._merge(step.rows)
            return
        tile, several = self._logits(step), self.given.ranks.several
        before = self.state[0, step.rows].clone() if step.phases & EXPONENTIALS else None
        if several and step.phases & UPDATE and step.phases & GRADIENT:
            self._row_kernel(step, tile, UPDATE)
            self._merge(step.rows)
            self._row_kernel(step, tile, GRADIENT)
        elif step.phases:
            self._row_kernel(step, tile, step.phases)
        if step.adds:
            if before is not None:
                self.sums.rescale(step, before - self.state[0, step.rows])
            self.sums.add(step, self._gathered(step), tile)

    def _logits(self, step: Step) -> Tensor:
        """The tile of a step, multiplied, copied, or as it was left."""
        tile = self._at(step.place, step)
        if step.source is None:
            matmul = self.given.schedule.problem.matmul
            matmul.logits(self._gathered(step), self.given.weight[step.classes], tile)
        elif step.source is not step.place:
            tile.copy_(self._at(step.source, step))
        return tile

    def _at(self, place: Place, step: Step) -> Tensor:
        """Where the logits of a step lie in a place."""
        schedule, x = self.given.schedule, self.given.tokens.x
        if place.lender is not None:
            memory = self.sums.unwritten(place.lender)
        else:
            if self._tile is None:
                self._tile = x.new_empty(schedule.rows * padded(schedule.columns))
            memory = self._tile
        high, wide = _length(place.rows), padded(_length(place.classes))
        whole = memory[: high * wide].view(high, wide)
        return whole[_within(step.rows, place.rows), _within(step.classes, place.classes)]

    def _gathered(self, step: Step) -> Tensor:
        """The input rows of a step; those of a chunk are gathered once."""
        size, count = self.given.schedule.rows, self.given.tokens.count
        start = step.rows.start // size * size
        chunk = slice(start, min(start + size, count))
        if chunk != self._rows or self._x is self.given.tokens.x:
            self._x = self.given.tokens.x  # before the next rows are gathered
            self._rows, self._x = chunk, self.given.tokens.gather(chunk)
        return self._x[_within(step.rows, chunk)]

    def _row_kernel(self, step: Step, tile: Tensor, phases: int) -> None:
        given, rows, classes = self.given, step.rows, step.classes
        tokens, call = given.tokens, given.call
        target, upstream = tokens.target[rows], None
        if tokens.probabilities:
            target = target[:, classes]
            if tokens.casts:
                target = target.new_empty(target.shape, dtype=self.state.dtype).copy_(target)
        if phases & GRADIENT:
            upstream = self.upstream
            if upstream is not None and upstream.shape[1] > 1:
                upstream = upstream[:, rows]
        argmax = self.argmax if phases & UPDATE else None
        _OPS._cross_entropy_rows(
            tile,
            target,
            None if given.bias is None else given.bias[classes],
            None if tokens.class_weight is None else tokens.class_weight[classes],
            upstream,
            self.state[:, rows],
            None if argmax is None else argmax[rows],
            given.first_class + classes.start,
            given.vocabulary,
            call.ignore_index,
            call.softcap,
            call.logit_scale,
            call.label_smoothing,
            phases | (self.also if phases & UPDATE else 0),
        )

    def _merge(self, rows: slice) -> None:
        """Merge the state of some rows with those of the other ranks, if there are any."""
        given = self.given
        if not given.ranks.several:
            return
        target = given.tokens.target[rows]
        ignored = target == given.call.ignore_index
        if given.tokens.probabilities:
            ignored = torch.zeros(len(target), dtype=torch.bool, device=target.device)
        part = None if self.argmax is None else self.argmax[rows]
        given.ranks.merge(self.state[:, rows], part, ignored, given.vocabulary)


def _length(part: slice) -> int:
    return int(part.stop - part.start)


def _within(part: slice, whole: slice) -> slice:
    return slice(part.start - whole.start, part.stop - whole.start)
