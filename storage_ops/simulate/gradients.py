"""Gradients of parameters before a simulated step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn


def check_gradients_are_on() -> None:
    """Raise a ValueError inside `torch.no_grad` and `torch.inference_mode`."""
    if not torch.is_grad_enabled():
        raise ValueError(
            "Gradients are off, but a training step needs them. Call this function outside of "
            "torch.no_grad() and torch.inference_mode()."
        )


def with_dense_gradients(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained parameters that do not have sparse gradients.

    Sparse gradients of earlier batches do not count, because their sizes depend on these batches.
    """
    of_kind: dict[bool, set[nn.Parameter]] = {True: set(), False: set()}
    for module in model.modules():
        is_sparse = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
        of_kind[is_sparse].update(module.parameters(recurse=False))
    sparse = of_kind[True] - of_kind[False]
    return [p for p in model.parameters() if p.requires_grad and p not in sparse]


def earlier_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Create gradients of trained parameters in a simulation, as after earlier batches."""
    for p in parameters:
        if p.requires_grad:
            p.grad = torch.empty_like(p)


@contextlib.contextmanager
def without_gradients(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Remove the gradients of parameters inside a with block, and restore them after it."""
    parameters = list(parameters)
    before = [(p, p.grad) for p in parameters]
    for p, _ in before:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in before:
            p.grad = gradient
