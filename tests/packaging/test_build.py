"""The package builds without torch or from prebuilt libraries, and says what it lacks."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pybind11
import pytest
import setuptools

from build_tools import toolchain

ROOT = Path(__file__).parents[2]
SOURCE = ["setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md", "CHANGELOG.md",
          "CONTRIBUTING.md", "Makefile", "storage_ops", "storage_ops_plan.py", "csrc", "cuda",
          "build_tools", "requirements"]  # fmt: skip
INFO = {"compiler": "g++", "cuda": "", "cuda_archs": "", "torch_target": "2.10",
        "torch_built_with": "9.9", "bindings": "2.10 9.9"}  # fmt: skip


@pytest.fixture
def tree(tmp_path):
    """Return a copy of the source and a Python that has only setuptools."""
    ignore = shutil.ignore_patterns("*.so", "__pycache__", "lib")
    for name in SOURCE:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / "src" / name, ignore=ignore)
        else:
            (tmp_path / "src").mkdir(exist_ok=True)
            shutil.copy(source, tmp_path / "src" / name)
    packages = Path(setuptools.__file__).parents[1]
    (tmp_path / "site").mkdir()
    for package in [*packages.glob("setuptools*"), packages / "_distutils_hack"]:
        (tmp_path / "site" / package.name).symlink_to(package)
    return tmp_path


def run_setup(tree, *arguments, **environment):
    """Run setup.py. Ignore the options of builds that this process inherits."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("STORAGE_OPS_")}
    return subprocess.run(
        [sys.executable, "-S", "setup.py", "-q", *arguments],
        cwd=tree / "src",
        env={**inherited, "PYTHONPATH": str(tree / "site"), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_sdist_without_torch_contains_everything_for_a_build(tree):
    result = run_setup(tree, "sdist", "-d", str(tree / "dist"))
    assert result.returncode == 0, result.stderr
    (archive,) = (tree / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    for folder in ("build_tools", "csrc", "cuda", "storage_ops"):
        for path in (tree / "src" / folder).rglob("*"):
            if path.is_file() and path.suffix != ".pyc":
                assert str(path.relative_to(tree / "src")) in names


def test_pure_python_wheel_without_torch(tree):
    result = run_setup(tree, "bdist_wheel", "-d", str(tree / "dist"), STORAGE_OPS_NO_NATIVE="1")
    assert result.returncode == 0, result.stderr
    (wheel,) = (tree / "dist").glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"storage_ops/py.typed", "storage_ops_plan.py"} <= set(names)
    assert not any(name.endswith(".so") for name in names)
    assert built(wheel)["pure"] == "STORAGE_OPS_NO_NATIVE=1" and "WARNING" not in result.stderr


def built(wheel):
    return json.loads(zipfile.ZipFile(wheel).read("storage_ops/lib/build_info.json"))


def test_an_editable_installation_is_a_path_that_type_checkers_follow(tree):
    """Type checkers read paths in .pth files but do not run import hooks."""
    folder = tree / "dist"
    result = run_setup(tree, "editable_wheel", "-d", str(folder), STORAGE_OPS_NO_NATIVE="1")
    assert result.returncode == 0, result.stderr
    (wheel,) = folder.glob("*.whl")
    opened = zipfile.ZipFile(wheel)
    (path_file,) = [name for name in opened.namelist() if name.endswith(".pth")]
    assert Path(opened.read(path_file).decode().strip()).samefile(tree / "src")
    assert not [name for name in opened.namelist() if name.endswith(".py")]  # no import hook


def test_a_build_without_a_compiler_is_pure_python_and_says_so(tree):
    (tree / "bin").mkdir()
    no_compiler = {"PATH": str(tree / "bin"), "CXX": ""}
    result = run_setup(tree, "bdist_wheel", "-d", str(tree / "dist"), **no_compiler)
    assert result.returncode == 0, result.stderr
    said = "WARNING: storage_ops is built without its native libraries: no C++ compiler was found."
    assert result.stderr.count(said) == 1 and "On Linux, install g++" in result.stderr
    assert "Traceback" not in result.stderr
    (wheel,) = (tree / "dist").glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert built(wheel)["pure"] == "no C++ compiler was found"
    result = run_setup(tree, "build_ext", STORAGE_OPS_NO_NATIVE="0", **no_compiler)
    assert "cannot build its native libraries" in result.stderr


def test_the_message_of_a_pure_build_replaces_facts_of_an_earlier_build(tree):
    """An editable installation leaves the facts of its libraries in the tree."""
    stale = tree / "src/storage_ops/lib/build_info.json"
    stale.parent.mkdir()
    stale.write_text(json.dumps({**INFO, "version": "0.0.0"}))
    result = run_setup(tree, "bdist_wheel", "-d", str(tree / "dist"), STORAGE_OPS_NO_NATIVE="1")
    assert result.returncode == 0, result.stderr
    (wheel,) = (tree / "dist").glob("*.whl")
    assert set(built(wheel)) == {"version", "pure"}


def test_a_build_on_other_systems_than_linux_is_pure_python(monkeypatch):
    monkeypatch.setattr("sys.platform", "win32")
    assert toolchain.missing() == "its libraries are for Linux and this is win32"


def test_a_native_build_without_torch_says_so_in_one_sentence(tree):
    result = run_setup(tree, "build_ext")
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert "torch>=2.10 is not installed here" in last and "--no-build-isolation" in last


@pytest.mark.in_turn
def test_prebuilt_libraries_are_used_unchanged(tree):
    """Only the module of this CPython is compiled, without torch."""
    (tree / "site/pybind11").symlink_to(Path(pybind11.__file__).parent)
    libs = tree / "libs"
    libs.mkdir()
    environment = {"STORAGE_OPS_PREBUILT_LIBS": str(libs)}
    assert "has no build_info.json" in run_setup(tree, "build", **environment).stderr
    (libs / "build_info.json").write_text(json.dumps({**INFO, "version": "0.0.0"}))
    assert "is of version 0.0.0. Expected" in run_setup(tree, "build", **environment).stderr
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    (libs / "build_info.json").write_text(json.dumps({**INFO, "version": version[1]}))
    (libs / "libstorage_ops_cpu.so").write_bytes(content := os.urandom(64))
    result = run_setup(tree, "build", "--build-lib", str(tree / "out"), **environment)
    assert result.returncode == 0, result.stderr
    built = tree / "out/storage_ops"
    assert (built / "lib/libstorage_ops_cpu.so").read_bytes() == content
    assert json.loads((built / "lib/build_info.json").read_text())["bindings"] == "2.10 9.9"
    (module,) = built.glob("_build_info*.so")
    spec = importlib.util.spec_from_file_location("_build_info", module)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    assert loaded.bindings == "2.10 9.9" and loaded.version == version[1]
    result = run_setup(tree, "build_ext", "--inplace", **environment)
    assert result.returncode == 0, result.stderr
    lib = tree / "src/storage_ops/lib"
    assert (lib / "libstorage_ops_cpu.so").read_bytes() == content
    assert json.loads((lib / "build_info.json").read_text())["bindings"] == "2.10 9.9"


def test_forcing_cuda_without_nvcc_says_so(tree):
    if shutil.which("/usr/local/cuda/bin/nvcc"):
        environment = {"FORCE_CUDA": "0"}  # nvcc exists, and the variable must still be accepted
        assert "torch>=2.10" in run_setup(tree, "build_ext", **environment).stderr
    else:
        result = run_setup(tree, "build_ext", FORCE_CUDA="1", PATH="/usr/bin", CUDA_HOME="")
        assert "FORCE_CUDA is 1, but nvcc was not found" in result.stderr


LOGS = sorted((ROOT / "build").glob("native-*/*.log"))


@pytest.mark.skipif(not LOGS, reason="no CUDA code was compiled in this tree (no nvcc)")
@pytest.mark.parametrize("path", LOGS, ids=[path.stem for path in LOGS])
def test_cuda_kernels_are_compiled_for_every_gpu_and_spill_no_registers(path):
    log, ninja = path.read_text(), path.with_name("build.ninja").read_text()
    wanted = set(re.findall(r"code=sm_(\d+)", ninja))
    assert wanted and set(re.findall(r"for 'sm_(\d+)'", log)) == wanted
    kernels = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert kernels and set(kernels) == {("0", "0")}
    assert "warning" not in log
