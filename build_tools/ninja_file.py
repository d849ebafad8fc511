"""Writes the ninja file of the native libraries. Every flag of every compiler is here.

Paths in it are relative to the source tree or removed by a mapping, so that builds in two folders
have the same bytes.
"""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from build_tools.toolchain import (
    ROOT,
    TARGET,
    gpu_archs,
    python_include,
    python_includes,
    torch_headers,
)

STABLE = "-DTORCH_TARGET_VERSION=0x020a000000000000"
ALIAS_TARGET = (2, 12)  # from here on torch can swap storages in Python
ALIAS_STABLE = "-DTORCH_TARGET_VERSION=0x020c000000000000"
ARCHS = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
HOST = "-std=c++20 -fPIC -fvisibility=hidden -Wall -Wextra"  # torch 2.15 headers need C++20
OPTIMISE = "-O3 -fno-math-errno -fno-trapping-math -fopenmp-simd"
SANITIZERS = {
    "address": "-fsanitize=address,undefined -fno-sanitize-recover=undefined",
    "thread": "-fsanitize=thread",
}
DEVICE = "-O3 -std=c++17 --expt-relaxed-constexpr -lineinfo -cudart=static -Xptxas=-v"
DEVICE_HOST = "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall"
STUBS = ("torch_cpu", "torch_cuda", "torch_python", "c10")
DEPFILE = "  depfile = $out.d\n  deps = gcc"
assert STABLE.endswith("{:02x}{:02x}000000000000".format(*TARGET))


def on(variable: str) -> bool:
    return os.environ.get(variable) == "1"


def sanitizer() -> str:
    """Return the value of STORAGE_OPS_SANITIZE: a key of `SANITIZERS`, or ""."""
    name = os.environ.get("STORAGE_OPS_SANITIZE", "")
    if name and name not in SANITIZERS:
        raise SystemExit(
            f"STORAGE_OPS_SANITIZE is {name}. Expected one of {', '.join(SANITIZERS)}."
        )
    return name


def digest_of_sources() -> str:
    """Return a digest of the libraries' sources and flags. A new digest requires a new build."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in sorted([*(ROOT / "csrc").rglob("*"), *(ROOT / "cuda").iterdir()]):
        if path.is_file():
            digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def archs(nvccs: Iterable[str]) -> str:
    """Return the GPUs to compile for. The default is those of ARCHS that all toolkits support."""
    if listed := os.environ.get("TORCH_CUDA_ARCH_LIST"):
        return listed
    known = [gpu_archs(nvcc) for nvcc in nvccs]
    return ";".join(arch for arch in ARCHS if all(arch in each for each in known)) + "+PTX"


def gencode(listed: str) -> list[str]:
    flags = []
    for arch in listed.replace(";", " ").split():
        number = arch.removesuffix("+PTX").replace(".", "")
        for code in ("sm", "compute") if arch.endswith("+PTX") else ("sm",):
            flags.append(f"-gencode=arch=compute_{number},code={code}_{number}")
    return flags


def rules(cxx: str, gpus: str) -> list[str]:
    debug, werror = map(on, ("DEBUG", "STORAGE_OPS_WERROR"))
    sanitize = SANITIZERS.get(sanitizer(), "")
    host = [HOST, "-O0 -g -fopenmp-simd" if debug else OPTIMISE, "-Werror" if werror else ""]
    host += [f"{sanitize} -fno-omit-frame-pointer -g -O1"] if sanitize else []
    device = [DEVICE, *gencode(gpus), "-Werror=all-warnings" if werror else ""]
    device += [DEVICE_HOST, f"--threads={os.environ.get('NVCC_THREADS', '2')}"]
    common = "-I../../csrc -I../../cuda $flags -c $in -o $out"
    link = sanitize or ("" if debug else "-Xlinker -s")
    return [
        "rule cxx",  # error messages name files of the source tree
        f"  command = {cxx} -MMD -MF $out.d -ffile-prefix-map=../../= {' '.join(host)} {common}",
        DEPFILE,
        "rule nvcc",  # the log contains ptxas's numbers of registers and spills
        f"  command = $nvcc -MD -MF $out.d {' '.join(device)} {common} "
        "> $out.log 2>&1 || (cat $out.log; exit 1)",
        DEPFILE,
        "rule link",  # the stubs define nothing, so the linker must not drop unneeded libraries
        f"  command = $linker -shared {link} $in -o $out {os.environ.get('LDFLAGS', '')} "
        "-L. -Xlinker --no-as-needed $libs",
        # Replaces a library of torch, so that a build needs only torch's headers.
        "rule stub",
        f"  command = {cxx} -shared -Wl,-soname,$out -x c++ /dev/null -o $out",
        *(f"build lib{name}.so: stub" for name in STUBS),
    ]


def includes(ext) -> list[str]:
    if not ext.torch:
        return [f"-isystem {path}" for path in python_includes()]
    include = torch_headers(ext.torch)
    mapping = f"-ffile-prefix-map={include}=torch"
    flags = [f"-isystem {include} -isystem {include}/torch/csrc/api/include"]
    if "torch_python" in ext.torch_libs:
        flags.append(f"-isystem {python_include()}")
    return [*flags, f"-Xcompiler={mapping}" if ext.nvcc else mapping]


def write(build, extensions, cxx: str, info: dict[str, str]) -> None:
    """Write `build`/build.ninja. Every extension becomes `build`/STEM.so."""
    facts = [f"'-DSTORAGE_OPS_{key.upper()}=\"{value}\"'" for key, value in info.items()]
    lines = rules(cxx, info["cuda_archs"])
    for ext in extensions:
        macros = ext.macros if ext.torch else facts
        objects = {f"{ext.stem}-{Path(source).stem}.o": source for source in ext.sources}
        for name, source in objects.items():
            lines += [
                f"build {name}: {'nvcc' if ext.nvcc else 'cxx'} ../../{source}",
                f"  flags = {' '.join([*macros, *includes(ext)])}",
                f"  nvcc = {ext.nvcc}",
            ]
        stubs = " ".join(f"lib{name}.so" for name in STUBS)
        lines += [
            f"build {ext.stem}.so: link {' '.join(objects)} | {stubs}",
            f"  libs = {' '.join(f'-l{lib}' for lib in ext.torch_libs)}",
            f"  linker = {f'{ext.nvcc} -cudart=static' if ext.nvcc else cxx}",
        ]
    (build / "build.ninja").write_text("\n".join(lines) + "\n")
