"""The choice of libraries, and the behavior without them."""

import json
import os
import subprocess
import sys

import pytest

import storage_ops
from storage_ops import _library
from storage_ops._library import select

CPU, ALIAS = "libstorage_ops_cpu.so", "libstorage_ops_alias.so"
CU12, CU13 = "libstorage_ops_cu12.so", "libstorage_ops_cu13.so"
B210, B213 = "libstorage_ops_binding_2_10.so", "libstorage_ops_binding_2_13.so"
FOR_210 = {B210, "libstorage_ops_saved_2_10.so"}
FOR_213 = {B213, "libstorage_ops_saved_2_13.so"}
ALL = [CPU, ALIAS, CU12, CU13, *sorted(FOR_210), *sorted(FOR_213)]


@pytest.mark.parametrize(
    "torch, cuda, loaded, reasons",
    [
        pytest.param(
            "2.13.0+cpu",
            None,
            {CPU, ALIAS, *FOR_213},
            {CU13: "no CUDA", B210: "for torch 2.10"},
            id="CPU build",
        ),
        pytest.param(
            "2.13.1",
            "13.0",
            {CPU, ALIAS, CU13, *FOR_213},
            {CU12: "another CUDA than torch's"},
            id="CUDA 13",
        ),
        pytest.param(
            "2.10.0+cu128",
            "12.8",
            {CPU, CU12, *FOR_210},
            {ALIAS: "cannot swap", CU13: "another"},
            id="CUDA 12",
        ),
        pytest.param(
            "2.11.0+cpu",
            None,
            {CPU},
            {ALIAS: "cannot swap", B210: "this is 2.11.0"},
            id="CPU build without a binding",
        ),
        pytest.param(
            "2.12.0a0+git1234",
            None,
            {CPU, ALIAS},
            {B213: "built for torch 2.13"},
            id="prerelease of 2.12",
        ),
        pytest.param(
            "2.13.0a0+git1234",
            None,
            {CPU, ALIAS},
            dict.fromkeys(FOR_213, "not a release"),
            id="prerelease of 2.13",
        ),
        pytest.param(
            "2.13.0.dev20260701+cu130",
            "13.0",
            {CPU, ALIAS, CU13},
            {B213: "not a release"},
            id="nightly",
        ),
        pytest.param(
            "2.15.0+cu132",
            "13.2",
            {CPU, ALIAS, CU13},
            {B213: "this is 2.15.0+cu132"},
            id="unknown minor",
        ),
        pytest.param("3.0.0", None, {CPU, ALIAS}, {B213: "this is 3.0.0"}, id="unknown major"),
        pytest.param(
            "2.9.1", "12.8", set(), {CPU: "older than 2.10", CU12: "older than 2.10"}, id="too old"
        ),
        pytest.param("unknown", None, set(), {CPU: "older than 2.10"}, id="unknown version"),
    ],
)
def test_select(torch, cuda, loaded, reasons):
    plan = select(torch, cuda, ALL)
    assert set(plan.load) == loaded
    assert set(plan.skipped) == set(ALL) - loaded
    for name, reason in reasons.items():
        assert reason in plan.skipped[name]


def test_select_names_missing_libraries():
    plan = select("2.14.0+cu130", "13.0", [ALIAS])
    of_minor = {f"libstorage_ops_{kind}_2_14.so" for kind in ("binding", "saved")}
    assert set(plan.missing) == {CPU, CU13, *of_minor}
    assert plan.load == (ALIAS,) and not plan.skipped


def test_status_says_why():
    status = _library.Status(skipped={CU13: "torch has no CUDA"}, missing={CPU: "no such file"})
    assert status.why_missing(CU13).endswith("lib: torch has no CUDA.")
    assert "no such file" in status.why_missing(CPU)
    assert "not looked for" in status.why_missing(B210)


def python(code, **environment):
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


USE_EVERYTHING = """
import json, torch, storage_ops as so
x, w = torch.randn(9, 4, requires_grad=True), torch.randn(7, 4)
so.linear_cross_entropy(x, w, torch.randint(7, (9,))).backward()
a, b = torch.ones(4), torch.zeros(4)
so.discard_storage(a); assert so.is_discarded(a)
so.share_storage(a, b); assert torch.equal(a, b)
so.output_discard(torch.sin, torch.cos)(x).sum().backward()
print(json.dumps(so.info()))
"""


