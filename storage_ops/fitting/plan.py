"""The result of `fit`: a table, and the changes to the layers of the model."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import TypeVar

from storage_ops._subclass import check_module
from storage_ops.checkpoint.discard import scope
from storage_ops.checkpoint.layers import tile, wrapper
from storage_ops.checkpoint.layers.config_policy import class_of, uncompiled
from storage_ops.fitting import entries
from storage_ops.fitting.actions import Action
from storage_ops.fitting.conditions import Conditions
from storage_ops.fitting.fingerprint import MODE, aspects, hashed
from storage_ops.fitting.heads import LOSS_NAME, is_budgeted, patching
from storage_ops.fitting.units import Unit, compiled_loss, units_of
from storage_ops.quantities import Tabular, metric, readable
from storage_ops.simulate.step import check_loss, simulate_step

if TYPE_CHECKING:
    from storage_ops.tables import Grid

# The class of the model. It is covariant, because a plan only returns the model.
ModelT_co = TypeVar("ModelT_co", bound=nn.Module, covariant=True, default=nn.Module)
ModelT = TypeVar("ModelT", bound=nn.Module)
_FORMAT = 5
_LAYERS = "settings of layers"
_PATCHED = "patched"  # an aspect of models with the patch of `patching()`


@dataclass
class Row:
    """Layers of one class with one action.

    Attributes:
        names: names of the layers.
        action: the action.
        kept_bytes: bytes that all of them keep between forward and backward.
        peak_bytes: bytes of all of them at the peak of the step.
        seconds: predicted seconds added to a step.
    """

    names: list[str]
    action: str
    kept_bytes: int = 0
    peak_bytes: int = 0
    seconds: float = 0.0


class FitPlan(Tabular, Generic[ModelT_co]):
    """The actions of layers. Prints as a table, which rich renders in colour.

    Attributes:
        peak_bytes: peak of a step with the plan, by a simulation of the whole step.
        seconds: predicted seconds that a step takes longer than without recomputing.
        budget: the given bytes.
        device: the name of the device.
        rows: layers by action.
        totals: peak in bytes and added seconds of other plans, "none" and "full checkpoint". Peaks
            are computed from single layers, or simulated if that is not exact.
        step_seconds: predicted seconds of a step without recomputing and without the optimizer.
        conditions: the shapes of the batch, autocast and gradient accumulation of the step.
        is_calibrated: whether the seconds are predicted from times that `calibrate` measured, and
            not from the table of devices.
        hint: a sentence about arguments of `fit` that would save more, or "".

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Linear(32, 8))
        >>> plan: storage_ops.FitPlan = storage_ops.fit(model, torch.randn(4, 8), budget="1GiB")
        >>> plan.peak_bytes < plan.budget
        True
    """

    def __init__(
        self, model: ModelT_co, loss: Callable[[Any], Tensor] | None,
        actions: list[tuple[Unit, Action]], peak_bytes: int, seconds: float, budget: int,
        device: str, rows: list[Row], totals: dict[str, tuple[int, float]], step_seconds: float,
        conditions: Conditions, is_calibrated: bool, hint: str = "",
    ) -> None:  # fmt: skip
        self._model, self._loss, self._actions = model, loss, actions
        self._aspects = _aspects(model)
        self._is_applied = False
        self.peak_bytes, self.seconds, self.budget = peak_bytes, seconds, budget
        self.device, self.rows, self.totals = device, rows, totals
        self.step_seconds, self.conditions, self.hint = step_seconds, conditions, hint
        self.is_calibrated = is_calibrated

    def apply(self) -> ModelT_co:
        """Change the layers of the model. An error leaves all of them unchanged.

        Returns:
            The model.

        Raises:
            RuntimeError: this plan or another one is applied already, or the model has changed
                since the plan was made.
        """
        if self._is_applied:
            raise RuntimeError("fit: the plan is applied already. Call undo() first.")
        check_plain(self._model, self._loss)
        patches = any(action.patches(unit.module) for unit, action in self._actions)
        if patches and patching().is_patched(self._model):
            raise RuntimeError(
                "fit: the plan patches the model, which is patched already. Call "
                "unpatch_causal_lm(model) before apply()."
            )
        of_patched = _PATCHED in self._aspects or any(a.patched for _, a in self._actions)
        if of_patched and not patching().is_patched(self._model):
            raise RuntimeError(
                "fit: the plan is for a patched model, and this one is not patched. Call "
                "patch_causal_lm(model) before apply()."
            )
        layers = _places(self._model, self._loss)
        differs = _differences(self._aspects, _aspects(self._model))
        if differs or any(
            unit.name not in layers
            or layers[unit.name].module is not unit.module
            or layers[unit.name].print != unit.print
            for unit, _ in self._actions
        ):
            raise RuntimeError(
                "fit: the model is not what it was when the plan was made. It differs in: "
                f"{differs or 'layers'}. Pass the same model, or make a new "
                f"plan.{_hint_of_mode(differs, self._model)}"
            )
        _apply(self._actions)
        self._is_applied = True
        return self._model

    def undo(self) -> ModelT_co:
        """Change the layers back.

        Returns:
            The model.

        Raises:
            RuntimeError: the plan is not applied.
        """
        if not self._is_applied:
            raise RuntimeError("fit: the plan is not applied. Call apply() before undo().")
        _undo(self._actions)
        self._is_applied = False
        return self._model

    @property
    def is_applied(self) -> bool:
        """Return True between `apply` and `undo`."""
        return self._is_applied

    def is_of(self, model: nn.Module) -> bool:
        """Return True if the plan changes layers of this model object, or of a model inside it."""
        own = uncompiled(self._model)
        return any(module is own for module in model.modules())

    def peak_with(
        self, model: nn.Module, batch: object, optimizer: Optimizer | None, accumulate: bool
    ) -> int:
        """Return the peak in bytes of a step of another batch, with the model as it is now.

        Args:
            model: the model of the plan, or one that it is in.
            batch, optimizer, accumulate: as in `storage_ops.memory.simulate_step`, which is also
                the source of errors.
        """
        step = simulate_step(
            model, batch, loss=self._loss, optimizer=optimizer, accumulate=accumulate
        )
        return step.peak_bytes

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, for `load_fit`."""
        Path(path).write_text(json.dumps(self.as_dict(), indent=1) + "\n")

    def as_dict(self) -> dict[str, Any]:
        """Return the content of a saved plan."""
        return {
            "format": _FORMAT,
            "model": class_of(uncompiled(self._model)).__name__,
            "fingerprint": self._aspects,
            "peak_bytes": self.peak_bytes,
            "seconds": self.seconds,
            "budget": self.budget,
            "device": self.device,
            "totals": self.totals,
            "step_seconds": self.step_seconds,
            "conditions": self.conditions.as_dict(),
            "is_calibrated": self.is_calibrated,
            "rows": [asdict(row) for row in self.rows],
            "actions": [
                {"layer": unit.name, "print": unit.print, **action.as_dict()}
                for unit, action in self._actions
            ],
        }

    def __repr__(self) -> str:
        name = class_of(uncompiled(self._model)).__name__
        peak, budget = (readable(n, up=True) for n in (self.peak_bytes, self.budget))
        return (
            f"FitPlan({name}: peak {peak} of {budget}, {metric(self.seconds, 's')} added to a step "
            f"on {self.device}, {'applied' if self._is_applied else 'not applied'})"
        )

    def __rich__(self) -> Grid:
        return self.table(self.hint)

    def table(self, hint: str) -> Grid:
        """Return a table of the layers by action, with a hint below it."""
        from rich import box

        from storage_ops.tables import Grid

        share = f", {self.seconds / self.step_seconds:.1%} of {metric(self.step_seconds, 's')}"
        peak, budget = (readable(n, up=True) for n in (self.peak_bytes, self.budget))
        lines = [
            f"peak {peak} of {budget} allowed, {metric(self.seconds, 's')} added to a step{share}, "
            f"predicted for {self.device} "
            + ("(calibrated)" if self.is_calibrated else "(device table)")
        ]
        lines += [
            f"{name}: peak {readable(highest, up=True)}, {metric(seconds, 's')} added"
            for name, (highest, seconds) in self.totals.items()
        ]
        lines += [hint] if hint else []
        rows = [
            (
                f"{len(row.names)} x {_together(row.names)}",
                row.action,
                readable(row.kept_bytes),
                readable(row.peak_bytes),
                metric(row.seconds, "s"),
            )
            for row in self.rows
        ]
        return Grid(
            "Fit",
            ("layers", "action", "bytes kept", "at the peak", "seconds added"),
            rows,
            "\n".join(lines),
            words=("layers", "action"),
            optional=("bytes kept", "at the peak"),
            box=box.SIMPLE_HEAD,
        )


