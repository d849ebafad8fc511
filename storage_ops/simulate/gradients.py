"""Gradients of parameters before a simulated step."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn


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
def later_gradients(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Add gradients to those of a later call of a layer, in a backward inside a with block.

    Autograd holds the gradient of the later call. It adds to it in place unless this gradient is a
    view, such as the transposed gradient of a linear layer's weight.
    """
    held = {p: torch.empty_like(p) for p in parameters if p.requires_grad}

    def added(p: nn.Parameter, gradient: Tensor) -> Tensor:
        later = held.pop(p)
        return later + gradient if gradient._is_view() else later.add_(gradient)

    hooks = [p.register_hook(functools.partial(added, p)) for p in held]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


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
