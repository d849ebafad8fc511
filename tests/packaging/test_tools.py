"""The build tools say what is wrong with their arguments."""

import base64
import hashlib
import json
import os
import re
import zipfile
from types import SimpleNamespace

import pytest

from build_tools import check_wheel, ninja_file, release_notes, sbom, test_wheel, toolchain, wheel
from build_tools.toolchain import MACHINE

PROJECT = (toolchain.ROOT / "pyproject.toml").read_text()


def test_binding_torches(monkeypatch):
    monkeypatch.setenv("STORAGE_OPS_BINDING_TORCHES", " 2.15;2.9.1")
    with pytest.raises(SystemExit, match=r"has '2.9.1'. Expected minors from 2.10"):
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
    with pytest.raises(SystemExit, match=r"is of torch 9.2. Expected 9.1"):
        toolchain.torch_headers("9.1")


def test_toolkits_are_listed_by_major_version(monkeypatch, tmp_path):
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


def test_only_gpus_that_every_toolkit_supports_are_built_for(monkeypatch, tmp_path):
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
    with pytest.raises(SystemExit, match=r"tag is v1.2.0, but pyproject.toml has version 1.3.0"):
        release_notes.notes("v1.2.0", 'version = "1.3.0"', CHANGELOG)
    for version in ("1.3.0", "1.1.0"):  # without a section, and with an empty one
        with pytest.raises(SystemExit, match=rf"no section '## {version}'"):
            release_notes.notes(f"v{version}", f'version = "{version}"', CHANGELOG)


def test_the_matrix_names_the_oldest_and_the_newest_binding():
    minors = test_wheel.minors()
    assert minors[0] == "2.10" and minors == sorted(minors, key=toolchain.minor_of)
    workflow = (toolchain.ROOT / ".github/workflows/wheels.yml").read_text()
    assert f'torch: "{minors[0]}"' in workflow and f'torch: "{minors[-1]}"' in workflow


def test_a_bad_wheel_is_reported(tmp_path):
    pytest.importorskip("auditwheel")
    path = tmp_path / "storage_ops-1.0+cu13-cp311-cp311-linux_x86_64.whl"
    metadata = "Metadata-Version: 2.4\nName: storage_ops\nVersion: 1.0+cu13\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            "storage_ops-1.0.dist-info/METADATA", metadata + "Requires-Dist: torch==2.13"
        )
        archive.writestr("storage_ops/lib/build_info.json", '{"cuda": "13.0", "bindings": "2.10"}')
        archive.writestr("tests/test_x.py", "")
    problems = "\n".join(check_wheel.check(path))
    for complaint in ("local tag", "requires ['torch==2.13']", "no manylinux_2_28 tag",
                      "libstorage_ops_cu13.so", "binding_2_10", "has tests/test_x.py",
                      "lacks sboms/", "has no module of any", "not for every CPython"):  # fmt: skip
        assert complaint in problems


