"""`python -m storage_ops bench`: runs the benchmarks of the source tree, and reports results."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

import storage_ops
from storage_ops.cli import output

MISSING = """\
There are no benchmarks here: they belong to the source tree and are not installed with the package,
which is in {package}.
Unpack the source archive of version {version}, or clone the repository, and run there:
  make build && .venv/bin/python -m storage_ops bench"""

HELP = "measure every part against its peers, and report"
EXAMPLE = "--quick"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    which = parser.add_argument_group("the benchmarks")
    which.add_argument("parts", nargs="*", metavar="part", help="benchmarks (default: all)")
    which.add_argument("--quick", action="store_true", help="small shapes and few rounds: minutes")
    files = parser.add_argument_group("the output")
    output.add_json(files)
    files.add_argument("--out", type=Path, default=Path("bench-report"), help="folder for results")


def source_tree() -> Path | None:
    """Return the folder of the benchmarks: the package's, else the current one."""
    for folder in (Path(storage_ops.__file__).parents[1], Path.cwd()):
        if (folder / "benchmarks" / "_runner.py").is_file():
            return folder
    return None


def run(args: argparse.Namespace, console: Console) -> int:
    """Run benchmarks. Return the exit code."""
    tree = source_tree()
    if tree is None:
        package = Path(storage_ops.__file__).parent
        version = storage_ops._library.build_info().get("version", "the one you have")
        output.complain(MISSING.format(package=package, version=version))
        return 2
    sys.path.insert(0, str(tree))
    runner: Any = importlib.import_module("benchmarks._runner")
    known: list[str] = runner.parts()
    unknown = [part for part in args.parts if part not in known]
    if unknown:
        output.complain(f"PART is {unknown[0]}. Expected one of {', '.join(known)}.")
        return 2
    shown = Console(stderr=True) if args.json else console
    code = int(runner.run(args.parts or known, args.quick, args.out, shown))
    if args.json:
        output.print_json(
            [json.loads(row) for row in (args.out / "rows.jsonl").read_text().splitlines()],
            console,
        )
    return code
