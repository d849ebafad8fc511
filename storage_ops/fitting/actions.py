"""The actions that `fit` can apply to a layer, carried out by other parts of the package."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from torch import nn

from storage_ops import policies
from storage_ops.checkpoint.layers.config import ActivationCheckpointConfig
from storage_ops.checkpoint.layers.tile import tile
from storage_ops.checkpoint.layers.transform import (
    apply_activation_checkpoint,
    remove_activation_checkpoint,
)
from storage_ops.fitting.entries import checked, count, texts
from storage_ops.fitting.heads import CompiledLoss, budgeted, heads_in, patching, restored
from storage_ops.quantities import readable

ActionName = Literal[
    "keep", "output_discard", "selective", "full", "offload", "tile", "linear_cross_entropy"
]
NAMES: tuple[ActionName, ...] = get_args(ActionName)
EXACT, LOSS = NAMES[:4], NAMES[-1]
_MODES = (*EXACT, LOSS)
# Shares of the bytes of the logits that the loss may take; None is its own choice.
_SHARES = (1 / 4, 1 / 16, 1 / 64)


@dataclass(frozen=True)
class Action:
    """An action for a layer, or for the loss of the model.

    Attributes:
        mode: "keep", "full", "selective" or "output_discard". For a layer with heads, a compiled
            loss, or a whole model of transformers, "linear_cross_entropy".
        saved: calls of ops to save with mode "selective": (op, number of the call).
        offloaded: those of them that are saved in host memory.
        discarded: names of modules in the layer, with mode "output_discard".
        tiled: names of modules in the layer that run in tiles.
        tiles: the number of tiles.
        memory_budget: bytes, or None, with mode "linear_cross_entropy".
        patched: with mode "linear_cross_entropy", whether the model of transformers is patched
            already, so that only the budget of its loss is chosen.
    """

    mode: str
    saved: tuple[tuple[str, int], ...] = ()
    offloaded: tuple[tuple[str, int], ...] = ()
    discarded: tuple[str, ...] = ()
    tiled: tuple[str, ...] = ()
    tiles: int = 0
    memory_budget: int | None = None
    patched: bool = False

    def apply(self, layer: nn.Module) -> None:
        """Change a layer. `undo` changes it back, also after an error."""
        if isinstance(layer, CompiledLoss):
            layer.budgeted(self.memory_budget)
            return
        if self.mode == LOSS:
            for head in heads_in(layer):
                budgeted(head, self.memory_budget)
            if self.patched:
                patching().set_memory_budget(layer, self.memory_budget)
            elif self.patches(layer):
                patching().patch(layer, memory_budget=self.memory_budget)
            return
        for name in self.tiled:
            tile(layer.get_submodule(name), self.tiles)
        if self.mode != "keep":
            apply_activation_checkpoint(layer, self._config())

    def undo(self, layer: nn.Module) -> None:
        """Change a layer back."""
        if isinstance(layer, CompiledLoss):
            layer.restored()
            return
        if self.mode == LOSS:
            for head in heads_in(layer):
                restored(head)
            if self.patched:
                patching().restore_memory_budget(layer)
            elif self.patches(layer):
                patching().unpatch(layer)
            return
        remove_activation_checkpoint(layer)

    def patches(self, layer: nn.Module) -> bool:
        """Return True if the action patches a model of transformers that is not patched yet."""
        if self.mode != LOSS or self.patched or isinstance(layer, CompiledLoss):
            return False
        return not heads_in(layer)

    def _config(self) -> ActivationCheckpointConfig:
        if self.mode == "output_discard":
            names = list(self.discarded)
            return ActivationCheckpointConfig(layer_names=names, mode="output_discard")
        parts = [policies.save_calls(self.saved)] if self.saved else []
        if self.offloaded:
            parts.append(policies.offload(policies.save_calls(self.offloaded)))
        return ActivationCheckpointConfig(layer_names=[""], policy=parts or None)

    def __str__(self) -> str:
        what = {"full": "full checkpoint", "keep": "keep"}.get(self.mode, self.mode)
        if self.mode == "selective":
            kept = [_counted(self.saved)] if self.saved else []
            if self.offloaded:
                kept.append(f"{_counted(self.offloaded)} in host memory")
            what = f"recompute all but {'; '.join(kept)}"
        elif self.mode == LOSS:
            where = "" if self.memory_budget is None else f" in {readable(self.memory_budget)}"
            what = f"linear_cross_entropy{where}, sums in another order"
        elif self.mode == "output_discard":
            what = "discard output of " + ", ".join(self.discarded)
        if self.tiled:
            what += f"; {', '.join(self.tiled)} in {self.tiles} tiles, sums in another order"
        return what

    def as_dict(self) -> dict[str, Any]:
        """Return the action for JSON."""
        return {key: value for key, value in asdict(self).items() if value}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Action:
        """Return an action from the result of `as_dict`.

        Another value raises a TypeError, ValueError or KeyError.
        """
        mode, budget = values["mode"], values.get("memory_budget")
        if mode not in _MODES:
            raise ValueError(f"`mode` is {mode!r}. Expected one of {', '.join(_MODES)}.")
        return Action(
            mode,
            _calls(values.get("saved", []), "saved"),
            _calls(values.get("offloaded", []), "offloaded"),
            texts(values.get("discarded", []), "discarded"),
            texts(values.get("tiled", []), "tiled"),
            count(values.get("tiles", 0), "tiles"),
            budget if budget is None else count(budget, "memory_budget"),
            checked(values.get("patched", False), "patched", bool),
        )


def loss_actions(logits: int, patched: bool = False) -> list[Action]:
    """Return ways to compute a loss whose logits would take this many bytes."""
    budgets = (None, *(int(logits * share) for share in _SHARES))
    return [Action(LOSS, memory_budget=n, patched=patched) for n in budgets]


def _calls(value: object, name: str) -> tuple[tuple[str, int], ...]:
    calls = checked(value, name, list)
    return tuple((checked(op, name, str), count(number, name)) for op, number in calls)


def _counted(calls: tuple[tuple[str, int], ...]) -> str:
    counts = Counter(op.partition("::")[2] or op for op, _ in calls)
    return ", ".join(f"{n} {op}" if n > 1 else op for op, n in counts.items())


KEEP = Action("keep")
