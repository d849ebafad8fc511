"""`python -m storage_ops calibrate`: measure this machine, so that `fit` predicts its times."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from rich.console import Console

import storage_ops
from storage_ops.cli import output

HELP = "measure how long ops take on this machine, for the predictions of fit"
EXAMPLE = "--device cpu --seconds 30"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    measurement = parser.add_argument_group("the measurement")
    measurement.add_argument(
        "--device", help="cpu or cuda (default: the GPU if there is one, else the CPU)"
    )
    measurement.add_argument(
        "--seconds", type=float, default=45.0, help="time to measure (default: %(default)g)"
    )
    output.add_json(parser.add_argument_group("the output"))


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the command. Return the exit code."""
    calibration = storage_ops.calibrate(args.device, args.seconds)
    if args.json:
        facts = {**asdict(calibration), "path": str(calibration.path)}
        output.print_json({**facts, "op_times": calibration.op_times.points}, console)
    else:
        console.print(calibration)
    return 0
