"""What commands share: JSON on the output, progress and complaints beside it."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


def add_json(parser: argparse.ArgumentParser) -> None:
    """Declare --json."""
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")


def print_json(facts: Any) -> None:
    """Print the result of a command as JSON, on the standard output."""
    print(json.dumps(facts, indent=1))


def complain(error: Exception | str) -> None:
    """Print what is wrong, on the standard error."""
    console = Console(stderr=True)
    console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)


def working(what: str) -> Progress:
    """A with block during which a terminal shows what goes on, and for how long."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    progress.add_task(what, total=None)
    return progress
