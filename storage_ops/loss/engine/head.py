"""A head and its tokens in the form that kernels take: rows, and the classes of this rank."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from storage_ops import matmul
from storage_ops.loss.call import Call, arithmetic
from storage_ops.loss.engine.ranks import Ranks, ranks_of
from storage_ops.loss.engine.tokens import Tokens, may_count, same_storage, tokens_of
from storage_ops.loss.planning import cost
from storage_ops.loss.planning.devices import device_kind, has_row_kernel_for, rates_of
from storage_ops.loss.planning.problem import Problem
from storage_ops.matmul.aten import takes


@dataclass
class Head:
    """The operands of a call.

    Attributes:
        call: the arguments.
        ranks: the processes that hold the other classes.
        tokens: the tokens to process; `tokens.x` has strides that products accept.
        weight: (classes, D), the classes of this rank without padding, with such strides.
        first_class: the number of this rank's first class.
        vocabulary: the number of classes on all ranks, without padding.
        problem: the input of the planner, with the most classes that a rank has. It is the same on
            every rank, so that all ranks choose the same plan.
    """

    call: Call
    ranks: Ranks
    tokens: Tokens
    weight: Tensor
    first_class: int
    vocabulary: int
    problem: Problem

    @staticmethod
    def of(call: Call, compare: bool) -> Head:
        """Return the operands of a call. With `compare`, raise an error if ranks differ."""
        ranks = ranks_of(call.group)
        sizes = ranks.sizes(call, compare)
        first, vocabulary = sum(sizes[: ranks.rank]), _valid_of(sizes, call.valid_classes)
        most = [min(n, vocabulary - sum(sizes[:k])) for k, n in enumerate(sizes)]
        classes = most[ranks.rank]
        tokens = tokens_of(call, ranks, first, classes)
        p = problem_of(call, tokens, max(most))
        p = replace(p, several=ranks.several, alike=len(set(most)) == 1, keeps=call.keeps)
        tokens.x = for_products(tokens.x)
        weight = for_products(call.weight[:classes])
        return Head(call, ranks, tokens, weight, first, vocabulary, p)

    def targets_within(self, rows: slice, classes: slice) -> Tensor:
        """Return the targets of these rows among the rank's `classes`, with duplicates.

        Indices count from the first of `classes`. If the number of targets may not be read, all
        other targets become class 0.
        """
        local = self.tokens.target[rows] - self.first_class - classes.start
        in_slice = (local >= 0) & (local < classes.stop - classes.start)
        if may_count(local):
            inside: Tensor = local[in_slice]
            return inside
        return torch.where(in_slice, local, 0)


def for_products(matrix: Tensor) -> Tensor:
    """Return a matrix, copied if products do not accept its strides."""
    return matrix if takes(matrix) else matrix.contiguous()


def bias_dtype(call: Call) -> torch.dtype:
    """Return the dtype in which the row kernel of cross-entropy takes the bias.

    It is the dtype of the bias, unless the logits have a wider one.
    """
    assert call.bias is not None
    return torch.promote_types(call.bias.dtype, call.logits_dtype or call.input.dtype)


def bytes_of_copy(t: Tensor, dtype: torch.dtype, classes: int, by_strides: bool) -> int:
    """Return the bytes of a copy of one number per class, if there must be one.

    `by_strides`: whether strides decide, too.
    """
    fits = t.dtype == dtype and (t.is_contiguous() or not by_strides)
    return 0 if fits else classes * dtype.itemsize


def problem_of(call: Call, tokens: Tokens, classes: int) -> Problem:
    """Return the problem that the plan of a call is made for.

    Ranks must choose the same plan, but may differ in strides, slice sizes and threads. So with a
    group, copies because of strides do not count, nor do threads.

    Args:
        call, tokens: the arguments.
        classes: the most classes that a rank has. Copies of values per class count with as many.
    """
    x, alone, copies = tokens.x, not call.group, 0
    if alone and not takes(x):
        copies += x.nbytes
    if alone and not takes(call.weight):
        copies += classes * x.shape[1] * x.element_size()
    wide_logits = call.logits_dtype is not None and call.logits_dtype != x.dtype
    if call.bias is not None:
        copies += bytes_of_copy(call.bias, bias_dtype(call), classes, alone)
    if call.class_weight is not None:
        copies += bytes_of_copy(call.class_weight, arithmetic(x.dtype), classes, alone)
    if alone and tokens.probabilities and not same_storage(tokens.target, call.target):
        copies += len(x) * classes * call.target.element_size()
    threads = torch.get_num_threads() if alone else 1
    smooth_cap = bool(call.label_smoothing and call.softcap)
    p = Problem(
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
        cast_bytes=arithmetic(x.dtype).itemsize if tokens.casts(by_strides=alone) else 0,
        fixed_bytes=tokens.copied_bytes + copies,
    )
    if not call.gradient_tolerance:
        return p
    if call.max_classes is not None:
        return replace(p, multiplied=call.max_classes)
    return cost.selecting(p, cost.EXPECTED, rates_of(x.device))


def _valid_of(sizes: list[int], valid: int | None) -> int:
    """Return the number of classes on all ranks that are no padding.

    The error is the same on every rank. A rank that has only padding raises it, too.
    """
    total, before = sum(sizes), sum(sizes[:-1])
    if valid is not None and not before < valid <= total:
        raise ValueError(
            f"linear_cross_entropy: `valid_classes` is {valid}. Expected {before + 1} to {total}, "
            "so that every rank has a class that is not padding."
        )
    return total if valid is None else valid
