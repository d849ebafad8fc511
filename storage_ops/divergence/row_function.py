"""The rows of a divergence: tiles of both heads, and the targets."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from storage_ops import matmul
from storage_ops.divergence import plan, rows
from storage_ops.divergence.call import IGNORED, DivergenceCall
from storage_ops.divergence.coarse import Coarse
from storage_ops.divergence.targets import Targets
from storage_ops.loss import formulas
from storage_ops.loss.engine.head import Head, bytes_of_copy, for_products
from storage_ops.loss.engine.run import RowFunction, Run
from storage_ops.loss.engine.tokens import same_storage
from storage_ops.loss.planning.cost import STATE_ROWS
from storage_ops.loss.planning.devices import device_kind, rates_of
from storage_ops.loss.planning.problem import Problem, padded
from storage_ops.loss.planning.schedule import GRADIENT, UPDATE, Step

_OPS = torch.ops.storage_ops


class DivergenceRows(RowFunction):
    """Computes statistics and gradients from a tile of the student and a tile of the teacher.

    Attributes:
        call: the arguments.
        bias: the student's bias in the arithmetic dtype, or None.
        teacher: the teacher's input rows (N, E), weight and bias, or None.
        coarse: the classes of a stored teacher, or None.
        targets: the student's cross-entropy, or None.
        state: (state_rows, n) statistics of the rows, first of the divergence, then of the targets.
        loss: (n,) divergence of each row.
        upstream: (n,) or (1,) gradient with respect to each row's divergence.
    """

    selects_by_gradient = True

    def __init__(self, call: DivergenceCall, head: Head, state: Tensor | None):
        """Prepare for a forward, or for a backward with the `state` that the forward returned."""
        self.call, self._head = call, head
        tokens, x, classes = head.tokens, head.tokens.x, len(head.weight)
        self.teacher, self.coarse = self._teacher(classes), None
        self.bias = self._bias(call.bias, classes)
        self._ignored = None
        ignores = call.token_weight is not None or call.shift or call.target is not None
        if ignores and (tokens.kept is None or call.max_valid is not None):
            # Otherwise all ignored tokens were left out.
            self._ignored = tokens.target == IGNORED
        if call.ids is not None:
            self.coarse = Coarse.of(call, tokens.kept, tokens.target == IGNORED, classes)
        # At temperature 1, one kernel computes both gradients of the forward divergence: see
        # `targets`. Otherwise the gradient of the divergence overwrites the teacher's logits, that
        # of targets the student's.
        caps = call.softcap or call.teacher_softcap
        plain = call.divergence == "forward" and call.temperature == 1 and not caps
        self._mixes = (
            call.target is not None and self.teacher is not None and plain
            and not head.ranks.several
        )  # fmt: skip
        alike = self.teacher is not None and self.teacher[1].dtype == x.dtype
        self._over_teacher = call.target is not None and alike and not self._mixes
        self._products = self._teacher_products()
        self.loss = x.new_zeros(tokens.count, dtype=call.wide)
        if state is None:
            self.state = x.new_zeros(call.state_rows, tokens.count, dtype=call.wide)
        else:
            self.state = tokens.collect_state(state)
        self.targets = None
        if call.target is not None:
            self.targets = Targets(call, tokens, self.state[call.own_rows :], self.bias)
        self.upstream = x.new_zeros(1, dtype=call.wide)
        self._teacher_tile: Tensor | None = None

    def _teacher(self, classes: int) -> tuple[Tensor, Tensor, Tensor | None] | None:
        call = self.call
        if call.teacher_input is None or call.teacher_weight is None:
            return None
        x = call.teacher_input.reshape(-1, call.teacher_input.shape[-1])
        bias = self._bias(call.teacher_bias, classes)
        return for_products(x), for_products(call.teacher_weight[:classes]), bias

    def _bias(self, bias: Tensor | None, classes: int) -> Tensor | None:
        """Return the bias of some classes in the form that kernels take."""
        return None if bias is None else bias[:classes].to(self.call.wide).contiguous()

    def _teacher_products(self) -> matmul.Matmul | None:
        if self.teacher is None:
            return None
        x = self.teacher[0]
        return matmul.of(x.dtype, device_kind(x), self._head.problem.matmul.threads)

    def problem(self) -> tuple[Problem, plan.Teacher]:
        """Return the student's and the teacher's part of the problem, for the planner."""
        p, targets = self._head.problem, self.call.target is not None
        student = replace(
            p, plain=False, several=False, alike=True, fixed_bytes=p.fixed_bytes + self._copies(),
            selects_late=self.selects_by_gradient,
        )  # fmt: skip
        teacher = plan.Teacher(
            0 if self.teacher is None else self.teacher[0].shape[1],
            self._products,
            rows.COPIES + bool(self.call.softcap),
            targets,
            copied=targets and not (self._over_teacher or self._mixes),
            plain=p.plain,
        )
        return student, teacher

    def _copies(self) -> int:
        """Return the bytes of copies of the teacher's tensors, and of other values per token."""
        call, size, count = self.call, 0, self._head.tokens.count
        if self.teacher is not None:
            x, weight, _ = self.teacher
            classes = self._head.problem.vocab  # the most of a rank, as in `problem_of`
            alone = not self._head.ranks.several
            assert call.teacher_input is not None and call.teacher_weight is not None
            if alone and not same_storage(call.teacher_input, x):
                size += x.nbytes
            if alone and not same_storage(call.teacher_weight, weight):
                size += classes * weight.shape[1] * weight.element_size()
            if call.teacher_bias is not None:
                size += bytes_of_copy(call.teacher_bias, call.wide, classes, alone)
        if call.target is not None:  # the state twice, targets, losses
            size += count * (2 * STATE_ROWS + 8) * call.wide.itemsize
        if call.ids is not None:  # ids and log-probabilities, the state, and temporaries
            size += call.ids.numel() * 8 * (4 + call.wide.itemsize)
        # Most bytes of a step: the state of both heads' rows, and sums.
        if self._head.ranks.several:
            size += count * (2 * STATE_ROWS + 6) * call.wide.itemsize * 2
        return size

    def set_upstream(self, loss: Tensor) -> None:
        """Set the gradient of the loss, or of each token's loss, in the form of `collect`."""
        tokens = self._head.tokens
        loss = loss.to(self.call.wide) * formulas.scale_of(tokens, self._head.call)
        weight = tokens.token_weight
        loss = loss.reshape(-1) if weight is None else loss * weight
        self.upstream = loss if self._ignored is None else loss.masked_fill(self._ignored, 0)

    def divergences(self) -> Tensor:
        """Return the divergence of each token times its weight, (n,); 0 where it is ignored."""
        weight = self._head.tokens.token_weight
        loss = self.loss if self.targets is None else self.loss + self.targets.losses()
        loss = loss if weight is None else loss * weight
        loss = loss if self._ignored is None else loss.masked_fill(self._ignored, 0)
        broken = self._head.tokens.broken  # more tokens are valid than `max_valid`
        return loss if broken is None else loss.masked_fill(broken, torch.nan)

    def work(self, step: Step, tile: Tensor) -> None:
        """See `RowFunction`. Computes the teacher's tile, too."""
        other = self._teacher_logits(step, len(tile) * padded(tile.shape[1]))
        upstream = self.upstream if len(self.upstream) == 1 else self.upstream[step.rows]
        if self._mixes and other is not None:
            self._mixed(step, tile, other, upstream)
            return
        targets, over_teacher, more = self.targets, self._over_teacher, None
        if targets is not None and not over_teacher:
            more = targets.take(step, tile, upstream, copied=True)
        if other is None:
            self._stored(step, tile, upstream)
        else:
            self._formed(step, tile, other, upstream)
        if targets is not None and over_teacher:
            at_targets = targets.take(step, tile, upstream, copied=False)
            more = None if at_targets is None else other
        if more is not None:
            tile += more

    def _teacher_logits(self, step: Step, size: int) -> Tensor | None:
        """Return the teacher's tile, in a buffer of the size of the first and largest tile."""
        if self.teacher is None or self._products is None:
            return None
        (hidden, weight, _), kept = self.teacher, self._head.tokens.kept
        hidden = hidden[step.rows] if kept is None else hidden.index_select(0, kept[step.rows])
        if self._teacher_tile is None:
            self._teacher_tile = hidden.new_empty(size)
        high, wide = step.rows.stop - step.rows.start, step.classes.stop - step.classes.start
        whole = self._teacher_tile[: high * padded(wide)].view(high, padded(wide))
        self._products.logits(hidden, weight[step.classes], whole[:, :wide])
        return whole[:, :wide]

    def _mixed(self, step: Step, tile: Tensor, other: Tensor, upstream: Tensor) -> None:
        """Do as `_formed`, for the divergence and the targets together."""
        targets, state = self.targets, self.state[: self.call.own_rows, step.rows]
        assert targets is not None and self.teacher is not None
        if step.phases & UPDATE:
            self._formed(step._replace(phases=UPDATE), tile, other, upstream)
            targets.read(step, tile, state[0])
        if step.phases & GRADIENT:
            mixed, factor = targets.mixed(step, state, upstream)
            biases = self.bias, self.teacher[2]
            value = targets.at_targets(step, (tile, other), biases, mixed, upstream)
            self._formed(step._replace(phases=GRADIENT), tile, other, factor, mixed)
            targets.write(step, tile, value)

    def _formed(
        self,
        step: Step,
        tile: Tensor,
        other: Tensor,
        upstream: Tensor,
        state: Tensor | None = None,
    ) -> None:
        """Compute a tile's statistics if asked for, and overwrite logits by their gradient.

        `state`: the state of the rows, if it is not that of the call.
        """
        assert self.teacher is not None
        call, classes = self.call, step.classes
        bias, offset, phases = self.bias, self.teacher[2], step.phases
        heads = (
            tile, other, None if bias is None else bias[classes],
            None if offset is None else offset[classes],
            self.state[: call.own_rows, step.rows] if state is None else state,
            self.loss[step.rows],
        )  # fmt: skip
        options = (call.divergence, call.beta, 1 / call.temperature)
        caps = (call.softcap, call.teacher_softcap)
        over_teacher = self._over_teacher
        ranks = self._head.ranks
        if ranks.several and phases & UPDATE:
            rows.statistics_over_ranks(*heads, *options, caps, self._merge, ranks.add_up)
            phases &= ~UPDATE
        if not phases:
            return
        native = call.divergence != "cosine" and not any(caps) and other.dtype == tile.dtype
        if not native:
            rows.divergence_rows(*heads, upstream, *options, phases, over_teacher, caps)
        else:
            _OPS._divergence_rows(*heads, upstream, *options, phases, over_teacher)

    def _merge(self, state: Tensor) -> None:
        """Merge the state of rows with that of other ranks, in place."""
        ignored = torch.zeros(state.shape[1], dtype=torch.bool, device=state.device)
        head = self._head
        for _ in head.ranks.merge(state, None, ignored, head.call, head.vocabulary):
            pass  # no other work overlaps this communication

    def _stored(self, step: Step, tile: Tensor, upstream: Tensor) -> None:
        """Process a tile of the student for a stored teacher."""
        coarse, scale = self.coarse, 1 / self.call.temperature
        assert coarse is not None
        bias = None if self.bias is None else self.bias[step.classes]
        for part in rows.pieces(tile):
            whole = slice(step.rows.start + part.start, step.rows.start + part.stop)
            z = rows.scaled(tile[part], bias, scale, self.call.wide, self.call.softcap)
            state = self.state[: self.call.own_rows, whole]
            if step.phases & UPDATE:
                state.copy_(coarse.logits(whole, z))
                self.loss[whole] = coarse.values(whole, state)
            if step.phases & GRADIENT:
                coarse.gradient(whole, state, z, step.classes.start)
                if self.call.softcap:
                    z.mul_(rows.cap_slope(tile[part], bias, z.dtype, self.call.softcap))
                own = upstream if len(upstream) == 1 else upstream[part]
                rows.store(z, own, scale, tile[part])

    def mass_sums(
        self, step: Step, tile: Tensor, factors: Tensor | None, out: Tensor, buckets: Tensor | None
    ) -> None:
        """See `RowFunction`. The weight of a class is the gradient of the token's divergence."""
        upstream = self.upstream.expand(self._head.tokens.count)[step.rows].abs()
        weight = torch.where(upstream == 0, 0, upstream.reciprocal())
        _OPS._tile_sums(out, tile, None, weight, None, buckets, 0.0, 1.0, True)

    def needed_classes(self, step: Step) -> Tensor:
        """See `RowFunction`."""
        if self.call.target is None:
            return torch.empty(0, dtype=torch.int64, device=self.loss.device)
        return self._head.targets_within(step.rows, step.classes)

    def free(self) -> None:
        """See `RowFunction`."""
        self._teacher_tile = None
        if self.targets is not None:
            self.targets.free()


DivergenceRun = Run[DivergenceRows]


def run_of(call: DivergenceCall, state: Tensor | None = None) -> DivergenceRun:
    """Return the run of a call. `state` is the state that the call's forward has returned."""
    head = Head.of(call.as_loss(), compare=state is None)
    row_function = DivergenceRows(call, head, state)
    chosen = plan.choose(*row_function.problem(), call.memory_budget, rates_of(call.input.device))
    chosen = chosen.with_classes(len(head.weight))
    if chosen.sliced is None:
        return Run(head, row_function, chosen.whole)
    return Run(head, row_function, chosen.sliced, first=chosen.whole)
