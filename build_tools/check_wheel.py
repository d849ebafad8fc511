"""Checks wheels: `python -m build_tools.check_wheel dist/*.whl` prints their faults.

It checks the tag, the size, the requirements, the contents, and the imports of every library.
Stable libraries may import only functions of torch's stable ABI in 2.10. All libraries may need
only versions of glibc and libstdc++ that the platform tag allows. The exit code is 1 for a bad
wheel.
"""

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

from build_tools import sbom
from build_tools.old_glibc import POLICY, allowed
from build_tools.toolchain import MACHINE

MOST_BYTES = 20_000_000
MODULE = re.compile(rf"storage_ops/_build_info\.cpython-3(\d+t?)-{MACHINE}-linux-gnu\.so")
TORCH_SYMBOL = re.compile(r"(aoti_torch|torch)_\w+")
# For each library, the functions of torch's C ABI in the oldest torch that it supports.
ABI = Path(__file__).parent / "torch_abi"
STABLE = {"libstorage_ops_cpu": "2.10", "libstorage_ops_cu": "2.10", "libstorage_ops_alias": "2.12"}


def imports(library: Path) -> list[tuple[str, str, str]]:
    """Return a library's imports: kind ("U", or "w" and "v" if optional), name, version or ""."""
    command = ["nm", "-D", "--undefined-only", "--with-symbol-versions", str(library)]
    listed = subprocess.check_output(command, text=True)
    matches = re.findall(r"^\s+([UwvV]) ([^\s@]+)(?:@+(\S+))?", listed, re.MULTILINE)
    return [(kind, name, version) for kind, name, version in matches]


def abi_of(library: Path) -> set[str] | None:
    """Return the functions of torch that a stable library may import, or None for another one."""
    for prefix, minor in STABLE.items():
        if re.fullmatch(rf"{prefix}\d*", library.stem):
            return set((ABI / f"{minor}.txt").read_text().split())
    return None


def wrong_imports(library: Path) -> Iterator[str]:
    """Yield imports of a stable library from neither torch's stable ABI nor the C runtime."""
    functions = abi_of(library)
    for kind, name, version in imports(library) if functions is not None else ():
        if TORCH_SYMBOL.fullmatch(name):
            if name not in functions:
                yield f"{library.name} imports {name}, which the oldest torch for it lacks"
        elif not re.match(r"(GLIBC|GLIBCXX|CXXABI|GCC|GOMP|OMP)_", version) and kind == "U":
            yield f"{library.name} imports {name}, which is not of the stable ABI"


def wrong_versions(library: Path) -> Iterator[str]:
    """Yield imports of a library that are newer than the platform tag allows."""
    for _, name, version in imports(library):
        family, _, number = version.partition("_")
        if family in allowed() and number not in allowed()[family]:
            yield f"{library.name} imports {name}@{version}, too new for {POLICY}"


def cpythons(names: list[str]) -> list[str]:
    """Return the CPythons for which a wheel has a module, such as "3.14t"."""
    return sorted((f"3.{m[1]}" for name in names if (m := MODULE.fullmatch(name))), key=len)


def wrong_contents(
    wheel: Path, names: list[str], metadata: str, info: dict[str, str]
) -> Iterator[str]:
    """Yield missing and forbidden files and requirements of a wheel."""
    headers = Parser().parsestr(metadata)
    if "+" in headers["Version"]:
        yield f"the version {headers['Version']} has a local tag"
    pins = [r for r in headers.get_all("Requires-Dist", []) if re.match(r"torch\W", r)]
    if pins != ["torch>=2.10"]:
        yield f"requires {pins}; expected torch>=2.10 and nothing closer"
    if (size := wheel.stat().st_size) > MOST_BYTES:
        yield f"has {size} bytes; expected at most {MOST_BYTES}"
    if POLICY not in wheel.name:
        yield f"has no {POLICY} tag"
    if "-py3-none-" not in wheel.name:
        yield "is not for every CPython"
    libraries = ["cpu", "alias"] + [f"cu{v.partition('.')[0]}" for v in info["cuda"].split()]
    minors = [minor.replace(".", "_") for minor in info["bindings"].split()]
    libraries += [f"{kind}_{minor}" for kind in ("binding", "saved") for minor in minors]
    expected = {f"storage_ops/lib/libstorage_ops_{name}.so" for name in libraries}
    expected |= {"storage_ops/py.typed", "storage_ops/lib/build_info.json"}
    present = {n for n in names if n.endswith(".so")} | (expected & set(names))
    if not cpythons(names):
        yield "has no module of any CPython"
    expected |= {name for name in names if MODULE.fullmatch(name)}
    yield from (f"lacks {name}" for name in sorted(expected - present))
    yield from (f"has {name}, which belongs to no build" for name in sorted(present - expected))
    if not any(name.endswith(sbom.NAME) for name in names):
        yield f"lacks {sbom.NAME}"
    yield from (f"has {n}" for n in names if not re.match(r"storage_ops([-/]|_plan\.py$)", n))


def check(wheel: Path) -> list[str]:
    """Return all faults of a wheel."""
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        info = json.loads(archive.read("storage_ops/lib/build_info.json"))
        faults = list(wrong_contents(wheel, names, archive.read(metadata).decode(), info))
        for name in names:
            if name.endswith(".so"):
                library = Path(archive.extract(name, folder))
                faults += [*wrong_imports(library), *wrong_versions(library)]
    return faults


def report(wheel: Path) -> bool:
    """Print the faults of a wheel. Return True if there are none."""
    problems = check(wheel)
    size = f"{wheel.stat().st_size / 1e6:.1f} MB"
    with zipfile.ZipFile(wheel) as archive:
        modules = f"modules of CPython {', '.join(cpythons(archive.namelist()))}"
    print(f"{wheel.name}: {size}, {modules}", *(problems or ["good"]), sep="\n  ")
    return not problems


if __name__ == "__main__":
    reports = [report(Path(name)) for name in sys.argv[1:]]
    sys.exit(not all(reports))
