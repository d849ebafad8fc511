"""Runs benchmarks one after another, each in a separate process, and writes a report."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from benchmarks import command, fit
from benchmarks.report import markdown
from benchmarks.report.rows import head

ROOT = Path(__file__).parents[1]
INTERRUPTED = 130  # exit status of an interrupted process in a shell


@dataclass(frozen=True)
class Outcome:
    """The end of a benchmark.

    Attributes:
        code: exit code of its process.
        result: the written result, also of an unfinished benchmark, or None.
    """

    part: str
    code: int
    result: dict[str, Any] | None


def parts() -> list[str]:
    """Return the names of all benchmarks. `fit:plans` is the case "plans" of `fit`."""
    files = (p.stem for p in Path(__file__).parent.glob("*.py") if p.stem[0] != "_")
    return sorted([*files, *(f"fit:{case}" for case in fit.CASES)])


def read(path: Path) -> dict[str, Any] | None:
    """Return the content of a result file, or None if there is none."""
    return json.loads(path.read_text()) if path.is_file() else None


def run(chosen: list[str], quick: bool, out: Path, console: Console) -> int:
    """Run benchmarks and write `out`/report.md with its pictures.

    Each writes `out`/<part>.json and `out`/<part>.log. A part that fails does not stop the next. An
    interrupt ends the running part, and the report has everything measured so far.

    Returns:
        0, or 1 if one of them failed.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    outcomes = []
    bars = (
        TextColumn("{task.description:22}"), BarColumn(), TaskProgressColumn(),
        TimeElapsedColumn(), TextColumn("{task.fields[at]}"),
    )  # fmt: skip
    with Progress(*bars, console=console) as progress:
        for part in chosen:
            task = progress.add_task(part, total=1.0, at="")
            outcome = _run_one(part, quick, out, lambda d, at, t=task: _show(progress, t, d, at))
            outcomes.append(outcome)
            done = {"completed": 1.0} if outcome.code == 0 else {}
            rows = len((outcome.result or {}).get("rows", ()))
            at = f"{rows} rows" if outcome.code == 0 else f"[red]failed, see {out / part}.log"
            progress.update(task, at=at, **done)
            progress.stop_task(task)
            if outcome.code == INTERRUPTED:
                break
    results = [outcome.result for outcome in outcomes if outcome.result is not None]
    markdown.write(out, results, console)
    lines = [json.dumps({**head(r), **row}) for r in results for row in r["rows"]]
    (out / "rows.jsonl").write_text("".join(f"{line}\n" for line in lines))
    console.print(f"report: {out / 'report.md'}, every row: {out / 'rows.jsonl'}")
    for outcome in outcomes:
        if outcome.code != 0:
            console.print(f"[red]{outcome.part} failed[/] with exit code {outcome.code}:")
            tail = (out / f"{outcome.part}.log").read_text().splitlines()[-5:]
            console.print("\n".join(tail), markup=False)
    return int(any(outcome.code != 0 for outcome in outcomes))


def _show(progress: Progress, task: Any, done: float, at: str) -> None:
    progress.update(task, completed=done, at=at)


def _run_one(part: str, quick: bool, out: Path, show: Any) -> Outcome:
    path = out / f"{part}.json"
    path.unlink(missing_ok=True)
    arguments = command(part, path, *(["--quick"] if quick else []))
    with (out / f"{part}.log").open("w") as log:
        process = subprocess.Popen(arguments, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                time.sleep(0.25)
                now = read(path) or {}
                show(now.get("done", 0.0), now.get("running", "starting"))
        except KeyboardInterrupt:
            return Outcome(part, INTERRUPTED, read(path))
        finally:
            process.kill()
            process.wait()
    return Outcome(part, process.returncode, read(path))
