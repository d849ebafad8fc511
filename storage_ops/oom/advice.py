"""Asks `fit` for a plan for a step that ran out of memory."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from storage_ops.foundation.ops import Args, Kwargs
from storage_ops.measure.calls import around_calls
from storage_ops.quantities import readable

if TYPE_CHECKING:
    from storage_ops.fitting.plan import FitPlan

_CALL = "storage_ops.fit(model, batch, budget, loss, optimizer)"
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


@dataclass
class KnownStep:
    """The known arguments for a call of `fit`. Fields have the names of its arguments."""

    model: nn.Module | None = None
    batch: Any = None
    loss: Callable[[Any], Tensor] | None = None
    optimizer: type[Optimizer] | Optimizer | None = None
    accumulate: bool = False


class Follower:
    """Finds the model and the batch of a step among the calls of modules.

    The step is the last outermost call, with gradients, of the module with the most parameters. Its
    tensors are held by weak references, so that they are freed as usual.
    """

    def __init__(self, roots: list[nn.Module]) -> None:
        self._roots = nn.ModuleList(roots)
        self._depth, self._most = 0, 0
        self._call: tuple[nn.Module, Any, Any] | None = None
        self._gradient: weakref.ref[Tensor] | None = None  # a gradient of earlier batches

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Watch calls inside a with block."""
        with around_calls(self._roots, self._around):
            yield

    def _around(
        self, module: nn.Module, name: str, call: Callable[..., Any], args: Args, kwargs: Kwargs
    ) -> Any:
        if self._depth == 0 and torch.is_grad_enabled():
            size = sum(p.numel() for p in module.parameters())
            if size >= self._most:
                self._most, self._call = size, (module, *tree_map(_weak, (args, kwargs)))
                gradients = (p.grad for p in module.parameters() if p.grad is not None)
                self._gradient = next(map(weakref.ref, gradients), None)
        self._depth += 1
        try:
            return call(*args, **kwargs)
        finally:
            self._depth -= 1

    def complete(self, step: KnownStep, optimizers: Iterable[Optimizer]) -> KnownStep:
        """Return `step` with observed values in place of missing ones, if they still exist."""
        model, batch, optimizer = step.model, step.batch, step.optimizer
        if self._call is not None and (model is None or model is self._call[0]):
            model, *weak = self._call
            args, kwargs = tree_map(_strong, weak)
            gone = any(isinstance(x, _Gone) for x in tree_leaves((args, kwargs)))
            if batch is None and not gone:
                names = list(_parameters_of(model))
                batch = {**dict(zip(names, args, strict=False)), **kwargs} if kwargs else args
        if optimizer is None and model is not None:
            ours = {id(p) for p in model.parameters()}
            optimizer = next((o for o in optimizers if _updates(o, ours)), None)
        adds = self._gradient is not None and self._gradient() is not None
        return KnownStep(model, batch, step.loss, optimizer, adds)


class _Gone:
    """Represents an argument that was freed, or must not be referenced."""


def _weak(x: object) -> Any:
    return weakref.ref(x) if isinstance(x, Tensor) else x if isinstance(x, _PLAIN) else _Gone()


def _strong(x: object) -> Any:
    value = x() if isinstance(x, weakref.ref) else x
    return _Gone() if value is None and x is not None else value


def _parameters_of(model: nn.Module) -> Iterable[str]:
    import inspect

    return inspect.signature(model.forward).parameters


def _updates(optimizer: Optimizer, ours: set[int]) -> bool:
    return any(id(p) in ours for group in optimizer.param_groups for p in group["params"])


def advise(step: KnownStep, budget: int | None) -> tuple[FitPlan | None, str]:
    """Return the plan of `fit` for a budget, and a sentence about it or about how to get one."""
    from storage_ops.fitting.fit import fit

    call = f"what fit would do: call {_CALL}"
    if step.model is None or step.batch is None:
        return None, f"{call}, or give explain_oom a model and a batch"
    if budget is None:
        return None, f"{call}, with the bytes that there are"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return None, f"{call} in one process"
    try:
        with _disable_current_modes():
            plan = fit(
                step.model, step.batch, budget, step.loss, step.optimizer,
                accumulate=step.accumulate,
            )  # fmt: skip
    except Exception as error:
        return None, f"what fit would do: {error}"
    loss = "" if step.loss else ", with the loss that the model returns or the sum of its output"
    optimizer = "no optimizer (none was found; explain_oom(optimizer=...) counts its state)"
    if step.optimizer is not None:
        optimizer_now = step.optimizer
        optimizer = (
            optimizer_now if isinstance(optimizer_now, type) else type(optimizer_now)
        ).__name__
    accumulated = ", where gradients of earlier batches are there" if step.accumulate else ""
    return plan, f"what fit would do for {readable(budget)} and {optimizer}{loss}{accumulated}:"


def bytes_of(device: torch.device, error: BaseException) -> int | None:
    """Return how many bytes this process may have on a device, or None if that is unknown."""
    known: int | None = getattr(error, "limit_bytes", None)
    if known is not None or device.type != "cuda":
        return known
    free, total = torch.cuda.mem_get_info(device)
    share = torch.cuda.get_per_process_memory_fraction(device)
    return int(min(total * share, free + torch.cuda.memory_reserved(device)))
