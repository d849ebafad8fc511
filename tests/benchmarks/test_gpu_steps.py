"""What gpu_run.sh does besides benchmarks: which libraries it takes, which packages it names."""

import json
import re
import zipfile
from types import SimpleNamespace

import pytest

from benchmarks import _gpu_steps
from build_tools import ninja_file

DIGEST = ninja_file.digest_of_sources()


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A tree with libraries, and what was run in it; `said` is what info says there."""
    said = {"loaded": ["libstorage_ops_cpu.so"], "problems": []}
    ran = []

    def run(command, **options):
        ran.append(command)
        return SimpleNamespace(returncode=0, stdout=json.dumps(said), stderr="")

    lib = tmp_path / "storage_ops" / "lib"
    lib.mkdir(parents=True)
    (lib / "build_info.json").write_text(json.dumps({"sources": DIGEST}))
    monkeypatch.setattr(_gpu_steps, "ROOT", tmp_path)
    monkeypatch.setattr(_gpu_steps.subprocess, "run", run)
    return SimpleNamespace(said=said, ran=ran, info=lib / "build_info.json")


def was_built(tree):
    assert _gpu_steps.build() == 0
    return any("build_ext" in command for command in tree.ran)


def test_libraries_that_load_are_taken(tree, capsys):
    assert not was_built(tree) and "prebuilt libraries: loaded" in capsys.readouterr().out


@pytest.mark.parametrize(
    "said, why",
    [
        ({"problems": ["no kernels for CUDA 13 are loaded."]}, "no kernels for CUDA 13"),
        ({"loaded": []}, "they do not load"),
        ({"problems": ["torch does not import: x"], "loaded": []}, "torch does not import: x"),
    ],
)
def test_libraries_that_do_not_load_are_built_again(tree, capsys, said, why):
    tree.said.update(said)
    assert was_built(tree) and why in capsys.readouterr().out


def test_libraries_of_other_sources_are_built_again(tree, capsys):
    tree.info.write_text(json.dumps({"sources": DIGEST[::-1]}))
    assert was_built(tree) and "built from other sources" in capsys.readouterr().out
    tree.info.unlink()
    assert was_built(tree) and "there are none" in capsys.readouterr().out


def test_the_digest_is_of_every_source_and_flag(tmp_path, monkeypatch):
    for folder in ("csrc/rows", "cuda"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setattr(ninja_file, "ROOT", tmp_path)
    found = {ninja_file.digest_of_sources()}
    for name, text in (("csrc/a.h", "1"), ("csrc/a.h", "2"), ("cuda/a.h", "2"), ("csrc/b.h", ""),
                       ("csrc/rows/a.h", "2"), ("csrc/rows/b.h", "")):  # fmt: skip
        (tmp_path / name).write_text(text)
        found.add(ninja_file.digest_of_sources())
    assert len(found) == 7


def wheel(folder, name, module):
    """A wheel of one file, of a folder that others may fill too."""
    about = f"{name}-1.0.dist-info"
    files = {
        f"shared_by_wheels/{module}.py": "",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{file},,\n" for file in [*files, f"{about}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for file, text in {**files, f"{about}/RECORD": record}.items():
            archive.writestr(file, text)


@pytest.mark.in_turn
def test_packages_are_installed_or_named(tmp_path, capfd):
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    (wheels / "broken-1.0-py3-none-any.whl").write_text("no wheel")
    wheel(wheels, "first", "one")
    wheel(wheels, "second", "two")
    assert _gpu_steps.packages(str(site), str(wheels)) == 0
    assert {path.name for path in site.glob("shared_by_wheels/*")} == {"one.py", "two.py"}
    printed = capfd.readouterr().out
    assert "not installed: broken\n" in printed and printed.count("not installed") == 1
    for peer in ("quack-kernels", "liger-kernel", "liger-cute-kernels", "cut-cross-entropy"):
        assert f"peer missing: {peer}: " in printed or f"peer found: {peer}" in printed


def test_a_missing_tool_fails_and_is_named(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(_gpu_steps, "TOOLS", ("pytest", "no_such_tool"))
    assert _gpu_steps.packages(str(tmp_path)) == 1
    assert "missing: no_such_tool: ModuleNotFoundError" in capfd.readouterr().out


@pytest.fixture
def executed(monkeypatch):
    """The command that a step becomes, instead of becoming it."""
    found = []
    monkeypatch.setattr(_gpu_steps.os, "execvp", lambda program, command: found.append(command))
    monkeypatch.setattr(_gpu_steps.os, "environ", {})
    return found


def test_the_two_parts_of_the_tests_are_all_that_need_a_gpu(executed):
    root = _gpu_steps.ROOT
    needing = [str(path.relative_to(root)) for path in (root / "tests").rglob("test_*.py")
               if re.search(r"^@pytest.mark.cuda|^@each_device|^pytestmark.*cuda", path.read_text(),
                            re.MULTILINE)]  # fmt: skip
    assert len(needing) >= 10 and all(name.startswith(tuple(_gpu_steps.OTHERS)) for name in needing)
    assert set(_gpu_steps.CORE) <= set(needing)
    _gpu_steps.tests("core", "a.xml")
    _gpu_steps.tests("others", "a.xml")
    core, others = executed
    assert core[core.index("-m", 3) : -2] == ["-m", "cuda", *_gpu_steps.CORE]
    ignored = [f"--ignore={name}" for name in _gpu_steps.CORE]
    assert others[-2 - len(ignored) : -2] == ignored


def test_tests_without_xdist_are_one_process(executed, capsys, monkeypatch):
    _gpu_steps.tests("core", "a.xml")
    assert executed[-1][-2:] == ["-n", "8"]
    monkeypatch.setattr(_gpu_steps.importlib.util, "find_spec", lambda name: None)
    _gpu_steps.tests("others", "a.xml", "rehearse")
    assert "-n" not in executed[-1] and "-m" not in executed[-1][3:]
    assert "pytest-xdist is not here" in capsys.readouterr().out


def test_the_sanitizer_is_found_or_named(executed, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(_gpu_steps.shutil, "which", lambda name: None)
    assert _gpu_steps.sanitize("memcheck", "a.xml") == _gpu_steps.UNAVAILABLE
    assert "compute-sanitizer is neither on the PATH nor beside nvcc" in capsys.readouterr().out
    monkeypatch.setattr(_gpu_steps.shutil, "which", lambda name: f"/bin/{name}")
    for tool in ("memcheck", "racecheck", "initcheck"):
        _gpu_steps.sanitize(tool, "a.xml")
        assert executed[-1][1:3] == ["--tool", tool]
        assert ("kns=_rows" in executed[-1]) == (tool == "racecheck")
