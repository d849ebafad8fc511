"""Interleaved timing, peak memory, and results as JSON with versions and hardware."""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import storage_ops
from benchmarks.report.rows import columns
from storage_ops.matmul import packed, scratch
from storage_ops.memory import Measurement

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
REPORT = Path("bench-report")  # folder of results that are not stored
MIB = 1 << 20
Case = Callable[[], object]
Runs = list[tuple[float, float]]  # results of Clock, of which the second is compared
POINTS = 400  # maximum in a stored memory curve
WARM_RUNS = {"cpu": 1, "cuda": 3}
HEAD_START = 20_000_000  # cycles that a GPU waits for the host: about 10 ms
PEER_PACKAGES = ("triton", "liger-kernel", "liger-cute-kernels", "cut-cross-entropy",
                 "quack-kernels", "megatron-core", "ai2-olmo-core", "transformers")  # fmt: skip


class Result:
    """The result file of a running benchmark. At any moment it has all rows so far."""

    def __init__(self, stem: str, path: Path, arguments: argparse.Namespace) -> None:
        self.path = path
        self.head = {"stem": stem, **provenance(arguments.device)}
        self.head |= {"note": arguments.note} if arguments.note else {}
        self.head |= {"quick": True} if arguments.quick else {}
        self.skipped: dict[str, str] = {}
        self.rows: list[dict[str, Any]] = []
        self.groups = self.groups_done = 0
        self.end = time.monotonic() + (arguments.seconds or math.inf)
        self._written = 0.0
        path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, **running: Any) -> None:
        """Replace the file, one row per line. It has `running` until the benchmark ends."""
        part = self.path.with_suffix(".part")
        result = {**self.head, **running, "skipped": self.skipped, "rows": self.rows}
        part.write_text(text_of(result))
        os.replace(part, self.path)
        self._written = time.monotonic()

    def tick(self, at: str, share: float) -> None:
        """Note that `share` of the current group is done."""
        if time.monotonic() - self._written > 0.3:
            done = (self.groups_done + share) / max(self.groups, self.groups_done + 1)
            self.write(running=at, done=round(done, 4))


def text_of(result: dict[str, Any]) -> str:
    """Return a result as JSON, one row a line."""
    rows = ",\n  ".join(json.dumps(row) for row in result["rows"])
    head = {key: value for key, value in result.items() if key != "rows"}
    return f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n  {rows}\n ]\n}}\n'


_result: Result | None = None


def expect(groups: int) -> None:
    """Set the number of groups for the progress bar. Each call of `interleave` is a group."""
    if _result is not None:
        _result.groups = groups


def skip(name: str, why: str) -> None:
    """Note that a case or a peer is skipped, and why."""
    print(f"skipped: {name}: {why}", flush=True)
    if _result is not None:
        _result.skipped[name] = why


def interleave(
    cases: dict[str, Case], repeats: int, device: str = "cpu", label: str = ""
) -> dict[str, Runs]:
    """Run every case once per round after a warm-up, in alternating order.

    A case that raises in the warm-up is named and removed from `cases`. `label` says what the cases
    have in common.

    Returns:
        The runs of each case as wall seconds and seconds of process CPU time. On a GPU, both are
        device time between two events. On a shared machine, ratios of medians within one process
        are reproducible, unlike single times.
    """
    prefix = f"{label}: " if label else ""
    for name in list(cases):
        tick(f"{prefix}{name}, warm-up", 0.0)
        try:
            for _ in range(WARM_RUNS[device]):
                cases[name]()
            _synchronize(device)
        except Exception as error:
            del cases[name]
            lines = str(error).strip().splitlines() or [""]
            skip(f"{prefix}{name}", f"{type(error).__name__}: {lines[0][:200]}")
            release(device)
    seconds: dict[str, Runs] = {name: [] for name in cases}
    for round_ in range(repeats):
        if round_ > 0 and _result is not None and time.monotonic() > _result.end:
            print(f"{prefix}{round_} of {repeats} rounds within the time limit", flush=True)
            break
        names = list(cases) if round_ % 2 == 0 else list(reversed(cases))
        for k, name in enumerate(names):
            tick(f"{prefix}{name}", (round_ + k / len(names)) / repeats)
            seconds[name].append(_timed(cases[name], device))
    group_done()
    return seconds


