"""Carries out the steps of a schedule: products, the row kernel, and sums of the gradients."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from storage_ops import matmul
from storage_ops.loss import formulas, planner
from storage_ops.loss.call import Call, arithmetic
from storage_ops.loss.cost import STATE_ROWS
from storage_ops.loss.devices import device_kind, has_row_kernel_for, rates_of
from storage_ops.loss.kept import free
from storage_ops.loss.picked import Picked
from storage_ops.loss.pieces import traced
from storage_ops.loss.problem import Problem, padded
from storage_ops.loss.ranks import ranks_of
from storage_ops.loss.schedule import (
    EXPONENTIALS,
    GRADIENT,
    MERGE,
    RUNNING_RESCALE,
    SLOPE,
    UPDATE,
    Place,
    Step,
    carried_out,
    within,
)
from storage_ops.loss.sums import Sums
from storage_ops.loss.tokens import Tokens, copy_elements, tokens_of
from storage_ops.matmul.aten import takes

_OPS = torch.ops.storage_ops


def problem_of(call: Call, tokens: Tokens, classes: int) -> Problem:
    """What the plan of a call depends on; `classes`: the most that a rank has."""
    x, weight = tokens.x, call.weight
    copies = sum(t.nbytes for t in (x, weight) if not takes(t))
    wide_logits = call.logits_dtype is not None and call.logits_dtype != x.dtype
    if call.bias is not None:
        dtype = _bias_dtype(call)
        copies += copy_elements(call.bias, dtype) * dtype.itemsize
    # So that ranks plan alike.
    threads = 1 if call.group else torch.get_num_threads()
    smooth_cap = bool(call.label_smoothing and call.softcap)
    return Problem(
        tokens.count,
        x.shape[1],
        classes,
        matmul.of(x.dtype, device_kind(x), threads),
        len(x) - tokens.count,
        (call.grad_mask[0], call.grad_mask[1], call.grad_mask[2]),
        sums_fp32=call.accumulate_dtype != x.dtype,
        in_forward=call.in_forward,
        rescales=not (tokens.probabilities or call.group or smooth_cap),
        into=call.accumulate_into is not None,
        gathers=tokens.kept is not None,
        masks=tokens.masked,
        plain=not has_row_kernel_for(x),
        wide_logits=wide_logits,
        picks=call.top_k + (0 if call.selected_ids is None else call.selected_ids.shape[-1]),
        top=call.top_k,
        cast_bytes=arithmetic(x.dtype).itemsize if tokens.casts else 0,
        fixed_bytes=tokens.copied_bytes + copies,
    )


def _bias_dtype(call: Call) -> torch.dtype:
    """What the row kernel takes a bias in: its own, unless that is narrower than the logits."""
    assert call.bias is not None
    return torch.promote_types(call.bias.dtype, call.logits_dtype or call.input.dtype)


def simulated(t: Tensor) -> bool:
    """Whether a tensor stands for one whose memory is counted."""
    return isinstance(t, FakeTensor) and not traced()


class Run:
    """A call, and how far it is.

    Attributes:
        call: the arguments.
        ranks: who holds the classes that are not here.
        tokens: those that are worked on, as rows.
        weight, bias: the classes of this rank, with strides that kernels take.
        vocabulary, first_class: the number of all classes, and the first one here.
        schedule: the way through the logits.
        state: (STATE_ROWS, n) statistics of the rows; see csrc/rows/row_math.h.
        argmax: (n,) classes of the largest logits, or None.
        picked: the classes whose log-probabilities are asked for, or None.
        upstream: rows of upstream gradient for the row kernel, or None.
    """

    def __init__(self, call: Call, state: Tensor | None = None, kept: Tensor | None = None):
        """`state`, `kept`: what the forward has returned as such, if this is its backward."""
        ranks = self.ranks = ranks_of(call.group)
        sizes = ranks.sizes(call, compare=state is None)
        self.call, self.first_class = call, sum(sizes[: ranks.rank])
        self.vocabulary = _valid_of(sizes, call.valid_classes)
        most = [min(n, self.vocabulary - sum(sizes[:k])) for k, n in enumerate(sizes)]
        classes = most[ranks.rank]
        tokens = self.tokens = tokens_of(call, ranks, self.first_class, classes)
        p = problem_of(call, tokens, max(most))  # every rank must plan alike
        p = replace(p, several=ranks.several, alike=len(set(most)) == 1, keeps=call.keeps)
        key = call.plan
        if not planner.keeping(key, False):
            budget, rates = call.memory_budget, rates_of(call.input.device)
            if kept is not None:
                key = planner.resumed(p, (kept.shape[0], kept.shape[1]), budget, rates)
            else:
                key = planner.choose(p, budget, rates).key
        self.schedule = planner.schedule_of(replace(p, vocab=classes), key)
        x = tokens.x = tokens.x if takes(tokens.x) else tokens.x.contiguous()
        weight = call.weight[:classes]
        self.weight = weight if takes(weight) else weight.contiguous()
        self.bias = call.bias
        if call.bias is not None:
            self.bias = call.bias[:classes].to(_bias_dtype(call)).contiguous()
        if state is None:
            self.state = x.new_zeros(STATE_ROWS, tokens.count, dtype=arithmetic(x.dtype))
        else:
            self.state = tokens.collect_state(state)
        if ranks.agree is not None:
            self.state = self.state + ranks.agree
        self.argmax = x.new_zeros(tokens.count, dtype=torch.int64) if call.wants[3] else None
        picks = call.selected_ids is not None or call.top_k
        self.picked = Picked(self) if picks else None
        if self.picked is not None and state is None:
            self.picked.check()
        self.upstream: Tensor | None = None
        self._tile: Tensor | None = None
        self._kept = kept
        self._merges: list[tuple[slice, Iterator[None]]] = []  # that are under way, oldest first
        self._rows, self._x = slice(0, 0), x

    @functools.cached_property
    def every(self) -> bool:
        """Whether each tile is worked on; a simulation does with two of a size."""
        several = self.ranks.several or self.schedule.strategy == RUNNING_RESCALE
        return several or not simulated(self.call.input)

    @functools.cached_property
    def sums(self) -> Sums:
        """Sums of the gradients; they take no memory before they are needed."""
        return Sums(self)

    def statistics(self) -> Tensor | None:
        """The state of every row, and the class of its largest logit.

        Returns the buffer with the last tile, of its rows and columns, if that is to be kept.
        """
        left = self._take(self.schedule.statistics(self.every))
        return None if left is None or not self.schedule.keeps else left.as_strided(*self._layout())

    def gradients(self) -> list[Tensor]:
        """Gradients of input, weight and bias from the finished state; logits are formed again."""
        there = self._take_over()
        self._take(self.schedule.gradients(self.every, there))
        if there and self._kept is not None:
            free(self._kept)  # before sums are rounded
        return self.sums.finish()

    def _take_over(self) -> bool:
        """Whether the tile that was kept is this schedule's last; if so, it is in the buffer."""
        kept = self._kept
        if kept is None:
            return False
        shape, stride = self._layout()
        size = shape[0] * stride[0]
        fits = self.schedule.keeps and kept.shape == shape and kept.stride() == stride
        if fits and kept.untyped_storage().nbytes() >= size * kept.element_size():
            self._tile = kept.as_strided((1, size), (size, 1))
            return True
        free(kept)  # of other tiles, or copied, as hooks of what is saved may do
        return False

    def left(self) -> Tensor:
        """Like what `statistics` returns, without values."""
        x = self.tokens.x
        if not (self.schedule.keeps and self.tokens.count):
            return x.new_empty(0)
        return x.new_empty_strided(*self._layout(), dtype=self.call.logits_dtype)

    def _layout(self) -> tuple[tuple[int, int], tuple[int, int]]:
        s = self.schedule
        return (s.rows, s.columns), (padded(s.columns), 1)

    def statistics_and_gradients(self) -> list[Tensor]:
        """Both in one go."""
        self._take(self.schedule.statistics_and_gradients(self.every))
        if self.schedule.strategy == RUNNING_RESCALE:
            self.sums.finish_rescaled(self)
        return self.sums.finish()

    def reduced(self, loss: Tensor) -> Tensor:
        """The loss that is returned, from that of each token."""
        call, target = self.call, self.tokens.target
        if not call.adds_losses:
            return formulas.reduce(loss, self.tokens, call)
        local = target - self.first_class
        here = (local >= 0) & (local < len(self.weight))
        # Each rank has the loss of its targets, and all that of a target that is no class: nan.
        here |= (target < 0) | (target >= self.vocabulary)
        own = formulas.reduce(torch.where(here, loss, 0), self.tokens, call)
        return self.ranks.add_up(own)

    def target_gradient(self) -> Tensor:
        """The gradient with respect to targets that are probabilities, in their shape.

        d loss_i / d q_ij = (1 - smoothing) C_j (lse_i - z_ij) times the upstream gradient.
        """
        call, state = self.call, self.state
        result = torch.zeros_like(call.target, memory_format=torch.contiguous_format)
        flat = result.view(-1, len(call.weight))[call.shift :]
        assert self.upstream is not None
        spread = self.upstream[1] if len(self.upstream) > 1 else self.upstream.new_zeros(1)
        factor = (spread * (1 - call.label_smoothing)).expand(self.tokens.count).unsqueeze(1)
        lse = (state[0] + state[1].log()).unsqueeze(1)
        for step in self.schedule.logits():
            rows, classes = step.rows, step.classes
            tile = self._logits(step)  # first: a product takes memory for itself
            z = flat[rows, classes].to(state.dtype).copy_(tile)
            z = z if self.bias is None else z.add_(self.bias[classes])
            z.mul_(call.logit_scale)
            if call.softcap:
                z.div_(call.softcap).tanh_().mul_(call.softcap)
            z.neg_().add_(lse[rows])
            if self.tokens.class_weight is not None:
                z.mul_(self.tokens.class_weight[classes])
            flat[rows, classes] = z.mul_(factor[rows])
            del z  # what the targets' part was cast to: one at a time is counted
        return result

    def _take(self, steps: Iterable[Step]) -> Tensor | None:
        """Carry out steps; the buffer of tiles, as they leave it."""
        try:
            for step in carried_out(steps):
                self._step(step)
            return self._tile
        finally:
            self._tile, self._x = None, self.tokens.x  # before sums are rounded
            self._merges.clear()

    def _step(self, step: Step) -> None:
        if step.phases == MERGE:
            self._merge(step.rows)
            return
        tile, picked = self._logits(step), self.picked
        products = None
        if picked is not None and step.phases & UPDATE:
            picked.read(step, tile)
        elif picked is not None and step.phases & GRADIENT:
            products = picked.products(step, tile)
        before = self.state[0, step.rows].clone() if step.phases & EXPONENTIALS else None
        if step.phases & GRADIENT:
            self._end_merges(step.rows)
        if step.phases:
            self._row_kernel(step, tile, step.phases)
        if picked is not None and products is not None and self.upstream is not None:
            picked.write(step, tile, products, self.upstream)
        if step.adds:
            if before is not None:
                self.sums.rescale(step, before - self.state[0, step.rows])
            self.sums.add(step, self._gathered(step), tile)
            self._advance_merges()

    def _logits(self, step: Step) -> Tensor:
        """The tile of a step, multiplied, copied, or as it was left."""
        tile = self._at(step.place, step)
        if step.source is None:
            products = self.schedule.problem.matmul
            products.logits(self._gathered(step), self.weight[step.classes], tile)
        elif step.source is not step.place:
            tile.copy_(self._at(step.source, step))
        return tile

    def _at(self, place: Place, step: Step) -> Tensor:
        """Where the logits of a step lie in a place."""
        schedule, x = self.schedule, self.tokens.x
        if place.borrowed is not None:
            memory = self.sums.unwritten(place.borrowed)
        else:
            if self._tile is None:
                size = schedule.tiles, schedule.rows * padded(schedule.columns)
                self._tile = x.new_empty(size, dtype=self.call.logits_dtype)
            memory = self._tile[place.rows.start // schedule.rows % schedule.tiles]
        high, wide = _length(place.rows), padded(_length(place.classes))
        whole = memory[: high * wide].view(high, wide)
        return whole[within(step.rows, place.rows), within(step.classes, place.classes)]

    def _gathered(self, step: Step) -> Tensor:
        """The input rows of a step; those of a chunk are gathered once."""
        size, count = self.schedule.rows, self.tokens.count
        start = step.rows.start // size * size
        chunk = slice(start, min(start + size, count))
        if chunk != self._rows or self._x is self.tokens.x:
            self._x = self.tokens.x  # before the next rows are gathered
            self._rows, self._x = chunk, self.tokens.gather(chunk)
        return self._x[within(step.rows, chunk)]

    def _row_kernel(self, step: Step, tile: Tensor, phases: int) -> None:
        tokens, call, rows, classes = self.tokens, self.call, step.rows, step.classes
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
            None if self.bias is None else self.bias[classes],
            None if tokens.class_weight is None else tokens.class_weight[classes],
            upstream,
            self.state[:, rows],
            None if argmax is None else argmax[rows],
            self.first_class + classes.start,
            self.vocabulary,
            call.ignore_index,
            call.softcap,
            call.logit_scale,
            call.label_smoothing,
            phases | (SLOPE if phases & UPDATE and call.wants[2] else 0),
        )

    def _merge(self, rows: slice) -> None:
        """Begin to merge the state of rows with those of the other ranks, if there are any.

        On every rank merges begin, go on and end in one order, whatever its number of classes.
        """
        if not self.ranks.several:
            return
        if not _length(rows):
            self._end_merges(slice(0, self.tokens.count))
            return
        self._advance_merges()
        self._merges.append((rows, self._merging(rows)))
        next(self._merges[-1][1])

    def _advance_merges(self) -> None:
        """What the merges under way have sent is there: they send what is next."""
        self._merges = [m for m in self._merges if next(m[1], self) is not self]

    def _end_merges(self, rows: slice) -> None:
        """End the merges of some rows, and those that began before."""
        while any(r.start < rows.stop and rows.start < r.stop for r, _ in self._merges):
            for _ in self._merges.pop(0)[1]:
                pass

    def _merging(self, rows: slice) -> Iterator[None]:
        """A merge, which stops where it waits for other ranks."""
        target = self.tokens.target[rows]
        ignored = target == self.call.ignore_index
        if self.tokens.probabilities:
            ignored = torch.zeros(len(target), dtype=torch.bool, device=target.device)
        part = None if self.argmax is None else self.argmax[rows]
        state = self.state[:, rows]
        yield from self.ranks.merge(state, part, ignored, self.call, self.vocabulary)
        if self.picked is not None:
            self.picked.merge(rows)


def _valid_of(sizes: list[int], valid: int | None) -> int:
    """How many classes of the whole vocabulary are no padding; the same error on every rank."""
    total, before = sum(sizes), sum(sizes[:-1])
    if valid is not None and not before < valid <= total:
        raise ValueError(
            f"linear_cross_entropy: valid_classes is {valid}; expected {before + 1} to {total}, so "
            "that every rank has a class that is no padding"
        )
    return total if valid is None else valid


def _length(part: slice) -> int:
    return int(part.stop - part.start)
