"""Builds storage_ops: a few small native libraries, one ninja file, no import of torch.

Environment: FORCE_CUDA=0/1, TORCH_CUDA_ARCH_LIST, CUDA_HOME, MAX_JOBS, NVCC_THREADS, DEBUG=1, CXX,
LDFLAGS, STORAGE_OPS_NO_NATIVE=1 (pure Python) or 0 (never), STORAGE_OPS_WERROR=1,
STORAGE_OPS_SANITIZE, STORAGE_OPS_BINDING_TORCHES, STORAGE_OPS_TORCH_HEADERS and
STORAGE_OPS_PREBUILT_LIBS, explained in docs/installing.md. The flags of the compilers are in
build_tools/ninja_file.py.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # setuptools runs this file without its folder in the path

from build_tools import ninja_file, toolchain  # noqa: E402
from build_tools.toolchain import minor_of, stop  # noqa: E402

NO_NATIVE = "STORAGE_OPS_NO_NATIVE=1"
PREBUILT = os.environ.get("STORAGE_OPS_PREBUILT_LIBS")


class Native(Extension):
    """A native library: its place, its sources, and the torch and ABI that it may use."""

    def __init__(self, name, sources, torch="", macros=(), torch_libs=(), nvcc=""):
        super().__init__(f"storage_ops.{name}", sources.split())
        self.torch, self.macros, self.torch_libs = torch, macros, torch_libs
        self.nvcc, self.stem = nvcc, name.rpartition(".")[2]


def kernels() -> list[Native]:
    """Return the libraries that use no Python or its stable ABI, which every CPython can load."""
    minors = toolchain.binding_torches()
    if PREBUILT or not minors:
        return []  # an sdist needs no torch, and a build stops below
    newest, cpu = (
        minors[-1],
        " ".join(
            f"csrc/rows/{name}.cpp"
            for name in ("linear_cross_entropy", "divergence", "tile_selection")
        ),
    )
    if (ROOT / "csrc/products").is_dir():  # otherwise torch's products are used
        cpu += " csrc/products/products.cpp"
    libs = [Native("lib.libstorage_ops_cpu", cpu, newest, [ninja_file.STABLE], ["torch_cpu"])]
    for minor in minors:
        end, needs = minor.replace(".", "_"), ["torch_cpu", "c10"]
        binding = "csrc/storage/storage_binding.cpp"
        saved = " ".join(
            f"csrc/checkpoint/{name}.cpp"
            for name in (
                "saved_tensors",
                "call_in",
                "checksum",
                "copied_buffers",
                "default_hooks",
                "discarding",
                "kept_inputs",
                "plain_region",
                "saved_results",
                "snapshot",
                "state",
                "walk",
            )
        )
        libs.append(Native(f"lib.libstorage_ops_binding_{end}", binding, minor, [], needs))
        if not sysconfig.get_config_var("Py_GIL_DISABLED"):  # it has no stable ABI
            needs = ["torch_python", *needs]
            libs.append(Native(f"lib.libstorage_ops_saved_{end}", saved, minor, [], needs))
    if minor_of(newest) >= ninja_file.ALIAS_TARGET:
        name, macros = "lib.libstorage_ops_alias", [ninja_file.ALIAS_STABLE]
        libs.append(Native(name, "csrc/storage/storage_alias.cpp", newest, macros, ["torch_cpu"]))
    for major, nvcc in toolchain.nvccs().items():
        name, needs = f"lib.libstorage_ops_cu{major}", ["torch_cpu", "torch_cuda"]
        macros = [ninja_file.STABLE, "-DUSE_CUDA"]
        cuda = Native(
            name,
            "cuda/linear_cross_entropy.cu cuda/divergence.cu cuda/scale.cu cuda/tile_selection.cu",
            newest,
            macros,
            needs,
            nvcc,
        )
        libs.append(cuda)
    return libs


def why_pure() -> str:
    """Return why nothing is compiled, or "" if it is compiled.

    The reason is STORAGE_OPS_NO_NATIVE=1, or a missing tool. With STORAGE_OPS_NO_NATIVE=0, which
    `make` sets, a missing tool is an error.
    """
    wanted = os.environ.get("STORAGE_OPS_NO_NATIVE", "")
    if wanted == "1":
        return NO_NATIVE
    return "" if wanted == "0" else toolchain.missing()


PURE = why_pure()


def natives() -> list[Native]:
    """Return the libraries to compile."""
    return [] if PURE else [Native("_build_info", "csrc/build_info.cpp"), *kernels()]


class BuildPython(build_py):
    def run(self) -> None:
        """Also record why the package is pure Python, for `python -m storage_ops info`."""
        super().run()
        if PURE:
            base = ROOT if self.editable_mode else Path(self.build_lib)
            info = {"version": self.distribution.get_version(), "pure": PURE}
            write_build_info(base, info)
            if PURE != NO_NATIVE:
                print(toolchain.PURE_WARNING.format(missing=PURE), file=sys.stderr, flush=True)


def write_build_info(base: Path, info: dict[str, str]) -> None:
    lib = base / "storage_ops/lib"
    lib.mkdir(parents=True, exist_ok=True)
    (lib / "build_info.json").write_text(json.dumps(info, indent=1) + "\n")


class BuildNative(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        if "libstorage_ops" in fullname:  # without Python symbols, so without a CPython tag
            return f"{fullname.replace('.', os.sep)}.so"
        return super().get_ext_filename(fullname)

    def build_extensions(self) -> None:
        info, cxx, ninja = self.build_info(), toolchain.compiler(), toolchain.ninja()
        kind = ninja_file.sanitizer() or "native"
        build = ROOT / "build" / f"{kind}-{sys.implementation.cache_tag}{sys.abiflags}"
        build.mkdir(parents=True, exist_ok=True)
        ninja_file.write(build, self.extensions, cxx, info)
        jobs = os.environ.get("MAX_JOBS", str(os.cpu_count()))
        subprocess.run([ninja, "-C", str(build), "-j", jobs], check=True)
        for ext in self.extensions:
            target = Path(self.get_ext_fullpath(ext.name))
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(build / f"{ext.stem}.so", target)
        self.complete(Path(self.build_lib))

    def copy_extensions_to_source(self) -> None:
        """Finish --inplace and an editable installation."""
        self.complete(ROOT)
        super().copy_extensions_to_source()

    def complete(self, base: Path) -> None:
        """Add files that are not built here to the folder of the libraries."""
        write_build_info(base, self.build_info())
        if PREBUILT:
            for path in sorted(Path(PREBUILT).glob("lib*.so")):
                shutil.copy2(path, base / "storage_ops/lib")

    def build_info(self) -> dict[str, str]:
        version = self.distribution.get_version()
        if PREBUILT:
            twin = Path(PREBUILT) / "build_info.json"
            if not twin.exists():
                stop(
                    f"STORAGE_OPS_PREBUILT_LIBS is {PREBUILT}, which has no build_info.json. "
                    "Expected a folder of built libraries."
                )
            info = json.loads(twin.read_text())
            if info["version"] != version:
                stop(f"{twin} is of version {info['version']}. Expected {version}.")
            return info
        nvccs = list(toolchain.nvccs().values())
        if not (minors := toolchain.binding_torches()):
            stop(
                "torch>=2.10 is not installed here. Install it and use `pip install "
                "--no-build-isolation`. Or set STORAGE_OPS_NO_NATIVE=1 for a pure-Python package."
            )
        return {
            "version": version,
            "compiler": toolchain.version_of(toolchain.compiler(), r"(.+)"),
            "cuda": " ".join(map(toolchain.cuda_version, nvccs)),
            "cuda_archs": ninja_file.archs(nvccs) if nvccs else "",
            "torch_target": "{}.{}".format(*toolchain.TARGET),
            "torch_built_with": minors[-1],
            "bindings": " ".join(minors),
            "sources": ninja_file.digest_of_sources(),
        }


setup(ext_modules=natives(), cmdclass={"build_ext": BuildNative, "build_py": BuildPython})
