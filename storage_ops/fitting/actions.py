"""What can be done with one layer, and how it is done: by what the package has."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from storage_ops import policies
from storage_ops.checkpoint.config import ActivationCheckpointConfig
from storage_ops.checkpoint.tile import tile
from storage_ops.checkpoint.transform import (
    apply_activation_checkpoint,
    remove_activation_checkpoint,
)
from storage_ops.quantities import readable

LOSS = "linear_cross_entropy"
NAMES = ("keep", "output_discard", "selective", "full", "tile", LOSS)
EXACT = NAMES[:4]


@dataclass(frozen=True)
class Action:
    """What is done with a layer, or with the loss of the model.

    Attributes:
        mode: "keep", "full", "selective" or "output_discard"; of a whole model of transformers
            "linear_cross_entropy".
        saved: with mode "selective": which calls of which ops are saved, (op, number of the call).
        discarded: with mode "output_discard": names of modules in the layer.
        tiled: names of modules in the layer that run in tiles.
        tiles: how many.
        memory_budget: with mode "linear_cross_entropy": bytes, or None.
    """

    mode: str
    saved: tuple[tuple[str, int], ...] = ()
    discarded: tuple[str, ...] = ()
    tiled: tuple[str, ...] = ()
    tiles: int = 0
    memory_budget: int | None = None

    def apply(self, layer: nn.Module) -> None:
        """Change a layer; whatever comes, `undo` makes it what it was."""
        if self.mode == LOSS:
            patching().patch_causal_lm(layer, memory_budget=self.memory_budget)
            return
        for name in self.tiled:
            tile(layer.get_submodule(name), self.tiles)
        if self.mode != "keep":
            apply_activation_checkpoint(layer, self._config())

    def undo(self, layer: nn.Module) -> None:
        """Change a layer back."""
        if self.mode == LOSS:
            patching().unpatch_causal_lm(layer)
            return
        remove_activation_checkpoint(layer)

    def _config(self) -> ActivationCheckpointConfig:
        if self.mode == "output_discard":
            names = list(self.discarded)
            return ActivationCheckpointConfig(layer_names=names, mode="output_discard")
        policy = policies.save_calls(self.saved) if self.mode == "selective" else None
        return ActivationCheckpointConfig(layer_names=[""], policy=policy)

    def __str__(self) -> str:
        what = {"full": "full checkpoint", "keep": "keep"}.get(self.mode, self.mode)
        if self.mode == "selective":
            counts: dict[str, int] = {}
            for op, _ in self.saved:
                short = op.partition("::")[2] or op
                counts[short] = counts.get(short, 0) + 1
            ops = (f"{n} {op}" if n > 1 else op for op, n in counts.items())
            what = f"recompute all but {', '.join(ops)}"
        elif self.mode == LOSS:
            where = "" if self.memory_budget is None else f" in {readable(self.memory_budget)}"
            what = f"linear_cross_entropy{where}, sums in another order"
        elif self.mode == "output_discard":
            what = "discard output of " + ", ".join(self.discarded)
        if self.tiled:
            what += f"; {', '.join(self.tiled)} in {self.tiles} tiles, sums in another order"
        return what

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {key: value for key, value in asdict(self).items() if value}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Action:
        """From what `as_dict` returned."""
        return Action(
            values["mode"],
            tuple((str(op), int(n)) for op, n in values.get("saved", ())),
            tuple(values.get("discarded", ())),
            tuple(values.get("tiled", ())),
            int(values.get("tiles", 0)),
            values.get("memory_budget"),
        )


KEEP = Action("keep")


def patching() -> Any:
    """What patches models of transformers; imported late, for beside it are callbacks of plans."""
    from storage_ops.integrations import transformers

    return transformers
