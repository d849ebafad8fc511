"""`python -m storage_ops will-it-fit`: whether a step of a model fits, without a GPU."""

from __future__ import annotations

import argparse
import json

from rich.console import Console

from storage_ops.cli import hf_model

HELP = "whether a training step of a model fits into a GPU"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    hf_model.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the command; return the exit code: 0 if it fits, 1 if not."""
    from storage_ops.memory import will_it_fit

    try:
        model, batch = hf_model.model_and_batch(args)
        optimizer = hf_model.optimizer_named(args.optimizer)
        report = will_it_fit(model, batch, args.budget, None, optimizer, args.device)
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        hf_model.complain(error)
        return 2
    if args.json:
        names = ("fits", "peak_bytes", "budget_bytes", "by_owner", "device")
        print(json.dumps({name: getattr(report, name) for name in names}, indent=1))
    else:
        console.print(report)
    return 0 if report.fits else 1
