"""Build of storage_ops: five small native libraries, one ninja file, no import of torch.

Environment: FORCE_CUDA=0/1, TORCH_CUDA_ARCH_LIST, MAX_JOBS, NVCC_THREADS, DEBUG=1, CXX, CUDA_HOME,
STORAGE_OPS_NO_NATIVE=1 (pure-Python wheel), STORAGE_OPS_WERROR=1 (warnings are errors).
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
PACKAGE = "storage_ops"
TARGET = (2, 10)  # the oldest torch whose stable ABI the kernel libraries use
ALIAS_TARGET = (2, 12)  # from here on torch can swap storages in Python
ARCHS = "8.0;8.6;8.9;9.0;10.0;12.0+PTX"


def stop(missing: str) -> None:
    sys.exit(f"storage_ops cannot build its native libraries: {missing}")


def torch_version() -> tuple[int, int] | None:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None


def torch_root() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        stop(
            "torch is not installed here; install torch>=2.10 and use `pip install "
            "--no-build-isolation`, or set STORAGE_OPS_NO_NATIVE=1 for a pure-Python package."
        )
    if (torch_version() or TARGET) < TARGET:
        stop(f"torch {importlib.metadata.version('torch')} is too old; torch>=2.10 is needed.")
    return Path(spec.submodule_search_locations[0])


def nvcc() -> str | None:
    if os.environ.get("FORCE_CUDA") == "0":
        return None
    home = os.environ.get("CUDA_HOME")
    found = shutil.which("nvcc", path=f"{home}/bin" if home else None)
    found = found or shutil.which("/usr/local/cuda/bin/nvcc")
    if found is None and os.environ.get("FORCE_CUDA") == "1":
        stop("FORCE_CUDA=1 but nvcc was not found on PATH, in CUDA_HOME or in /usr/local/cuda.")
    return found


def first_line(command: list[str], pattern: str) -> str:
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    match = re.search(pattern, text)
    return match[1] if match else text.splitlines()[0]


def version_macro(version: tuple[int, int]) -> str:
    return f"-DTORCH_TARGET_VERSION=0x{version[0]:02x}{version[1]:02x}000000000000"


def gencode(archs: str) -> list[str]:
    flags = []
    for arch in re.split(r"[;\s]+", archs.strip("; ")):
        number = arch.removesuffix("+PTX").replace(".", "")
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if arch.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


class Native(Extension):
    """One native library: where it goes, what it is built from, which ABI it is allowed to use."""

    def __init__(self, name: str, source: str, macros: list[str], torch_libs: list[str]) -> None:
        super().__init__(f"{PACKAGE}.{name}", [source])
        self.macros, self.torch_libs, self.stem = macros, torch_libs, name.rpartition(".")[2]


def natives() -> list[Extension]:
    if os.environ.get("STORAGE_OPS_NO_NATIVE") == "1":
        return []
    stable = [version_macro(TARGET)]
    libs = [
        Native("_build_info", "csrc/build_info.cpp", [], []),
        Native("lib.libstorage_ops_cpu", "csrc/linear_cross_entropy.cpp", stable, ["torch_cpu"]),
    ]
    torch = torch_version()
    if torch:
        name = f"lib.libstorage_ops_binding_{torch[0]}_{torch[1]}"
        libs.append(Native(name, "csrc/storage_binding.cpp", [], ["torch_cpu", "c10"]))
    if torch and torch >= ALIAS_TARGET:
        macros = [version_macro(ALIAS_TARGET)]
        alias = "lib.libstorage_ops_alias"
        libs.append(Native(alias, "csrc/storage_alias.cpp", macros, ["torch_cpu"]))
    if nvcc():
        major = first_line([nvcc(), "--version"], r"release (\d+)")
        source, macros = "cuda/linear_cross_entropy.cu", [*stable, "-DUSE_CUDA"]
        cuda_libs = ["torch_cpu", "torch_cuda"]
        libs.append(Native(f"lib.libstorage_ops_cu{major}", source, macros, cuda_libs))
    return libs


class BuildNative(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        if "libstorage_ops" in fullname:  # holds no Python symbols: no CPython tag
            return f"{fullname.replace('.', os.sep)}.so"
        return super().get_ext_filename(fullname)

    def build_extensions(self) -> None:
        ninja = shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent))
        if ninja is None:
            stop("ninja is not installed; run `pip install ninja`.")
        if importlib.util.find_spec("pybind11") is None:
            stop("pybind11 is not installed; run `pip install pybind11`.")
        build = ROOT / "build" / f"native-{sys.implementation.cache_tag}"
        build.mkdir(parents=True, exist_ok=True)
        self.write_ninja(build)
        jobs = os.environ.get("MAX_JOBS")
        subprocess.run([ninja, "-C", str(build), *(["-j", jobs] if jobs else [])], check=True)
        for ext in self.extensions:
            target = Path(self.get_ext_fullpath(ext.name))
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(build / f"{ext.stem}.so", target)
        here = ROOT if self.editable_mode else Path(self.build_lib)
        folder = here / PACKAGE / "lib"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "build_info.json").write_text(json.dumps(self.build_info(), indent=1) + "\n")

    def build_info(self) -> dict[str, str]:
        cuda = nvcc()
        return {
            "version": self.distribution.get_version(),
            "compiler": first_line([self.cxx, "--version"], r"(.+)"),
            "cuda": first_line([cuda, "--version"], r"release ([\d.]+)") if cuda else "",
            "cuda_archs": os.environ.get("TORCH_CUDA_ARCH_LIST", ARCHS) if cuda else "",
            "torch_target": "{}.{}".format(*TARGET),
            "torch_built_with": importlib.metadata.version("torch"),
        }

    @property
    def cxx(self) -> str:
        found = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
        return found or stop("no C++ compiler was found; install g++ or set CXX.")

    def write_ninja(self, build: Path) -> None:
        import sysconfig

        import pybind11

        torch, debug = torch_root(), os.environ.get("DEBUG") == "1"
        optimise = ["-O0", "-g"] if debug else ["-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd"]
        werror = os.environ.get("STORAGE_OPS_WERROR") == "1"
        warn = ["-Wall", "-Wextra", *(["-Werror"] if werror else [])]
        headers = [torch / "include", torch / "include/torch/csrc/api/include"]
        system = [f"-isystem {p}" for p in headers]
        host = [*optimise, "-std=c++17", "-fPIC", "-fvisibility=hidden", *warn, f"-I{ROOT}/csrc"]
        host += [f"-ffile-prefix-map={ROOT}/="]  # error messages name files of the source tree
        device = ["-O3", "-std=c++17", f"-I{ROOT}/csrc", "-Xcompiler=-fPIC,-fvisibility=hidden"]
        device += ["-Xcompiler=-Wall", "-Xptxas=-v", "-lineinfo", "-cudart=static"]
        device += ["-Werror=all-warnings"] if werror else []
        device += [f"--threads={os.environ.get('NVCC_THREADS', '2')}"]
        device += gencode(os.environ.get("TORCH_CUDA_ARCH_LIST", ARCHS))
        info = self.build_info()
        info_macros = [f'-DSTORAGE_OPS_{k.upper()}="{v}"' for k, v in info.items()]
        python = [f"-isystem {sysconfig.get_paths()['include']}"]
        python += [f"-isystem {pybind11.get_include()}", *(f"'{m}'" for m in info_macros)]
        lines = [
            f"rule cxx\n  command = {self.cxx} -MMD -MF $out.d {' '.join(host)} $flags -c $in -o $out",
            "  depfile = $out.d\n  deps = gcc",
            f"rule nvcc\n  command = {nvcc()} -MD -MF $out.d {' '.join(device + system)} $flags "
            "-c $in -o $out > $out.log 2>&1 || (cat $out.log; exit 1)\n  depfile = $out.d\n  deps = gcc",
            f"rule link\n  command = {self.cxx} -shared -s $in -o $out -L{torch}/lib -L{build} $libs",
            f"rule stub\n  command = {self.cxx} -shared -Wl,-soname,$soname -x c++ /dev/null -o $out",
            "build libtorch_cuda.so: stub\n  soname = libtorch_cuda.so",
        ]
        for ext in self.extensions:
            source, cuda = ROOT / ext.sources[0], ext.sources[0].endswith(".cu")
            includes = [] if cuda else system if ext.torch_libs else python
            libs = [f"-l{lib}" for lib in ext.torch_libs]
            if cuda:
                toolkit = Path(nvcc()).resolve().parents[1]
                libs += [f"-L{toolkit}/lib64 -L{toolkit}/lib -lcudart_static -ldl -lrt -lpthread"]
            lines += [
                f"build {ext.stem}.o: {'nvcc' if cuda else 'cxx'} {source}",
                f"  flags = {' '.join([*ext.macros, *includes])}",
                f"build {ext.stem}.so: link {ext.stem}.o | libtorch_cuda.so",
                f"  libs = {' '.join(libs)}",
            ]
        (build / "build.ninja").write_text("\n".join(lines) + "\n")


setup(ext_modules=natives(), cmdclass={"build_ext": BuildNative})
