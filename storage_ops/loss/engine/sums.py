"""Sums the gradients of a head over its tiles of logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from storage_ops.loss.call import arithmetic
from storage_ops.loss.engine.head import Head
from storage_ops.loss.engine.selection import Gather, Selection, multiply
from storage_ops.loss.planning.cost import narrowed_rows, plain_rows
from storage_ops.loss.planning.devices import on_gpu
from storage_ops.loss.planning.schedule import INPUT, WEIGHT, Schedule, Step, slices

_OPS = torch.ops.storage_ops


class Sums:
    """Sums of the tiles' gradients, in the widest dtype that the plan has memory for.

    Attributes:
        input: (N, D), until `finish_input`; None if it has no gradient.
        weight: (V, D) the gradient; None if it is rounded from a sum at the end.
        bias: (V,), or None.
    """

    def __init__(self, head: Head, schedule: Schedule, memory: Tensor | None = None) -> None:
        """Allocate the sums. `memory`: (V, D), for the weight's gradient of one chunk of tokens."""
        call = head.call
        self._tokens, self._weight, self._schedule = head.tokens, head.weight, schedule
        self._ranks, self._into = head.ranks, call.accumulate_into
        self._bias_dtype = None if call.bias is None else call.bias.dtype
        self._partial = call.input_grad == "partial"
        # Complete rows go to their rank at once. If tokens are left out, they go at the end.
        self._scatters = call.input_grad == "reduce_scatter"
        self._reduced: list[Any] = []
        self._matmul = schedule.problem.matmul
        s, p = schedule, schedule.problem
        x, w, into = head.tokens.x, call.weight, self._into
        wide = arithmetic(x.dtype)
        self.input: Tensor | None = None
        self._input, self._shape = w.new_empty(0), call.input.shape
        self.weight: Tensor | None = None
        self.bias = w.new_zeros(len(w), dtype=wide) if p.grads[2] else None
        # The wide sum of a slice of the vocabulary, or of all classes.
        self._wide: Tensor | None = None
        if p.grads[1]:
            by_slice = s.by_slice and s.num_slices > 1
            if into is not None:
                self.weight = into
            elif memory is not None:
                self.weight = memory
            elif not s.num_chunks:
                self.weight = torch.zeros_like(w, memory_format=torch.contiguous_format)
            elif not s.wide_weight or by_slice:
                self.weight = torch.empty_like(w, memory_format=torch.contiguous_format)
            if s.wide_weight and into is None:
                self._wide = w.new_empty(s.columns if by_slice else len(w), w.shape[1], dtype=wide)
            for total in (self.weight, self._wide):  # padding classes have no gradient
                if total is not None and total is not into:
                    total[p.vocab :] = 0
        if p.grads[0]:
            if s.borrowed:
                self.input = self.unwritten(slice(0, s.borrowed)).view(wide).view(x.shape)
            else:
                self.input = x.new_empty(x.shape, dtype=wide if s.wide_input else x.dtype)
            # Rows of ignored tokens, and inputs without a class, keep gradient 0.
            if head.tokens.kept is not None or not s.num_slices:
                self.input.zero_()
            else:
                self.input[head.tokens.count :] = 0
        # For rows, by the first row: how many classes were added to the input's gradient. For
        # classes, by the first class: how many rows were added to the weight's gradient.
        self._added: dict[int, int] = {}
        self._rows_added: dict[int, int] = {}

    def unwritten(self, classes: slice) -> Tensor:
        """Return the memory of the weight's gradient of classes before it is written."""
        assert self.weight is not None
        return self.weight[classes].view(-1)

    def add(
        self,
        step: Step,
        x: Tensor,
        dz: Tensor,
        selection: Selection | None = None,
        gather: Gather | None = None,
    ) -> None:
        """Add the contribution of a tile's gradient. The tile may be overwritten.

        Args:
            step: the tile.
            x: (rows, D) its input rows.
            dz: (rows, classes) the gradient with respect to its logits.
            selection: the part of the gradient to multiply; None: all classes.
            gather: computes the gradient from `dz`, which then has logits. None: `dz` is the
                gradient.
        """
        if step.adds & WEIGHT and self.bias is not None:
            bias_gradient(dz, self.bias[step.classes])
        if selection is not None:
            self._add_selected(step, x, dz, selection, gather)
            return
        dz = _narrowed(dz, x.dtype)
        if step.adds & INPUT:
            self._add_to_input(step, x, dz)
        if step.adds & WEIGHT:
            if step.classes.start < self._schedule.borrowed:
                self.finish_input()  # its sums are in the memory that is written next
            self._add_to_weight(step, x, dz)

    def _add_selected(
        self, step: Step, x: Tensor, dz: Tensor, selection: Selection, gather: Gather | None
    ) -> None:
        w, part = self._weight[step.classes], None
        if step.adds & INPUT and self.input is not None:
            part = x.new_zeros(x.shape, dtype=arithmetic(x.dtype))
        total, adds = self._weight_of(step) if step.adds & WEIGHT else (None, True)

        def copied(out: Tensor, kept: Tensor | None, *places: Tensor) -> None:
            _OPS._gather_gradient(out, kept, dz, *places, *(None,) * 5, 0.0, 1.0)

        multiply(selection, self._matmul, gather or copied, x, w, part, total, adds)
        if part is not None:
            self._put(step, part, selection.tokens)
        if total is not None:
            self._complete(step, total)

    def _put(self, step: Step, part: Tensor, tokens: Tensor) -> None:
        """Add a part of the input's gradient to the rows of these tokens of the tile."""
        assert self.input is not None
        rows, kept = step.rows, self._tokens.kept
        places = tokens + rows.start if kept is None else kept[rows][tokens]
        has_values = self._counted(step)
        if has_values:
            part += self.input[places]
        self.input[places] = part.to(self.input.dtype)
        self._reduce_complete(rows)

    def _counted(self, step: Step) -> bool:
        """Count the classes of a tile. Return True if earlier tiles were added to its rows."""
        first, classes = step.rows.start, step.classes
        added = self._added.get(first, 0)
        self._added[first] = added + classes.stop - classes.start
        return added > 0

    def _reduce_complete(self, rows: slice) -> None:
        """Begin to sum complete rows over the ranks."""
        complete = self._added[rows.start] == self._schedule.problem.vocab
        if self._tokens.kept is None and complete and not self._partial:
            assert self.input is not None
            self._reduced += self._ranks.reduce(self.input, rows, self._scatters)

    def _add_to_input(self, step: Step, x: Tensor, dz: Tensor) -> None:
        if self.input is None:
            return
        rows, w = step.rows, self._weight[step.classes]
        kept, adds = self._tokens.kept, self._counted(step)
        if kept is None:
            self._matmul.input_gradient(dz, w, self.input[rows], adds)
            self._reduce_complete(rows)
            return
        part = x.new_empty(x.shape, dtype=self.input.dtype)
        self._matmul.input_gradient(dz, w, part, False)
        if adds:
            self.input.index_add_(0, kept[rows], part)
        else:
            self.input.index_copy_(0, kept[rows], part)

    def _add_to_weight(self, step: Step, x: Tensor, dz: Tensor) -> None:
        part, has_values = self._weight_of(step)
        if part is not None:
            self._matmul.weight_gradient(dz, x, part, has_values)
            self._complete(step, part)

    def _weight_of(self, step: Step) -> tuple[Tensor | None, bool]:
        """Return the sum of the weight's gradient of a tile's classes, and True if it has values.

        It is None if the weight needs no gradient.
        """
        classes = step.classes
        if not self._schedule.problem.grads[1]:
            return None, False
        total, first = self.weight, 0
        if self._wide is not None:
            total, first = self._wide, classes.start if self.weight is not None else 0
        assert total is not None
        part = total[classes.start - first : classes.stop - first]
        return part, self._rows_added.get(classes.start, 0) > 0 or total is self._into

    def _complete(self, step: Step, part: Tensor) -> None:
        """Count the rows that were added to a part of the sum. Round a complete part."""
        classes, rows = step.classes, step.rows
        added = self._rows_added.get(classes.start, 0) + rows.stop - rows.start
        self._rows_added[classes.start] = added
        complete = added == self._tokens.count
        if complete and self._wide is not None and self.weight is not None:
            self.weight[classes] = part

    def rescale(self, step: Step, change: Tensor) -> None:
        """Multiply the sums of rows by exp of the change of their maximum, as in online softmax.

        RUNNING_RESCALE sums exp(z_j - max so far) C_j w_j over the classes so far.
        """
        assert self.input is not None
        if not step.classes.start:
            return
        place = self.place(step.rows)
        # A row with only -inf so far has a sum of zeros, so its factor does not matter.
        factor = change.exp_().nan_to_num_(0.0, 0.0).unsqueeze(1)
        self.input[place] = self.input[place].mul_(factor.to(self.input.dtype))

    def place(self, rows: slice) -> slice | Tensor:
        """Return the position of token rows among the rows of the sums."""
        kept = self._tokens.kept
        return rows if kept is None else kept[rows]

    def finish_input(self) -> None:
        """Round the sums of the input's gradient, and free their memory."""
        if self.input is None:
            return
        total, dtype = self.input, self._weight.dtype
        if self._tokens.kept is not None and not self._partial:
            self._reduced = self._ranks.reduce(total, slice(0, len(total)), self._scatters)
        for work in self._reduced:
            work.wait()
        if self._scatters:
            total = self._ranks.own(total).to(dtype, copy=True)
        self._input, self.input = total.to(dtype).view(self._shape), None

    def finish(self) -> list[Tensor]:
        """Return the gradients of input (..., D), weight and bias; empty ones if not requested."""
        w, bias_dtype = self._weight, self._bias_dtype
        self.finish_input()
        weight = self._wide if self.weight is None else self.weight
        if weight is None or weight is self._into:
            weight = w.new_empty(0)
        bias = w.new_empty(0) if self.bias is None else self.bias.to(bias_dtype)
        return [self._input, weight.to(w.dtype), bias]


def _narrowed(tile: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a tile's gradient to the dtype of the product's operands, in its own memory."""
    if tile.dtype == dtype:
        return tile
    narrow = tile.view(dtype)[:, : tile.shape[1]]
    for rows in slices(len(tile), narrowed_rows(len(tile))):
        narrow[rows] = tile[rows].to(dtype)
    return narrow


def bias_gradient(dz: Tensor, out: Tensor) -> None:
    """Add the sum of dz (rows, classes) over its rows to `out` (classes), in the dtype of `out`."""
    # A GPU widens values as it reads them. A CPU would make a wide copy first.
    if dz.dtype == out.dtype or on_gpu(dz):
        out += dz.sum(0, dtype=out.dtype)
        return
    step = plain_rows(*dz.shape)
    for begin in range(0, len(dz), step):
        out += dz[begin : begin + step].to(out.dtype).sum(0)
