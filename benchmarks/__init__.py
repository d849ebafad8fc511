"""Benchmarks: `python -m benchmarks.<stem> [--json OUT]`."""

import sys
from pathlib import Path


def command(part: str, path: Path, *options: str) -> list[str]:
    """Return the command that runs a benchmark and writes its results."""
    stem, *case = part.split(":")
    return [sys.executable, "-m", f"benchmarks.{stem}", *case, "--json", str(path), *options]
