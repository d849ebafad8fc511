"""The options that say which recipe a model of transformers is trained by; without torch."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """Declare --reference."""
    parser.add_argument(
        "--reference",
        choices=("dpo", "grpo"),
        help="a step of DPO on --batch pairs, or of GRPO, with a frozen reference model",
    )


def sequences(args: argparse.Namespace) -> int:
    """Return the number of sequences in a batch; a pair has two."""
    return (args.batch or 1) * (2 if args.reference == "dpo" else 1)


def refuse_with_function(args: argparse.Namespace) -> None:
    """Raise if an option is given that a model of `--model` has no use for.

    Raises:
        ValueError: an option is for models of transformers.
    """
    if args.reference is not None:
        raise ValueError(
            f"--reference is {args.reference}; expected none with --model, whose function can "
            "return a model and a loss with a reference"
        )