def check_plain(model: nn.Module, loss: object) -> None:
    """Refuse a model with checkpoints, or with another plan."""
    compiled = compiled_loss(loss)
    if compiled is not None and compiled.module.is_budgeted:
        raise RuntimeError(
            "fit: the loss has the budget of a plan. Call undo() of that plan first."
        )
    for name, module in model.named_modules():
        change = None
        if (checkpointing := wrapper.checkpointing_of(module)) is not None:
            change = f"mode {checkpointing.mode!r}"
        elif tile.tiling_of(module) is not None:
            change = "in tiles"
        elif scope.options_of(module) is not None:
            change = "mode 'output_discard'"
        elif is_budgeted(module):
            change = "its budget is that of a plan"
        elif getattr(module, "gradient_checkpointing", False) is True:
            change = "gradient_checkpointing is on"
        if change is not None:
            raise RuntimeError(
                f"fit: {name or type(module).__name__} is checkpointed or tiled already "
                f"({change}). Call remove_activation_checkpoint(model), undo() of an earlier plan, "
                "or gradient_checkpointing_disable() first."
            )


def _places(model: nn.Module, loss: object) -> dict[str, Unit]:
    """Return the objects of actions by name: layers, a compiled loss, and the model as ""."""
    compiled = compiled_loss(loss)
    beside = [Unit("", uncompiled(model), ""), *([compiled] if compiled is not None else [])]
    return {unit.name: unit for unit in (*beside, *units_of(model, loss))}


