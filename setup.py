"""Build of storage_ops: five small native libraries, one ninja file, no import of torch.

Environment: FORCE_CUDA=0/1, TORCH_CUDA_ARCH_LIST, MAX_JOBS, NVCC_THREADS, DEBUG=1, CXX, CUDA_HOME,
STORAGE_OPS_NO_NATIVE=1 (pure Python), STORAGE_OPS_WERROR=1, STORAGE_OPS_SANITIZE=1 (ASan, UBSan).
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
TARGET = (2, 10)  # the oldest torch whose stable ABI the kernel libraries use
STABLE = "-DTORCH_TARGET_VERSION=0x020a000000000000"
ALIAS_TARGET = (2, 12)  # from here on torch can swap storages in Python
ALIAS_STABLE = "-DTORCH_TARGET_VERSION=0x020c000000000000"
ARCHS = "8.0;8.6;8.9;9.0;10.0;12.0+PTX"
HOST = "-std=c++20 -fPIC -fvisibility=hidden -Wall -Wextra"  # torch 2.15 headers need C++20
HOST_OPTIMISE = "-O3 -fno-math-errno -fno-trapping-math -fopenmp-simd"
SANITIZE = os.environ.get("STORAGE_OPS_SANITIZE") == "1"
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer"
DEVICE = "-O3 -std=c++17 --expt-relaxed-constexpr -lineinfo -cudart=static -Xptxas=-v"
DEVICE_HOST = "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall"


def stop(missing: str) -> None:
    sys.exit(f"storage_ops cannot build its native libraries: {missing}")


def torch_version() -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in importlib.metadata.version("torch").split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        return ()


def torch_root() -> Path:
    if torch_version() < TARGET:
        stop(
            "torch>=2.10 is not installed here; install it and use `pip install "
            "--no-build-isolation`, or set STORAGE_OPS_NO_NATIVE=1 for a pure-Python package."
        )
    return Path(importlib.util.find_spec("torch").origin).parent


def python_includes() -> list[str]:
    try:
        import pybind11
    except ImportError:
        stop("pybind11 is not installed; run `pip install pybind11`.")
    return [sysconfig.get_paths()["include"], pybind11.get_include()]


def nvcc() -> str | None:
    if os.environ.get("FORCE_CUDA") == "0":
        return None
    home = os.environ.get("CUDA_HOME")
    found = shutil.which(f"{home}/bin/nvcc" if home else "nvcc")
    found = found or shutil.which("/usr/local/cuda/bin/nvcc")
    if found is None and os.environ.get("FORCE_CUDA") == "1":
        stop("FORCE_CUDA=1 but nvcc was not found on PATH, in CUDA_HOME or in /usr/local/cuda.")
    return found


def version_of(tool: str, pattern: str) -> str:
    return re.search(pattern, subprocess.check_output([tool, "--version"], text=True))[1]


def gencode(archs: str) -> list[str]:
    flags = []
    for arch in archs.replace(";", " ").split():
        number = arch.removesuffix("+PTX").replace(".", "")
        for code in ("sm", "compute") if arch.endswith("+PTX") else ("sm",):
            flags.append(f"-gencode=arch=compute_{number},code={code}_{number}")
    return flags


class Native(Extension):
    """One native library: where it goes, what it is built from, which ABI it is allowed to use."""

    def __init__(self, name: str, source: str, macros: list[str], torch_libs: list[str]) -> None:
        super().__init__(f"storage_ops.{name}", [source])
        self.macros, self.torch_libs, self.stem = macros, torch_libs, name.rpartition(".")[2]


def natives() -> list[Extension]:
    if os.environ.get("STORAGE_OPS_NO_NATIVE") == "1":
        return []
    libs = [
        Native("_build_info", "csrc/build_info.cpp", [], []),
        Native("lib.libstorage_ops_cpu", "csrc/linear_cross_entropy.cpp", [STABLE], ["torch_cpu"]),
    ]
    if torch_version() >= TARGET:
        name = "lib.libstorage_ops_binding_{}_{}".format(*torch_version())
        libs.append(Native(name, "csrc/storage_binding.cpp", [], ["torch_cpu", "c10"]))
    if torch_version() >= ALIAS_TARGET:
        name = "lib.libstorage_ops_alias"
        libs.append(Native(name, "csrc/storage_alias.cpp", [ALIAS_STABLE], ["torch_cpu"]))
    if nvcc():
        name = f"lib.libstorage_ops_cu{version_of(nvcc(), r'release ([0-9]+)')}"
        macros, needs = [STABLE, "-DUSE_CUDA"], ["torch_cpu", "torch_cuda"]
        libs.append(Native(name, "cuda/linear_cross_entropy.cu", macros, needs))
    return libs


class BuildNative(build_ext):
    archs = os.environ.get("TORCH_CUDA_ARCH_LIST", ARCHS)

    def get_ext_filename(self, fullname: str) -> str:
        if "libstorage_ops" in fullname:  # holds no Python symbols: no CPython tag
            return f"{fullname.replace('.', os.sep)}.so"
        return super().get_ext_filename(fullname)

    def build_extensions(self) -> None:
        beside_python = shutil.which("ninja", path=str(Path(sys.executable).parent))
        if (ninja := beside_python or shutil.which("ninja")) is None:
            stop("ninja is not installed; run `pip install ninja`.")
        kind = "sanitize" if SANITIZE else "native"
        build = ROOT / "build" / f"{kind}-{sys.implementation.cache_tag}"
        build.mkdir(parents=True, exist_ok=True)
        self.write_ninja(build)
        jobs = os.environ.get("MAX_JOBS", str(os.cpu_count()))
        subprocess.run([ninja, "-C", str(build), "-j", jobs], check=True)
        for ext in self.extensions:
            target = Path(self.get_ext_fullpath(ext.name))
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(build / f"{ext.stem}.so", target)
        base = ROOT if self.editable_mode else Path(self.build_lib)
        twin = base / "storage_ops/lib/build_info.json"
        twin.parent.mkdir(parents=True, exist_ok=True)
        twin.write_text(json.dumps(self.build_info(), indent=1) + "\n")

    def build_info(self) -> dict[str, str]:
        cuda = nvcc()
        return {
            "version": self.distribution.get_version(),
            "compiler": version_of(self.cxx, r"(.+)"),
            "cuda": version_of(cuda, r"release ([\d.]+)") if cuda else "",
            "cuda_archs": self.archs if cuda else "",
            "torch_target": "{}.{}".format(*TARGET),
            "torch_built_with": importlib.metadata.version("torch"),
        }

    @property
    def cxx(self) -> str:
        found = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
        return found or stop("no C++ compiler was found; install g++ or set CXX.")

    def write_ninja(self, build: Path) -> None:
        torch, cuda = torch_root(), nvcc()
        werror, debug = (os.environ.get(k) == "1" for k in ("STORAGE_OPS_WERROR", "DEBUG"))
        macros = [f"'-DSTORAGE_OPS_{k.upper()}=\"{v}\"'" for k, v in self.build_info().items()]
        python = [f"-isystem {p}" for p in python_includes()] + macros
        system = [f"-isystem {torch}/include -isystem {torch}/include/torch/csrc/api/include"]
        host = ["-O0 -g" if debug else HOST_OPTIMISE, "-Werror" if werror else ""]
        host += [f"-ffile-prefix-map={ROOT}/="]  # error messages name files of the source tree
        host += [f"{SANITIZERS} -g -O1"] if SANITIZE else []
        device = [DEVICE, *gencode(self.archs), "-Werror=all-warnings" if werror else ""]
        device += [DEVICE_HOST, f"--threads={os.environ.get('NVCC_THREADS', '2')}"]
        common = f"-I{ROOT}/csrc $flags -c $in -o $out"
        link = SANITIZERS if SANITIZE else "" if debug else "-Xlinker -s"
        depfile = "  depfile = $out.d\n  deps = gcc"
        lines = [
            "rule cxx",
            f"  command = {self.cxx} -MMD -MF $out.d {HOST} {' '.join(host)} {common}",
            depfile,
            "rule nvcc",  # the log keeps what ptxas says of registers and spills
            f"  command = {cuda} -MD -MF $out.d {' '.join(device + system)} {common} "
            "> $out.log 2>&1 || (cat $out.log; exit 1)",
            depfile,
            "rule link",
            f"  command = $linker -shared {link} $in -o $out -L{torch}/lib -L{build} $libs",
            # Stands in for the library of a CUDA torch, so that any torch can link the kernels.
            "rule stub",
            f"  command = {self.cxx} -shared -Wl,-soname,$out -x c++ /dev/null -o $out",
            "build libtorch_cuda.so: stub",
        ]
        for ext in self.extensions:
            source, on_gpu = ROOT / ext.sources[0], ext.sources[0].endswith(".cu")
            includes = [] if on_gpu else system if ext.torch_libs else python
            lines += [
                f"build {ext.stem}.o: {'nvcc' if on_gpu else 'cxx'} {source}",
                f"  flags = {' '.join([*ext.macros, *includes])}",
                f"build {ext.stem}.so: link {ext.stem}.o | libtorch_cuda.so",
                f"  libs = {' '.join(f'-l{lib}' for lib in ext.torch_libs)}",
                f"  linker = {f'{cuda} -cudart=static' if on_gpu else self.cxx}",
            ]
        (build / "build.ninja").write_text("\n".join(lines) + "\n")


setup(ext_modules=natives(), cmdclass={"build_ext": BuildNative})
