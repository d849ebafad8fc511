"""Keyword arguments of linear cross-entropy by type, for the overloads that type checkers read.

`tests/test_types.py` compares their names with those that the functions take.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import TypedDict, Unpack

from storage_ops.loss.names import InputGrad, Reduction, TensorResult
from storage_ops.loss.planning.planner import Plan

# More names of results than the overloads count.
Several = tuple[TensorResult, TensorResult, Unpack[tuple[TensorResult, ...]]]


class Options(TypedDict, total=False):
    """Options that every loss on linear cross-entropy takes."""

    softcap: float | None
    max_valid: int | Literal["sync"] | None
    accumulate_dtype: torch.dtype | None
    memory_budget: int | float | str | None
    plan: Plan | None
    process_group: Any
    valid_classes: int | None
    input_grad: InputGrad
    check_ranks: bool
    logits_dtype: torch.dtype | None
    options: Any


class SumOptions(TypedDict, total=False):
    """How the losses of tokens are formed and added up."""

    reduction: Reduction
    label_smoothing: float
    z_loss: float
    logit_scale: float
    divisor: float | Tensor | None


class ModuleOptions(Options, SumOptions, total=False):
    """Options of `LinearCrossEntropyLoss`, but `returns`."""

    ignore_index: int | None
    shift: bool | int
    selected_ids: Tensor | None
    top_k: int | None


class CallOptions(ModuleOptions, total=False):
    """Keyword arguments of `linear_cross_entropy`, but `returns`."""

    linear_bias: Tensor | None
    weight: Tensor | None
    token_weight: Tensor | None
    accumulate_into: Tensor | None
