"""What commands share: JSON on the output, complaints beside it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from storage_ops.loss.devices import DEFAULT_GPU, DEVICES
from storage_ops.pictures import check_drawable


def add_json(parser: argparse.ArgumentParser) -> None:
    """Declare --json."""
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")


def add_device(parser: argparse.ArgumentParser) -> None:
    """Declare --device."""
    parser.add_argument(
        "--device",
        default=DEFAULT_GPU,
        help=f"{', '.join(DEVICES)}, or cuda: the GPU that torch finds (default: {DEFAULT_GPU})",
    )


def print_json(facts: Any) -> None:
    """Print the result of a command as JSON, on the standard output."""
    print(json.dumps(facts, indent=1))


def check_folder(option: str, path: Path | None) -> None:
    """Raise if there is no folder for a file that an option names: before the work, not after."""
    if path is not None and not path.parent.is_dir():
        raise FileNotFoundError(f"{option} is {path}; expected a file in a folder that exists")


def check_plot(path: Path | None, images_only: bool = True) -> None:
    """Raise if the file of --plot cannot be drawn: before the work, too."""
    check_folder("--plot", path)
    if path is not None:
        check_drawable(path, images_only)


def complain(error: Exception | str) -> None:
    """Print what is wrong, on the standard error."""
    console = Console(stderr=True)
    console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
