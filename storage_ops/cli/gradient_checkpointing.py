"""`--gradient-checkpointing`: compare checkpoints of transformers with a plan of `fit`."""

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
    """The peak of a step that keeps or recomputes activations in one way, and the added time."""

    name: str
    peak_bytes: int
    seconds: float | None  # None: not predicted


@contextlib.contextmanager
def enabled(model: nn.Module) -> Iterator[None]:
    """Enable the gradient checkpointing of a transformers model in a with block.

    Raises:
        ValueError: the model does not support gradient checkpointing.
    """
    from storage_ops.checkpoint.layers.config_policy import class_of

    enable: Any = _method(model, "enable")
    if enable is None:
        raise ValueError(
            f"--gradient-checkpointing is given, but {class_of(model).__name__} has no "
            "gradient_checkpointing_enable(). Expected a model of transformers that supports it."
        )
    enable()
    # With frozen embeddings, no input of a layer would require a gradient. PEFT does the same.
    with_adapters: Any = model if hasattr(model, "peft_config") else None
    if with_adapters is not None:
        with_adapters.enable_input_require_grads()
    try:
        yield
    finally:
        _method(model, "disable")()
        if with_adapters is not None:
            with_adapters.disable_input_require_grads()


def _method(model: nn.Module, verb: str) -> Any:
    """Return the method that enables or disables checkpoints. Later transformers 5 renamed it."""
    names = f"activation_checkpointing_{verb}", f"gradient_checkpointing_{verb}"
    return next((getattr(model, name) for name in names if hasattr(model, name)), None)


def compared(
    args: argparse.Namespace,
    step: Workload,
    optimizer: type[Optimizer] | None,
    checkpointed: int,
    budget: int,
) -> list[Peak]:
    """Return three peaks: without recomputing, with gradient checkpointing, and with a plan.

    Args:
        args: options of the command.
        step: the model with gradient checkpointing disabled, its batch and its loss.
        optimizer: the class of the step's optimizer.
        checkpointed: the peak with gradient checkpointing, in bytes.
        budget: the budget in bytes.
    """
    from storage_ops.fitting.search import NothingFits, Search
    from storage_ops.memory import simulate_step
    from storage_ops.progress import showing

    kept = simulate_step(
        step.model, step.batch, loss=step.loss, optimizer=optimizer, device=args.device,
        accumulate=ranks.accumulates(args),
    ).peak_bytes  # fmt: skip
    seconds: float | None = None
    with showing("fit"):
        search = Search(*step, optimizer, args.device, None, ranks.accumulates(args))
        try:
            plan = search.plan(budget)
            ours = Peak("a plan of fit", plan.peak_bytes, plan.seconds)
            # Gradient checkpointing recomputes whole layers, as full checkpoints do.
            seconds = plan.totals["full checkpoint"][1]
        except NothingFits as error:
            ours = Peak("the smallest plan of fit", error.smallest_bytes, None)
    return [Peak("keep all", kept, 0.0), Peak(_OF_TRANSFORMERS, checkpointed, seconds), ours]


def table(peaks: list[Peak], budget: int) -> Grid:
    """Return a table of the peaks that says which ones are within the budget."""
    from storage_ops.tables import Grid

    return Grid(
        f"Peak of the step by what it recomputes; the budget is {readable(budget)}",
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