def tick(at: str, share: float) -> None:
    """Note that this share of the benchmark's current group is done."""
    if _result is not None:
        _result.tick(at, share)


def group_done() -> None:
    """Note that a group is done: a call of `interleave` or other work."""
    if _result is not None:
        _result.groups_done += 1


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def release(device: str) -> None:
    """Free unused memory, also of objects that refer to themselves."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


class Clock:
    """Seconds of the wall clock and of this process's CPU. On a GPU, both are of the device.

    A GPU is busy until its first work is launched. So the host's work before that does not count,
    as with a queue that is never empty.
    """

    def __init__(self, device: str) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * (device == "cuda"))]
        if self._events:
            torch.cuda.synchronize()
            torch.cuda._sleep(HEAD_START)
            self._events[0].record()
        self._start = time.perf_counter(), time.process_time()

    def stop(self) -> tuple[float, float]:
        """Return the seconds since the clock was created, once the device has finished."""
        if self._events:
            self._events[1].record()
            self._events[1].synchronize()
            seconds = self._events[0].elapsed_time(self._events[1]) / 1000
            return seconds, seconds
        wall, cpu = self._start
        cpu = time.process_time() - cpu
        return time.perf_counter() - wall, cpu


def _timed(run: Case, device: str) -> tuple[float, float]:
    clock = Clock(device)
    run()
    return clock.stop()


def ratios(seconds: dict[str, Runs], base: str) -> dict[str, tuple[float, float, float]]:
    """Return the median, least and largest ratio of each case's time to that of `base`."""
    below = [clock for _, clock in seconds[base]]
    result = {}
    for name, runs in seconds.items():
        above = [clock for _, clock in runs]
        ratios_of_rounds = [a / b for a, b in zip(above, below, strict=True)]
        median = statistics.median(above) / statistics.median(below)
        result[name] = (median, min(ratios_of_rounds), max(ratios_of_rounds))
    return result


def milliseconds(runs: Runs) -> float:
    """Return the median of the compared clock in milliseconds."""
    return round(1e3 * statistics.median(clock for _, clock in runs), 3)


def peak(run: Case, device: str = "cpu") -> float:
    """Return the peak MiB of a run above the memory allocated before it."""
    if device == "cpu":
        with storage_ops.memory.measure() as m:
            run()
        return round(m.peak_bytes / MIB, 1)
    release(device)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / MIB, 1)


