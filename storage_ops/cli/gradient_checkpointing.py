"""`--gradient-checkpointing`: that of transformers, beside keeping everything and a plan of fit."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from storage_ops.cli import ranks
from storage_ops.cli.workload import Workload
from storage_ops.quantities import metric, readable

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from storage_ops.tables import Grid

_OF_TRANSFORMERS = "gradient checkpointing of transformers"


class Peak(NamedTuple):
    """The peak of a step with one treatment of activations, and the seconds that it adds."""

    name: str
    peak_bytes: int
    seconds: float | None  # None: not predicted


@contextlib.contextmanager
def enabled(model: nn.Module) -> Iterator[None]:
    """Checkpoint layers as trainers of transformers do, inside a with block.

    Raises:
        ValueError: the model has no gradient checkpointing.
    """
    from storage_ops.checkpoint.layers.config_policy import class_of

    enable: Any = _method(model, "enable")
    if enable is None:
        raise ValueError(
            f"--gradient-checkpointing is given, and {class_of(model).__name__} has no "
            "gradient_checkpointing_enable(). Expected a model of transformers."
        )
    enable()
    frozen: Any = model if hasattr(model, "peft_config") else None
    if frozen is not None:  # as PEFT does, since layers would have no input with a gradient
        frozen.enable_input_require_grads()
    try:
        yield
    finally:
        _method(model, "disable")()
        if frozen is not None:
            frozen.disable_input_require_grads()


def _method(model: nn.Module, verb: str) -> Any:
    """Return the method that enables or disables checkpoints; late versions 5 renamed it."""
    names = f"activation_checkpointing_{verb}", f"gradient_checkpointing_{verb}"
    return next((getattr(model, name) for name in names if hasattr(model, name)), None)


def compared(
    args: argparse.Namespace, step: Workload, optimizer: type[Optimizer] | None, checkpointed: int
) -> list[Peak]:
    """Return the peaks of a step that keeps all activations, one with checkpoints, and a plan's.

    Args:
        args: options of the command.
        step: the model, without checkpoints, its batch and its loss.
        optimizer: of the step.
        checkpointed: the peak with gradient checkpointing, in bytes.
    """
    from storage_ops.fitting.fit import NothingFits, Search
    from storage_ops.memory import simulate_step
    from storage_ops.progress import showing
    from storage_ops.quantities import parse_bytes

    kept = simulate_step(
        step.model, step.batch, loss=step.loss, optimizer=optimizer, device=args.device,
        accumulate=ranks.accumulates(args),
    ).peak_bytes  # fmt: skip
    seconds: float | None = None
    with showing("fit"):
        search = Search(*step, optimizer, args.device, None, ranks.accumulates(args))
        try:
            plan = search.plan(parse_bytes(args.budget, "--budget"))
            ours = Peak("a plan of fit", plan.peak_bytes, plan.seconds)
            # Both checkpoint whole layers.
            seconds = plan.totals["full checkpoint"][1]
        except NothingFits as error:
            ours = Peak("the smallest plan of fit", error.smallest_bytes, None)
    return [Peak("keep all", kept, 0.0), Peak(_OF_TRANSFORMERS, checkpointed, seconds), ours]


def table(peaks: list[Peak], budget: int) -> Grid:
    """Return a table of the peaks, and whether each is within the budget."""
    from storage_ops.tables import Grid

    return Grid(
        f"Peaks of the step by what it keeps; the budget is {readable(budget)}",
        ("activations", "peak", "added to a step", "fits"),
        [
            (
                name,
                readable(peak, up=True),
                "" if seconds is None else metric(seconds, "s"),
                "yes" if peak <= budget else "no",
            )
            for name, peak, seconds in peaks
        ],
        words=("activations",),
        optional=("added to a step",),
    )
