"""The names that options of the losses may have: types for type checkers, tuples for checks."""

from __future__ import annotations

from typing import Literal, get_args

Reduction = Literal["mean", "sum", "none"]
InputGrad = Literal["replicate", "partial", "reduce_scatter"]
Grad = Literal["input", "weight", "bias"]  # arguments of the loss that need a gradient
Strategy = Literal["token-chunked", "vocab-sliced", "running-rescale"]
TensorResult = Literal["loss", "nll", "lse", "entropy", "argmax", "correct", "z_loss", "selected"]
Result = Literal[TensorResult, "topk"]  # "topk" is a pair of tensors

REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)
INPUT_GRADS: tuple[InputGrad, ...] = get_args(InputGrad)
GRADS: tuple[Grad, ...] = get_args(Grad)
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
RESULTS: tuple[Result, ...] = get_args(Result)
