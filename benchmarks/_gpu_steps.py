"""What gpu_run.sh does besides benchmarks: `python -m benchmarks._gpu_steps STEP [ARGUMENT...]`.

Each step runs in a process of its own, under a time limit, and its exit status is its outcome.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
UNAVAILABLE = 75  # exit status: what the step needs is not here, which its last line names
TOOLS = ("torch", "ninja", "pybind11", "rich", "pytest", "hypothesis", "numpy")
PEERS = {
    "quack-kernels": "quack.linear_cross_entropy",
    "liger-kernel": "liger_kernel.transformers.functional",
    "liger-cute-kernels": "liger_cute_kernels",
    "cut-cross-entropy": "cut_cross_entropy",
}
ROWS = ["tests/cuda/test_row_kernel.py", "tests/cuda/test_divergence_rows.py"]
CORE = [*ROWS, "tests/cuda/test_storage.py", "tests/cuda/test_loss.py"]
# Files with tests of a GPU, and no others: these may import what a machine for a while lacks.
OTHERS = ["tests/cuda", "tests/graph/test_capture.py", "tests/memory/test_estimate_published.py"]
PYTEST = [
    sys.executable, "-m", "pytest", "-p", "benchmarks._failures_at_once", "--no-summary",
    "-p", "no:cacheprovider", "--continue-on-collection-errors", "-o", "faulthandler_timeout=60",
]  # fmt: skip


def facts() -> int:
    """The GPU, the compiler, and everything that torch's own collector of facts knows."""
    for command in (["nvidia-smi"], ["nvcc", "--version"]):
        if shutil.which(command[0]):
            subprocess.run(command, check=False)
        else:
            print(f"{command[0]} is not on the PATH")
    return subprocess.run([sys.executable, "-m", "torch.utils.collect_env"], check=False).returncode


def why_not(module: str) -> str:
    """Why a module does not import; empty if it does."""
    try:
        importlib.import_module(module)
    except Exception as error:  # a package without what it needs can fail in any way
        return f"{type(error).__name__}: {error}"
    return ""


def packages(site: str, wheels: str = "") -> int:
    """Install the wheels, and say of every tool and peer whether it is here."""
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps",
               "--no-compile", "--target", site, "--find-links", wheels]  # fmt: skip
    # One that is broken, or for another Python, must not keep the rest out. The rest goes in at
    # once: several may fill one folder, which pip would replace.
    good = []
    for name in sorted({path.name.split("-")[0] for path in Path(wheels or site).glob("*.whl")}):
        if subprocess.run([*install, "--dry-run", name], check=False).returncode == 0:
            good.append(name)
        else:
            print(f"not installed: {name}", flush=True)
    if good:
        subprocess.run([*install, *good], check=False)
    importlib.invalidate_caches()
    for name, module in PEERS.items():
        why = why_not(module)
        print(f"peer missing: {name}: {why}" if why else f"peer found: {name}")
    missing = {name: why for name in TOOLS if (why := why_not(name))}
    for name, why in missing.items():
        print(f"missing: {name}: {why}; put its wheel into the folder of --wheels")
    return int(bool(missing))


def why_not_prebuilt() -> str:
    """Why the libraries in storage_ops/lib do not serve here; empty if they do."""
    from build_tools import ninja_file

    info = ROOT / "storage_ops" / "lib" / "build_info.json"
    if not info.is_file():
        return "there are none"
    if json.loads(info.read_text()).get("sources") != ninja_file.digest_of_sources():
        return "they were built from other sources"
    command = [sys.executable, "-m", "storage_ops", "info", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    try:
        found = json.loads(done.stdout)
    except ValueError:
        return (done.stderr.strip().splitlines() or ["storage_ops does not import"])[-1]
    if found["problems"]:
        return " ".join(found["problems"])
    return "" if "libstorage_ops_cpu.so" in found["loaded"] else "they do not load"


def build() -> int:
    """Build the native libraries, unless storage_ops/lib has what this torch and GPU load."""
    why = why_not_prebuilt()
    if why:
        print(f"prebuilt libraries: {why}; building")
        import torch

        gpu = torch.cuda.is_available()
        arch = "{}.{}".format(*torch.cuda.get_device_capability()) if gpu else "9.0"
        environment = {**os.environ, "TORCH_CUDA_ARCH_LIST": arch, "FORCE_CUDA": "1"}
        command = [sys.executable, "setup.py", "-q", "egg_info", "build_ext", "--inplace"]
        if code := subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode:
            return code
        for log in ROOT.glob("build/native-*/libstorage_ops_cu*.o.log"):
            lines = re.findall(r".*(?:registers|spill).*", log.read_text())
            print("\n".join(f"{lines.count(line)} x {line}" for line in sorted(set(lines))))
    else:
        print("prebuilt libraries: loaded")
        # Entry points, by which torch.compile finds the backend.
        command = [sys.executable, "setup.py", "-q", "egg_info"]
        if code := subprocess.run(command, cwd=ROOT, check=False).returncode:
            return code
    return subprocess.run([sys.executable, "-m", "storage_ops", "info"], cwd=ROOT).returncode


def tests(which: str, junit: str, rehearse: str = "") -> int:
    """Run "core" or "others"; to rehearse, their bodies on the CPU, and kernels emulated there."""
    chosen = CORE if which == "core" else [*OTHERS, *(f"--ignore={path}" for path in CORE)]
    if rehearse and which == "core":
        chosen = [*chosen, "tests/cuda_emulation"]
        os.environ["CI"] = "1"  # a share of them
    command = [*PYTEST, f"--junit-xml={junit}", *([] if rehearse else ["-m", "cuda"]), *chosen]
    workers = 8
    if importlib.util.find_spec("xdist"):
        command += ["-n", str(workers)]
        os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // workers))
    else:
        print("pytest-xdist is not here: one process, and a test that hangs ends it")
    os.execvp(command[0], command)


def sanitize(tool: str, junit: str) -> int:
    """Run the tests of the row kernels under a tool of compute-sanitizer."""
    toolkit = Path(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc").resolve().parent
    program = shutil.which("compute-sanitizer") or shutil.which(toolkit / "compute-sanitizer")
    if program is None:
        print("compute-sanitizer is neither on the PATH nor beside nvcc")
        return UNAVAILABLE
    command = [program, "--tool", tool, "--error-exitcode", "99", "--target-processes", "all"]
    # What else shares memory is not ours to check. The other tools have to see what torch writes.
    if tool == "racecheck":
        command += ["--kernel-name", "kns=_rows"]
    command += [*PYTEST, "-v", f"--junit-xml={junit}", "-m", "cuda", *ROWS,
                "-k", "(plain or all) and not 50257 and not 128256"]  # fmt: skip
    # Without the cache every tensor is an allocation of its own, and its end is known.
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    os.execvp(command[0], command)


STEPS = {"facts": facts, "packages": packages, "build": build, "tests": tests, "sanitize": sanitize}

if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(STEPS[sys.argv[1]](*sys.argv[2:]))
