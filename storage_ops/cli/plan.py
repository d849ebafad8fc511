"""`python -m storage_ops plan`: shows the plan for a budget, and plans for other budgets."""

from __future__ import annotations

import argparse
import dataclasses
import math
from typing import Any

from rich import box
from rich.console import Console
from rich.text import Text

import storage_ops
from storage_ops.cli import output
from storage_ops.loss.planning import plan as plans
from storage_ops.loss.planning import planner, schedule
from storage_ops.loss.planning.devices import DEFAULT_GPU, Rates, key_of, named
from storage_ops.loss.planning.planner import Plan
from storage_ops.loss.planning.problem import Problem, padded
from storage_ops.quantities import metric, parse_bytes, readable
from storage_ops.tables import Grid

HELP = "show how linear cross-entropy will use a memory budget"
EXAMPLE = "--tokens 8192 --hidden 4096 --vocab 128256 --budget 400MiB"
COLORS: dict[str, str] = {
    schedule.TOKEN_CHUNKED: "green",
    schedule.VOCAB_SLICED: "cyan",
    schedule.RUNNING_RESCALE: "magenta",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    loss = parser.add_argument_group("the loss")
    sizes = {
        "tokens": "rows of the input",
        "hidden": "hidden size: columns of the input and of the weight",
        "vocab": "classes: rows of the weight",
    }
    for name, meaning in sizes.items():
        loss.add_argument(f"--{name}", type=int, required=True, help=meaning)
    loss.add_argument("--dtype", default="bfloat16", help="bf16, fp16, fp32 or fp64")
    loss.add_argument(
        "--grads",
        nargs="*",
        default=["input", "weight"],
        help="gradients to compute: input, weight, bias, or nothing",
    )
    loss.add_argument("--reduction", default="mean", help="mean, sum or none")
    loss.add_argument("--max-valid", type=int, help="the most tokens that are not ignored")
    loss.add_argument(
        "--gradient-tolerance", type=float, default=0.0, metavar="P",
        help="probability that each token may leave out of its gradient",
    )  # fmt: skip
    loss.add_argument(
        "--share",
        type=float,
        help="expected part of the classes that is multiplied with --gradient-tolerance",
    )
    of_plan = parser.add_argument_group("the plan")
    of_plan.add_argument(
        "--budget", help="scratch memory, such as 400MiB (default: the loss's own)"
    )
    of_plan.add_argument("--accumulate-dtype", help="dtype of the sums of 16-bit gradients")
    of_plan.add_argument("--logits-dtype", help="dtype of the tiles: that of --dtype, or fp32")
    output.add_device(of_plan)
    output.add_json(parser.add_argument_group("the output"))


@dataclasses.dataclass(frozen=True)
class Curve:
    """The plans for several budgets.

    Attributes:
        points: budgets in bytes, ascending, and their plans.
        floor: seconds of the matrix products alone, each computed once.
        logits: bytes of all logits.
    """

    points: list[tuple[int, Plan]]
    floor: float
    logits: int


def curve(p: Problem, rates: Rates, extra: int | None = None) -> Curve:
    """Return plans for budgets from the smallest to all logits, in factors of two, and `extra`."""
    logits = p.tokens * padded(p.vocab) * p.logit_bytes
    least, most = planner.smallest_budget(p), planner.whole_budget(p)
    octaves = math.log2(max(logits / least, 1))
    # About eight budgets: half steps in a small range, double steps in a large one.
    step = 0.5 if octaves < 5 else 1 if octaves < 10 else 2
    between = {int(logits / 2 ** (step * k)) for k in range(1, math.ceil(octaves / step))}
    budgets = {least, most, *(b for b in between if least < b < most)}
    if extra is not None:
        budgets.add(extra)
    return Curve(
        [(budget, planner.choose(p, budget, rates)) for budget in sorted(budgets)],
        planner.floor_seconds(p, rates),
        logits,
    )


def _device(name: str) -> str:
    """Return the name of the rates of a device. "cuda" is torch's GPU, if there is one."""
    if name != "cuda":
        return key_of(name)
    present = "cpu" if storage_ops.import_error is not None else plans.default_device()
    return DEFAULT_GPU if present == "cpu" else present


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the command. Return the exit code."""
    try:
        device = _device(args.device)
        if device == "cpu" and storage_ops.import_error is not None:
            raise ImportError(
                "--device is cpu, and a plan for it depends on the threads of torch and on the "
                "native products. torch is not imported here. Run `python -m storage_ops plan` "
                "where torch is installed."
            )
        p = plans.problem_of(
            args.tokens, args.hidden, args.vocab, args.dtype, args.grads, args.reduction,
            args.accumulate_dtype, args.logits_dtype, args.max_valid, device,
            args.gradient_tolerance, args.share,
        )  # fmt: skip
        budget_arg = None if args.budget is None else parse_bytes(args.budget, "--budget")
        rates = named(device)
        chosen = planner.choose(p, budget_arg, rates)
    except (ImportError, OSError, TypeError, ValueError) as error:
        output.complain(error, args)
        return 2
    budget = planner.default_budget(p, rates) if budget_arg is None else budget_arg
    budgets = curve(p, rates, budget)
    if args.json:
        output.print_json(_facts(p, device, budget, chosen, budgets), console)
    else:
        console.print(plans.describe(chosen, p, rates, budget_arg), highlight=False, soft_wrap=True)
        console.print(_table(budgets, rates, budget))
    return 0


def _facts(p: Problem, device: str, budget: int, chosen: Plan, budgets: Curve) -> dict[str, Any]:
    return {
        "problem": dataclasses.asdict(p),
        "device": device,
        "budget_bytes": budget,
        "smallest_budget_bytes": planner.smallest_budget(p),
        "logits_bytes": budgets.logits,
        "floor_seconds": budgets.floor,
        "fast_budget_bytes": plans.fast_budget(chosen, p, named(device), budget),
        "plan": dataclasses.asdict(chosen),
        "curve": [
            {"budget_bytes": point, **dataclasses.asdict(plan)} for point, plan in budgets.points
        ],
    }


def _table(budgets: Curve, rates: Rates, budget: int) -> Grid:
    rows = [
        (
            f"{'> ' if point == budget else ''}{readable(point, up=True)}",
            Text(plan.strategy, COLORS[plan.strategy]),
            f"{plan.num_chunks}x{plan.num_slices} of {plan.rows}x{plan.widest}",
            readable(plan.peak_bytes, up=True),
            metric(plan.seconds, "s"),
            f"{plan.seconds / budgets.floor:.2f}" if budgets.floor else "",
        )
        for point, plan in budgets.points
    ]
    pairs = zip(budgets.points, budgets.points[1:], strict=False)
    return Grid(
        f"What other budgets buy, predicted for {rates.name}",
        ("budget", "strategy", "tiles", "peak", "time", "x floor"),
        rows,
        f"tiles: how many, and of how many tokens x classes; all logits are "
        f"{readable(budgets.logits)}\nx floor: time over the {metric(budgets.floor, 's')} that the "
        "products take, each formed once",
        words=("strategy",),
        optional=("tiles", "x floor", "peak"),
        sections=[i for i, (a, b) in enumerate(pairs) if a[1].strategy != b[1].strategy],
        bold=[i for i, (point, _) in enumerate(budgets.points) if point == budget],
        box=box.SIMPLE_HEAD,
    )
