"""Searches the fastest plan of a model and a batch for a budget."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from storage_ops._subclass import check_module
from storage_ops.checkpoint.layers.config_policy import uncompiled
from storage_ops.checkpoint.state.left_behind import few_objects
from storage_ops.fitting.actions import (
    EXACT,
    KEEP,
    LOSS,
    NAMES,
    Action,
    ActionName,
    loss_actions,
)
from storage_ops.fitting.calibration import calibration_of
from storage_ops.fitting.choices import costs_of
from storage_ops.fitting.conditions import Conditions
from storage_ops.fitting.heads import CompiledLoss, heads_in, patching
from storage_ops.fitting.loss_variants import LossVariant, logits_to_spare
from storage_ops.fitting.plan import FitPlan, Row, applied, check_plain
from storage_ops.fitting.probe import Cost
from storage_ops.fitting.record import Recorder, StepRecording
from storage_ops.fitting.units import Unit, compiled_loss, units_of
from storage_ops.loss.planning.devices import Rates
from storage_ops.measure.owners import owners_in_words
from storage_ops.progress import say
from storage_ops.quantities import readable
from storage_ops.simulate.advice import warn_of_eval_mode, warn_of_missing_labels
from storage_ops.simulate.compiled import as_it_runs, largest_of
from storage_ops.simulate.module_kinds import Kinds
from storage_ops.simulate.rates import SimulatedDevice
from storage_ops.simulate.step import (
    arguments,
    batches_of,
    check_accumulate,
    check_loss,
    loss_of,
    optimizer_of,
    simulate_step,
)
from storage_ops.simulate.values.assume import Assumption

_EXACT = 1e-3  # how far what was computed of layers is from a whole step, where it is exact
_DOUBT = 0.02  # how far a whole step may be below what was computed of its layers
_Choice = tuple[int, list[int]]  # the number of a variant, and of an action for each call
_LOOKS = 12  # whole simulations at most, while plans turn out to take more than was computed
_MORE_LOOKS = 4  # and while they turn out to take less


class _Simulated(NamedTuple):
    """The kept part of the simulation of a whole step."""

    peak_bytes: int
    by_owner: dict[str, int]


class NothingFits(ValueError):
    """No plan is within the budget.

    Attributes:
        smallest_bytes: the smallest budget that a plan fits.
    """

    def __init__(
        self, budget: int, smallest: int, hint: str, by_owner: Mapping[str, int] | None = None
    ) -> None:
        """Name both budgets, the owners of the smallest one's bytes, and other remedies."""
        self.smallest_bytes = smallest
        owners = f" Its peak consists of {owners_in_words(by_owner)}." if by_owner else ""
        hint = owners + (hint and f" {hint}")
        if budget < 4096:
            hint += " A number without a unit is a number of bytes: pass text such as '24GiB'."
        super().__init__(
            f"`budget` is {readable(budget)} ({budget} bytes), but a step of this model and batch "
            f"needs at least {readable(smallest, up=True)} ({smallest} bytes).{hint}"
        )


def checked(actions: Sequence[ActionName] | None) -> tuple[ActionName, ...]:
    """Return the actions that a plan may use, if each name is known."""
    if actions is None:
        return EXACT
    if isinstance(actions, str) or not isinstance(actions, Sequence):
        raise TypeError(f"`actions` is {actions!r}. Expected a list of {', '.join(NAMES)}.")
    for name in actions:
        if name not in NAMES:
            raise ValueError(f"`actions` has {name!r}. Expected names among {', '.join(NAMES)}.")
    return tuple(actions)


