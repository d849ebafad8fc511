"""`--audio`: how many seconds a recording of a model of audio has."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

RATE = 16_000  # samples in a second, of all models of transformers that take samples
_FRAMES = 100  # frames of features in a second


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """Declare --audio."""
    parser.add_argument(
        "--audio",
        type=float,
        metavar="SECONDS",
        help="seconds of a recording, for models of audio (default: those of the config)",
    )


def refuse(args: argparse.Namespace, why: str) -> None:
    """Raise if `--audio` is given, where `why` says what takes no recordings.

    Raises:
        ValueError: the option is given.
    """
    if args.audio is not None:
        raise ValueError(f"--audio is {args.audio:g}, but {why}. Leave out --audio.")


def samples(kind: str, args: argparse.Namespace, has_tokens: bool) -> int:
    """Return the samples of a recording: those of --audio, or --seq without it.

    Args:
        kind: the name of the model's class.
        args: options of the command.
        has_tokens: whether the model takes tokens besides, whose number is then --seq.

    Raises:
        ValueError: both options are missing, or --seq has no meaning.
    """
    if args.audio is not None and args.seq is not None and not has_tokens:
        raise ValueError(
            f"--seq is {args.seq} and --audio is {args.audio:g}, but {kind} takes audio alone. "
            "Leave out --seq."
        )
    if args.audio is not None:
        return max(1, round(_seconds(args) * RATE))
    if args.seq is None:
        raise ValueError(
            f"--audio is missing, but {kind} takes recordings. Pass the seconds of a recording."
        )
    return int(args.seq)


def check_padded(kind: str, args: argparse.Namespace, frames: int) -> None:
    """Check a recording of a model whose processor pads features to a number of frames.

    Raises:
        ValueError: the recording is longer.
    """
    longest = frames / _FRAMES
    if args.audio is not None and _seconds(args) > longest:
        raise ValueError(
            f"--audio is {args.audio:g}. Expected at most {longest:g} seconds, to which the "
            f"processor of {kind} pads each recording."
        )


def frames(kind: str, args: argparse.Namespace, model: nn.Module) -> int:
    """Return the frames of a recording of any length, which is at most that of the config.

    Raises:
        ValueError: the recording is longer than the config's positions.
    """
    config: Any = model.config
    most = config.max_source_positions
    if args.audio is None:
        return int(most)
    number = max(1, math.ceil(_seconds(args) * _FRAMES))
    if number > most:
        raise ValueError(
            f"--audio is {args.audio:g}. Expected at most {most / _FRAMES:g} seconds: "
            f"max_source_positions of {kind} is {most} frames."
        )
    return number


def _seconds(args: argparse.Namespace) -> float:
    if not 0 < args.audio < math.inf:
        raise ValueError(f"--audio is {args.audio:g}. Pass a number of seconds above 0.")
    return float(args.audio)
