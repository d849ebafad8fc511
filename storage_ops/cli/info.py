"""`python -m storage_ops info`: facts about this installation. Returns 1 if a part fails."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

import storage_ops
from storage_ops import _library
from storage_ops.cli import output
from storage_ops.tables import Grid

HELP = "show versions, libraries and paths in use, and what does not work"
EXAMPLE = "--json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    output.add_json(parser.add_argument_group("the output"))


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the command. Return the exit code."""
    if storage_ops.import_error is not None:
        broken = str(storage_ops.import_error)
        build, problems = _library.build_info(), [f"torch does not import: {broken}"]
        facts = {"broken": broken, "build": build, "problems": problems}
    else:
        facts = storage_ops.info()
    if args.json:
        output.print_json(facts, console)
    else:
        rows = [
            (key, Text(text, "red" if key == "problems" and facts[key] else ""))
            for key, text in _rows(facts)
        ]
        columns = ("fact", "value")
        table = Grid("storage_ops", columns, rows, words=columns, show_header=False)
        console.print(table)
    return 1 if facts["problems"] else 0


def _rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of the table: names and values. Bindings of other minors share one row."""
    rows = []
    for key, value in facts.items():
        if key == "skipped":
            other = "built for torch "
            minors = [why.split(",")[0].removeprefix(other) for why in value.values()]
            minors = [m for m, why in zip(minors, value.values(), strict=True) if other in why]
            # Each minor has a storage binding and one more library.
            minors = list(dict.fromkeys(minors))
            remaining = [f"{name}: {why}" for name, why in value.items() if other not in why]
            if minors:
                remaining.append(f"libraries for torch {', '.join(minors)}: not this torch")
            text = "\n".join(remaining)
        elif isinstance(value, Mapping):
            text = "\n".join(f"{name}: {what}" for name, what in value.items())
        else:
            text = "\n".join(map(str, value)) if isinstance(value, list) else str(value)
        rows.append((key, text or "none"))
    return rows
