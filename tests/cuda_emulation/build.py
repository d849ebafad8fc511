"""Compile CUDA sources for the CPU, into libraries whose ops run on CPU tensors."""

import ctypes
import fcntl
import functools
import hashlib
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from storage_ops import _schemas

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
KERNELS = [
    ROOT / f"cuda/{name}.cu"
    for name in ("linear_cross_entropy", "divergence", "scale", "tile_selection")
]
NAMESPACE = "storage_ops_emulated"

WARNINGS = ["-Wall", "-Wextra", "-Werror"]
# As with nvcc, its header comes first, pointers are cast as the hardware allows, and a product and
# its sum are rounded once. Variables start with a pattern, so that unwritten ones are noticed.
KERNEL = [
    "-x", "c++", "-include", "cuda_runtime.h", "-fno-strict-aliasing", "-march=native",
    "-ffp-contract=fast", "-Wno-unknown-pragmas", "-ftrivial-auto-var-init=pattern",
]  # fmt: skip
# Sanitizers for the kernels only, because they do not support the fibers that run the kernels. With
# "", an access that is not aligned for its type ends in a signal.
SANITIZERS = {
    "": ["-O1", "-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"],
    "thread": ["-O1", "-g", "-fsanitize=thread"],
    "address": ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
}
# Functions of torch and its CUDA library that kernels call. torch_cuda.cpp replaces them.
WRAPPED = [
    "aoti_torch_library_init_impl",
    "aoti_torch_get_current_cuda_stream",
    "aoti_torch_create_device_guard",
    "aoti_torch_delete_device_guard",
    "torch_c10_cuda_check_msg",
    "torch_c10_cuda_free_error_msg",
]


def why_not() -> str:
    """Return the reason why kernels cannot be emulated here, or an empty string."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return "the emulation is for Linux on x86-64"
    if not all(kernel.exists() for kernel in KERNELS):
        return "the sources of the kernels are not here"
    return "" if shutil.which("g++") else "there is no g++"


def _compile(folder: Path, kernels: Sequence[Path], sanitizer: str, namespace: str) -> Path:
    from build_tools.ninja_file import STABLE  # missing in a copy of the tests

    torch_folder = Path(torch.__file__).parent
    include = torch_folder / "include"
    common = [
        "g++", "-c", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-O2", *WARNINGS,
        STABLE, "-DUSE_CUDA", f"-DEMULATION_{sanitizer.upper() or 'PLAIN'}",
        f'-DEMULATION_NAMESPACE="{namespace}"', f"-I{HERE / 'include'}", f"-I{HERE}",
        f"-I{ROOT / 'csrc'}",
        f"-isystem{include}", f"-isystem{include / 'torch/csrc/api/include'}",
    ]  # fmt: skip
    units = [(HERE / name, []) for name in ("block.cpp", "torch_cuda.cpp")]
    units += [(kernel, [*KERNEL, *SANITIZERS[sanitizer]]) for kernel in kernels]
    objects = []
    for source, flags in units:
        objects.append(str(folder / f"{source.stem}.o"))
        subprocess.run([*common, *flags, str(source), "-o", objects[-1]], check=True)
    library = folder / "kernels.so"
    link = [f"-Wl,--wrap={name}" for name in WRAPPED]
    link += [f"-L{torch_folder / 'lib'}", "-Wl,--no-as-needed", "-ltorch_cpu"]
    link += SANITIZERS[sanitizer]
    subprocess.run(["g++", "-shared", "-o", str(library), *objects, *link], check=True)
    return library


def built(
    sanitizer: str = "", kernels: Sequence[Path] = KERNELS, namespace: str = NAMESPACE
) -> Path:
    """Return the library of some CUDA sources. Compile it if a source or header has changed."""
    sources = [*(ROOT / "csrc").rglob("*.h"), *HERE.rglob("*.h"), *HERE.rglob("*.cuh")]
    sources += [*HERE.glob("*.cpp"), HERE / "build.py", *kernels]
    sources += [header for kernel in kernels for header in kernel.parent.glob("*.cuh")]
    digest = hashlib.sha256(f"{torch.__version__} {namespace}".encode())
    for source in sorted(sources):
        digest.update(source.read_bytes())
    folder = ROOT / "build/cuda_emulation"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{sanitizer or 'plain'}-{digest.hexdigest()[:16]}.so"
    with open(folder / "lock", "w") as lock:  # one process compiles, others wait
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=folder) as work:
                _compile(Path(work), kernels, sanitizer, namespace).rename(target)
    return target


@functools.cache
def _schemas_in(namespace: str) -> torch.library.Library:
    library = torch.library.Library(namespace, "DEF")
    for name, schema in _schemas.SCHEMAS.items():
        library.define(name + schema)
    return library


def load(library: Path, namespace: str = NAMESPACE) -> ctypes.CDLL:
    """Load a library, and make its ops callable in the namespace that it was compiled for."""
    _schemas_in(namespace)
    torch.ops.load_library(library)
    return ctypes.CDLL(str(library))
