"""Find compilers, CUDA toolkits and torch headers for a build. It needs only Python."""

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
MACHINE = platform.machine()  # x86_64 or aarch64: libraries are built where they run
TARGET = (2, 10)  # the oldest torch whose stable ABI the kernel libraries use
PURE_WARNING = """
********************************************************************************
WARNING: storage_ops is built without its native libraries: {missing}.
It then uses plain torch operations, which are slower. Sharing a storage copies
its bytes, and reads of discarded tensors are not detected.
On Linux, install g++ (or set CXX) and install storage_ops again.
STORAGE_OPS_NO_NATIVE=0 makes this an error, STORAGE_OPS_NO_NATIVE=1 accepts it.
********************************************************************************
"""
Minor = tuple[int, ...]


def stop(missing: str) -> NoReturn:
    sys.exit(f"storage_ops cannot build its native libraries: {missing}")


def minor_of(version: str) -> Minor:
    return tuple(int(part) for part in version.split(".")[:2])


def installed_torch() -> Minor:
    """Return the minor of the installed torch, or () without one."""
    try:
        return minor_of(importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:
        return ()


def binding_torches() -> list[str]:
    """Return the minors for which to build a binding: the listed or the installed one."""
    listed = re.split(r"[\s,;]+", os.environ.get("STORAGE_OPS_BINDING_TORCHES", ""))
    listed = [entry for entry in listed if entry]
    for entry in listed:
        if not re.fullmatch(r"\d+\.\d+", entry) or minor_of(entry) < TARGET:
            stop(
                f"STORAGE_OPS_BINDING_TORCHES has {entry!r}. Expected minors from 2.10, such as "
                "'2.10 2.11'."
            )
    at_hand = [".".join(map(str, installed_torch()))] if installed_torch() >= TARGET else []
    return sorted(listed or at_hand, key=minor_of)


def headers_folder() -> Path:
    return Path(os.environ.get("STORAGE_OPS_TORCH_HEADERS", ROOT / "build/torch-headers"))


def torch_headers(minor: str) -> Path:
    """Return the include folder of the installed torch or of an unpacked one."""
    if installed_torch() == minor_of(minor):
        include = Path(importlib.util.find_spec("torch").origin).parent / "include"
    else:
        include = headers_folder() / minor / "include"
    version = include / "torch/headeronly/version.h"
    if not version.exists():
        stop(
            f"The headers of torch {minor} are not in {include}. Run `python -m "
            f"build_tools.torch_headers {minor}`."
        )
    parts = dict(re.findall(r"define TORCH_VERSION_(MAJOR|MINOR) (\d+)", version.read_text()))
    if f"{parts['MAJOR']}.{parts['MINOR']}" != minor:
        stop(f"{version} is of torch {parts['MAJOR']}.{parts['MINOR']}. Expected {minor}.")
    return include


def python_include() -> str:
    return sysconfig.get_paths()["include"]


def python_includes() -> list[str]:
    try:
        import pybind11
    except ImportError:
        stop("pybind11 is not installed. Run `pip install pybind11`.")
    return [python_include(), pybind11.get_include()]


def nvccs() -> dict[str, str]:
    """Return nvcc by CUDA major. CUDA_HOME may name several toolkits, separated as in PATH."""
    if os.environ.get("FORCE_CUDA") == "0":
        return {}
    homes = [home for home in os.environ.get("CUDA_HOME", "").split(os.pathsep) if home]
    wanted = [f"{home}/bin/nvcc" for home in homes] or ["nvcc"]
    tools = [tool for tool in map(shutil.which, wanted) if tool]
    tools = tools or [tool for tool in [shutil.which("/usr/local/cuda/bin/nvcc")] if tool]
    if not tools and os.environ.get("FORCE_CUDA") == "1":
        stop(
            "FORCE_CUDA is 1, but nvcc was not found on PATH, in CUDA_HOME or in /usr/local/cuda. "
            "Install the CUDA toolkit, or set CUDA_HOME."
        )
    return {cuda_version(tool).partition(".")[0]: tool for tool in reversed(tools)}


def version_of(tool: str, pattern: str) -> str:
    return re.search(pattern, subprocess.check_output([tool, "--version"], text=True))[1]


def cuda_version(nvcc: str) -> str:
    return version_of(nvcc, r"release ([\d.]+)")


def gpu_archs(nvcc: str) -> set[str]:
    """Return the GPUs for which a toolkit can compile: {"8.0", "9.0", ...}."""
    listed = subprocess.check_output([nvcc, "--list-gpu-arch"], text=True)
    return {f"{major}.{minor}" for major, minor in re.findall(r"compute_(\d+)(\d)\b", listed)}


def missing() -> str:
    """Return why nothing can be compiled here, or ""."""
    if not sys.platform.startswith("linux"):
        return f"its libraries are for Linux and this is {sys.platform}"
    return "" if _compiler() else "no C++ compiler was found"


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")


def compiler() -> str:
    return _compiler() or stop("No C++ compiler was found. Install g++ or set CXX.")


def ninja() -> str:
    beside_python = shutil.which("ninja", path=str(Path(sys.executable).parent))
    return (
        beside_python
        or shutil.which("ninja")
        or stop("ninja is not installed. Run `pip install ninja`.")
    )
