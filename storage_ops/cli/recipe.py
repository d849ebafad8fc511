"""The options for the training recipe of a model of transformers. Needs no torch."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """Declare --reference and --packing."""
    parser.add_argument(
        "--reference",
        choices=("dpo", "grpo"),
        help="a step of DPO on --batch pairs, or of GRPO, with a frozen reference model",
    )
    parser.add_argument(
        "--packing",
        choices=("flash", "sdpa"),
        help="one row with all sequences of the batch, by flash attention of varying lengths or by "
        "torch's attention with a mask",
    )


def sequences(args: argparse.Namespace) -> int:
    """Return the number of sequences in a batch. A pair has two."""
    return (args.batch or 1) * (2 if args.reference == "dpo" else 1)


def refuse_with_function(args: argparse.Namespace) -> None:
    """Raise an error for an option that does not apply to a model of `--model`.

    Raises:
        ValueError: an option is for models of transformers.
    """
    for name in ("reference", "packing"):
        if (value := getattr(args, name)) is not None:
            raise ValueError(
                f"--{name} is {value}, but the function of --model returns its own batch and loss. "
                f"Leave out --{name}."
            )
