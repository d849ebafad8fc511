"""The build tools say what is wrong with what they are given."""

import base64
import hashlib
import json
import os
import re
import zipfile

import pytest

from build_tools import check_wheel, ninja_file, release_notes, sbom, test_wheel, toolchain

PROJECT = (toolchain.ROOT / "pyproject.toml").read_text()


def test_binding_torches(monkeypatch):
    monkeypatch.setenv("STORAGE_OPS_BINDING_TORCHES", " 2.15;2.9.1")
    with pytest.raises(SystemExit, match=r"has '2.9.1'; expected minors from 2.10"):
        toolchain.binding_torches()
    monkeypatch.setenv("STORAGE_OPS_BINDING_TORCHES", "2.15, 2.10 2.9")
    with pytest.raises(SystemExit, match=r"has '2.9'"):
        toolchain.binding_torches()
    monkeypatch.setenv("STORAGE_OPS_BINDING_TORCHES", "3.1; 2.15,2.10")
    assert toolchain.binding_torches() == ["2.10", "2.15", "3.1"]
    monkeypatch.delenv("STORAGE_OPS_BINDING_TORCHES")
    assert toolchain.binding_torches() == [".".join(map(str, toolchain.installed_torch()))]


def test_headers_of_another_torch_are_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("STORAGE_OPS_TORCH_HEADERS", str(tmp_path))
    with pytest.raises(SystemExit, match=r"headers of torch 9.1 .* build_tools.torch_headers 9.1"):
        toolchain.torch_headers("9.1")
    version = tmp_path / "9.1/include/torch/headeronly/version.h"
    version.parent.mkdir(parents=True)
    version.write_text("#define TORCH_VERSION_MAJOR 9\n#define TORCH_VERSION_MINOR 2\n")
    with pytest.raises(SystemExit, match=r"is of torch 9.2; expected 9.1"):
        toolchain.torch_headers("9.1")


def test_several_toolkits_are_found_by_major(monkeypatch, tmp_path):
    for release in ("12.8", "13.0"):
        nvcc = tmp_path / release / "bin/nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V1'\n")
        nvcc.chmod(0o755)
    homes = [str(tmp_path / release) for release in ("12.8", "13.0")]
    monkeypatch.setenv("CUDA_HOME", os.pathsep.join(homes))
    monkeypatch.delenv("FORCE_CUDA", raising=False)
    assert toolchain.nvccs() == {"12": f"{homes[0]}/bin/nvcc", "13": f"{homes[1]}/bin/nvcc"}
    monkeypatch.setenv("FORCE_CUDA", "0")
    assert toolchain.nvccs() == {}


def test_gpus_are_those_that_every_toolkit_knows(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    old, new = tmp_path / "old", tmp_path / "new"
    for nvcc, listed in (old, "80 86 87 89 90"), (new, "75 80 86 89 90 90a 100 103 120"):
        lines = "\\n".join(f"compute_{number}" for number in listed.split())
        nvcc.write_text(f"#!/bin/sh\n[ $1 = --list-gpu-arch ] && printf '{lines}\\n'\n")
        nvcc.chmod(0o755)
    assert ninja_file.archs([str(new)]) == "8.0;8.6;8.9;9.0;10.0;12.0+PTX"
    assert ninja_file.archs([str(new), str(old)]) == "8.0;8.6;8.9;9.0+PTX"
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5")
    assert ninja_file.archs([str(old)]) == "7.5"


def test_gencode():
    assert ninja_file.gencode("8.0;12.0+PTX") == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_120,code=sm_120",
        "-gencode=arch=compute_120,code=compute_120",
    ]


CHANGELOG = "# Changelog\n\n## Unreleased\n\n- new\n\n## 1.2.0 - a day\n\n- old\n\n## 1.1.0\n"


def test_release_notes():
    assert release_notes.notes("v1.2.0", 'version = "1.2.0"', CHANGELOG) == "- old"
    with pytest.raises(SystemExit, match=r"tag is v1.2.0, pyproject.toml has version 1.3.0"):
        release_notes.notes("v1.2.0", 'version = "1.3.0"', CHANGELOG)
    for version in ("1.3.0", "1.1.0"):  # no section, and an empty one
        with pytest.raises(SystemExit, match=rf"no section '## {version}'"):
            release_notes.notes(f"v{version}", f'version = "{version}"', CHANGELOG)


