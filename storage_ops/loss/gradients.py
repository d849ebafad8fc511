"""Where the gradients of linear cross-entropy are summed over tiles of logits."""

from __future__ import annotations

import torch
from torch import Tensor

from storage_ops.loss import plan_memory, ranks, tile_memory
from storage_ops.loss.planner import Plan
from storage_ops.loss.task import Task, tile_of
from storage_ops.loss.tokens import arithmetic
from storage_ops.matmul import products


class Gradients:
    """Sums of the tiles' gradients, in the widest dtype that the plan has memory for."""

    def __init__(self, task: Task, plan: Plan) -> None:
        self._task, self._problem = task, task.problem
        p, x, w = task.problem, task.tokens.x, task.weight
        wide = arithmetic(x.dtype)
        mixed, many = p.mixed, plan.num_slices > 1
        by_slice = many and plan.strategy != plan_memory.TOKEN_CHUNKED
        gathered = task.tokens.kept is not None
        self.input: Tensor | None = None  # the sums, until they are finished
        self._input = w.new_empty(0)
        self.weight: Tensor | None = None
        self.bias = w.new_zeros(len(w), dtype=wide) if p.grads[2] else None
        self._slice_sum: Tensor | None = None
        self._parks = plan_memory.parks(p, plan.rows)
        self._direct = not mixed or plan.num_chunks <= 1
        if p.grads[1]:
            if task.into is not None:
                self.weight, self._direct = task.into, True
            elif not plan.num_chunks:
                self.weight = torch.zeros_like(w, memory_format=torch.contiguous_format)
            elif self._direct or by_slice:
                self.weight = torch.empty_like(w, memory_format=torch.contiguous_format)
            if not self._direct:
                height = plan.columns if by_slice else len(w)
                self._slice_sum = w.new_empty(height, w.shape[1], dtype=wide)
        if p.grads[0]:
            fp32 = mixed and (many or plan.strategy == plan_memory.RUNNING_RESCALE)
            if plan.lent:
                self.input = self.memory(slice(0, plan.lent)).view(wide).view(x.shape)
            else:
                self.input = x.new_empty(x.shape, dtype=wide if fp32 else x.dtype)
            # Rows that are left out, and inputs without a class, keep their 0.
            if gathered or not plan.num_slices:
                self.input.zero_()
            else:
                self.input[task.tokens.count :] = 0

    def add(
        self, rows: slice, columns: slice, x: Tensor, w: Tensor, dz: Tensor, again: bool
    ) -> None:
        """Add what the gradient of a tile of logits gives; `again`: not the rows' first classes.

        The tile may be overwritten.
        """
        self.add_to_input(rows, x, w, dz, again)
        self.add_to_weight(rows, columns, x, dz)

    def add_to_input(self, rows: slice, x: Tensor, w: Tensor, dz: Tensor, again: bool) -> None:
        """Add what a tile gives to the input's gradient, if that is asked for and not finished."""
        threads = self._problem.threads
        if self.input is None:
            return
        if self._task.tokens.kept is None:
            products.input_gradient(dz, w, self.input[rows], again, threads)
            return
        index = self._task.tokens.kept[rows]
        part = x.new_empty(x.shape, dtype=self.input.dtype)
        products.input_gradient(dz, w, part, False, threads)
        if again:
            self.input.index_add_(0, index, part)
        else:
            self.input.index_copy_(0, index, part)

    def add_to_weight(self, rows: slice, columns: slice, x: Tensor, dz: Tensor) -> None:
        """Add what a tile gives to those of weight and bias; the tile may be overwritten."""
        threads = self._problem.threads
        if self.bias is not None:
            products.bias_gradient(dz, self.bias[columns])
        if self._problem.grads[1]:
            again = rows.start > 0
            if self._direct:
                assert self.weight is not None
                again = again or self._task.into is self.weight
                products.weight_gradient(dz, x, self.weight[columns], again, threads)
            else:
                assert self._slice_sum is not None
                first = columns.start if self.weight is None else 0
                part = self._slice_sum[first : first + columns.stop - columns.start]
                products.weight_gradient(dz, x, part, again, threads)

    def memory(self, columns: slice) -> Tensor:
        """That of the weight's gradient of these classes, before it is written."""
        assert self.weight is not None
        return self.weight[columns].view(-1)

    def parking(self, columns: slice) -> Tensor | None:
        """Logits (tokens, classes) in the memory of the weight's gradient; the first that fit."""
        if not self._parks:
            return None
        width, tokens = columns.stop - columns.start, self._task.tokens.count
        count = tile_memory.parked_rows(tokens, width, self._problem.hidden)
        return tile_of(self.memory(columns), count, width)

    def end_slice(self, columns: slice) -> None:
        """Round the sum of a slice of the vocabulary into its place."""
        if self._slice_sum is not None and self.weight is not None:
            self.weight[columns] = self._slice_sum[: columns.stop - columns.start]

    def finish_input(self) -> None:
        """Round the sums of the input's gradient, which then need their memory no more."""
        if self.input is not None:
            total = ranks.add_up(self._task.spec.group, self.input)
            self._input, self.input = total.to(self._task.weight.dtype), None

    def finish(self) -> list[Tensor]:
        """The gradients of input (N, D), weight and bias; empty where none was asked for."""
        w = self._task.weight
        self.finish_input()
        weight = self._slice_sum if self.weight is None else self.weight
        if weight is None or weight is self._task.into:
            weight = w.new_empty(0)
        bias = w.new_empty(0) if self.bias is None else self.bias.to(w.dtype)
        return [self._input, weight.to(w.dtype), bias]