class Search:
    """The facts of a model and a batch, and plans for any budget. Arguments are those of `fit`.

    Attributes:
        problem: the effects of actions on each call of a layer, with the loss of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: object,
        loss: Callable[[Any], Tensor] | None = None,
        optimizer: type[Optimizer] | Optimizer | None = None,
        device: str | torch.device | None = None,
        actions: Sequence[ActionName] | None = None,
        accumulate: bool = False,
        assume: float | Mapping[str, float] | None = None,
    ) -> None:
        check_module(model)
        check_accumulate(accumulate)
        check_loss(loss)
        allowed = checked(actions)
        check_plain(model, loss)
        warn_of_eval_mode(model, "fit")
        batches = batches_of(batch)
        warn_of_missing_labels(model, batches, loss, "fit")
        self._model, self._batches = model, batches
        self._loss, self._optimizer, self._device = loss, optimizer, device
        self._accumulate = accumulate
        self._assume, self._assumption = assume, Assumption(assume)
        self._losses: dict[Action, Any] = {}
        self._simulated_device = SimulatedDevice.of(device, model, batches)
        calibration = calibration_of(self._rates)
        self._is_calibrated = calibration is not None
        if calibration is not None:
            rates = calibration.used_in(self._rates)
            self._simulated_device = self._simulated_device._replace(rates=rates)
        self._steps: dict[tuple[int, ...], _Simulated] = {}  # by the variant and the choices
        self._known: dict[Any, list[tuple[Action, Cost]]] = {}
        optimizer_object = optimizer_of(model, optimizer)
        self._largest = largest = max(batches, key=_numbers_in)
        self._conditions = Conditions.of(
            model, *arguments(largest), accumulate, optimizer is not None
        )
        self._replaces = LOSS in allowed
        units = units_of(model, loss)
        kinds = Kinds(model, *(unit.module for unit in units))
        has_heads = any(heads_in(unit.module) for unit in units)
        if self._replaces and heads_in(model) and not has_heads:
            raise ValueError(
                f"`actions` has {LOSS!r}, but the LinearCrossEntropyLoss in the model is in "
                "several places or had its forward replaced. Expected a loss module in one place."
            )
        # The layer whose action is that of the loss.
        self._of_loss = compiled_loss(loss) or Unit("", uncompiled(model), "")
        replaced = self._replaces and not has_heads
        is_compiled = isinstance(self._of_loss.module, CompiledLoss)
        losses: list[Action] = []
        if replaced and not is_compiled:
            losses = loss_actions(
                logits_to_spare(model, largest, loss), patching().is_patched(model)
            )

        def variants(action: Action) -> list[LossVariant]:
            recorder = Recorder(units, kinds, self._simulated_device, accumulate, self._assumption)
            with self._applied([(self._of_loss, action)]):
                recording = recorder.run(
                    model, largest, self._loss_with(action) or loss_of, optimizer_object
                )
            return LossVariant.all_of(action, recording, self._costs_of_calls(recording, allowed))

        with few_objects():
            self._variants = variants(KEEP)
            if replaced and is_compiled:
                actions_of_loss = loss_actions(largest_of(self._loss_with(KEEP)))
                losses = [action for action in actions_of_loss if action.memory_budget is not None]
            for action in losses:
                try:
                    self._variants += variants(action)
                except (RuntimeError, ValueError):
                    if action.memory_budget is None:
                        raise  # else so little memory is not enough for the loss
        self.problem = self._variants[0].problem

    @property
    def _rates(self) -> Rates:
        return self._simulated_device.rates

    def _loss_with(self, action: Action) -> Any:
        """Return the loss to simulate with an action.

        Graphs of a compiled loss are kept for all runs.
        """
        if action not in self._losses:
            self._losses[action] = as_it_runs(self._loss, action.memory_budget)
        return self._losses[action]

    @contextlib.contextmanager
    def _applied(self, actions: list[tuple[Unit, Action]]) -> Iterator[None]:
        """Change layers inside a with block. A compiled loss is only simulated, and not changed."""
        with applied([pair for pair in actions if not isinstance(pair[0].module, CompiledLoss)]):
            yield

    def _costs_of_calls(
        self, recording: StepRecording, allowed: tuple[str, ...]
    ) -> list[list[tuple[Action, Cost]]]:
        costs_of_calls = []
        for call in recording.calls:
            is_free = call.backward is not None
            key = call.kind, is_free
            if key not in self._known:
                say(f"what may be recomputed of {call.unit.name}")
                names = allowed if is_free else ()
                costs = costs_of(call, names, self._simulated_device, self._assumption)
                self._known[key] = list(costs.items())
            costs_of_calls.append(self._known[key])
        return costs_of_calls

    def plan(self, budget: int) -> FitPlan[Any]:
        """Return the fastest plan whose simulated peak is within the budget."""
        inside = [budget] * len(self._variants)
        nothing = [0] * len(self.problem.options)
        is_best = all(
            variant.seconds >= self._variants[0].seconds for variant in self._variants
        ) and all(option.seconds >= 0 for options in self.problem.options for option in options)
        # Of compiled layers more is computed than a whole step takes in eager mode.
        may_fit = self._rates.fuses or self.problem.peak(nothing) <= budget * (1 + _DOUBT)
        if is_best and may_fit and self._simulated(0, nothing).peak_bytes <= budget:
            return self._plan_of(0, nothing, budget)
        least: _Choice | None = self._least()
        smallest, by_owner = math.inf, {}
        for look in range(_LOOKS):
            fastest = self._fastest(inside)
            if fastest is None or look == _LOOKS - 1:
                fastest, least = least, None
            if fastest is None:
                break
            number, choice = fastest
            peak = self._simulated(number, choice).peak_bytes
            if peak <= budget:
                return self._plan_of(*self._with_room_used(fastest, budget), budget)
            if peak < smallest:
                smallest, by_owner = peak, self._simulated(number, choice).by_owner
            # The next plan that is smaller by what was computed; later ones skip the excess.
            excess = peak - budget if look > 2 else 1
            inside[number] = self._variants[number].problem.peak(choice) - excess
        # More may be computed of layers than a step takes: one that is left alone fits at its peak.
        alone = self._simulated(0, nothing)
        if alone.peak_bytes <= budget:
            return self._plan_of(0, nothing, budget)
        if alone.peak_bytes < smallest:
            smallest, by_owner = alone.peak_bytes, alone.by_owner
        raise NothingFits(budget, int(smallest), self._hint(), by_owner)

    def _with_room_used(self, found: _Choice, budget: int) -> _Choice:
        """Return a faster choice than one within the budget, if the peak of that is below it.

        More may be computed of layers than they take, such as of layers that run twice in a step.
        """
        if self._rates.fuses:  # the peak of compiled code is the one that was computed
            return found

        def peaks_of(number: int, choice: list[int]) -> tuple[int, int]:
            computed = self._variants[number].problem.peak(choice)
            return computed, self._simulated(number, choice).peak_bytes

        computed, peak = peaks_of(*found)
        inside = budget + computed - peak
        for _ in range(_MORE_LOOKS):
            if inside <= budget * (1 + _EXACT):
                break
            faster = self._fastest([inside] * len(self._variants))
            if faster is None or self._seconds(*faster) >= self._seconds(*found):
                break
            computed, peak = peaks_of(*faster)
            if peak <= budget:
                found, inside = faster, budget + computed - peak
            else:
                inside = computed - 1  # the next plan that is smaller by what was computed
        return found

    def smallest(self) -> int:
        """Return the simulated peak of the plan with the least computed memory."""
        return self._simulated(*self._least()).peak_bytes

    def _hint(self) -> str:
        """Return advice on a loss that could take less memory and was not changed."""
        if self._replaces:
            return ""
        try:
            logits = logits_to_spare(self._model, self._largest, self._loss)
        except ValueError:
            return ""
        names = ", ".join(map(repr, (*EXACT[1:], LOSS)))
        if patching().is_patched(self._model):
            return f"Pass actions=[{names}] to choose the memory budget of the patched loss too."
        return f"Pass actions=[{names}] to do without the logits, {readable(logits)}."

    def _least(self) -> _Choice:
        """Return the choice with the lowest peak of all, as computed."""
        choices = [
            (number, variant.problem.smallest()) for number, variant in enumerate(self._variants)
        ]
        return min(choices, key=lambda f: self._variants[f[0]].problem.peak(f[1]))

    def _fastest(self, budgets: list[int]) -> _Choice | None:
        """Return the choice that adds the fewest seconds within the budget of its variant."""
        choices = [
            (number, choice)
            for number, (variant, budget) in enumerate(zip(self._variants, budgets, strict=True))
            if (choice := variant.problem.fastest(budget)) is not None
        ]
        return min(choices, key=lambda f: self._seconds(*f), default=None)

    def _seconds(self, number: int, choice: list[int]) -> float:
        """Return the seconds added to a step without recomputing and with the model's own loss."""
        variant = self._variants[number]
        other = variant.seconds - self._variants[0].seconds if number else 0.0
        return variant.problem.seconds(choice) + other

    def curve(self, points: int = 60) -> list[tuple[int, float]]:
        """Return computed peaks in bytes and added seconds, from the smallest budget to none."""
        number, choice = self._least()
        low = self._variants[number].problem.peak(choice)
        high = self.problem.peak([0] * len(self.problem.options))
        points_by_peak = {}
        for i in range(points):
            budget = low + (high - low) * i // (points - 1)
            best = self._fastest([budget] * len(self._variants))
            if best is not None:
                points_by_peak[self._variants[best[0]].problem.peak(best[1])] = self._seconds(*best)
        return sorted(points_by_peak.items())

    def _simulated(self, number: int, choice: list[int]) -> _Simulated:
        """Simulate a whole step with these actions, if that has not been done."""
        key = number, *choice
        if key not in self._steps:
            loss = self._loss_with(self._variants[number].loss)
            with few_objects(), self._applied(self._actions(number, choice)):
                step = simulate_step(
                    self._model, self._batches, loss=loss, optimizer=self._optimizer,
                    device=self._device, accumulate=self._accumulate, assume=self._assume,
                )  # fmt: skip
            self._steps[key] = _Simulated(step.peak_bytes, step.by_owner)
        return self._steps[key]

    def _actions(self, number: int, choice: list[int]) -> list[tuple[Unit, Action]]:
        variant = self._variants[number]
        actions = {(self._of_loss, variant.loss): None}  # calls of one layer have one action
        for call, costs, index in zip(variant.recording.calls, variant.costs, choice, strict=True):
            actions[call.unit, costs[index][0]] = None
        return [(unit, action) for unit, action in actions if action != KEEP]

    def _plan_of(self, number: int, choice: list[int], budget: int) -> FitPlan:
        variant, own = self._variants[number], self._variants[0]
        peak = self._simulated(number, choice).peak_bytes
        problem, calls = variant.problem, variant.recording.calls
        at_peak = problem.at_peak(choice)
        rows: dict[tuple[str, Action], Row] = {}
        for place, (call, costs, index) in enumerate(
            zip(calls, variant.costs, choice, strict=True)
        ):
            action, cost = costs[index]
            row = rows.setdefault((call.unit.class_name, action), Row([], str(action)))
            if call.unit.name not in row.names:
                row.names.append(call.unit.name)
            row.kept_bytes += problem.options[place][index].kept
            row.seconds += problem.options[place][index].seconds
            if place < at_peak.alive:
                row.peak_bytes += cost.kept + cost.casts * at_peak.has_casts
            elif place == at_peak.running:
                row.peak_bytes += max(cost.forward, cost.backward)
        if variant.loss != KEEP:
            at_peak_bytes = variant.loss_bytes if at_peak.alive == len(calls) else 0
            name = self._of_loss.name or "loss"
            row = Row([name], str(variant.loss), 0, at_peak_bytes, variant.seconds - own.seconds)
            rows["", variant.loss] = row
        nothing = [0] * len(own.costs)
        full = [
            next((i for i, (a, _) in enumerate(costs) if a == Action("full")), 0)
            for costs in own.costs
        ]
        is_exact = abs(problem.peak(choice) - peak) <= _EXACT * peak

        def highest(other: list[int]) -> int:
            known = is_exact and (0, *other) not in self._steps
            return own.problem.peak(other) if known else self._simulated(0, other).peak_bytes

        totals = {
            "none": (highest(nothing), 0.0),
            "full checkpoint": (highest(full), own.problem.seconds(full)),
        }
        seconds = self._seconds(number, choice)
        return FitPlan(
            self._model, self._loss, self._actions(number, choice), peak, seconds, budget,
            self._rates.name, list(rows.values()), totals, own.seconds, self._conditions,
            self._is_calibrated, self._hint() if seconds > 0 else "",
        )  # fmt: skip


def _numbers_in(batch: object) -> int:
    return sum(t.numel() for t in tree_leaves(batch) if isinstance(t, Tensor))