def test_the_matrix_names_the_oldest_and_the_newest_binding():
    minors = test_wheel.minors()
    assert minors[0] == "2.10" and minors == sorted(minors, key=toolchain.minor_of)
    workflow = (toolchain.ROOT / ".github/workflows/wheels.yml").read_text()
    assert f'torch: "{minors[0]}"' in workflow and f'torch: "{minors[-1]}"' in workflow


def test_a_bad_wheel_is_reported(tmp_path):
    pytest.importorskip("auditwheel")
    wheel = tmp_path / "storage_ops-1.0+cu13-cp311-cp311-linux_x86_64.whl"
    metadata = "Metadata-Version: 2.4\nName: storage_ops\nVersion: 1.0+cu13\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(
            "storage_ops-1.0.dist-info/METADATA", metadata + "Requires-Dist: torch==2.13"
        )
        archive.writestr("storage_ops/lib/build_info.json", '{"cuda": "13.0", "bindings": "2.10"}')
        archive.writestr("tests/test_x.py", "")
    found = "\n".join(check_wheel.check(wheel))
    for complaint in ("local tag", "requires ['torch==2.13']", "no manylinux_2_28 tag",
                      "libstorage_ops_cu13.so", "binding_2_10", "has tests/test_x.py",
                      "lacks sboms/"):  # fmt: skip
        assert complaint in found


@pytest.mark.parametrize("tag", ["cp314-cp314", "cp314-cp314t"])
def test_a_wheel_has_the_module_of_its_cpython(tmp_path, tag):
    wheel = tmp_path / f"storage_ops-1.0-{tag}-manylinux_2_28_x86_64.whl"
    wheel.touch()
    info = {"cuda": "", "bindings": ""}
    found = "\n".join(check_wheel.wrong_contents(wheel, [], "Version: 1.0\n", info))
    assert f"lacks storage_ops/_build_info.cpython-{tag.split('cp')[-1]}-" in found


def test_a_wheel_lists_what_is_in_it(tmp_path):
    pytest.importorskip("wheel")
    path = tmp_path / "storage_ops-1.0-cp311-cp311-linux_x86_64.whl"
    info, library = "storage_ops-1.0.dist-info", os.urandom(64)
    facts = {"version": "1.0", "compiler": "g++ 12", "sources": "ab", "cuda": "13.0",
             "bindings": "2.10 2.11"}  # fmt: skip
    tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp311-cp311-linux_x86_64\n"
    files = {
        f"{info}/WHEEL": tag.encode(),
        "storage_ops/lib/build_info.json": json.dumps(facts).encode(),
        "storage_ops/lib/libstorage_ops_cpu.so": library,
    }
    with zipfile.ZipFile(path, "w") as archive:
        record = [f"{info}/RECORD,,"]
        for name, content in files.items():
            archive.writestr(name, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            record.append(f"{name},sha256={digest},{len(content)}")
        archive.writestr(f"{info}/RECORD", "\n".join(record))
    sbom.add(path)
    with zipfile.ZipFile(path) as archive:
        listed = json.loads(archive.read(f"{info}/{sbom.NAME}"))
        record = archive.read(f"{info}/RECORD").decode()
    assert f"{info}/{sbom.NAME},sha256=" in record
    assert listed["metadata"]["component"]["version"] == "1.0"
    parts = {part["name"]: part for part in listed["components"]}
    assert {"pybind11", "torch headers 2.10", "torch headers 2.11"} < set(parts)
    found = parts["storage_ops/lib/libstorage_ops_cpu.so"]["hashes"][0]["content"]
    assert found == hashlib.sha256(library).hexdigest()


def test_actions_are_named_by_digest():
    for workflow in (toolchain.ROOT / ".github/workflows").glob("*.yml"):
        for line in workflow.read_text().splitlines():
            _, uses, action = line.partition("uses: ")
            if uses and not action.startswith("./"):
                assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", action), action
