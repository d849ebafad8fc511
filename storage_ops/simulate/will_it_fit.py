"""Answers whether a training step fits on a GPU, without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from storage_ops._subclass import check_module
from storage_ops.loss.planning.devices import DEFAULT_GPU
from storage_ops.quantities import Tabular, readable
from storage_ops.simulate.advice import warn_of_eval_mode, warn_of_missing_labels
from storage_ops.simulate.rates import budget_of
from storage_ops.simulate.step import StepEstimate, batches_of, simulate_step

if TYPE_CHECKING:
    from storage_ops.tables import Grid


@dataclass(frozen=True)
class FitReport(Tabular):
    """The answer whether a step fits, and its memory at the peak. Prints as a table.

    Attributes:
        fits: whether the peak is within the budget.
        peak_bytes: the highest level of everything on the device during one step.
        budget_bytes: the budget.
        by_owner: bytes at the peak by their owner, as in `StepEstimate`.
        device: the device that the step was simulated for.
        step: the whole estimate.
    """

    fits: bool
    peak_bytes: int
    budget_bytes: int
    by_owner: dict[str, int]
    device: str
    step: StepEstimate = field(repr=False)

    def __rich__(self) -> Grid:
        return self.step.table(verdict(self.peak_bytes, self.budget_bytes, self.device))


def verdict(peak: int, budget: int, device: str) -> str:
    """Return whether a peak is within a budget, and the margin as text."""
    margin = budget - peak
    fits = f"fits, {readable(margin)} to spare"
    lacks = f"does not fit, {readable(-margin, up=True)} too much"
    said = fits if margin >= 0 else lacks
    return f"{said}: peak {readable(peak, up=True)} of {readable(budget)} on {device}"


def will_it_fit(
    model: nn.Module,
    batch: object,
    budget: int | float | str | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: type[Optimizer] | Optimizer | None = torch.optim.AdamW,
    device: str | torch.device | None = DEFAULT_GPU,
    accumulate: bool = False,
    assume: float | Mapping[str, float] | None = None,
) -> FitReport:
    """Return whether a training step of a model fits into a device, and the owners of its memory.

    The step is simulated as in `simulate_step`. Nothing is computed or allocated at that size, so a
    model on the meta device and a laptop are enough. The CUDA context, workspaces of libraries
    other than cuBLAS, and fragmentation do not count. Leave some hundred MiB of a GPU free for
    them.

    Args:
        model: the model as it will be trained, with its checkpoints, its dtype and its mode.
        batch: a tensor, a tuple (`model(*batch)`), a dict (`model(**batch)`), or a list of these.
            The batch with the highest peak decides.
        budget: the available memory, in bytes or as text such as "70GiB". None: the memory of the
            device, without 0.5 GiB of a GPU for the CUDA context.
        loss: a function of the model's output that returns a scalar. None: the output itself if it
            is one, or its `loss`, or the sum of its numbers.
        optimizer: an optimizer of the model's parameters, a class, or None.
        device: "cpu" or a GPU, such as "cuda" or "h100", the default. None: the parameters' device.
        accumulate: whether gradients of earlier batches exist, as in `simulate_step`.
        assume: as in `estimate`, for sizes that depend on values.

    Raises:
        TypeError, ValueError: an argument is wrong. The error names it.
        RuntimeError: as in `estimate`.

    Example:
        >>> mlp = torch.nn.Sequential(
        ...     torch.nn.Linear(4096, 16384, device="meta"),
        ...     torch.nn.GELU(),
        ...     torch.nn.Linear(16384, 4096, device="meta"),
        ... )
        >>> x = torch.empty(8192, 4096, device="meta")
        >>> report = storage_ops.memory.will_it_fit(mlp, x, budget="4GiB")
        >>> report.fits, report.peak_bytes >> 20
        (True, 3648)
    """
    check_module(model)
    budget_bytes = budget_of(budget, device, model)
    warn_of_eval_mode(model, "will_it_fit")
    warn_of_missing_labels(model, batches_of(batch), loss, "will_it_fit")
    step = simulate_step(
        model, batch, loss=loss, optimizer=optimizer, device=device, assume=assume,
        accumulate=accumulate,
    )  # fmt: skip
    where = str(device) if device is not None else "the device of its parameters"
    peak = step.peak_bytes
    return FitReport(peak <= budget_bytes, peak, budget_bytes, step.by_owner, where, step)
