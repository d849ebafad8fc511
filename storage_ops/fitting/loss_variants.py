"""A step of a model with one loss: the costs of its layers, and the memory besides them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from operator import le
from typing import Any

from torch import Tensor, nn

from storage_ops.fitting.actions import LOSS, Action
from storage_ops.fitting.heads import patching
from storage_ops.fitting.probe import Cost
from storage_ops.fitting.record import StepRecording
from storage_ops.fitting.solve import ActionProblem, Option
from storage_ops.simulate.step import outside_autocast

Costs = list[list[tuple[Action, Cost]]]  # of actions, for each call of a layer


@dataclass(frozen=True)
class LossVariant:
    """A step with one loss, with or without results in host memory.

    Attributes:
        loss: the action for the loss of the model.
        recording: the recording of the step without its layers.
        costs: costs of the actions for each call of a layer.
        problem: the effects of actions on each call.
        away: the most bytes that a call has in host memory. At every moment one more call than
            computed may have its bytes on the device: they leave late and come back early.
    """

    loss: Action
    recording: StepRecording
    costs: Costs
    problem: ActionProblem
    away: int

    @staticmethod
    def all_of(loss: Action, recording: StepRecording, costs: Costs) -> list[LossVariant]:
        """Return variants from a recording, first without anything in host memory."""
        on_device = [[(a, c) for a, c in of_call if not a.offloaded] for of_call in costs]
        away = max((c.away for of_call in costs for _, c in of_call), default=0)
        variants = []
        for choices, most in [(on_device, 0), (costs, away)][: 2 if away else 1]:
            best = _without_worse(recording, choices)
            variants.append(
                LossVariant(loss, recording, best, _problem(recording, best, most), most)
            )
        return variants

    @property
    def seconds(self) -> float:
        """Return the seconds of a step without recomputing."""
        return self.recording.seconds + sum(costs[0][1].seconds for costs in self.costs)

    @property
    def loss_bytes(self) -> int:
        """Return the highest level between the last forward of a layer and the first backward."""
        calls = self.recording.calls
        before = self.recording.levels[calls[-1].forward[1] if calls else self.recording.start]
        return self.problem.between[-1] - self.away - before


def _places_of_layers(recording: StepRecording) -> list[list[int]]:
    """Return the places of the calls of each layer. A call without a backward is separate."""
    places: dict[Any, list[int]] = {}
    for place, call in enumerate(recording.calls):
        key = call.unit.name if call.backward is not None else place
        places.setdefault(key, []).append(place)
    return list(places.values())


def _without_worse(recording: StepRecording, costs_of_calls: Costs) -> Costs:
    """Return for each call the first action, and each action that no other beats in everything.

    Calls of one layer have the same actions.
    """
    remaining: Costs = [[] for _ in costs_of_calls]
    for places in _places_of_layers(recording):
        known = [dict(costs_of_calls[place]) for place in places]
        actions = [action for action in known[0] if all(action in costs for costs in known)]
        numbers = [[n for costs in known for n in _numbers_of(costs[a])] for a in actions]
        best = [
            action
            for action, ours in zip(actions, numbers, strict=True)
            if action is actions[0] or not any(o != ours and all(map(le, o, ours)) for o in numbers)
        ]
        for place, costs in zip(places, known, strict=True):
            remaining[place] = [(action, costs[action]) for action in best]
    return remaining


def _numbers_of(cost: Cost) -> tuple[float, ...]:
    return cost.kept, cost.casts, cost.forward, cost.backward, cost.seconds


def logits_to_spare(model: nn.Module, batch: object, loss: object) -> int:
    """Return the bytes of the logits that a causal language model of transformers can do without.

    Raises:
        ValueError: the loss of this model cannot be replaced.
    """
    why = (
        f"`actions` has {LOSS!r}, but there is no loss that it can change. It replaces the loss of "
        "a model of transformers. It sets the budget of each storage_ops.LinearCrossEntropyLoss, "
        "and of a loss that storage_ops compiles."
    )
    if loss is not None:
        raise ValueError(f"{why} Pass loss=None.")
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor):
        raise ValueError(f"{why} Pass a batch that is a dict with labels.")
    try:
        patched = patching().is_patched(model)
        # Autocast would keep casts of the fake weights with which patching tries the model, and
        # looking for their holders takes longer than the rest of `fit`.
        with outside_autocast(), contextlib.nullcontext() if patched else patching().patch(model):
            head: Any = model.get_output_embeddings()  # type: ignore[operator]
            weight = head.weight
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"{why} {error}") from error
    return int(labels.numel() * weight.shape[0] * weight.itemsize)


def _problem(recording: StepRecording, costs_of_calls: Costs, away: int) -> ActionProblem:
    levels, calls = recording.levels, recording.calls
    options = []
    for call, costs in zip(calls, costs_of_calls, strict=True):
        at_forward = levels[call.forward[0]]
        at_backward = 0
        if call.backward is not None:
            at_backward = levels[call.backward[0]] - call.gradient_bytes
        least = costs[0][1].seconds
        options.append(
            [
                Option(
                    c.kept if call.backward else 0,
                    max(at_forward + c.forward, at_backward + c.backward) + away,
                    c.seconds - least,
                    c.casts if call.backward else 0,
                    at_forward + c.forward + away,
                )
                for _, c in costs
            ]
        )
    repeated = [places for places in _places_of_layers(recording) if len(places) > 1]
    between, between_forwards = (
        [level + away for level in _between(recording, in_forward)] for in_forward in (False, True)
    )
    return ActionProblem(options, between, repeated, between_forwards)


def _between(recording: StepRecording, in_forward: bool) -> list[int]:
    """Return the highest level outside of calls, by how many calls are in memory.

    `in_forward`: whether only the forward of the step counts.
    """
    calls, levels = recording.calls, recording.levels
    between = [0] * (len(calls) + 1)
    spans = [(*c.forward, i, True) for i, c in enumerate(calls)]
    if in_forward:
        levels = levels[: recording.turn + 1]
    else:
        spans += [(*c.backward, i, False) for i, c in enumerate(calls) if c.backward is not None]
    alive: set[int] = set()
    at = recording.start
    for first, last, index, is_forward in sorted(spans):
        next_index = max(alive, default=-1) + 1
        between[next_index] = max(between[next_index], *levels[at : first + 1])
        at = last
        (alive.add if is_forward else alive.discard)(index)
        if calls[index].backward is None:
            alive.discard(index)
    next_index = max(alive, default=-1) + 1
    between[next_index] = max(between[next_index], *levels[at:])
    return between
