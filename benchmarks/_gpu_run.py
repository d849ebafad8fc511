"""Build, test, check and measure on a machine that has an NVIDIA GPU, torch, nvcc and triton.

It needs no network. Four calls do everything, each in the minutes that a machine may give to one
command; each builds what it needs, so that they can be made on different machines:

  1  tests of the row kernel, the storage ops and the loss; memcheck; the first benchmarks
  2  racecheck, initcheck, more shapes of the loss
  3  the other tests, output discarding, training
  4  divergences, log-probabilities and DPO; plans made without a GPU

If storage_ops/lib was built from the same sources and loads, it is used: it may travel with the
tree. Wheels in a folder bring peers, and what else the machine lacks. A stage that fails or takes
too long does not stop the next. Four files, of at most 16 MiB each, hold the results: log.txt ends
in what to look at first, `make results FROM=DIR/results.json` keeps the numbers, summary.json has
how each stage ended, and more.tar.gz every stage's whole log and junit file. The exit status is how
many stages were not done.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import _digest, _gpu_ranking
from benchmarks._gpu_steps import UNAVAILABLE

ROOT = Path(__file__).parents[1]
MINUTES = 9  # of a call; its stages were given seconds for this
MOST_BYTES = 16 << 20  # of a file that is handed back
MOST_OF_A_STAGE = 1 << 20  # of log.txt; all of it is in more.tar.gz
GRACE = 15  # seconds that a stage has to report after it was interrupted
NO_GPU = "not run: no GPU"
OUTCOMES = {0: "ok", UNAVAILABLE: "not run: what it needs is not here"}


@dataclass(frozen=True)
class Stage:
    """A part of a call.

    Attributes:
        calls: those that it is part of; a stage of none is run by its name.
        seconds: kept for it in a call of nine minutes; it may take twice that of what is left over.
        part: a step of _gpu_steps, or a benchmark.
        arguments: what the part is given. OUT is the folder for junit files.
    """

    name: str
    calls: tuple[int, ...]
    seconds: int
    part: str
    arguments: tuple[str, ...] = ()

    @property
    def is_benchmark(self) -> bool:
        """Whether it writes results."""
        return (ROOT / "benchmarks" / f"{self.part}.py").is_file()

    @property
    def needs_gpu(self) -> bool:
        """Whether without a GPU it says nothing of what it is for."""
        return self.part not in ("facts", "packages", "build")


def loss(name: str, calls: tuple[int, ...], seconds: int, *shapes: str) -> Stage:
    """A stage that measures shapes of the loss."""
    return Stage(name, calls, seconds, "linear_cross_entropy", ("--shapes", *(shapes or (name,))))


CALLS = (1, 2, 3, 4)
STAGES = [
    Stage("facts", CALLS, 15, "facts"),
    Stage("packages", CALLS, 25, "packages"),
    Stage("build", CALLS, 90, "build"),
    Stage("tests-core", (1,), 150, "tests", ("core", "OUT/tests-core.xml")),
    Stage("row_kernel", (1,), 45, "row_kernel"),
    Stage("memcheck", (1,), 90, "sanitize", ("memcheck", "OUT/memcheck.xml")),
    loss("R1", (1,), 110),
    Stage("racecheck", (2,), 60, "sanitize", ("racecheck", "OUT/racecheck.xml")),
    Stage("initcheck", (2,), 55, "sanitize", ("initcheck", "OUT/initcheck.xml")),
    loss("R2", (2,), 65),
    loss("R7", (2,), 70),
    loss("R8", (2,), 55),
    loss("R9", (2,), 70, "R9, 1024", "R9, 512", "R9, 128"),
    Stage("op_peaks", (2,), 25, "op_peaks"),
    Stage("tests-others", (3,), 150, "tests", ("others", "OUT/tests-others.xml")),
    Stage("output_discard", (3,), 110, "output_discard"),
    Stage("train_gpt", (3,), 140, "train_gpt"),
    Stage("divergence", (4,), 100, "head", ("--parts", "divergence")),
    Stage("head", (4,), 130, "head", ("--parts", "selected", "dpo")),
    Stage("carried_plans", (4,), 170, "carried_plans"),
    *(loss(name, (), 120) for name in ("R3", "R4", "R5", "R6")),
    Stage("R1-variants", (), 120, "linear_cross_entropy",
          ("--shapes", "R1", "--variants", "none", "half ignored")),
    *(Stage(name, (), 120, name)
      for name in ("selective_checkpoint", "autochunk", "storage", "demo", "fit_plans",
                   "fit_compiled")),
]  # fmt: skip


class Run:
    """The stages of a call, one after another, and the files that it hands back."""

    def __init__(self, out: Path, seconds: float, wheels: str, rehearse: bool) -> None:
        self.out, self.rehearse = out, rehearse
        self._temporary = tempfile.TemporaryDirectory(prefix="gpu_run-")
        self.work = Path(self._temporary.name)
        self.site = self.work / "site"
        self.wheels, self.share = wheels, seconds / (60 * MINUTES)
        self.end = time.monotonic() + seconds
        self.rows: list[dict[str, Any]] = []
        for folder in (out, self.site, *(self.work / part for part in ("json", "logs", "junit"))):
            folder.mkdir(parents=True, exist_ok=True)
        (out / "log.txt").write_bytes(b"")
        self.environment = self._environment()
        self.has_gpu = not rehearse and self._finds_gpu()

    def _environment(self) -> dict[str, str]:
        found = dict(os.environ, PYTHONUNBUFFERED="1")
        found["PYTHONPATH"] = os.pathsep.join(
            path for path in (str(self.site), str(ROOT), os.environ.get("PYTHONPATH")) if path
        )
        found["PATH"] = os.pathsep.join([f"{self.site}/bin", os.environ["PATH"]])
        found["STORAGE_OPS_REQUIRE_CUDA"] = "0" if self.rehearse else "1"
        found.setdefault("MAX_JOBS", str(os.cpu_count()))
        return found | ({"CUDA_VISIBLE_DEVICES": ""} if self.rehearse else {})

    def _finds_gpu(self) -> bool:
        command = [sys.executable, "-c", "import torch; torch.zeros(1, device='cuda')"]
        try:
            done = subprocess.run(command, capture_output=True, timeout=60, text=True, check=False)
        except subprocess.TimeoutExpired:
            self.say("no GPU: torch did not answer within a minute")
            return False
        if done.returncode != 0:
            self.say(f"no GPU: {(done.stderr.strip().splitlines() or [''])[-1]}")
        return done.returncode == 0

    def say(self, text: str) -> None:
        """To the log and to whoever watches."""
        with (self.out / "log.txt").open("a") as log:
            log.write(text + "\n")
        print(text, flush=True)

    def command(self, stage: Stage, limit: int) -> list[str]:
        """What a stage runs."""
        python = [sys.executable, "-m"]
        if stage.is_benchmark:
            # Some time is left for what follows the rounds: peaks, for one.
            how = ["--device", "cuda", "--repeats", "9", "--seconds", str(limit * 6 // 10)]
            if self.rehearse:
                how = ["--device", "cpu", "--quick", "--repeats", "1"]
            path, arguments = str(self.work / "json" / f"{stage.name}.json"), stage.arguments
            if self.rehearse and stage.part == "linear_cross_entropy":
                arguments = ()
            return [*python, f"benchmarks.{stage.part}", "--json", path, *how, *arguments]
        given = [a.replace("OUT/", f"{self.work}/junit/") for a in stage.arguments]
        if stage.part == "packages":
            given = [str(self.site), *([self.wheels] if self.wheels else [])]
        given += ["rehearse"] if self.rehearse and stage.part == "tests" else []
        return [*python, "benchmarks._gpu_steps", stage.part, *given]

    def stages(self, stages: Sequence[Stage]) -> None:
        """Run them in turn; what one leaves of its time, the next may use."""
        for number, stage in enumerate(stages):
            kept = sum(later.seconds for later in stages[number + 1 :]) * self.share
            self._stage(stage, self.end - time.monotonic() - kept)

    def _stage(self, stage: Stage, left: float) -> None:
        begin, share, outcome = time.monotonic(), stage.seconds * self.share, "interrupted"
        try:
            if stage.needs_gpu and not self.has_gpu and not self.can_rehearse(stage):
                outcome = NO_GPU
            elif left < share / 2:
                outcome = "not begun, no time left"
            else:
                limit = int(min(2 * share, left))
                outcome = self._limited(stage.name, self.command(stage, limit), limit)
                if outcome == "ok" and stage.needs_gpu and self.rehearse:
                    outcome = "rehearsed, no GPU"
        finally:
            seconds = round(time.monotonic() - begin)
            self.rows.append({"stage": stage.name, "outcome": outcome, "seconds": seconds})
            self.say(line(self.rows[-1]))
            self.write()

    def can_rehearse(self, stage: Stage) -> bool:
        """Whether some of a stage is done on a CPU, as was asked for."""
        return self.rehearse and stage.part != "sanitize"

    def _limited(self, name: str, command: list[str], limit: int) -> str:
        log = self.out / "log.txt"
        with log.open("a") as file:
            file.write(f"\n===== {name}, at most {limit} s: {shlex.join(command)}\n")
        begin, grace = log.stat().st_size, min(GRACE, limit // 3)
        # An interrupt first, at which pytest and benchmarks report; all processes get it.
        bound = ["timeout", "-s", "INT", "-k", str(grace), str(limit - grace), *command]
        with log.open("ab") as file:
            process = subprocess.Popen(
                bound, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                cwd=ROOT, env=self.environment,
            )  # fmt: skip
        try:
            code = process.wait()
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()
            self._keep(name, log, begin)
        if code in (124, 128 + signal.SIGKILL, -signal.SIGKILL):
            return f"stopped after {limit} s"
        return OUTCOMES.get(code, f"FAILED, exit status {code}")

    def _keep(self, name: str, log: Path, begin: int) -> None:
        whole = log.read_bytes()[begin:]
        (self.work / "logs" / f"{name}.txt").write_bytes(whole)
        if len(whole) > MOST_OF_A_STAGE:
            os.truncate(log, begin)
            with log.open("ab") as file:
                file.write(shortened(whole, MOST_OF_A_STAGE))

    def ranking(self) -> list[str]:
        """What to look at first, so far."""
        texts = {path.stem: path.read_text(errors="replace")
                 for path in sorted((self.work / "logs").glob("*.txt"))}  # fmt: skip
        results = json.loads((self.out / "results.json").read_text())
        return _gpu_ranking.ranked(self.rows, texts, results)

    def write(self) -> None:
        """Bring every file but the log up to date."""
        paths = sorted((self.work / "json").glob("*.json"), key=lambda p: p.stat().st_mtime)
        found = ",\n".join(json.dumps(json.loads(path.read_text())) for path in paths)
        (self.out / "results.json").write_text(f"[\n{found}\n]\n")
        summary = {"stages": self.rows, "look at first": self.ranking()}
        (self.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        pack(self.out / "more.tar.gz", [*self.work.glob("logs/*"), *self.work.glob("junit/*")])

    def close(self) -> int:
        """Say how all went, and what to look at first; how many stages were not done."""
        digest = _digest.lines([self.out / "results.json"])
        table = [line(row) for row in self.rows]
        self.say("\n".join(["", *digest, "", *table, "", "Look at first:", *self.ranking()]))
        self._temporary.cleanup()
        done = ("ok", "rehearsed", NO_GPU) if self.rehearse else ("ok",)
        return sum(not row["outcome"].startswith(done) for row in self.rows)


def line(row: dict[str, Any]) -> str:
    """How a stage ended."""
    return f"{row['stage']:20} {row['outcome']:34} {row['seconds']:5} s"


def shortened(text: bytes, most: int) -> bytes:
    """The beginning and the end of a text."""
    cut = f"\n\n[{len(text) - most} bytes are left out here]\n\n".encode()
    return text[: most // 2] + cut + text[len(text) - most // 2 :]


def pack(path: Path, files: list[Path], most: int = MOST_BYTES) -> None:
    """Put files into an archive; the largest are left out until it is small enough."""
    files = sorted(files, key=lambda file: file.stat().st_size)
    while True:
        with tarfile.open(path, "w:gz") as archive:
            for file in files:
                archive.add(file, f"{file.parent.name}/{file.name}")
        if path.stat().st_size <= most:
            return
        print(f"{path.name}: {files.pop().name} is left out, for its size", flush=True)


def chosen(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> list[Stage]:
    """The stages that were asked for."""
    if arguments.stages is None:
        return [stage for stage in STAGES if arguments.call in stage.calls]
    names, known = arguments.stages.split(), [stage.name for stage in STAGES]
    for name in names:
        if name not in known:
            parser.error(f"--stages has {name}; expected some of {' '.join(known)}")
    return [stage for stage in STAGES if stage.name in names]


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(
        "gpu_run.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--call", type=int, choices=CALLS)
    which.add_argument("--stages", help=f"these alone, of {' '.join(s.name for s in STAGES)}")
    parser.add_argument("--minutes", default=str(MINUTES),
                        help="it ends after so many (default: 9), stages get shares")  # fmt: skip
    parser.add_argument("--wheels", type=Path, help="a folder of wheels to install for this alone")
    parser.add_argument("--out", type=Path, help="where the files go (default: bench-report/gpu-N)")
    parser.add_argument("--commit", help="what the results call the source (default: git's name)")
    parser.add_argument("--dry-run", action="store_true",
                        help="rehearse on the CPU: small shapes, tests that run there")  # fmt: skip
    arguments = parser.parse_args(argv)
    if not arguments.minutes.isdecimal() or int(arguments.minutes) == 0:
        parser.error(f"--minutes is {arguments.minutes}; expected a whole number of at least 1")
    if arguments.wheels is not None and not arguments.wheels.is_dir():
        parser.error(f"--wheels is {arguments.wheels}; expected a folder")
    stages = chosen(arguments, parser)
    if arguments.commit:
        os.environ["STORAGE_OPS_COMMIT"] = arguments.commit
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    out = arguments.out or ROOT / "bench-report" / f"gpu-{arguments.call or 'stages'}"
    wheels = str(arguments.wheels.resolve()) if arguments.wheels else ""
    run = Run(out.resolve(), 60 * int(arguments.minutes), wheels, arguments.dry_run)
    if int(arguments.minutes) > MINUTES:
        run.say(f"warning: --minutes is {arguments.minutes}; many machines end a command after 10")
    try:
        run.stages(stages)
    except KeyboardInterrupt:
        run.say("interrupted")
        run.write()
        run.close()
        return 128 + signal.SIGINT
    return run.close()


if __name__ == "__main__":
    sys.exit(main())
