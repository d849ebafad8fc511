"""Test a wheel, away from this tree: `python -m build_tools.test_wheel [TORCH ...] [options]`.

For every torch minor (all that pyproject.toml names by default) a fresh environment is made, the
wheel in dist/ is installed into it, and its tests run from a copy that lies where no source does.
An environment has several gigabytes; it is removed afterwards. `--python` names an environment that
has torch and the test requirements already, into which nothing is installed. `--fallbacks` runs the
tests of the ops once more for every library that is taken away. Options of pytest follow `--`.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from build_tools.toolchain import MACHINE, ROOT

TESTS = ["tests", "-m", "not cuda", "-p", "no:cacheprovider"]
OPS = [
    "tests/storage",
    "tests/loss",
    "tests/matmul",
    "tests/test_opcheck.py",
    "tests/test_compile.py",
    "tests/test_library.py",
    "-m",
    "not cuda",
    "-p",
    "no:cacheprovider",
]
# Tests of the source tree, which a wheel does not hold.
OF_THE_TREE = ["packaging", "benchmarks", "test_house.py", "graph/test_docs.py"]
# A pytest plugin that stands in for a torch that cannot swap storages.
HIDE_SWAP = """
class Hidden:
    def __get__(self, instance, owner):
        raise AttributeError("hidden")
import torch
torch.UntypedStorage._swap_data_ptr_ = Hidden()
"""


def call(python: Path, *arguments: str, check: bool = False, **options: object) -> int:
    """Run an interpreter on arguments; its exit code."""
    return subprocess.run([str(python), *arguments], check=check, **options).returncode


def environment(torch: str, wheel: Path, folder: Path) -> Path:
    """A fresh environment with the wheel and a torch minor, as a user gets it; its interpreter."""
    call(Path(sys.executable), "-m", "venv", str(folder), check=True)
    python = folder / "bin/python"
    install = ["-m", "pip", "install", "--quiet", "--no-cache-dir"]
    call(python, *install, f"torch=={torch}.*", f"{wheel}[test]", check=True)
    return python


def overlay(python: Path, wheel: Path, folder: Path) -> Path:
    """The wheel unpacked by pip into a folder for PYTHONPATH, with copies of its tests beside."""
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--target", str(folder / "site"), str(wheel)], check=True)
    ignored = shutil.ignore_patterns("__pycache__", *map(os.path.basename, OF_THE_TREE))
    for name in ("tests", "benchmarks", "examples"):  # tests measure blocks, and run examples
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder / "site"


def situations(site: Path, minor: str) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Name -> libraries to take away and variables to set: each leads to the next path."""
    lib, cpu, alias = site / "storage_ops/lib", "libstorage_ops_cpu.so", "libstorage_ops_alias.so"
    binding = f"libstorage_ops_binding_{minor.replace('.', '_')}.so"
    saved = binding.replace("binding", "saved")
    here = [name for name in (cpu, binding, saved, alias) if (lib / name).exists()]
    here += sorted(path.name for path in lib.glob("libstorage_ops_cu*.so"))
    found: dict[str, tuple[list[str], dict[str, str]]] = {f"no {n}": ([n], {}) for n in here}
    found["no storage library"] = ([binding, alias], {})
    found["no swap in torch"] = ([binding], {"PYTEST_PLUGINS": "hide_swap"})
    found["nothing native"] = ([], {"STORAGE_OPS_DISABLE_NATIVE": "1"})
    return found


def run(python: Path, folder: Path, arguments: list[str], **variables: str) -> bool:
    """Say what is in use, then run the tests in `folder`; whether both were good."""
    env = {**os.environ, "PYTHONPATH": str(folder / "site"), **variables}
    show = "import hide_swap" if "PYTEST_PLUGINS" in variables else "pass"
    show += "\nimport json, storage_ops; print(json.dumps(storage_ops.info()))"
    answer = subprocess.run([str(python), "-c", show], env=env, cwd=folder, capture_output=True)
    if answer.returncode:
        print(answer.stderr.decode())
        return False
    info = json.loads(answer.stdout)
    keys = ("torch", "storage_path", "zero_copy", "guard", "row_kernel", "row_kernel_cuda")
    print("  ", {key: info[key] for key in (*keys, "problems")}, flush=True)
    return call(python, "-m", "pytest", *arguments, env=env, cwd=folder) == 0


def test(python: Path, wheel: Path, options: argparse.Namespace) -> bool:
    """Test a wheel in an environment; whether all was good."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        site = overlay(python, wheel, folder)
        (site / "hide_swap.py").write_text(HIDE_SWAP)
        say = "import torch; print(torch.__version__)"
        version = subprocess.check_output([str(python), "-c", say], text=True)
        print(f"torch {version.strip()}: {wheel.name}", flush=True)
        good = options.only_fallbacks or run(python, folder, [*TESTS, *options.pytest])
        if not (options.fallbacks or options.only_fallbacks):
            return good
        for what, (gone, variables) in situations(site, ".".join(version.split(".")[:2])).items():
            print(f"  {what}", flush=True)
            lib = site / "storage_ops/lib"
            kept = {n: (lib / n).read_bytes() for n in gone if (lib / n).exists()}
            for library in kept:
                (lib / library).unlink()
            good &= run(python, folder, [*OPS, *options.pytest], **variables)
            for library, content in kept.items():
                (lib / library).write_bytes(content)
    return good


def built() -> Path:
    """The wheel in dist/."""
    found = sorted((ROOT / "dist").glob(f"*_{MACHINE}.whl"))
    return found[-1] if found else sys.exit("dist/ holds no wheel: run `make wheel`")


def minors() -> list[str]:
    """The torch minors that the release workflow builds a binding for."""
    listed = re.search(r'BINDING_TORCHES = "(.+)"', (ROOT / "pyproject.toml").read_text())
    return listed[1].split()


def main(arguments: list[str]) -> bool:
    """Run the command line; whether all was good."""
    own, rest = arguments, []
    if "--" in arguments:
        own, rest = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    parser = argparse.ArgumentParser(prog="python -m build_tools.test_wheel", description=__doc__)
    parser.add_argument("torch", nargs="*", help="minors such as 2.10")
    parser.add_argument("--python", type=os.path.abspath, action="append", default=[])
    parser.add_argument("--fallbacks", action="store_true")
    parser.add_argument("--only-fallbacks", action="store_true")
    options = parser.parse_args(own)
    options.pytest = rest
    wheel = built()
    results = [test(python, wheel, options) for python in map(Path, options.python)]
    for torch in options.torch or ([] if options.python else minors()):
        (ROOT / "build").mkdir(exist_ok=True)  # gigabytes: not where temporary files go
        with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
            results.append(test(environment(torch, wheel, Path(folder)), wheel, options))
    return all(results)


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1:]))
