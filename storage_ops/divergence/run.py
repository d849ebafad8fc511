"""Carries out the steps of a divergence: products of both heads, rows, sums of the gradients."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from storage_ops import matmul
from storage_ops.divergence import plan, rows
from storage_ops.divergence.call import IGNORED, DivergenceCall
from storage_ops.divergence.coarse import Coarse
from storage_ops.divergence.targets import Targets
from storage_ops.loss import formulas
from storage_ops.loss.cost import STATE_ROWS
from storage_ops.loss.devices import device_kind, rates_of
from storage_ops.loss.problem import Problem, padded
from storage_ops.loss.ranks import ranks_of
from storage_ops.loss.run import problem_of, simulated
from storage_ops.loss.schedule import GRADIENT, MERGE, UPDATE, Schedule, Step, carried_out
from storage_ops.loss.sums import Sums
from storage_ops.loss.tokens import same_storage, tokens_of
from storage_ops.matmul.aten import takes

_OPS = torch.ops.storage_ops


class DivergenceRun:
    """A call, and how far it is; `tokens`, `weight`, `schedule` and `call` are what `Sums` reads.

    Attributes:
        call: the student's part as a call of linear cross-entropy.
        ranks: who holds the classes that are not here.
        tokens: those that are worked on, as rows.
        weight, bias: the student's head, with strides that products take.
        teacher: the teacher's input rows (N, D), weight and bias, or None.
        coarse: the classes of a stored teacher, or None.
        targets: the student's cross-entropy, or None.
        state: (state_rows, n) statistics of the rows; of the divergence, then of the targets.
        loss: (n,) divergence of each row.
        upstream: (n,) or (1,) gradient with respect to it.
    """

    def __init__(self, given: DivergenceCall, state: Tensor | None = None):
        """`state`: what the forward of the call has returned as such, if this is its backward."""
        self.given, self.call = given, given.as_loss()
        ranks = self.ranks = ranks_of(given.group)
        sizes = ranks.sizes(self.call, compare=state is None)
        classes = given.valid_classes or len(given.weight)
        self._vocabulary = classes if not ranks.several else sum(sizes)
        tokens = self.tokens = tokens_of(self.call, ranks, sum(sizes[: ranks.rank]), classes)
        self.teacher, self.coarse = self._teacher(classes), None
        # Every rank must plan alike.
        p = problem_of(self.call, tokens, max(sizes) if ranks.several else classes)
        plain = p.plain
        p = replace(p, plain=False, fixed_bytes=p.fixed_bytes + self._copies())
        x, weight = tokens.x, given.weight[:classes]
        tokens.x = x if takes(x) else x.contiguous()
        self.weight = weight if takes(weight) else weight.contiguous()
        self.bias = None if given.bias is None else given.bias[:classes].to(given.wide)
        self._ignored = None
        ignores = given.token_weight is not None or given.shift or given.target is not None
        if ignores and (tokens.kept is None or given.max_valid is not None):
            # Else all that are ignored were left out.
            self._ignored = tokens.target == IGNORED
        if given.ids is not None:
            self.coarse = Coarse.of(given, tokens.kept, tokens.target == IGNORED, classes)
        targets, alike = given.target is not None, self.teacher and self.teacher[1].dtype == x.dtype
        # Where the gradient of the divergence goes, beside that of the targets.
        self._over_teacher = bool(targets and alike)
        copied = targets and not self._over_teacher
        teacher = replace(self._planned(p), targets=targets, copied=copied, plain=plain)
        self._teacher_products = teacher.matmul
        self.plan = plan.choose(p, teacher, given.memory_budget, rates_of(given.input.device))
        self.plan = self.plan.with_classes(classes)
        self.schedule = self.plan.sliced or self.plan.whole
        self.loss = x.new_zeros(tokens.count, dtype=given.wide)
        if state is None:
            self.state = x.new_zeros(given.state_rows, tokens.count, dtype=given.wide)
        else:
            self.state = tokens.collect_state(state)
        self.targets = None
        if given.target is not None:
            self.targets = Targets(given, tokens, self.state[given.own_rows :], self.bias)
        self.upstream = x.new_zeros(1, dtype=given.wide)
        self.every = ranks.several or not simulated(given.input)  # or two tiles of a size
        self._tile: Tensor | None = None
        self._teacher_tile: Tensor | None = None

    def _teacher(self, classes: int) -> tuple[Tensor, Tensor, Tensor | None] | None:
        given = self.given
        if given.teacher_input is None or given.teacher_weight is None:
            return None
        x = given.teacher_input.reshape(-1, given.teacher_input.shape[-1])
        weight = given.teacher_weight[:classes]
        bias = None if given.teacher_bias is None else given.teacher_bias[:classes].to(given.wide)
        x = x if takes(x) else x.contiguous()
        return x, weight if takes(weight) else weight.contiguous(), bias

    def _copies(self) -> int:
        """Bytes of copies of the teacher's tensors, and of what a stored teacher takes."""
        given, size = self.given, 0
        if self.teacher is not None:
            before = (given.teacher_input, given.teacher_weight, given.teacher_bias)
            for old, new in zip(before, self.teacher, strict=True):
                if old is not None and new is not None:
                    size += new.nbytes * (not same_storage(old, new))
        if given.target is not None:  # the state twice, targets, losses
            size += self.tokens.count * (2 * STATE_ROWS + 8) * given.wide.itemsize
        if given.ids is not None:  # ids and log-probabilities, the state, what is made of them
            size += given.ids.numel() * 8 * (4 + given.wide.itemsize)
        if self.ranks.several:  # of a step, at most: the state of both heads' rows, and sums
            size += self.tokens.count * (2 * STATE_ROWS + 6) * given.wide.itemsize * 2
        return size

    def _planned(self, p: Problem) -> plan.Teacher:
        copies = rows.COPIES + bool(self.given.softcap)
        if self.teacher is None:
            return plan.Teacher(copies=copies)
        x = self.teacher[0]
        products = matmul.of(x.dtype, device_kind(x), p.matmul.threads)
        return plan.Teacher(x.shape[1], products, copies)

    @functools.cached_property
    def sums(self) -> Sums:
        """Sums of the gradients; they take no memory before they are needed."""
        return Sums(self)  # type: ignore[arg-type]

    def statistics(self) -> None:
        """The state and the divergence of every row."""
        self._take(self.plan.whole, self.plan.whole.statistics(self.every))

    def gradients(self) -> list[Tensor]:
        """Gradients of input, weight and bias from the state; logits are formed again."""
        self._take(self.schedule, self.schedule.gradients(self.every))
        return self.sums.finish()

    def statistics_and_gradients(self) -> list[Tensor]:
        """Both in one go, if the plan has whole rows for them."""
        if self.plan.sliced is not None:
            self.statistics()
            return self.gradients()
        self._take(self.schedule, self.schedule.statistics_and_gradients(self.every))
        return self.sums.finish()

    def set_upstream(self, loss: Tensor) -> None:
        """Take the gradient with respect to the loss, or to each token's, as `tokens.collect`."""
        loss = loss.to(self.given.wide) * formulas.scale_of(self.tokens, self.call)
        weight = self.tokens.token_weight
        loss = loss.reshape(-1) if weight is None else loss * weight
        self.upstream = loss if self._ignored is None else loss.masked_fill(self._ignored, 0)

    def divergences(self) -> Tensor:
        """(n,) the divergence of each token times its weight, 0 for those that are ignored."""
        weight = self.tokens.token_weight
        loss = self.loss if self.targets is None else self.loss + self.targets.losses()
        loss = loss if weight is None else loss * weight
        loss = loss if self._ignored is None else loss.masked_fill(self._ignored, 0)
        broken = self.tokens.broken  # more tokens are valid than was promised
        return loss if broken is None else loss.masked_fill(broken, torch.nan)

    def _take(self, schedule: Schedule, steps: Iterable[Step]) -> None:
        size = schedule.rows * padded(schedule.columns)
        try:
            for step in carried_out(steps):
                if step.phases != MERGE and step.rows.stop > step.rows.start:
                    self._step(step, size)
        finally:
            self._tile = self._teacher_tile = None  # before sums are rounded
            if self.targets is not None:
                self.targets.free()

    def _step(self, step: Step, size: int) -> None:
        tokens, classes = self.tokens, step.classes
        x = tokens.gather(step.rows)
        if self._tile is None:
            self._tile = tokens.x.new_empty(size)
        tile, other = _shaped(self._tile, step), None
        self.schedule.problem.matmul.logits(x, self.weight[classes], tile)
        if self.teacher is not None:
            hidden, weight, _ = self.teacher
            kept = tokens.kept
            hidden = hidden[step.rows] if kept is None else hidden.index_select(0, kept[step.rows])
            if self._teacher_tile is None:
                self._teacher_tile = hidden.new_empty(size)
            other = _shaped(self._teacher_tile, step)
            assert self._teacher_products is not None
            self._teacher_products.logits(hidden, weight[classes], other)
            del hidden
        upstream = self.upstream if len(self.upstream) == 1 else self.upstream[step.rows]
        targets, over_teacher, more = self.targets, self._over_teacher, None
        if targets is not None and not over_teacher:
            more = targets.take(step, tile, upstream, copied=True)
        if other is None:
            self._stored(step, tile, upstream)
        else:
            self._formed(step, tile, other, upstream)
        if targets is not None and over_teacher:
            found = targets.take(step, tile, upstream, copied=False)
            more = None if found is None else other
        if more is not None:
            tile += more
        if step.adds:
            self.sums.add(step, x, tile)

    def _formed(self, step: Step, tile: Tensor, other: Tensor, upstream: Tensor) -> None:
        """A tile of both heads: statistics where asked for, and the gradient over the logits."""
        assert self.teacher is not None
        given, classes = self.given, step.classes
        bias, offset, phases = self.bias, self.teacher[2], step.phases
        heads = (
            tile, other, None if bias is None else bias[classes],
            None if offset is None else offset[classes],
            self.state[: given.own_rows, step.rows], self.loss[step.rows],
        )  # fmt: skip
        how = (given.divergence, given.beta, 1 / given.temperature)
        caps = (given.softcap, given.teacher_softcap)
        over_teacher = self._over_teacher
        if self.ranks.several and phases & UPDATE:
            rows.statistics_over_ranks(*heads, *how, caps, self._merge, self.ranks.add_up)
            phases &= ~UPDATE
        if not phases:
            return
        native = given.divergence != "cosine" and not any(caps) and other.dtype == tile.dtype
        if not native:
            rows.divergence_rows(*heads, upstream, *how, phases, over_teacher, caps)
        else:
            _OPS._divergence_rows(*heads, upstream, *how, phases, over_teacher)

    def _merge(self, state: Tensor) -> None:
        """Merge the state of rows of the loss with that of other ranks, in place."""
        ignored = torch.zeros(state.shape[1], dtype=torch.bool, device=state.device)
        for _ in self.ranks.merge(state, None, ignored, self.call, self._vocabulary):
            pass  # nothing here hides the time that it takes

    def _stored(self, step: Step, tile: Tensor, upstream: Tensor) -> None:
        """A tile of the student for a stored teacher."""
        coarse, scale = self.coarse, 1 / self.given.temperature
        assert coarse is not None
        bias = None if self.bias is None else self.bias[step.classes]
        for part in rows.pieces(tile):
            whole = slice(step.rows.start + part.start, step.rows.start + part.stop)
            z = rows.scaled(tile[part], bias, scale, self.given.wide, self.given.softcap)
            state = self.state[: self.given.own_rows, whole]
            if step.phases & UPDATE:
                state.copy_(coarse.logits(whole, z))
                self.loss[whole] = coarse.values(whole, state)
            if step.phases & GRADIENT:
                coarse.gradient(whole, state, z, step.classes.start)
                if self.given.softcap:
                    z.mul_(rows.cap_slope(tile[part], bias, z.dtype, self.given.softcap))
                own = upstream if len(upstream) == 1 else upstream[part]
                rows.store(z, own, scale, tile[part])


def _shaped(memory: Tensor, step: Step) -> Tensor:
    high, wide = step.rows.stop - step.rows.start, step.classes.stop - step.classes.start
    return memory[: high * padded(wide)].view(high, padded(wide))[:, :wide]