@contextlib.contextmanager
def applied(actions: list[tuple[Unit, Action]]) -> Iterator[None]:
    """Change layers inside a with block."""
    _apply(actions)
    try:
        yield
    finally:
        _undo(actions)


def _apply(actions: list[tuple[Unit, Action]]) -> None:
    try:
        for unit, action in actions:
            action.apply(unit.module)
    except BaseException:
        _undo(actions)
        raise


def _undo(actions: list[tuple[Unit, Action]]) -> None:
    for unit, action in actions:
        action.undo(unit.module)


def load_fit(
    path: str | os.PathLike[str], model: ModelT, loss: Callable[[Any], Tensor] | None = None
) -> FitPlan[ModelT]:
    """Read a plan that was saved, for the same model.

    Args:
        path: the path of the file.
        model: a model like the fitted one: modules, sizes, dtypes and mode.
        loss: a loss like that of `fit`, if the plan has actions for a head in it.

    Raises:
        TypeError: `path` is no path.
        ValueError: the file is not a plan, or is a plan of another model.
        OSError: the file cannot be read.

    Example:
        >>> import tempfile, os
        >>> model = torch.nn.Sequential(torch.nn.TransformerEncoderLayer(16, 2))
        >>> plan = storage_ops.fit(model, torch.randn(4, 2, 16), budget="1GiB")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "fit.json")
        ...     plan.save(path)
        ...     again = storage_ops.load_fit(path, model)
        >>> again.peak_bytes == plan.peak_bytes
        True
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(
            f"load_fit: `path` is a {type(path).__name__}. Expected the path of a file that "
            "plan.save() wrote."
        )
    check_module(model)
    check_loss(loss)
    try:
        values: dict[str, Any] = json.loads(Path(path).read_text())
        if values["format"] != _FORMAT:
            raise ValueError(
                f"`format` is {values['format']!r}, which another version of storage_ops wrote. "
                f"Expected {_FORMAT}. Make the plan again with this version."
            )
        saved = [
            (entries.checked(v["layer"], "layer", str), v.get("print"), Action.from_dict(v))
            for v in entries.checked(values["actions"], "actions", list)
        ]
        rows = [_row(**row) for row in entries.checked(values["rows"], "rows", list)]
        totals = {
            name: (entries.count(peak, name), entries.seconds(added, name))
            for name, (peak, added) in values["totals"].items()
        }
        peak, budget = (entries.count(values[name], name) for name in ("peak_bytes", "budget"))
        added, whole = (entries.seconds(values[name], name) for name in ("seconds", "step_seconds"))
        if whole <= 0:
            raise ValueError(f"`step_seconds` is {whole}. Expected more than 0.")
        known = entries.checked(values["fingerprint"], "fingerprint", dict)
        device = entries.checked(values["device"], "device", str)
        name_of_model = entries.checked(values["model"], "model", str)
        conditions = Conditions.from_dict(values["conditions"])
        is_calibrated = entries.checked(values["is_calibrated"], "is_calibrated", bool)
    except (
        AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError,
    ) as error:  # fmt: skip
        raise ValueError(
            f"load_fit: {path} is not a plan of fit: {error!r}. Pass a file that plan.save() wrote."
        ) from error
    units = _places(model, loss)
    for name, known_print, _ in saved:
        of_loss = name.startswith(LOSS_NAME)
        if of_loss and (name not in units or units[name].print != known_print):
            raise ValueError(
                f"load_fit: {path} has an action for the loss that fit was given, which was "
                f"compiled or had a LinearCrossEntropyLoss. `loss` is {loss!r}. Pass a loss like "
                "that one."
            )
    own_name = class_of(uncompiled(model)).__name__
    differs = _differences(known, _aspects(model))
    if differs:
        check_plain(model, loss)
    if differs or any(name not in units for name, _, _ in saved):
        raise ValueError(
            f"load_fit: {path} is a plan of another model, a {name_of_model}. `model` is a "
            f"{own_name}, which differs in: {differs or 'layers'}. Pass a model like the one that "
            f"was fitted.{_hint_of_mode(differs, model)}"
        )
    actions = [(units[name], action) for name, _, action in saved]
    plan = FitPlan(
        model, loss, actions, peak, added, budget, device, rows, totals, whole, conditions,
        is_calibrated,
    )  # fmt: skip
    if _PATCHED in known:  # the model can be patched after this, too
        plan._aspects[_PATCHED] = known[_PATCHED]
    return plan


def _aspects(model: nn.Module) -> dict[str, str]:
    """Return the fingerprints by which a plan knows its model.

    Trainers set attributes of modules that are not layers, so only layers have full fingerprints.
    """
    layers = [(unit.name, unit.print) for unit in units_of(model)]
    patched = {_PATCHED: "yes"} if patching().is_patched(model) else {}
    return {**aspects(model), _LAYERS: hashed(layers), **patched}


def _differences(before: dict[str, Any], now: dict[str, str]) -> str:
    """Return the names of the aspects that differ.

    If "modules" differ, all other aspects do, too, so only "modules" is named. Fingerprints of
    layers cover all aspects, so layers are named only if nothing else differs. A patch that the
    plan does not need is no difference.
    """
    names = [name for name in now if name != _PATCHED and before.get(name) != now[name]]
    if "modules" in names:
        return "modules"
    return ", ".join([name for name in names if name != _LAYERS] or names)


def _hint_of_mode(differs: str, model: nn.Module) -> str:
    """Return when to call model.train(), if the mode differs."""
    if MODE not in differs:
        return ""
    if model.training:
        return " The model was in eval mode then. Call model.train() before fit."
    return " The model is in eval mode. Call model.train() before this."


def _row(
    names: object, action: object, kept_bytes: object, peak_bytes: object, seconds: object
) -> Row:
    """Return a row of a file. Raise a TypeError or ValueError if it is not a row."""
    if not (layers := list(entries.texts(names, "names"))):
        raise ValueError("`names` is []. Expected a list of names.")
    return Row(
        layers,
        entries.checked(action, "action", str),
        entries.checked(kept_bytes, "kept_bytes", int),  # negative if a layer frees its input
        entries.checked(peak_bytes, "peak_bytes", int),
        entries.seconds(seconds, "seconds"),
    )


def _together(names: list[str]) -> str:
    """Return names that differ in one number as one: `layers.0-3,5`."""
    parts = [re.fullmatch(r"(.*?)(\d+)(\D*)", name) for name in names]
    if len(names) == 1 or any(part is None for part in parts):
        return ", ".join(names)
    matches = [part for part in parts if part is not None]
    if len({(m[1], m[3]) for m in matches}) > 1:
        return ", ".join(names)
    ranges: list[list[int]] = []
    for number in sorted(int(m[2]) for m in matches):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
    return f"{matches[0][1]}{text}{matches[0][3]}"