def wheel_of_one_cpython(folder, tag, library=b"", module=True):
    """Write the parts that tools read of a wheel that setup.py builds for one CPython."""
    path = folder / f"storage_ops-1.0-cp{tag.removesuffix('t')}-cp{tag}-linux_{MACHINE}.whl"
    info = "storage_ops-1.0.dist-info"
    tags = f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp311-cp{tag}-linux_{MACHINE}\n"
    facts = {"version": "1.0", "compiler": "g++ 12", "sources": "ab", "cuda": "13.0",
             "bindings": "2.10 2.11"}  # fmt: skip
    files = {
        f"{info}/METADATA": b"Metadata-Version: 2.4\nName: storage_ops\nVersion: 1.0\n",
        f"{info}/WHEEL": tags.encode(),
        "storage_ops/lib/build_info.json": json.dumps(facts).encode(),
        "storage_ops/lib/libstorage_ops_cpu.so": library,
        f"storage_ops/_build_info.cpython-{tag}-{MACHINE}-linux-gnu.so": tag.encode(),
    }
    if not module:
        files.popitem()
    with zipfile.ZipFile(path, "w") as archive:
        record = [f"{info}/RECORD,,"]
        for name, content in files.items():
            archive.writestr(name, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            record.append(f"{name},sha256={digest},{len(content)}")
        archive.writestr(f"{info}/RECORD", "\n".join(record))
    return path


def test_one_wheel_is_for_every_cpython_and_lists_its_contents(tmp_path):
    pytest.importorskip("wheel")
    library, tags = os.urandom(64), ["310", "314", "314t"]
    parts = [wheel_of_one_cpython(tmp_path, tag, library) for tag in tags]
    path = wheel.merge(parts, tmp_path / "dist")
    assert path == tmp_path / f"dist/storage_ops-1.0-py3-none-linux_{MACHINE}.whl"
    info = "storage_ops-1.0.dist-info"
    with zipfile.ZipFile(path) as archive:
        listed = json.loads(archive.read(f"{info}/{sbom.NAME}"))
        record = archive.read(f"{info}/RECORD").decode()
        assert f"Tag: py3-none-linux_{MACHINE}\n" in archive.read(f"{info}/WHEEL").decode()
        for tag in tags:
            name = f"storage_ops/_build_info.cpython-{tag}-{MACHINE}-linux-gnu.so"
            assert archive.read(name) == tag.encode() and f"{name},sha256=" in record
    assert f"{info}/{sbom.NAME},sha256=" in record
    assert listed["metadata"]["component"]["version"] == "1.0"
    components = {part["name"]: part for part in listed["components"]}
    assert {"pybind11", "torch headers 2.10", "torch headers 2.11"} < set(components)
    digest = components["storage_ops/lib/libstorage_ops_cpu.so"]["hashes"][0]["content"]
    assert digest == hashlib.sha256(library).hexdigest()


def test_a_wheel_without_its_module_is_not_merged(tmp_path):
    pytest.importorskip("wheel")
    parts = [
        wheel_of_one_cpython(tmp_path, "310"),
        wheel_of_one_cpython(tmp_path, "311", module=False),
    ]
    with pytest.raises(SystemExit, match=r"2 wheels have the modules .*cpython-310-.*. Expected"):
        wheel.merge(parts, tmp_path / "dist")
    assert not (tmp_path / "dist").exists()


def test_wheels_with_different_libraries_are_not_merged(tmp_path):
    pytest.importorskip("wheel")
    parts = [wheel_of_one_cpython(tmp_path, tag, os.urandom(64)) for tag in ("310", "311")]
    with pytest.raises(SystemExit, match=r"differ in .*libstorage_ops_cpu\.so"):
        wheel.merge(parts, tmp_path / "dist")
    assert not (tmp_path / "dist").exists()


def test_actions_are_named_by_digest():
    for workflow in (toolchain.ROOT / ".github/workflows").glob("*.yml"):
        for line in workflow.read_text().splitlines():
            _, uses, action = line.partition("uses: ")
            if uses and not action.startswith("./"):
                assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", action), action


def test_the_site_shows_both_pictures_of_the_readme():
    site = pytest.importorskip("build_tools.site")
    text = site._written("README.md")
    light, dark = re.findall(r"!\[[^]]+\]\(([^)#]+)#only-(?:light|dark)\)", text)
    assert dark == light.replace(".png", "-dark.png") and "<picture>" not in text
    assert all((site.ROOT / path).is_file() for path in (light, dark))


def test_the_site_shows_narrow_pictures_on_a_phone(tmp_path):
    site = pytest.importorskip("build_tools.site")
    for name in ("a.svg", "a-narrow.svg", "b.png"):
        (tmp_path / name).touch()
    page, config = SimpleNamespace(url="deep/"), SimpleNamespace(docs_dir=str(tmp_path))
    html = '<img alt="a" src="../a.svg"><img alt="b" src="../b.png">'
    shown = site.on_page_content(html, page, config, None)
    source = f'<source media="{site.PHONE}" srcset="../a-narrow.svg">'
    first, second = re.findall("<img[^>]*>", html)
    assert shown == f"<picture>{source}{first}</picture>{second}"
    assert site.PHONE in (site.ROOT / "docs/site.css").read_text()


def test_the_site_shows_the_returned_value_as_one_text():
    griffe, yaml = pytest.importorskip("griffe"), pytest.importorskip("yaml")
    config = yaml.safe_load((toolchain.ROOT / "mkdocs.yml").read_text())
    handler = config["plugins"][1]["mkdocstrings"]["handlers"]["python"]
    text = "Summary.\n\nReturns:\n    The loss: a scalar.\n    Products: three.\n"
    docstring = griffe.Docstring(text)
    sections = docstring.parse("google", **handler["options"]["docstring_options"])
    [item] = sections[1].value
    assert item.description == "The loss: a scalar.\nProducts: three."


def test_docstrings_have_an_entry_for_each_name_and_error():
    site = pytest.importorskip("build_tools.site")
    text = """What it does. ValueError: is no entry here.

Args:
    a: one.
    b, c: two,
        in two lines.

        And a paragraph.
    d: three.

Raises:
    TypeError, ValueError: wrong. OSError: it
        cannot be read.
        RuntimeError: is at the end of no sentence before it.

Example:
    >>> x, y: int
"""
    assert (
        site.spelled_out(text)
        == """What it does. ValueError: is no entry here.

Args:
    a: one.
    b: two,
        in two lines.

        And a paragraph.
    c: two,
        in two lines.

        And a paragraph.
    d: three.

Raises:
    TypeError: wrong.
    ValueError: wrong.
    OSError: it
        cannot be read.
    RuntimeError: is at the end of no sentence before it.

Examples:
    >>> x, y: int
"""
    )