@pytest.mark.in_turn
def test_an_op_that_needs_a_missing_library_says_so():
    code = "import torch, storage_ops; torch.ops.storage_ops._alias_bytes(torch.ones(4))"
    environment = {**os.environ, "STORAGE_OPS_DISABLE_NATIVE": "1"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60
    )
    message = result.stderr.strip().splitlines()[-1]
    assert "looked for libstorage_ops_alias.so in" in message and result.returncode == 1


@pytest.mark.in_turn
def test_everything_works_without_native_libraries():
    info = json.loads(python(USE_EVERYTHING, STORAGE_OPS_DISABLE_NATIVE="1"))
    assert info["storage_path"] == "copy" and not info["guard"] and not info["loaded"]
    assert info["problems"] == [] and not info["zero_copy"]
    assert info["row_kernel"] == "plain torch"
    assert all(reason == "STORAGE_OPS_DISABLE_NATIVE=1" for reason in info["skipped"].values())


@pytest.mark.in_turn
@pytest.mark.parametrize("off", ["saved", "binding,saved", "cpu", "alias"])
def test_some_libraries_can_be_switched_off(off):
    usual, info = (
        json.loads(python(USE_EVERYTHING, STORAGE_OPS_DISABLE_NATIVE=value)) for value in ("", off)
    )
    disabled = {
        name for name, why in info["skipped"].items() if why == f"STORAGE_OPS_DISABLE_NATIVE={off}"
    }
    kinds = tuple(f"libstorage_ops_{kind}" for kind in off.split(","))
    assert disabled and all(name.startswith(kinds) for name in disabled)
    assert set(info["loaded"]) == set(usual["loaded"]) - disabled
    assert info["problems"] == [] and info["missing"] == usual["missing"]
    if "saved" in off:
        assert info["saved_tensors"] == "Python"


def test_a_value_that_switches_nothing_off_is_named(monkeypatch):
    for value, off in (("", set()), ("0", set()), ("1", set(_library.KINDS)), ("cpu", {"cpu"})):
        assert _library.switched_off(value) == off
    for value in ("yes", "save", "cpu,", "saved cpu"):
        with pytest.raises(ValueError, match=f"DISABLE_NATIVE is '{value}', expected 1, or some"):
            _library.switched_off(value)
        monkeypatch.setenv("STORAGE_OPS_DISABLE_NATIVE", value)
        assert _library.warning(_library.Status(loaded=[CPU])).startswith(_library.DISABLE)


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["binding", "alias", "cpu", "saved"])
def test_a_library_that_does_not_load_is_reported_but_no_error(broken, tmp_path):
    code = """
import pathlib, shutil
from storage_ops import _library
"""
    names = [path.name for path in _library.FOLDER.glob("*.so")]
    victims = [name for name in names if broken in name]
    for name in names:
        content = b"not a library" if name in victims else (_library.FOLDER / name).read_bytes()
        (tmp_path / name).write_bytes(content)
    # The package is loaded from a copy with libraries in another folder.
    code = f"""
import importlib.util, pathlib, sys
source = {str(_library.__file__)!r}
spec = importlib.util.spec_from_file_location("storage_ops._library", source)
module = sys.modules["storage_ops._library"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.FOLDER = pathlib.Path({str(tmp_path)!r})
{USE_EVERYTHING}
"""
    info = json.loads(python(code))
    in_use = storage_ops.info()["loaded"]  # without those for other versions of torch
    assert all("loading failed" in info["skipped"][name] for name in victims if name in in_use)
    left = [path for path in ("binding", "alias") if path != broken]
    able = [path for path in left if any(path in name for name in in_use)]
    assert info["storage_path"] == (able[0] if able else "copy")


def test_a_failed_import_of_torch_is_explained(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch_cpu.so: no such file')")
    paths = os.pathsep.join([str(tmp_path), str(_library.FOLDER.parents[1])])
    result = subprocess.run(
        [sys.executable, "-m", "storage_ops", "info", "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
        timeout=60,
    )
    assert result.returncode == 1
    assert "libtorch_cpu.so: no such file" in json.loads(result.stdout)["broken"]
    code = "import storage_ops\ntry: storage_ops.discard_storage\n"
    code += "except ImportError as error: print(error)"
    assert "no such file" in python(code, PYTHONPATH=paths)
