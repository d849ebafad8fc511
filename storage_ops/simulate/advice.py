"""Warnings about arguments that are allowed, and that callers rarely mean."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from storage_ops._callers import warn_caller
from storage_ops.simulate.step import arguments


def warn_of_eval_mode(model: nn.Module, function: str) -> None:
    """Warn if a model is not in training mode, such as a model of `from_pretrained`."""
    if not model.training:
        warn_caller(
            f"{function}: `model`, a {type(model).__name__}, is in eval mode, in which dropout and "
            "other parts take less memory than in training. Trainers train in training mode. Call "
            "model.train() first."
        )


def warn_of_missing_labels(model: nn.Module, batches: list[Any], loss: Any, function: str) -> None:
    """Warn if a model computes its loss from labels that one of the batches does not have.

    The sum of the output, which then is the loss, takes less memory than the loss of logits.
    """
    if loss is not None or "labels" not in inspect.signature(model.forward).parameters:
        return
    for single in batches:
        args, kwargs = arguments(single)
        try:
            given = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
        except TypeError:  # the call of the model raises this error
            continue
        if given.get("labels") is None:
            warn_caller(
                f"{function}: `batch` has no labels, so the loss is the sum of the output of "
                f"{type(model).__name__}, which takes less memory. Add labels to the batch, or "
                "pass a function of the output as `loss`."
            )
            return
