"""Runs one call of the queue on a machine with an NVIDIA GPU and torch. It needs no network.

Libraries in storage_ops/lib must be built before, from the same sources. CONTRIBUTING.md says how.
A stage that fails or takes too long does not stop the next. In --out, log.txt has all printed text
and ends with the results. `make results FROM=OUT/results.json` stores the numbers. The exit status
is the number of failed stages.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import command
from benchmarks._gpu_queue import FILE, QUEUE, ROOT, Call, Stage, listed
from benchmarks.report.markdown import ratio_line
from benchmarks.report.rows import load, shapes
from build_tools import ninja_file

MINUTES = 9  # of a call
GRACE = 15  # seconds that a stage has to report after it was interrupted
AROUND = 60  # seconds of a call before and after the stages
CALLS = {call.name: call for call in QUEUE}


class Run:
    """The stages of a call, one after another."""

    def __init__(
        self, call: Call, out: Path, site: Path, minutes: float, rehearse: bool, file: str = ""
    ) -> None:
        """Start a log. `out` is for results, `site` for installed packages."""
        self.call, self.out, self.rehearse, self.file = call, out, rehearse, file
        self.share = minutes / MINUTES
        self.end = time.monotonic() + 60 * minutes - AROUND / 3 * self.share
        self.outcomes: dict[str, str] = {}
        self.site = site
        out.mkdir(parents=True, exist_ok=True)
        (out / "log.txt").write_bytes(b"")
        self.environment = {**os.environ, "PYTHONUNBUFFERED": "1", "STORAGE_OPS_CALL": call.name}
        paths = (str(self.site), str(ROOT), os.environ.get("PYTHONPATH"))
        self.environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self.environment["STORAGE_OPS_REQUIRE_CUDA"] = "0" if rehearse else "1"
        if rehearse:  # compilers take minutes, and a rehearsal does not test them
            self.environment |= {"CUDA_VISIBLE_DEVICES": "", "TORCH_COMPILE_DISABLE": "1"}

    def say(self, text: str) -> None:
        """Print a text, also to the log."""
        with (self.out / "log.txt").open("a") as log:
            log.write(text + "\n")
        print(text, flush=True)

    def _logged(self, words: list[str], limit: float) -> int:
        """Run a command with its output in the log. Return its exit status, 124 after the limit."""
        # First, all processes get an interrupt, after which pytest and benchmarks report.
        grace = min(GRACE, limit / 3)
        bound = ["timeout", "-s", "INT", "-k", f"{grace:.0f}", f"{limit - grace:.0f}", *words]
        with (self.out / "log.txt").open("a") as log:
            log.write(f"\n===== at most {limit:.0f} s: {shlex.join(words)}\n")
            log.flush()
            process = subprocess.Popen(
                bound, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT,
                env=self.environment,
            )  # fmt: skip
            try:
                return process.wait()
            finally:
                process.send_signal(signal.SIGINT)
                process.wait()

    def prepare(self, wheels: Path | None) -> str:
        """Install the wheels and load the libraries. Return why they cannot be used, or ""."""
        if wheels is not None:
            self.install(sorted(map(str, wheels.resolve().glob("*.whl"))))
        info = ROOT / "storage_ops" / "lib" / "build_info.json"
        if not info.is_file():
            return "storage_ops/lib has no libraries"
        if json.loads(info.read_text()).get("sources") != ninja_file.digest_of_sources():
            return "storage_ops/lib was built from other sources"
        # Entry points, with which torch.compile finds the backend.
        self._logged([sys.executable, "setup.py", "-q", "egg_info"], 60)
        code = self._logged([sys.executable, "-m", "storage_ops", "info"], 60)
        check = "import torch; torch.zeros(1, device='cuda')"
        if self.rehearse:
            return ""
        if self._logged([sys.executable, "-c", check], 60):
            return "no GPU"
        return "storage_ops info names a problem" if code else ""

    def install(self, wheels: list[str]) -> None:
        """Install wheels for this call. If not all can be installed, install the others."""
        # Wheels may have parts of one folder, which pip replaces unless it gets them together.
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps",
               "--no-compile", "--target", str(self.site), "--upgrade"]  # fmt: skip
        if wheels and self._logged([*pip, *wheels], 120):
            for wheel in wheels:
                if self._logged([*pip, wheel], 120):
                    self.say(f"not installed: {Path(wheel).name}")
        # Python reads files *.pth, which name more folders of modules, only in folders of `site`.
        hook = f"import site\nsite.addsitedir({str(self.site)!r})\n"
        (self.site / "sitecustomize.py").write_text(hook)

    def stage(self, stage: Stage, kept: float) -> None:
        """Run a stage. `kept` seconds of the call belong to later stages."""
        limit = self.end - time.monotonic() - kept
        if limit < stage.seconds * self.share / 2:
            self.outcomes[stage.name] = "not begun, no time left"
            return
        # The rest of the time is for work after the rounds, such as peaks.
        options = ["--device", "cuda", "--repeats", "9", "--seconds", f"{limit * 0.6:.0f}"]
        arguments = stage.arguments
        if self.rehearse:
            options, arguments = ["--device", "cpu", "--quick", "--repeats", "1"], stage.rehearsed
        if FILE in arguments and not self.file:
            self.outcomes[stage.name] = "not run: --real-logits is not given"
            return
        arguments = tuple(self.file if a == FILE else a for a in arguments)
        begin = time.monotonic()
        words = command(stage.part, self.out / f"{stage.name}.json", *options, *arguments)
        self.outcomes[stage.name] = "interrupted"
        code = self._logged(words, limit)
        took = f"{time.monotonic() - begin:.0f} s"
        ended = {0: f"ok, {took}", 124: f"stopped after {took}", 137: f"killed after {took}"}
        self.outcomes[stage.name] = ended.get(code, f"FAILED, exit status {code}, {took}")

    def stages(self) -> None:
        """Run all stages."""
        for number, stage in enumerate(self.call.stages):
            later = self.call.stages[number + 1 :]
            kept = 0.0 if self.rehearse else self.share * sum(each.seconds for each in later)
            self.stage(stage, kept)
            self.say(f"{stage.name:20} {self.outcomes[stage.name]}")

    def close(self) -> int:
        """Collect and print the results. Return how many stages failed."""
        paths = [self.out / f"{stage.name}.json" for stage in self.call.stages]
        results = load(path for path in paths if path.is_file())
        (self.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        self.say(f"\n{self.call.name} decides {self.call.decides}.")
        for result in results:
            for shape, rows in shapes(result).items():
                if text := ratio_line(rows):
                    self.say(f"{result['stem']}, {shape}:\n{text}")
            for name, why in result["skipped"].items():
                self.say(f"not measured: {name}: {why}")
        for name, outcome in self.outcomes.items():
            self.say(f"{name:20} {outcome}")
        return sum(not outcome.startswith(("ok", "not run")) for outcome in self.outcomes.values())


def main(argv: Sequence[str] | None = None) -> int:
    """Run a call or list the queue."""
    parser = argparse.ArgumentParser(
        "gpu_run.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--call", choices=list(CALLS))
    which.add_argument("--list", action="store_true", help="the queue, the next call first")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of the call (default: 9)")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels to install for this alone")
    parser.add_argument("--out", type=Path, help="where files go (default: bench-report/gpu-CALL)")
    parser.add_argument("--real-logits", type=Path, help="an .npz file with a model's head")
    parser.add_argument("--commit", help="what the results call the source (default: git's name)")
    parser.add_argument("--dry-run", action="store_true",
                        help="rehearse on the CPU: tiny sizes, nothing is compiled")  # fmt: skip
    arguments = parser.parse_args(argv)
    if arguments.list:
        print("\n".join(listed()))
        return 0
    if not arguments.minutes > 0:
        parser.error(f"--minutes is {arguments.minutes:g}. Expected more than 0.")
    if arguments.wheels is not None and not arguments.wheels.is_dir():
        parser.error(f"--wheels is {arguments.wheels}. Expected a folder.")
    if arguments.real_logits is not None and not arguments.real_logits.is_file():
        parser.error(f"--real-logits is {arguments.real_logits}. Expected a file.")
    if arguments.commit:
        os.environ["STORAGE_OPS_COMMIT"] = arguments.commit
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    call = CALLS[arguments.call]
    out = (arguments.out or ROOT / "bench-report" / f"gpu-{call.name}").resolve()
    file = str(arguments.real_logits.resolve()) if arguments.real_logits else ""
    with tempfile.TemporaryDirectory(prefix="gpu_run-") as site:
        run = Run(call, out, Path(site), arguments.minutes, arguments.dry_run, file)
        run.say(f"{call.name} decides {call.decides}.")
        try:
            if why := run.prepare(arguments.wheels):
                run.say(f"not run: {why}; log.txt has more")
                return 1
            run.stages()
        except KeyboardInterrupt:
            run.say("interrupted")
            run.close()
            return 128 + signal.SIGINT
        return run.close()


if __name__ == "__main__":
    sys.exit(main())
