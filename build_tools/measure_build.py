"""Hold the build to its budget: `python -m build_tools.measure_build [--cuda]`.

Builds two copies of the tree: the libraries must come out equal byte for byte, in another place
too, but for that of CUDA: nvcc names internal things by the path. A clean build on two cores must
take under a minute (with --cuda: two architectures, five minutes) and 2 GB, and one changed file
under ten seconds. Exits with 1 otherwise. Seconds are of the clock, for an idle machine; the
processor seconds beside them hold on a busy one too.
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
    """A copy of the sources and of the Python package, without what was built."""
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
    """What the processes that this one started have used, on all cores."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def build(tree: Path, **variables: str) -> tuple[float, dict[str, str]]:
    """Build a tree; the seconds it took, and library -> hash. Prints what the processors did."""
    started, out, before = time.monotonic(), tree / "out", processor_seconds()
    command = [sys.executable, "setup.py", "-q", "build", "--build-lib", str(out)]
    env = {**os.environ, "MAX_JOBS": "2", **variables}
    subprocess.run(command, cwd=tree, env=env, check=True, capture_output=True)
    seconds = time.monotonic() - started
    print(f"  {processor_seconds() - before:.1f} processor seconds")
    found = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in out.rglob("*.so")}
    return seconds, found


def main() -> bool:
    """Measure and print; whether everything was within the budget."""
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
