"""Compares the first batch of a training with the batch of a plan of `fit`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from storage_ops._callers import warn_caller
from storage_ops.fitting.conditions import Conditions, Difference, named_arguments
from storage_ops.fitting.plan import FitPlan
from storage_ops.foundation.ops import Args, Kwargs
from storage_ops.quantities import readable

# A peak this much above that of the plan is accepted although the budget is smaller. A trainer may
# add small tensors to a batch.
_DOUBT = 0.01


@dataclass(frozen=True)
class Training:
    """Facts from a trainer about the steps that follow.

    Attributes:
        optimizer: the optimizer of the trained parameters. None if unknown.
        autocast: the dtype that the trainer uses with autocast. "" if it does not change autocast.
        accumulate: whether one optimizer step is for several batches.
        remedy: how to use smaller batches with this trainer.
    """

    optimizer: Optimizer | None = None
    autocast: str = ""
    accumulate: bool = False
    remedy: str = "train with smaller batches"


class FirstBatch:
    """Checks the first call of a model before it runs.

    Calls that torch.compile traces are not checked, because a compiled model may forbid graph
    breaks.
    """

    def __init__(
        self, plan: FitPlan, model: nn.Module, training: Training, refuse: Callable[[], None]
    ) -> None:
        """Wait for the first call. `refuse` undoes the plan before an error is raised."""
        self._plan, self._training, self._refuse = plan, training, refuse
        self.disarm = model.register_forward_pre_hook(self._look, with_kwargs=True).remove

    def _look(self, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        self.disarm()
        with self._autocast(module):
            training = self._training
            counted = training.optimizer is not None
            now = Conditions.of(module, args, kwargs, training.accumulate, counted)
            differences = self._plan.conditions.differences(now)
            if not differences:
                return
            peak = None
            if any(difference.may_be_larger for difference in differences):
                peak = self._peak(module, args, kwargs)
                most = max(self._plan.budget, self._plan.peak_bytes * (1 + _DOUBT))
                if peak is None or peak > most:
                    self._refuse()
                    raise ValueError(self._error(differences, peak))
        warn_caller(self._line(differences, peak))

    @contextlib.contextmanager
    def _autocast(self, model: nn.Module) -> Iterator[None]:
        """Turn on autocast as the trainer does after the hooks of the model."""
        with contextlib.ExitStack() as stack:
            if self._training.autocast:
                device = next((p.device.type for p in model.parameters()), "cpu")
                dtype = getattr(torch, self._training.autocast)
                stack.enter_context(torch.autocast(device, dtype))
            yield

    def _peak(self, model: nn.Module, args: Args, kwargs: Kwargs) -> int | None:
        """Return the peak of a step with this batch and the plan, or None if not simulated."""
        batch = named_arguments(model, args, kwargs) if kwargs else args
        optimizer = self._training.optimizer if self._plan.conditions.optimizer else None
        try:
            return self._plan.peak_with(model, batch, optimizer, self._training.accumulate)
        except (RuntimeError, TypeError, ValueError):
            return None

    def _error(self, differences: list[Difference], peak: int | None) -> str:
        takes = "" if peak is None else f" A step takes {readable(peak, up=True)} now."
        remedies = ", ".join(difference.remedy for difference in differences)
        return (
            f"{self._compared(differences)}.{takes} The plan's step takes "
            f"{readable(self._plan.peak_bytes, up=True)}, within a budget of "
            f"{readable(self._plan.budget)}.{self._uncounted} Call fit {remedies}, or "
            f"{self._training.remedy}."
        )

    def _line(self, differences: list[Difference], peak: int | None) -> str:
        planned = readable(self._plan.peak_bytes, up=True)
        result = "so it is enough, but may recompute more than such a step needs"
        takes = ""
        if peak is not None:
            takes = f"A step takes {readable(peak, up=True)} now. "
            if peak > self._plan.peak_bytes:
                result = f"and the budget is {readable(self._plan.budget)}"
        return (
            f"{self._compared(differences)}. {takes}The plan's step takes {planned}, {result}."
            f"{self._uncounted}"
        )

    @property
    def _uncounted(self) -> str:
        return (
            "" if self._plan.conditions.optimizer else " The state of the optimizer is not counted."
        )

    def _compared(self, differences: list[Difference]) -> str:
        before = " and ".join(difference.before for difference in differences)
        now = " and ".join(difference.now for difference in differences)
        return f"fit: the plan was made for {before}, and training begins with {now}"
