"""`python -m storage_ops fit`: choose what to recompute so that a step fits, without a GPU."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from storage_ops.cli import autocast, hf_model, output, ranks
from storage_ops.cli.model_function import takes
from storage_ops.cli.workload import Workload, largest_to_try, model_errors, resized, workload
from storage_ops.loss.planning.devices import DEFAULT_GPU
from storage_ops.progress import showing
from storage_ops.quantities import readable, unit_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from storage_ops.fitting.largest import Largest

HELP = "choose what to recompute so that a training step of a model fits into a GPU"
EXAMPLE = "--hf-config config.json --batch 2 --seq 8192 --budget 76GiB --save fit.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    hf_model.add_arguments(parser)
    search = parser.add_argument_group("the plan")
    search.add_argument(
        "--actions",
        nargs="*",
        help="actions that a plan may use: keep, output_discard, selective, full, offload, tile, "
        "linear_cross_entropy",
    )
    search.add_argument(
        "--find",
        choices=("batch", "seq", "device"),
        help="find the largest --batch or --seq that fits, or the cheapest --device",
    )
    files = parser.add_argument_group("the output")
    files.add_argument(
        "--save", type=Path, metavar="FILE", help="save the plan in this file, for load_fit"
    )
    output.add_json(files)
    files.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the time of plans against their peak"
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the command. Return 0 if a plan fits, 1 if none does."""
    output.check_budget(args.budget)
    args.device = output.found(args.device)
    with autocast.block(args):
        return _find(args, console) if args.find is not None else _plan(args, console)


def _plan(args: argparse.Namespace, console: Console) -> int:
    """Print a plan for --batch and --seq. Return the exit code."""
    from storage_ops.fitting.search import NothingFits, Search
    from storage_ops.simulate.rates import budget_of

    assumptions: list[str] = []
    try:
        output.check_file("--save", args.save)
        output.check_plot(args.plot)
        step = workload(args)
        budget = budget_of(args.budget, args.device, step.model)
        errors = model_errors(args, step.model)
        with errors, ranks.one_of(args, step.model), showing("fit"):
            optimizer = ranks.optimizer_of(args, step.model)
            accumulates = ranks.accumulates(args)
            assumptions = ranks.assumptions(args, step.model)
            search = Search(*step, optimizer, args.device, args.actions, accumulates)
            plan = search.plan(budget)
    except NothingFits as error:
        output.complain(error, args)
        for sentence in assumptions:
            output.note(sentence)
        return 1
    _print(plan.as_dict(), plan.table(output.in_flags(plan.hint, args)), assumptions, args, console)
    if args.save is not None:
        plan.save(args.save)
    if args.plot is not None:
        _draw(args.plot, search, plan)
    return 0


def _find(args: argparse.Namespace, console: Console) -> int:
    """Print the largest size, or the cheapest GPU. Return 0, or 1 if nothing fits."""
    from storage_ops.simulate.rates import budget_of

    _check_find(args)
    output.check_file("--save", args.save)
    smallest = {} if args.find == "device" else {args.find: 1}
    step = workload(argparse.Namespace(**vars(args) | smallest))
    budget = budget_of(args.budget, args.device, step.model)
    with model_errors(args, step.model), ranks.one_of(args, step.model):
        optimizer = ranks.optimizer_of(args, step.model)
        assumptions = ranks.assumptions(args, step.model)
        answer = _largest(args, step, budget, optimizer)
    _print(answer.as_dict(), answer, assumptions, args, console)
    if answer.planned is None:
        return 1
    if args.save is not None:
        answer.planned.plan.save(args.save)
    return 0


def _print(
    facts: dict[str, Any], table: Any, assumptions: list[str], args: argparse.Namespace,
    console: Console,
) -> None:  # fmt: skip
    """Print an answer, as JSON or as a table, with its assumptions."""
    if args.json:
        output.print_json(facts | ({"assumptions": assumptions} if assumptions else {}), console)
    else:
        console.print(table)
        output.print_assumptions(assumptions, console)


def _largest(
    args: argparse.Namespace, step: Workload, budget: int, optimizer: type[Optimizer] | None
) -> Largest[Any]:
    """Search for what --find names."""
    from storage_ops.fitting import largest

    if args.find == "device":
        return largest.find_gpu(*step, optimizer, args.actions, ranks.accumulates(args))
    loss = step.loss

    def make_batch(number: int) -> object:
        nonlocal loss
        _, batch, loss = resized(step, args, args.find, number)
        return batch

    def loss_of_batch(out: Any) -> Any:
        """Call the loss function of the last batch: it may contain the labels of that batch."""
        assert loss is not None
        return loss(out)

    return largest.find_largest(
        step.model, make_batch, budget, loss and loss_of_batch, optimizer, args.device,
        args.actions, ranks.accumulates(args), most=largest_to_try(args, step),
    )  # fmt: skip


def _check_find(args: argparse.Namespace) -> None:
    """Raise an error for options that conflict with --find."""
    if args.plot is not None:
        raise ValueError(f"--plot is {args.plot}, but --find prints a table. Leave out --plot.")
    if (size := getattr(args, args.find)) is not None and args.find != "device":
        raise ValueError(
            f"--{args.find} is {size}, but --find {args.find} finds it. Leave out --{args.find}."
        )
    has_size = args.find == "device" or args.model is None or takes(args.model, args.find)
    if not has_size:
        raise ValueError(
            f"--find is {args.find}, but {args.model} has no argument {args.find}. Add the "
            "argument to the function, or pass --find device."
        )
    for name, default in (("budget", None), ("device", DEFAULT_GPU)):
        if args.find == "device" and (value := getattr(args, name)) != default:
            raise ValueError(
                f"--{name} is {value}, but --find device finds it. Leave out --{name}."
            )


def _draw(path: Path, search: Any, plan: Any) -> None:
    """Draw the time and peak of this plan, of the best plans, and of fixed ways to recompute."""
    from matplotlib.figure import Figure

    from storage_ops.measure.plot import PALETTE

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set_prop_cycle(color=PALETTE)
    points = search.curve()
    unit, size = unit_of(max(plan.budget, *(peak for peak, _ in points)))
    peaks = [peak / size for peak, _ in points]
    axes.step(peaks, [s * 1e3 for _, s in points], where="post", label="fit")
    for name, (peak, seconds) in plan.totals.items():
        axes.plot(peak / size, seconds * 1e3, "o", label=name)
    axes.plot(plan.peak_bytes / size, plan.seconds * 1e3, "*", markersize=14, label="this plan")
    budget, peak = readable(plan.budget), readable(plan.peak_bytes, up=True)
    axes.axvline(plan.budget / size, color="gray", linestyle=":", label=f"budget {budget}")
    model = plan.as_dict()["model"]
    axes.set_title(f"Fit of {model} on {plan.device}: peak {peak} of {budget}", fontsize="medium")
    axes.set_xlabel(f"peak of a step ({unit})")
    axes.set_ylabel(f"time added to a step (ms, predicted for {plan.device})")
    axes.legend()
    figure.savefig(path)
