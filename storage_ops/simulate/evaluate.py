"""Simulates an evaluation step during training: a forward without a graph, and its logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from storage_ops.measure.owners import STATE
from storage_ops.simulate.captured import Captured
from storage_ops.simulate.compiled import as_it_runs
from storage_ops.simulate.estimate import call_simulated, simulating_model
from storage_ops.simulate.rates import SimulatedDevice
from storage_ops.simulate.roles import Roles
from storage_ops.simulate.step import StepEstimate, arguments
from storage_ops.simulate.values.assume import Assumption

PREDICTIONS = "logits of evaluated batches"


@dataclass(frozen=True)
class Predictions:
    """The logits that evaluation keeps on the device, as a Trainer with `compute_metrics` does.

    Attributes:
        batches: number of batches whose logits are joined; 0 if each step keeps only its loss.
        ranks: number of ranks whose logits each rank gathers.
        in_float32: whether logits become float32, as accelerate does with mixed precision.
    """

    batches: int = 0
    ranks: int = 1
    in_float32: bool = False

    def of(self, output: Any) -> Tensor:
        """Return the logits of a batch after the ranks have gathered them."""
        logits: Tensor = output.logits.float() if self.in_float32 else output.logits
        return _repeated(logits, self.ranks) if self.ranks > 1 else logits


def _repeated(logits: Tensor, times: int) -> Tensor:
    """Return a tensor with the rows of `times` batches like this one."""
    return logits.new_empty(times * len(logits), *logits.shape[1:])


def simulate_evaluation(
    model: nn.Module,
    batch: object,
    *,
    state_bytes: int,
    predictions: Predictions,
    loss: Callable[[Any], Tensor] | None = None,
    device: str | torch.device | None = None,
) -> StepEstimate:
    """Simulate the last evaluation step before logits leave the device.

    Gradients were freed before it. The optimizer's state is in memory.

    Args:
        model: in evaluation mode.
        batch: as for `simulate_step`, but no list.
        state_bytes: bytes of the optimizer's state.
        predictions: which logits stay.
        loss: a function of the model's output, or None.
        device: as for `simulate_step`.
    """
    simulated_device = SimulatedDevice.of(device, model, [batch])
    compute = as_it_runs(loss)
    args, kwargs = arguments(batch)
    captured = Captured((model, compute), args, kwargs)

    def evaluate(roles: Roles, *args: Any, **kwargs: Any) -> None:
        where = next((p.device for p in model.parameters()), None)
        state = torch.empty(state_bytes, dtype=torch.uint8, device=where)
        roles.note(STATE, [state])
        logits = joined = None
        # The batches between the first and the last one take less memory than the last one.
        for count in sorted({1, max(1, predictions.batches)}):
            if count > 1 and logits is not None:
                joined = logits if count == 2 else _repeated(logits, count - 1)
                roles.note(PREDICTIONS, [joined])
            output = model(*args, **kwargs)
            if compute is not None:  # otherwise the model has computed the loss, if it has one
                compute(output)
            if predictions.batches:
                logits = predictions.of(output)
                roles.note(PREDICTIONS, [logits])
            del output
        if joined is not None and logits is not None:
            roles.note(PREDICTIONS, [torch.cat([joined, logits])])

    simulated = simulating_model(
        model, captured, args, kwargs, simulated_device, Assumption(None),
        "simulating an evaluation step",
    )  # fmt: skip
    with simulated as (_, roles, args, kwargs), torch.no_grad():
        call_simulated(evaluate, (roles, *args), kwargs)
        roles.add_workspaces(simulated_device)
        return StepEstimate(**roles.totals())
