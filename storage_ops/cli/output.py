"""Functions that commands share: print answers and errors, and end quietly with a closed pipe."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rich.console import Console

from storage_ops.loss.planning.devices import DEFAULT_GPU, DEVICES
from storage_ops.optional import check_drawable
from storage_ops.quantities import parse_bytes


def add_json(parser: argparse._ActionsContainer) -> None:
    """Declare --json."""
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")


def add_device(parser: argparse._ActionsContainer) -> None:
    """Declare --device."""
    parser.add_argument(
        "--device",
        default=DEFAULT_GPU,
        help=f"{', '.join(DEVICES)}, or cuda: the GPU that torch finds, if there is one (default: "
        f"{DEFAULT_GPU})",
    )


def found(device: str) -> str:
    """Return the device of --device, which is the default GPU for "cuda" without a GPU."""
    import torch

    return DEFAULT_GPU if device.startswith("cuda") and not torch.cuda.is_available() else device


def reserved(args: argparse.Namespace) -> AbstractContextManager[Any]:
    """Return a block in which --json reserves the standard output for `print_json`.

    Whatever the code of a model prints goes to the standard error.
    """
    return contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext()


def print_json(facts: Any, console: Console) -> None:
    """Print the result of a command as JSON, where the console prints."""
    print(json.dumps(facts, indent=1), file=console.file)


def print_assumptions(sentences: list[str], console: Console) -> None:
    """Print the assumptions of an answer after its table, one sentence per line."""
    for sentence in sentences:
        console.print(f"* {sentence}", highlight=False, markup=False, soft_wrap=True)


def check_file(option: str, path: Path | None) -> None:
    """Raise an error before the work starts if an output file cannot be written."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise OSError(f"{option} is {path}. Expected a file in a folder that exists.")


def check_budget(budget: str | None) -> None:
    """Raise an error before the work starts if --budget is not a number of bytes."""
    if budget is not None:
        parse_bytes(budget, "--budget")


def check_plot(path: Path | None, images_only: bool = True) -> None:
    """Raise an error before the work starts if the file of --plot cannot be drawn."""
    check_file("--plot", path)
    if path is not None:
        check_drawable(path, images_only)


def complain(error: Exception | str, args: argparse.Namespace | None = None) -> None:
    """Print an error on standard error.

    Args:
        error: the error, or its text.
        args: options of the command. If given, names of Python arguments in the text become
            names of options.
    """
    text = str(error)
    if not isinstance(error, (str, ImportError, OSError, RuntimeError, TypeError, ValueError)):
        # The text alone can be unclear: that of a KeyError is only the key.
        text = f"{type(error).__name__}: {' '.join(text.split())}"
    _print_error(text if args is None else in_flags(text, args), "red")


def note(text: str) -> None:
    """Print an assumption of an answer on standard error."""
    _print_error(text, "yellow")


def _print_error(text: str, style: str) -> None:
    console = Pipe(stderr=True)
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


_ALIASES = {"memory_budget": "budget"}  # Python arguments whose option has another name
_WORDS = r"'[\w.-]+'(?:, '[\w.-]+')*,?"


def _option_with_words(match: re.Match[str]) -> str:
    """Return an option and the items of a list as they are written on a command line."""
    return " ".join([match[1], *re.findall(r"[\w.-]+", match[2])])


def in_flags(text: str, args: argparse.Namespace) -> str:
    """Replace Python arguments in a message by options of the command.

    Example:
        >>> args = argparse.Namespace(actions=None, budget=None)
        >>> in_flags("`budget` is 1. Pass actions=['full', 'tile'].", args)
        '--budget is 1. Pass --actions full tile.'
    """
    names = {name: name for name in vars(args)} | _ALIASES
    for name, option in names.items():
        if option not in vars(args):
            continue
        flag = f"--{option.replace('_', '-')}"
        text = re.sub(rf"(?<![\w.-]){name}=(?=[\w'(\[])", f"{flag} ", text)
        text = text.replace(f"`{name}`", flag)
    text = re.sub(rf"(--[\w-]+) [\[(]({_WORDS})[\])]", _option_with_words, text)
    # No command has an option for `assume`.
    in_python = "Call storage_ops.memory.will_it_fit in Python with assume="
    text = text.replace("Pass assume=", in_python)
    # On a command line, a list is written without quotes, and None means no option.
    text = re.sub(rf"[\[(]({_WORDS})[\])]", lambda match: match[1].replace("'", ""), text)
    return re.sub(r", or None\b", "", text)


class Pipe(Console):
    """A console that raises BrokenPipeError, where rich's own console would exit with code 1."""

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError."""
        raise BrokenPipeError


# The codes that a shell gives for a program that a signal ended: 128 and the number of the signal.
INTERRUPTED = 130
BROKEN_PIPE = 141


def leave_quietly() -> int:
    """Return the exit code for a closed pipe, such as after `| head`.

    Python would write buffered text at its exit, and print an error about the closed pipe again.
    Such text goes to the null device instead.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(null, stream.fileno())
    return BROKEN_PIPE
