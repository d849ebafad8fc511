"""Stand-ins for libc, libm, libgcc and libstdc++ with only the symbols of a manylinux policy.

`python -m build_tools.old_glibc FOLDER` fills FOLDER and prints the LDFLAGS that use it. Then a
machine newer than manylinux_2_28 builds libraries that load on systems of that age. A stand-in has
every symbol of the real library, in the newest version that the policy allows. Symbols that the
policy's libstdc++ or libgcc lack come from the static library, as in the manylinux images. Headers
are those of the machine. Builds inside the images do not need this module.
"""

import functools
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

from build_tools.toolchain import MACHINE, compiler

POLICY = "manylinux_2_28"
SYMBOL = re.compile(
    r"\s+\d+: \w+\s+(\w+) (\w+)\s+(GLOBAL|WEAK|UNIQUE)\s+\w+\s+(?!UND)\w+ ([^\s@]+)@+(\S+)"
)
PARTS = {"pthread": 0, "dl": 2, "rt": 1}  # now in libc, separate libraries in the policy
LOADER = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}[MACHINE]
# The header of libstdc++ reads this variable of glibc 2.32. False means that there may be threads.
COMPAT = '__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;'


@functools.cache
def allowed() -> dict[str, set[str]]:
    """Return the versions in the policy by family, such as GLIBC."""
    package = Path(importlib.util.find_spec("auditwheel").origin).parent
    policies = json.loads((package / "policy/manylinux-policy.json").read_text())
    (policy,) = (policy for policy in policies if policy["name"] == POLICY)
    return {family: set(names) for family, names in policy["symbol_versions"][MACHINE].items()}


def order(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def symbols(library: str) -> dict[str, tuple[str, str, int]]:
    """Return the symbols that a library defines: name -> (newest allowed version, type, size)."""
    listed = subprocess.check_output(["readelf", "-W", "--dyn-syms", library], text=True)
    defined: dict[str, tuple[str, str, int]] = {}
    for size, kind, _, name, version in SYMBOL.findall(listed):
        family, _, number = version.partition("_")
        known = number in allowed().get(family, ()) and kind in ("FUNC", "IFUNC", "OBJECT", "TLS")
        if known and (name not in defined or order(defined[name][0]) < order(version)):
            defined[name] = (version, kind, int(size, 0))
    return defined


def stand_in(real: str, folder: Path) -> Path:
    """Return a shared library with the name, symbols and versions of `real`, and without code."""
    soname, offered = Path(real).name, symbols(real)
    lines = []
    for index, (name, (version, kind, size)) in enumerate(sorted(offered.items())):
        section = {"TLS": '.section .tbss,"awT",@nobits', "OBJECT": ".bss"}.get(kind, ".text")
        label, of = f"s{index}", {"TLS": "tls_object", "OBJECT": "object"}.get(kind, "function")
        lines += [section, f".globl {label}", f".type {label},@{of}", f"{label}: .zero {size or 1}"]
        lines += [f".size {label},{size}", f".symver {label},{name}@@{version},remove"]
    source, script = folder / f"{soname}.s", folder / f"{soname}.map"
    source.write_text("\n".join(lines) + '\n.section .note.GNU-stack,"",@progbits\n')
    versions = sorted({version for version, _, _ in offered.values()}, key=order)
    script.write_text("".join(f"{version} {{}};\n" for version in versions))
    target = folder / soname
    flags = ["-shared", "-nostdlib", f"-Wl,-soname,{soname}", f"-Wl,--version-script={script}"]
    subprocess.run([compiler(), *flags, str(source), "-o", str(target)], check=True)
    return target


def make(folder: Path) -> str:
    """Fill `folder`. Return the LDFLAGS that use it."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)

    def real(name: str) -> str:
        flag = f"-print-file-name={name}"
        return subprocess.check_output([compiler(), flag], text=True).strip()

    (folder / "compat.c").write_text(COMPAT + "\n")
    archive = ["ar", "rcs", str(folder / "libcompat.a"), str(folder / "compat.o")]
    source = ["-x", "c", "-c", str(folder / "compat.c"), "-o", str(folder / "compat.o")]
    subprocess.run([compiler(), "-fPIC", *source], check=True)
    subprocess.run(archive, check=True)
    names = ("libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", LOADER)
    libc, libm, cxx, gcc, loader = (stand_in(real(name), folder) for name in names)
    compat = folder / "libcompat.a"
    scripts = {
        "libc.so": f"{libc} {compat} {real('libc_nonshared.a')} AS_NEEDED({loader})",
        "libm.so": f"{libm}",
        "libstdc++.so": f"{cxx} {real('libstdc++.a')}",
        "libgcc_s.so": f"{gcc} {real('libgcc.a')}",
        **{f"lib{name}.so": real(f"lib{name}.so.{n}") for name, n in PARTS.items()},
    }
    for name, inputs in scripts.items():
        (folder / name).write_text(f"INPUT({inputs})\n")
    return f"-L{folder} -Xlinker --exclude-libs -Xlinker ALL"


if __name__ == "__main__":
    print(make(Path(sys.argv[1])))
