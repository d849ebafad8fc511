"""Functions that commands share: for JSON output, complaints, and a reader that went away."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from storage_ops.loss.planning.devices import DEFAULT_GPU, DEVICES
from storage_ops.optional import check_drawable


def add_json(parser: argparse._ActionsContainer) -> None:
    """Declare --json."""
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")


def add_device(parser: argparse._ActionsContainer) -> None:
    """Declare --device."""
    parser.add_argument(
        "--device",
        default=DEFAULT_GPU,
        help=f"{', '.join(DEVICES)}, or cuda: the GPU that torch finds (default: {DEFAULT_GPU})",
    )


def print_json(facts: Any) -> None:
    """Print the result of a command as JSON, on the standard output."""
    print(json.dumps(facts, indent=1))


def print_assumptions(sentences: list[str], console: Console) -> None:
    """Print what an answer assumes, one sentence a line, after its table."""
    for sentence in sentences:
        console.print(f"* {sentence}", highlight=False, markup=False, soft_wrap=True)


def check_folder(option: str, path: Path | None) -> None:
    """Raise if there is no folder for a file that an option names: before the work, not after."""
    if path is not None and not path.parent.is_dir():
        raise FileNotFoundError(f"{option} is {path}. Expected a file in a folder that exists.")


def check_plot(path: Path | None, images_only: bool = True) -> None:
    """Raise if the file of --plot cannot be drawn: before the work, too."""
    check_folder("--plot", path)
    if path is not None:
        check_drawable(path, images_only)


def complain(error: Exception | str, args: argparse.Namespace | None = None) -> None:
    """Print what is wrong, on the standard error.

    Args:
        error: the error, or its text.
        args: of the command; arguments that the text names are spelled as its options.
    """
    text = str(error)
    if not isinstance(error, (str, ImportError, OSError, RuntimeError, TypeError, ValueError)):
        # Its text alone, such as the key of a KeyError, says little.
        text = f"{type(error).__name__}: {' '.join(text.split())}"
    _print_aside(text if args is None else in_flags(text, args), "red")


def note(text: str) -> None:
    """Print what an answer assumes, on the standard error."""
    _print_aside(text, "yellow")


def _print_aside(text: str, style: str) -> None:
    console = Pipe(stderr=True)
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


_ALIASES = {"memory_budget": "budget"}  # arguments of functions whose option has another name
_WORDS = r"'[\w.-]+'(?:, '[\w.-]+')*,?"


def _words_after(found: re.Match[str]) -> str:
    """Return an option and the names of a list, as a command line has them."""
    return " ".join([found[1], *re.findall(r"[\w.-]+", found[2])])


def in_flags(text: str, args: argparse.Namespace) -> str:
    """Spell the arguments that a function's message names as options of the command.

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
        said = rf"(?<![\w.-]){name}"
        text = re.sub(rf"{said}=(?=[\w'(\[])", f"{flag} ", text)
        text = text.replace(f"`{name}`", flag)
    text = re.sub(rf"(--[\w-]+) [\[(]({_WORDS})[\])]", _words_after, text)
    in_python = "Call storage_ops.memory.will_it_fit in Python with assume="
    text = text.replace("Pass assume=", in_python)  # which no command has
    # Lists of Python, and None: an option that is not given.
    text = re.sub(rf"[\[(]({_WORDS})[\])]", lambda found: found[1].replace("'", ""), text)
    return re.sub(r", or None\b", "", text)


class Pipe(Console):
    """A console that lets a BrokenPipeError through, where rich would exit with 1."""

    def on_broken_pipe(self) -> None:
        """Raise the error that rich found."""
        raise BrokenPipeError


BROKEN_PIPE = 141  # as a shell says of a program that SIGPIPE ended: 128 + 13


def leave_quietly() -> int:
    """Return the exit code after the reader of the output went away, as `head` does.

    Buffered text would be written at the end of the process, which complains of the missing reader
    again. So the text goes to the null device.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(null, stream.fileno())
    return BROKEN_PIPE
