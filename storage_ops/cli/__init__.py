"""`python -m storage_ops {info,demo,plan,bench}`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

import storage_ops
from storage_ops import _library
from storage_ops.cli import bench as bench_command
from storage_ops.cli import plan as plan_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m storage_ops", description=storage_ops.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("info", help="versions, libraries and paths in use")
    show.add_argument("--json", action="store_true", help="print JSON")
    show.set_defaults(run=_info)
    demo = commands.add_parser("demo", help="train a small GPT with and without storage_ops")
    demo.add_argument("--text", type=Path, help="a text file (default: Python's standard library)")
    demo.add_argument("--preset", default="tiny", help="tiny, mini or gpt2-small")
    demo.add_argument("--device", default="cpu", help="cpu or cuda")
    demo.add_argument("--steps", type=int, default=32, help="optimizer steps of each training")
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--plot", type=Path, default=Path("demo.png"), help="where the picture goes")
    demo.set_defaults(run=_demo)
    plan = commands.add_parser("plan", help="how linear cross-entropy will use a memory budget")
    plan_command.add_arguments(plan)
    plan.set_defaults(run=plan_command.run)
    bench = commands.add_parser("bench", help="measure every part against its peers, and report")
    bench_command.add_arguments(bench)
    bench.set_defaults(run=bench_command.run)
    args = parser.parse_args(argv)
    return int(args.run(args, Console()))


def _info(args: argparse.Namespace, console: Console) -> int:
    """Print what this installation is; 1 when something that should work does not."""
    if storage_ops.import_error is not None:
        broken = str(storage_ops.import_error)
        build, problems = _library.build_info(), [f"torch does not import: {broken}"]
        facts = {"broken": broken, "build": build, "problems": problems}
    else:
        facts = storage_ops.info()
    if args.json:
        print(json.dumps(facts, indent=1))
    else:
        table = Table(title="storage_ops", show_header=False)
        for key, text in _rows(facts):
            table.add_row(key, Text(text, style="red" if key == "problems" and facts[key] else ""))
        console.print(table)
    return 1 if facts["problems"] else 0


def _rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The rows of one screen: names and values, the bindings for other minors on one line."""
    rows = []
    for key, value in facts.items():
        if key == "skipped":
            other = "built for torch "
            minors = [why.split(",")[0].removeprefix(other) for why in value.values()]
            minors = [m for m, why in zip(minors, value.values(), strict=True) if other in why]
            left = [f"{name}: {why}" for name, why in value.items() if other not in why]
            if minors:
                left.append(f"bindings for torch {', '.join(minors)}: not this torch")
            text = "\n".join(left)
        elif isinstance(value, Mapping):
            text = "\n".join(f"{name}: {what}" for name, what in value.items())
        else:
            text = "\n".join(map(str, value)) if isinstance(value, list) else str(value)
        rows.append((key, text or "none"))
    return rows


def _demo(args: argparse.Namespace, console: Console) -> int:
    try:
        from storage_ops.demo.command import run
    except ImportError as error:
        console.print(
            f"[red]The demo needs more packages[/]: {error}. Run: pip install 'storage_ops\\[demo]'"
        )
        return 1
    return run(args, console)
