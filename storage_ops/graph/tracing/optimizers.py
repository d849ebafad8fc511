"""Optimizers that step inside a traced function."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

from storage_ops.graph.tracing.slots import Slot

Options = list[dict[str, Any]]


class Optimizers:
    """The optimizers that stepped in a trace, with the options that the graph assumes."""

    def __init__(self, optimizers: list[Optimizer]) -> None:
        self._before = [(optimizer, _options(optimizer)) for optimizer in optimizers]
        self.stepped: list[tuple[Optimizer, Options]] = []

    @contextlib.contextmanager
    def watched(self, name: Callable[[Tensor, Slot], None]) -> Iterator[None]:
        """Record the optimizers that step in a with block.

        A new optimizer creates its state before its first step.

        Args:
            name: called with each tensor of a new state and its slot.

        Raises:
            RuntimeError: an option, or a number in a state, that the graph takes as fixed has
                another value after the block.
        """

        def before_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
            if not any(optimizer is known for known, _ in self.stepped):
                # These reads of gradients are not reads by fn.
                with _disable_current_modes(), torch._C.DisableTorchFunction():
                    _make_state(optimizer)
                self.stepped.append((optimizer, _options(optimizer)))
                for parameter, state in optimizer.state.items():
                    for key, value in state.items():
                        if isinstance(value, Tensor):
                            name(value, _slot(optimizer, parameter, key))

        handle = register_optimizer_step_pre_hook(before_step)
        try:
            yield
        finally:
            handle.remove()
        for what, now, then in _differences([*self._before, *self.stepped]):
            raise RuntimeError(
                f"trace_step: `fn` changes {what} from {then!r} to {now!r}, which a graph cannot "
                "do. Change it outside of `fn`, as a scheduler's step does, or make it a tensor."
            )

    def check(self) -> None:
        """Raise an error if an option that the trace fixed has changed since.

        Raises:
            ValueError: an option has changed. The error has both values.
        """
        for what, now, then in _differences(self.stepped):
            raise ValueError(
                f"traced step: {what} is {now!r}. Expected {then!r}, as when traced. Trace the "
                "function again, or make it a tensor, which is read at each call."
            )


def _differences(optimizers: list[tuple[Optimizer, Options]]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the changed options: name, current value, and value in the trace."""
    for optimizer, options in optimizers:
        kind, groups = type(optimizer).__name__, _options(optimizer)
        if len(groups) != len(options):
            yield f"the number of parameter groups of {kind}", len(groups), len(options)
        for index, (now, then) in enumerate(zip(groups, options, strict=False)):
            for name, value in then.items():
                if now.get(name) != value:
                    yield f"{name} of parameter group {index} of {kind}", now.get(name), value


def _options(optimizer: Optimizer) -> Options:
    """Return the options of each parameter group that are not tensors.

    The number of parameters is included, and so are numbers in the states of the parameters.
    """
    return [
        {name: v for name, v in group.items() if name != "params" and not isinstance(v, Tensor)}
        | {"the number of parameters": len(group["params"])}
        | {
            f"the state {key!r} of parameter {place}": number
            for place, parameter in enumerate(group["params"])
            for key, number in optimizer.state.get(parameter, {}).items()
            if isinstance(number, (int, float))
        }
        for group in optimizer.param_groups
    ]


def _slot(optimizer: Optimizer, parameter: Tensor, key: str) -> Slot:
    name = f"{key} in the state of {type(optimizer).__name__}"
    return Slot(name, lambda: optimizer.state[parameter][key])


def _make_state(optimizer: Optimizer) -> None:
    """Create the state of an optimizer that its first step would create."""
    begin: Callable[..., Any] | None = getattr(optimizer, "_init_group", None)
    if begin is None or optimizer.state:
        return
    lists = len(inspect.signature(begin).parameters) - 1
    for group in optimizer.param_groups:
        with_grad = [p for p in group["params"] if p.grad is not None]
        grads = [p.grad for p in with_grad]
        try:
            for p in with_grad:
                p.grad = torch.zeros_like(p)
            begin(group, *([] for _ in range(lists)))
        finally:
            for p, grad in zip(with_grad, grads, strict=True):
                p.grad = grad
