"""Symbols and libraries that the native libraries import. The check reports too new ones."""

import shutil
import subprocess

import pytest

from build_tools import check_wheel, ninja_file, toolchain
from storage_ops import _library

LIBRARIES = sorted(_library.FOLDER.glob("*.so"))
STABLE = [path for path in LIBRARIES if check_wheel.abi_of(path) is not None]


def test_the_stable_libraries_exist():
    expected = {"libstorage_ops_cpu.so"}
    if toolchain.minor_of(_library.build_info()["torch_built_with"]) >= ninja_file.ALIAS_TARGET:
        expected.add("libstorage_ops_alias.so")
    assert expected <= {path.name for path in STABLE}
    assert not any("binding" in path.name or "saved" in path.name for path in STABLE)


@pytest.mark.parametrize("library", STABLE, ids=[path.stem for path in STABLE])
def test_stable_libraries_import_only_the_stable_abi_of_their_oldest_torch(library):
    assert list(check_wheel.wrong_imports(library)) == []
    names = {name for _, name, _ in check_wheel.imports(library)}
    assert any(name.startswith(("aoti_torch_", "torch_")) for name in names)


@pytest.mark.parametrize("library", LIBRARIES, ids=[path.stem for path in LIBRARIES])
def test_libraries_need_only_libraries_of_torch_and_of_the_system(library):
    listed = subprocess.check_output(["readelf", "-d", library], text=True)
    needed = {line.split("[")[1].rstrip("]") for line in listed.splitlines() if "NEEDED" in line}
    torch = {"libtorch_cpu.so", "libtorch_cuda.so", "libc10.so"}
    system = {"libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6", "libpthread.so.0",
              "libdl.so.2", "librt.so.1", "libgomp.so.1", "ld-linux-x86-64.so.2"}  # fmt: skip
    if library.stem.startswith(_library.SAVED):
        torch.add("libtorch_python.so")
    assert "libtorch_cpu.so" in needed and needed <= torch | system
    assert ("libtorch_cuda.so" in needed) == ("libstorage_ops_cu" in library.stem and
                                              library.stem[-1].isdigit())  # fmt: skip
    assert "RPATH" not in listed and "RUNPATH" not in listed


@pytest.fixture
def link(tmp_path):
    """Return a function that compiles C code into a library. Symbols may stay undefined."""

    def link(name, code, *flags):
        (tmp_path / "code.c").write_text(code)
        library = tmp_path / name
        command = ["gcc", "-shared", "-fPIC", tmp_path / "code.c", "-o", library, *flags]
        subprocess.run(command, check=True)
        return library

    return link


def test_an_unstable_import_is_reported(link):
    code = "int aoti_torch_get_dim(void); int torch_new_function(void); int PyErr_Occurred(void);"
    code += "int _ZN3c104warnEv(void); int f(void) { return aoti_torch_get_dim() + "
    code += "torch_new_function() + PyErr_Occurred() + _ZN3c104warnEv(); }"
    reported = " ".join(check_wheel.wrong_imports(link("libstorage_ops_cpu.so", code)))
    for name in ("torch_new_function", "PyErr_Occurred", "_ZN3c104warnEv"):
        assert f"imports {name}," in reported
    assert "get_dim" not in reported
    assert list(check_wheel.wrong_imports(link("libstorage_ops_binding_2_10.so", code))) == []


def test_a_symbol_of_a_newer_torch_is_reported(link):
    code = "int torch_from_blob(void); int f(void) { return torch_from_blob(); }"
    alias = link("libstorage_ops_alias.so", code)
    assert list(check_wheel.wrong_imports(alias)) == []  # torch 2.12 has it
    (reported,) = check_wheel.wrong_imports(
        shutil.copy(alias, alias.with_stem("libstorage_ops_cpu"))
    )
    assert "torch_from_blob, which the oldest torch" in reported


EXP = "double exp(double); double f(double x) { return exp(x) + __builtin_sqrt(x); }"


def test_a_new_glibc_is_reported_and_the_replacements_avoid_it(link, tmp_path):
    pytest.importorskip("auditwheel")
    from build_tools import old_glibc

    versions = {name: version for _, name, version in check_wheel.imports(
        link("libnew.so", EXP, "-lm"))}  # fmt: skip
    library = tmp_path / "libnew.so"
    if old_glibc.order(versions["exp"]) > [2, 28]:
        assert "exp@GLIBC_2.29, too new for manylinux_2_28" in " ".join(
            check_wheel.wrong_versions(library)
        )
    old_glibc.make(tmp_path / "old")
    old = link("libold.so", EXP, f"-L{tmp_path / 'old'}", "-lm")
    assert list(check_wheel.wrong_versions(old)) == []
    assert ("U", "exp", "GLIBC_2.2.5") in check_wheel.imports(old)
