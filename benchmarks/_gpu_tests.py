"""Runs and counts tests that need a GPU: `python -m benchmarks._gpu_tests -- PYTEST_ARGUMENT...`.

With --tool they run under a tool of compute-sanitizer, and its findings are counted. A rehearsal on
a CPU only collects the tests. The exit status is that of the tests.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks._harness import ROOT, finish, parser, skip

PYTEST = [
    sys.executable, "-m", "pytest", "-p", "benchmarks._failures_at_once", "--no-summary",
    "-p", "no:cacheprovider", "--continue-on-collection-errors", "-o", "faulthandler_timeout=60",
    "-m", "cuda",
]  # fmt: skip
FINDING = re.compile(r"^========= (?!COMPUTE-SANITIZER|\w+ SUMMARY|No attached)(\S.*)$")
WORKERS = 8


def under(tool: str) -> list[str] | None:
    """Return the command that runs another one under a tool, or None if there is no sanitizer."""
    beside = Path(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc").parent / "compute-sanitizer"
    program = shutil.which("compute-sanitizer") or shutil.which(beside)
    if program is None:
        return None
    command = [program, "--tool", tool, "--error-exitcode", "99", "--target-processes", "all"]
    # Other libraries may share memory as they like. The other tools must see the writes of torch.
    return [*command, "--kernel-name", "kns=_rows"] if tool == "racecheck" else command


def run(arguments: argparse.Namespace, junit: Path) -> tuple[int, Counter[str]]:
    """Run the tests. Return the exit status and the findings of the sanitizer."""
    command = [*PYTEST, f"--junit-xml={junit}", *arguments.arguments]
    environment = dict(os.environ)
    if arguments.device == "cpu":
        command += ["--collect-only"]
    elif arguments.tool:
        tool = under(arguments.tool)
        if tool is None:
            skip(arguments.tool, "compute-sanitizer is neither on the PATH nor beside nvcc")
            return 1, Counter()
        # Without the cache, every tensor is a separate allocation with a known end.
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        command = [*tool, *command, "-v"]
    elif importlib.util.find_spec("xdist"):
        command += ["-n", str(WORKERS)]
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // WORKERS))
    findings: Counter[str] = Counter()
    # At the end of its time, a stage gets an interrupt, and the tests too. They still report.
    signal.signal(signal.SIGINT, lambda *_: None)
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            findings.update(FINDING.findall(line))
    return process.returncode, findings


def rows(arguments: argparse.Namespace, codes: list[int]) -> Iterator[dict[str, Any]]:
    """Yield the numbers of passed, failed and skipped tests, and of errors of the sanitizer."""
    shape = f"{arguments.tool or 'pytest -m cuda'}: {' '.join(arguments.arguments)}"
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        code, findings = run(arguments, junit)
        codes.append(code)
        if junit.is_file():
            suite = next(ElementTree.parse(junit).iter("testsuite"))
            counts = {name: int(suite.get(name, 0)) for name in ("failures", "errors", "skipped")}
            passed = int(suite.get("tests", 0)) - sum(counts.values())
            for case, count in {"passed": passed, **counts}.items():
                yield {"shape": shape, "case": case, "tests": count}
    for text, count in findings.most_common():
        yield {"shape": shape, "case": text, "findings": count}


def main() -> None:
    """Run the tests, write the rows and print them."""
    options = parser(__doc__)
    options.add_argument("--tool", help="memcheck, racecheck, initcheck or synccheck")
    options.add_argument("arguments", nargs="+", help="arguments of pytest, after --")
    arguments = options.parse_args()
    codes: list[int] = []
    finish(f"tests_{arguments.tool or 'cuda'}", rows(arguments, codes), arguments)
    sys.exit(codes[0])


if __name__ == "__main__":
    main()
