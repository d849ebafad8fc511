"""Tests a wheel outside this tree: `python -m build_tools.test_wheel [TORCH ...] [options]`.

For every torch minor (by default all in pyproject.toml), it creates a new environment and installs
the wheel in dist/ into it. The wheel's tests run from a copy in a folder without sources. An
environment has several gigabytes and is removed afterwards. `--python` names an environment with
torch and the test requirements, into which nothing is installed. `--fallbacks` repeats the tests of
the ops without each of the libraries. Options of pytest follow `--`.
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
# Tests of the source tree, which a wheel does not contain.
OF_THE_TREE = ["packaging", "benchmarks", "test_house.py", "graph/test_docs.py"]
# A pytest plugin that simulates a torch without swaps of storages.
HIDE_SWAP = """
class Hidden:
    def __get__(self, instance, owner):
        raise AttributeError("hidden")
import torch
torch.UntypedStorage._swap_data_ptr_ = Hidden()
"""


def call(python: Path, *arguments: str, check: bool = False, **options: object) -> int:
    """Run an interpreter with arguments. Return its exit code."""
    return subprocess.run([str(python), *arguments], check=check, **options).returncode


def environment(torch: str, wheel: Path, folder: Path) -> Path:
    """Create an environment with the wheel and a torch minor, as a user would.

    Return its interpreter.
    """
    call(Path(sys.executable), "-m", "venv", str(folder), check=True)
    python = folder / "bin/python"
    install = ["-m", "pip", "install", "--quiet", "--no-cache-dir"]
    call(python, *install, f"torch=={torch}.*", f"{wheel}[test]", check=True)
    return python


def overlay(python: Path, wheel: Path, folder: Path) -> Path:
    """Unpack the wheel by pip into a folder for PYTHONPATH, together with copies of its tests."""
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--target", str(folder / "site"), str(wheel)], check=True)
    ignored = shutil.ignore_patterns("__pycache__", *map(os.path.basename, OF_THE_TREE))
    for name in ("tests", "benchmarks", "examples"):  # tests import benchmarks and run examples
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder / "site"


def situations(site: Path, minor: str) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Return for each name the libraries to remove and variables to set.

    Each uses the next path.
    """
    lib, cpu, alias = site / "storage_ops/lib", "libstorage_ops_cpu.so", "libstorage_ops_alias.so"
    binding = f"libstorage_ops_binding_{minor.replace('.', '_')}.so"
    saved = binding.replace("binding", "saved")
    names = [name for name in (cpu, binding, saved, alias) if (lib / name).exists()]
    names += sorted(path.name for path in lib.glob("libstorage_ops_cu*.so"))
    cases: dict[str, tuple[list[str], dict[str, str]]] = {f"no {n}": ([n], {}) for n in names}
    cases["no storage library"] = ([binding, alias], {})
    cases["no swap in torch"] = ([binding], {"PYTEST_PLUGINS": "hide_swap"})
    cases["nothing native"] = ([], {"STORAGE_OPS_DISABLE_NATIVE": "1"})
    return cases


def run(python: Path, folder: Path, arguments: list[str], **variables: str) -> bool:
    """Print the paths in use, then run the tests in `folder`. Return True if both succeeded."""
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
    """Test a wheel in an environment. Return True if everything succeeded."""
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
    """Return the wheel in dist/."""
    wheels = sorted((ROOT / "dist").glob(f"*_{MACHINE}.whl"))
    return wheels[-1] if wheels else sys.exit("dist/ holds no wheel: run `make wheel`")


def minors() -> list[str]:
    """Return the torch minors for which the release workflow builds a binding."""
    listed = re.search(r'BINDING_TORCHES = "(.+)"', (ROOT / "pyproject.toml").read_text())
    return listed[1].split()


def main(arguments: list[str]) -> bool:
    """Run the command line. Return True if everything succeeded."""
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
        (ROOT / "build").mkdir(exist_ok=True)  # too large for the folder of temporary files
        with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
            results.append(test(environment(torch, wheel, Path(folder)), wheel, options))
    return all(results)


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1:]))
