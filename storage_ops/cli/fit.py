"""`python -m storage_ops fit`: what to recompute so that a step fits, without a GPU."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from storage_ops.cli import hf_model, output
from storage_ops.progress import showing
from storage_ops.quantities import parse_bytes, readable

HELP = "what to recompute so that a training step of a model fits into a GPU"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    hf_model.add_arguments(parser)
    parser.add_argument(
        "--actions",
        nargs="*",
        help="keep, output_discard, selective, full, offload, tile, linear_cross_entropy",
    )
    parser.add_argument("--save", type=Path, help="write the plan for load_fit into this file")
    output.add_json(parser)
    parser.add_argument("--plot", type=Path, help="draw time against peak into this file")


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the command; return the exit code: 0 if a plan fits, 1 if none does."""
    from storage_ops.fitting.fit import NothingFits, Search

    try:
        output.check_folder("--save", args.save)
        output.check_plot(args.plot)
        budget = parse_bytes(args.budget, "--budget")
        model, batch = hf_model.model_and_batch(args)
        optimizer = hf_model.optimizer_named(args.optimizer)
        with showing("fit"):
            search = Search(
                model, batch, None, optimizer, args.device, args.actions, args.accumulate
            )
            plan = search.plan(budget)
    except NothingFits as error:
        output.complain(error, args)
        return 1
    if args.json:
        output.print_json(plan.as_dict())
    else:
        console.print(plan.table(output.in_flags(plan.hint, args)))
    if args.save is not None:
        plan.save(args.save)
    if args.plot is not None:
        _draw(args.plot, search, plan)
    return 0


def _draw(path: Path, search: Any, plan: Any) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    gib = 1 << 30
    points = search.curve()
    peaks = [peak / gib for peak, _ in points]
    axes.step(peaks, [s * 1e3 for _, s in points], where="post", label="fit")
    for name, (peak, seconds) in plan.totals.items():
        axes.plot(peak / gib, seconds * 1e3, "o", label=name)
    axes.plot(plan.peak_bytes / gib, plan.seconds * 1e3, "*", markersize=14, label="this plan")
    budget, peak = readable(plan.budget), readable(plan.peak_bytes, up=True)
    axes.axvline(plan.budget / gib, color="gray", linestyle=":", label=f"budget {budget}")
    model = plan.as_dict()["model"]
    axes.set_title(f"Fit of {model} on {plan.device}: peak {peak} of {budget}", fontsize="medium")
    axes.set_xlabel("peak of a step, GiB")
    axes.set_ylabel(f"added to a step, ms (predicted for {plan.device})")
    axes.legend()
    figure.savefig(path)