def curve(m: Measurement) -> list[list[float]]:
    """Return seconds and MiB of the highest and the last point in each interval of the timeline."""
    samples = m.timeline
    length = -(-len(samples) // (POINTS // 2))
    kept = []
    for start in range(0, len(samples), length):
        stretch = samples[start : start + length]
        kept += sorted({max(stretch, key=lambda s: s.nbytes), stretch[-1]}, key=lambda s: s.seconds)
    return [[round(s.seconds, 5), round(s.nbytes / MIB, 2)] for s in kept]


def hardware(device: str | None = None) -> str:
    """Return the name of the processor, or of the GPU if there is one, as a folder name.

    With `device` "cpu" it is the processor's. A cloud gives one name to processors of several
    generations. So the name also has their family, which Linux knows, and their instructions.
    """
    if device == "cuda" or (device is None and torch.cuda.is_available()):
        return torch.cuda.get_device_name().lower().replace(" ", "-")
    facts = dict(
        re.findall(r"^(model name|cpu family)\s*: (.*)$", packed.processor(), re.MULTILINE)
    )
    name = re.sub(r"\((r|tm)\)", "", facts.get("model name", platform.machine()), flags=re.I)
    family = f"family {facts['cpu family']}" if "cpu family" in facts else ""
    unit = "AMX" if scratch.kind() == "amx_bf16" else torch.backends.cpu.get_cpu_capability()
    words = f"{name} {family} {unit} {torch.get_num_threads()} threads"
    return "-".join(words.lower().split())


def provenance(device: str | None = None) -> dict[str, Any]:
    """Return versions, hardware, commit and date."""
    commit = os.environ.get("STORAGE_OPS_COMMIT", "")  # for sources without history or git
    if not commit and shutil.which("git"):
        command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        commit = done.stdout.strip()
    facts = storage_ops.info()
    keys = ("storage_ops", "torch", "python", "gpu", "storage_path", "row_kernel")
    day = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return {
        "commit": commit,
        "day": day,
        **({"call": call} if (call := os.environ.get("STORAGE_OPS_CALL")) else {}),
        "hardware": hardware(device),
        **{key: facts[key] for key in keys},
        "packages": _versions(),
    }


def _versions() -> dict[str, str]:
    versions = {}
    for name in PEER_PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def finish(stem: str, rows: Iterable[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Write each row as JSON as soon as it exists, and print all rows as a table."""
    global _result
    device = arguments.device
    kept = RESULTS / hardware(device) if not arguments.quick else REPORT
    _result = Result(stem, arguments.json or kept / f"{stem}.json", arguments)
    result = _result
    result.write(running="start", done=0.0)
    for row in rows:
        result.rows.append(row)
        result.write(running=stem, done=result.groups_done / max(result.groups, 1))
    result.write()
    _result = None
    console = Console(width=None if sys.stdout.isatty() else 180)
    console.print(table(result.rows, f"{stem} on {hardware(device)}"))
    console.print(f"written to {result.path}")


def table(rows: list[dict[str, Any]], title: str) -> Table:
    """Return the rows as a table for a terminal."""
    result = Table(title=title)
    names = columns(rows)
    for name in names:
        result.add_column(name, justify="left" if name in ("shape", "case") else "right")
    for row in rows:
        result.add_row(*(str(row.get(name, "")) for name in names))
    return result


def real_logits(
    path: Path, hidden: int, device: str, dtype: torch.dtype, quick: bool = False
) -> tuple[Tensor, ...]:
    """Read the head of a language model, its last hidden states and its targets.

    The logits are those of the model at any hidden size: both factors are multiplied by one matrix
    with orthonormal rows.

    Args:
        path: an .npz file with `weight` (vocab, D) and its `scale` (vocab,), `hidden` (tokens, D)
            and `target` (tokens,).
        hidden: at least D, or 0 for D.
        device: of the results.
        dtype: of input and weight.
        quick: return only a few tokens and classes.

    Returns:
        Input (tokens, hidden), weight (vocab, hidden) and target (tokens,).
    """
    with numpy.load(path) as file:
        parts = {name: torch.from_numpy(file[name]).to(device) for name in file.files}
    if quick:
        few = {"hidden": 128, "target": 128, "weight": 1024, "scale": 1024}
        parts = {name: part[: few[name]] for name, part in parts.items()}
        parts["target"] %= few["weight"]
    w = parts["weight"].float() * parts["scale"].float()[:, None]
    x, target = parts["hidden"].float(), parts["target"].long()
    if 0 < hidden < x.shape[1]:
        raise ValueError(
            f"`hidden` is {hidden}. Expected at least {x.shape[1]}, the hidden size of {path}."
        )
    if hidden > x.shape[1]:
        rows = torch.linalg.qr(torch.randn(hidden, x.shape[1], device=device))[0].t()
        x, w = x @ rows, w @ rows
    return x.to(dtype), w.to(dtype), target


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has."""
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--json", type=Path, help="file for the results")
    result.add_argument("--repeats", type=int, default=5, help="rounds of interleaved runs")
    result.add_argument("--seconds", type=float,
                        help="begin no further round after this time")  # fmt: skip
    result.add_argument("--quick", action="store_true",
                        help="small shapes and few rounds, for a first look")  # fmt: skip
    result.add_argument("--device", choices=["cpu", "cuda"],
                        default="cuda" if torch.cuda.is_available() else "cpu")  # fmt: skip
    result.add_argument("--note", help="a remark that is stored with the results")
    return result
