"""Simulates an evaluation step during training: a forward without a graph, and its logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from storage_ops.foundation.ledger import Block
from storage_ops.measure.calls import ONE_AT_A_TIME, around_calls
from storage_ops.measure.owners import BATCH, STATE, WORKSPACES
from storage_ops.progress import showing
from storage_ops.simulate.captured import Captured
from storage_ops.simulate.compiled import as_it_runs
from storage_ops.simulate.estimate import (
    call_simulated,
    note_modules,
    note_roles,
    noting,
    settle,
    simulating,
)
from storage_ops.simulate.kernels.cuda import keep_workspaces
from storage_ops.simulate.mode import Simulation
from storage_ops.simulate.rates import SimulatedDevice
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
    ledger = simulated_device.ledger()
    compute = as_it_runs(loss)
    args, kwargs = arguments(batch)
    captured = Captured((model, compute), args, kwargs)
    roles: dict[Block, str] = {}

    def evaluate(simulation: Simulation, *args: Any, **kwargs: Any) -> None:
        where = next((p.device for p in model.parameters()), None)
        state = torch.empty(state_bytes, dtype=torch.uint8, device=where)
        note_roles(roles, STATE, [state], simulation)
        logits = joined = None
        # The batches between the first and the last one take less memory than the last one.
        for count in sorted({1, max(1, predictions.batches)}):
            if count > 1 and logits is not None:
                joined = logits if count == 2 else _repeated(logits, count - 1)
                note_roles(roles, PREDICTIONS, [joined], simulation)
            output = model(*args, **kwargs)
            if compute is not None:  # otherwise the model has computed the loss, if it has one
                compute(output)
            if predictions.batches:
                logits = predictions.of(output)
                note_roles(roles, PREDICTIONS, [logits], simulation)
            del output
        if joined is not None and logits is not None:
            note_roles(roles, PREDICTIONS, [torch.cat([joined, logits])], simulation)

    alone, shown = ONE_AT_A_TIME, showing("simulating an evaluation step")
    calls = around_calls(model, noting(ledger))
    simulated = simulating(ledger, captured, args, kwargs, Assumption(None), simulated_device)
    with alone, shown, calls, simulated as (simulation, *moved), torch.no_grad():
        note_modules(roles, (model, *captured.roots), simulation)
        note_roles(roles, BATCH, tree_leaves(moved), simulation)
        call_simulated(evaluate, (simulation, *moved[0]), moved[1])
        if simulation.multiplies:
            workspaces = keep_workspaces(ledger, simulated_device.workspace)
            roles |= dict.fromkeys(workspaces, WORKSPACES)
        return StepEstimate(**settle(simulation, roles))
