"""`python -m storage_ops {info,demo,plan,bench}`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

import storage_ops
from storage_ops import _library, bench_command, plan_command


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
    if storage_ops.import_error is not None:
        facts = {"broken": str(storage_ops.import_error), "build": _library.build_info()}
    else:
        facts = storage_ops.info()
    if args.json:
        print(json.dumps(facts, indent=1))
    else:
        table = Table(title="storage_ops", show_header=False)
        for key, value in facts.items():
            items = value.items() if isinstance(value, dict) else None
            text = "\n".join(f"{k}: {v}" for k, v in items) if items is not None else value
            table.add_row(key, ", ".join(text) if isinstance(text, list) else str(text))
        console.print(table)
    return 1 if "broken" in facts else 0


def _demo(args: argparse.Namespace, console: Console) -> int:
    try:
        from storage_ops.demo.command import run
    except ImportError as error:
        console.print(
            f"[red]The demo needs more packages[/]: {error}. Run: pip install 'storage_ops\\[demo]'"
        )
        return 1
    return run(args, console)
