"""Interleaved timing, and results as JSON with what they were measured on."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import storage_ops

RESULTS = Path(__file__).parent / "results"


def interleave(
    cases: dict[str, Callable[[], object]], repeats: int
) -> dict[str, list[tuple[float, float]]]:
    """Run every case once per round, in turn and back; (wall, process CPU) seconds of each run.

    Ratios of medians taken within one process hold on a shared machine where single times do not.
    """
    for run in cases.values():
        run()
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for round_ in range(repeats):
        names = list(cases) if round_ % 2 == 0 else list(reversed(cases))
        for name in names:
            wall, cpu = time.perf_counter(), time.process_time()
            cases[name]()
            seconds[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return seconds


def ratios(
    seconds: dict[str, list[tuple[float, float]]], base: str
) -> dict[str, tuple[float, float, float]]:
    """CPU time of each case over that of `base` in the same round: median, least, most."""
    result = {}
    for name, runs in seconds.items():
        each = [cpu / other for (_, cpu), (_, other) in zip(runs, seconds[base], strict=True)]
        result[name] = (statistics.median(each), min(each), max(each))
    return result


def hardware() -> str:
    """The processor's name as a folder name."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name().lower().replace(" ", "-")
    model = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    return f"{'-'.join(model.lower().split())}-{torch.get_num_threads()}-threads"


def provenance() -> dict[str, Any]:
    """Versions, hardware and commit."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    facts = storage_ops.info()
    keys = ("storage_ops", "torch", "python", "gpu", "storage_path", "row_kernel")
    return {"commit": commit, "hardware": hardware(), **{key: facts[key] for key in keys}}


def finish(stem: str, rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Write the rows as JSON and print them as a table."""
    path = arguments.json or RESULTS / hardware() / f"{stem}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**provenance(), "rows": rows}, indent=1) + "\n")
    table = Table(title=f"{stem} on {hardware()}")
    for column in rows[0]:
        table.add_column(column, justify="left" if column == "case" else "right")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    console = Console()
    console.print(table)
    console.print(f"written to {path}")


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--json", type=Path, help="where the results go")
    result.add_argument("--repeats", type=int, default=5, help="rounds of interleaved runs")
    return result
