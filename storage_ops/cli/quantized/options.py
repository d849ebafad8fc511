"""The options for stored weights and trained adapters. Needs no torch."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

NAMES = ("none", "nf4", "nf4-double", "int8", "fp8", "mxfp4", "gptq", "awq")


@dataclass(frozen=True)
class Lora:
    """Adapters to train.

    Attributes:
        rank: the rank of their products.
        modules: names of the layers with an adapter, "all-linear", or None for PEFT's choice.
        dropout: probability that an input of an adapter is left out.
    """

    rank: int
    modules: str | list[str] | None
    dropout: float


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """Declare the options."""
    parser.add_argument(
        "--quantize",
        choices=NAMES,
        help="how the weights of the frozen base are stored (default: as the config says)",
    )
    parser.add_argument(
        "--lora",
        metavar="R[:MODULES]",
        help="train adapters of rank R alone, by PEFT, on modules such as q_proj,v_proj or "
        "all-linear (default: PEFT's for the model)",
    )
    parser.add_argument(
        "--lora-dropout",
        type=float,
        default=0.0,
        metavar="P",
        help="dropout of the adapters (default: 0)",
    )
    parser.add_argument(
        "--prepare-kbit-training",
        action="store_true",
        help="do as PEFT's prepare_model_for_kbit_training: gradient checkpointing, and float32 "
        "for parameters that are not quantized",
    )


def refuse_with_function(args: argparse.Namespace) -> None:
    """Raise an error for an option that does not apply to a model of `--model`.

    Raises:
        ValueError: an option is for models of transformers.
    """
    for name in ("quantize", "lora", "lora_dropout", "prepare_kbit_training"):
        if value := getattr(args, name):
            raise ValueError(
                f"--{name.replace('_', '-')} is {value}, but --model can return a model with "
                f"adapters or quantized layers itself. Leave out --{name.replace('_', '-')}."
            )


def lora_of(args: argparse.Namespace) -> Lora | None:
    """Return the adapters of `--lora`, or None without the option.

    Raises:
        ValueError: a rank, a name or a probability is wrong.
    """
    if args.lora is None:
        if args.lora_dropout:
            raise ValueError(
                f"--lora-dropout is {args.lora_dropout} without --lora. Pass --lora too."
            )
        return None
    rank, colon, names = args.lora.partition(":")
    modules = names.split(",")
    if not rank.isdecimal() or int(rank) < 1 or (colon and not all(modules)):
        raise ValueError(
            f"--lora is {args.lora}. Expected a rank of 1 or more, or a rank and modules, such as "
            "16:q_proj,v_proj or 16:all-linear."
        )
    if not 0 <= args.lora_dropout < 1:
        raise ValueError(
            f"--lora-dropout is {args.lora_dropout}. Expected at least 0, less than 1."
        )
    chosen = names if names == "all-linear" else modules if colon else None
    return Lora(int(rank), chosen, args.lora_dropout)
