"""Checks the budget of the build: `python -m build_tools.measure_build [--cuda]`.

It builds two copies of the tree in two folders. The libraries must be byte-equal, except that of
CUDA, because nvcc names internal symbols by the path. A clean build on two cores must take under a
minute and 2 GB, and with --cuda, for two architectures, under five minutes. A build with one
changed file must take under ten seconds. Otherwise the exit code is 1. Seconds are wall time on an
idle machine. The processor seconds are also valid on a busy machine.
"""

import argparse
import hashlib
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from build_tools.toolchain import ROOT

NEEDED = ["setup.py", "pyproject.toml", "README.md", "LICENSE", "build_tools", "csrc", "cuda"]
ARCHS = "8.0;9.0"
MOST_SECONDS, MOST_SECONDS_CUDA, MOST_SECONDS_AGAIN, MOST_BYTES = 60, 300, 10, 2_000_000_000


def copy(folder: Path) -> Path:
    """Copy the sources and the Python package, without build products. Return the folder."""
    built = shutil.ignore_patterns("*.so", "__pycache__", "lib")
    for name in [*NEEDED, "storage_ops"]:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=built)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, folder)
    return folder


def processor_seconds() -> float:
    """Return the processor seconds of child processes on all cores."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def build(tree: Path, **variables: str) -> tuple[float, dict[str, str]]:
    """Build a tree.

    Return its seconds and the hash of each library. Print processor use.
    """
    started, out, before = time.monotonic(), tree / "out", processor_seconds()
    command = [sys.executable, "setup.py", "-q", "build", "--build-lib", str(out)]
    env = {**os.environ, "MAX_JOBS": "2", **variables}
    subprocess.run(command, cwd=tree, env=env, check=True, capture_output=True)
    seconds = time.monotonic() - started
    print(f"  {processor_seconds() - before:.1f} processor seconds")
    digests = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in out.rglob("*.so")}
    return seconds, digests


def main() -> bool:
    """Measure and print. Return True if everything is within the budget."""
    parser = argparse.ArgumentParser(prog="python -m build_tools.measure_build")
    parser.add_argument("--cuda", action="store_true", help=f"also for the GPUs {ARCHS}")
    cuda = parser.parse_args().cuda
    variables = {"FORCE_CUDA": str(int(cuda)), "TORCH_CUDA_ARCH_LIST": ARCHS}
    good = True

    def judge(what: str, value: float, most: float, unit: str) -> None:
        nonlocal good
        good &= value <= most
        print(f"{what:<40} {value:8.1f} {unit} of {most:g}", flush=True)

    with tempfile.TemporaryDirectory() as name:
        one = copy(Path(name) / "one")
        seconds, first = build(one, **variables)
        judge("clean build", seconds, MOST_SECONDS_CUDA if cuda else MOST_SECONDS, "s")
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        judge("largest process", peak / 1e6, MOST_BYTES / 1e6, "MB")
        for source in (
            "csrc/rows/linear_cross_entropy.cpp",
            "csrc/storage/storage_binding.cpp",
            "csrc/checkpoint/saved_tensors.cpp",
            "csrc/checkpoint/saved_results.cpp",
        ):
            with (one / source).open("a") as file:
                file.write("\n// changed\n")
            seconds, _ = build(one, **variables)
            judge(f"again, {source} changed", seconds, MOST_SECONDS_AGAIN, "s")
        shutil.rmtree(one)
        two = copy(one if cuda else Path(name) / "a" / "longer" / "place")
        seconds, second = build(two, **{**variables, "MAX_JOBS": "1"})
        print(f"{'clean build with MAX_JOBS=1':<40} {seconds:8.1f} s", flush=True)
        different = sorted(n for n in first.keys() | second.keys() if first.get(n) != second.get(n))
        print(f"{len(first)} libraries, different when built again: {different or 'none'}")
    return good and not different


if __name__ == "__main__":
    sys.exit(not main())
