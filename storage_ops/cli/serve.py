"""`will-it-fit --serve`: tell whether a transformers model fits when it generates text."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from storage_ops.cli import output

if TYPE_CHECKING:
    from rich.console import Console

_OF_TRAINING = (
    "accumulate", "autocast", "eval_batch", "eval_logits", "gpus", "gradient_checkpointing", "html",
    "model", "optimizer", "packing", "plot", "reference",
)  # fmt: skip


def check(args: argparse.Namespace, defaults: dict[str, Any]) -> None:
    """Raise an error for options that only apply to a training step.

    Raises:
        ValueError: such an option is given.
    """
    for name in _OF_TRAINING:
        value = getattr(args, name)
        if value != defaults[name]:
            flag = f"--{name.replace('_', '-')}"
            shown = "given" if value is True else value
            raise ValueError(f"{flag} is {shown}, but --serve trains nothing. Leave out {flag}.")


def run(args: argparse.Namespace, console: Console) -> int:
    """Print the memory of generation. Return 0 if it fits, 1 if not."""
    from storage_ops.cli.workload import model_errors, workload
    from storage_ops.simulate.rates import budget_of
    from storage_ops.simulate.serve import simulate_serving
    from storage_ops.simulate.will_it_fit import verdict

    step = workload(args)
    budget = budget_of(args.budget, args.device, step.model)
    labels = ("labels", "start_positions", "end_positions")
    inputs = {name: t for name, t in step.batch.items() if name not in labels}
    # Adapters are in the layers of the model that PEFT wraps, and that has the cache.
    base = getattr(step.model, "get_base_model", lambda: step.model)()
    with model_errors(args, step.model):
        report = simulate_serving(base.eval(), inputs, args.device)
    fits = report.peak_bytes <= budget
    if args.json:
        names = ("peak_bytes", "prefill_bytes", "decode_bytes", "cache_bytes", "by_owner")
        facts = {name: getattr(report, name) for name in names}
        common = {"fits": fits, "budget_bytes": budget, "device": args.device}
        output.print_json(common | facts, console)
    else:
        console.print(report.table(verdict(report.peak_bytes, budget, args.device)))
    return 0 if fits else 1
