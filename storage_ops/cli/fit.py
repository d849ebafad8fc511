"""`python -m storage_ops fit`: what to recompute so that a step fits, without a GPU."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from storage_ops.cli import autocast, hf_model, output, ranks
from storage_ops.cli.model_function import takes
from storage_ops.cli.workload import Workload, explained, longest, resized, workload
from storage_ops.loss.planning.devices import DEFAULT_GPU
from storage_ops.progress import showing
from storage_ops.quantities import parse_bytes, readable, unit_of

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
    written = parser.add_argument_group("the output")
    written.add_argument("--save", type=Path, help="write the plan for load_fit into this file")
    output.add_json(written)
    written.add_argument("--plot", type=Path, help="draw time against peak into this file")


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the command; return the exit code: 0 if a plan fits, 1 if none does."""
    with autocast.block(args):
        return _find(args, console) if args.find is not None else _plan(args, console)


def _plan(args: argparse.Namespace, console: Console) -> int:
    """Print a plan for the sizes that are given; return the exit code."""
    from storage_ops.fitting.fit import NothingFits, Search

    assumed: list[str] = []
    try:
        output.check_folder("--save", args.save)
        output.check_plot(args.plot)
        budget = parse_bytes(args.budget, "--budget")
        step = workload(args)
        told = explained(args, step.model)
        with told, ranks.one_of(args, step.model), showing("fit"):
            optimizer = ranks.optimizer_of(args, step.model)
            accumulates, assumed = ranks.accumulates(args), ranks.assumptions(args, step.model)
            search = Search(*step, optimizer, args.device, args.actions, accumulates)
            plan = search.plan(budget)
    except NothingFits as error:
        output.complain(error, args)
        for sentence in assumed:
            output.note(sentence)
        return 1
    if args.json:
        output.print_json(plan.as_dict() | ({"assumptions": assumed} if assumed else {}))
    else:
        console.print(plan.table(output.in_flags(plan.hint, args)))
        output.print_assumptions(assumed, console)
    if args.save is not None:
        plan.save(args.save)
    if args.plot is not None:
        _draw(args.plot, search, plan)
    return 0


def _find(args: argparse.Namespace, console: Console) -> int:
    """Print the largest size that fits; return 0, or 1 if none does."""
    _check_find(args)
    output.check_folder("--save", args.save)
    budget = parse_bytes(args.budget, "--budget")
    first = {} if args.find == "device" else {args.find: 1}
    step = workload(argparse.Namespace(**vars(args) | first))
    with explained(args, step.model), ranks.one_of(args, step.model):
        optimizer = ranks.optimizer_of(args, step.model)
        assumed = ranks.assumptions(args, step.model)
        found = _found(args, step, budget, optimizer)
    if args.json:
        output.print_json(found.as_dict() | ({"assumptions": assumed} if assumed else {}))
    else:
        console.print(found)
        output.print_assumptions(assumed, console)
    if found.planned is None:
        return 1
    if args.save is not None:
        found.planned.plan.save(args.save)
    return 0


def _found(
    args: argparse.Namespace, step: Workload, budget: int, optimizer: type[Optimizer] | None
) -> Largest[Any]:
    from storage_ops.fitting import largest

    if args.find == "device":
        return largest.find_gpu(*step, optimizer, args.actions, ranks.accumulates(args))
    loss = step.loss

    def make_batch(number: int) -> object:
        nonlocal loss
        _, batch, loss = resized(step, args, args.find, number)
        return batch

    def loss_of_batch(out: Any) -> Any:
        """Call the loss of the last batch, which may have labels of that batch."""
        assert loss is not None
        return loss(out)

    return largest.find_largest(
        step.model, make_batch, budget, loss and loss_of_batch, optimizer, args.device,
        args.actions, ranks.accumulates(args), most=longest(args, step),
    )  # fmt: skip


def _check_find(args: argparse.Namespace) -> None:
    """Refuse options that say what --find is to find."""
    if args.plot is not None:
        raise ValueError(f"--plot is {args.plot}, but --find prints a table. Leave out --plot.")
    if args.find == "seq" and args.seq is not None:
        raise ValueError(f"--seq is {args.seq}, but --find seq finds it. Leave out --seq.")
    has_size = args.find == "device" or args.model is None or takes(args.model, args.find)
    if not has_size:
        raise ValueError(
            f"--find is {args.find}, but {args.model} has no argument {args.find}. Pass --find "
            "device."
        )
    for name, default in (("budget", hf_model.BUDGET), ("device", DEFAULT_GPU)):
        if args.find == "device" and (value := getattr(args, name)) != default:
            raise ValueError(
                f"--{name} is {value}, but --find device finds it. Leave out --{name}."
            )


def _draw(path: Path, search: Any, plan: Any) -> None:
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
