"""Problems that `python -m storage_ops info` reports, without a GPU and for any torch."""

import json
from pathlib import Path

import pytest

import storage_ops
from storage_ops import _info, _library, cli

CPU, CU13 = "libstorage_ops_cpu.so", "libstorage_ops_cu13.so"


def facts(**changes):
    """Return the facts of a healthy installation on an H100, with changes."""
    healthy = {
        "torch": "2.13.0+cu130", "torch_cuda": "13.0", "gpu": "NVIDIA H100", "gpu_arch": "9.0",
        "storage_path": "binding", "zero_copy": True, "row_kernel": "C++, AVX2",
        "row_kernel_cuda": "CUDA 13.0", "skipped": {}, "missing": {},
        "build": {"compiler": "g++ 12", "cuda_archs": "8.0;9.0;12.0+PTX"},
    }  # fmt: skip
    return {**healthy, **changes}


def test_a_healthy_installation_has_no_problems():
    assert _info.problems(facts()) == []
    assert _info.problems(facts(gpu=None, gpu_arch=None, row_kernel_cuda="plain torch")) == []
    assert _info.problems(facts(skipped={"x_2_10.so": "built for torch 2.10, this is 2.13"})) == []


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"torch": "2.9.1", "skipped": {CPU: "torch 2.9.1 is older than 2.10"}}, "Update torch"),
        ({"skipped": {CU13: "loading failed: libx.so: no such file"}}, "loading failed: libx.so"),
        ({"missing": {CPU: "no such file"}, "row_kernel": "plain torch"}, f"{CPU} is missing"),
        ({"storage_path": "copy", "zero_copy": False}, "no storage binding for torch 2.13.0"),
        ({"zero_copy": False}, "copied its bytes on the path 'binding'"),
        ({"row_kernel_cuda": "plain torch"}, "no kernels for CUDA 13 are loaded"),
        ({"gpu_arch": "7.5"}, "is sm 7.5, but the kernels were built for 8.0;9.0;12.0+PTX"),
        ({"gpu_arch": "10.0"}, "is sm 10.0"),
    ],
)
def test_a_problem_is_named(changes, problem):
    (reported,) = _info.problems(facts(**changes))
    assert problem in reported


def test_sources_that_hide_the_installed_package_are_named(tmp_path, monkeypatch):
    """This happens if python starts in a checkout after `pip install .`."""
    assert _library.hidden() is None
    monkeypatch.setattr(_library, "FOLDER", tmp_path / "sources/storage_ops/lib")
    facts = tmp_path / "storage_ops-0.1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Name: storage_ops\nVersion: 0.1.0\n")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    (tmp_path / "storage_ops/lib").mkdir(parents=True)
    assert _library.hidden() is None  # pure Python
    (tmp_path / "storage_ops/lib" / CPU).touch()
    assert _library.hidden() == tmp_path / "storage_ops"
    *_, last = storage_ops.info()["problems"]
    assert f"installed package is {tmp_path / 'storage_ops'}. Start python in another" in last


def test_chosen_settings_are_no_problem():
    copying = {"storage_path": "copy", "zero_copy": False, "row_kernel": "plain torch"}
    disabled = {CPU: "STORAGE_OPS_DISABLE_NATIVE=1"}
    assert _info.problems(facts(**copying, skipped=disabled)) == []
    by_choice = {"pure": "STORAGE_OPS_NO_NATIVE=1"}
    assert _info.problems(facts(**copying, missing={CPU: "no such file"}, build=by_choice)) == []
    assert _info._purity(by_choice) == ", pure Python: STORAGE_OPS_NO_NATIVE=1"


@pytest.mark.parametrize(
    "build, why",
    [({"pure": "no C++ compiler was found"}, "no C++ compiler was found"), ({}, "never built")],
)
def test_a_package_that_was_not_compiled_lacks_its_libraries(build, why, monkeypatch):
    missing = dict.fromkeys((CPU, "libstorage_ops_binding_2_13.so"), "no such file")
    copying = {"storage_path": "copy", "zero_copy": False, "row_kernel": "plain torch"}
    pure = facts(**copying, missing=missing, build=build)
    (reported,) = _info.problems(pure)
    assert all(name in reported for name in missing) and why in reported
    assert (
        "copies its bytes" in reported and "pip install" in reported and "NO_NATIVE=1" in reported
    )
    monkeypatch.setattr("sys.platform", "win32")  # no libraries exist for Windows
    assert _info.problems(pure) == []


def test_a_torch_that_is_too_old_is_named_without_libraries():
    plan = _library.select("2.9.1", None, [])
    (reported,) = _info.problems(facts(torch="2.9.1", missing=plan.missing, build={}))
    assert "is older than 2.10" in reported


def test_the_version_equals_that_of_the_project(capsys, monkeypatch):
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert f'version = "{storage_ops.__version__}"' in project
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"{storage_ops.__version__}\n"
    monkeypatch.setattr(_library, "build_info", dict)  # sources without a build
    assert _library.version() in (storage_ops.__version__, "unknown")


@pytest.mark.parametrize(
    "arch, archs, runs",
    [
pytest.param("8.0", "8.0", True, id="same"),
pytest.param("8.9", "8.0;9.0", True, id="same major"),
pytest.param("8.0", "8.6", False, id="older minor"),
pytest.param("9.0", "8.0", False, id="older major"),
pytest.param("9.0", "8.0+PTX", True, id="PTX"),
pytest.param("12.1", "8.0 12.0", True, id="listed by spaces"),
pytest.param("9.0", "9.0a", True, id="sm_90a"),
pytest.param("9.1", "9.0a", False, id="not forward compatible"),
pytest.param("10.0", "Ampere", False, id="unknown name"),
],
)  # fmt: skip
def test_gpus_that_the_kernels_run_on(arch, archs, runs):
    assert _info.runs_on(arch, archs) == runs


def test_the_command_fails_and_says_why(capsys, monkeypatch):
    broken = {**storage_ops.info(), "problems": ["the frobnicator is missing."]}
    monkeypatch.setattr(storage_ops, "info", lambda: broken)
    assert cli.main(["info"]) == 1 and cli.main(["info", "--json"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("the frobnicator is missing.") == 2
    assert json.loads(printed[printed.index("\n{") :])["problems"] == broken["problems"]


def test_the_output_fits_on_one_screen(capsys, monkeypatch):
    minors = {f"libstorage_ops_{kind}_2_{n}.so": f"built for torch 2.{n}, this is 2.13.0"
              for kind in ("binding", "saved") for n in (10, 11, 12, 14, 15)}  # fmt: skip
    facts = {**storage_ops.info(), "skipped": minors}
    monkeypatch.setattr(storage_ops, "info", lambda: facts)
    cli.main(["info"])
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) <= 40
    assert "libraries for torch 2.10, 2.11, 2.12, 2.14, 2.15:" in " ".join(printed.split())
