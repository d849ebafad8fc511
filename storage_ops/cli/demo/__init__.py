"""`python -m storage_ops demo`: trains a small GPT twice, without and with storage_ops.

`corpus.py` reads text and encodes it. `model.py` is the GPT. `train.py` trains both versions in
turn. `command.py` reads the arguments and prints the table. `picture.py` draws. Benchmarks use the
models, too.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from storage_ops.cli import output
from storage_ops.optional import required

HELP = "train a small GPT with and without storage_ops"
EXAMPLE = "--steps 8 --plot demo.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    training = parser.add_argument_group("the training")
    training.add_argument(
        "--text", type=Path, help="a text file (default: Python's standard library)"
    )
    training.add_argument("--preset", default="tiny", help="tiny, mini or gpt2-small")
    training.add_argument("--device", default="cpu", help="cpu or cuda")
    training.add_argument("--steps", type=int, default=32, help="optimizer steps of each training")
    training.add_argument("--seed", type=int, default=0, help="of the weights and the batches")
    files = parser.add_argument_group("the output")
    output.add_json(files)
    files.add_argument(
        "--plot",
        type=Path,
        default=Path("demo.png"),
        help="draw into this file (default: demo.png)",
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the command. Return the exit code."""
    try:
        for package in ("matplotlib", "tokenizers"):
            required(package, "the demo")
        from storage_ops.cli.demo import command
    except ImportError as error:
        output.complain(error)
        return 2
    return command.run(args, console)
