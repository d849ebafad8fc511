"""Chooses and loads the native libraries. No other file knows their paths.

`select` decides from version strings and file names alone. Loading never raises. `status` records
which libraries were found, loaded and skipped, and why. `python -m storage_ops info` prints it.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "lib"
OLDEST_TORCH = (2, 10)
ALIAS_TORCH = (2, 12)  # first torch with UntypedStorage._swap_data_ptr_
CPU, ALIAS = "libstorage_ops_cpu.so", "libstorage_ops_alias.so"
# The beginning of the file's name, and the name of the module in the file.
SAVED, SAVED_TENSORS = "libstorage_ops_saved_", "storage_ops._saved_tensors"
NO_NATIVE = "STORAGE_OPS_NO_NATIVE=1"  # the build's variable, as setup.py writes it
DISABLE = "STORAGE_OPS_DISABLE_NATIVE"  # a variable of the environment
KINDS = ("alias", "binding", "cpu", "cu", "saved")


@dataclass(frozen=True)
class LoadPlan:
    """The libraries to load, in order, and why the others are skipped."""

    load: tuple[str, ...]
    skipped: dict[str, str]
    missing: dict[str, str]


@dataclass
class Status:
    """The result of loading the libraries."""

    loaded: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    storage_path: str = "copy"

    def why_missing(self, name: str) -> str:
        """Return a sentence that says why a library is missing, and where it was searched."""
        reason = self.skipped.get(name) or self.missing.get(name) or "it was not looked for"
        return f"storage_ops looked for {name} in {FOLDER}: {reason}."


def select(torch_version: str, cuda_version: str | None, files: Iterable[str]) -> LoadPlan:
    """Choose libraries for a torch.

    Args:
        torch_version: `torch.__version__`, such as "2.13.0+cpu".
        cuda_version: `torch.version.cuda`, such as "13.0", or None for a torch without CUDA.
        files: names of the library files that are installed.

    A storage binding, and a library of saved tensors, is chosen for the exact minor of a release
    only. A library that was built for another torch can load without an error and then corrupt
    memory.
    """
    present = sorted(files)
    match = re.match(r"(\d+)\.(\d+)\.(\d+)(.*)", torch_version)
    minor = (int(match[1]), int(match[2])) if match else (0, 0)
    suffix = match[4] if match else ""
    release = re.fullmatch(r"(\+(cpu|cu\d+|rocm[\d.]+|xpu))?", suffix) is not None
    end = f"{minor[0]}_{minor[1]}.so"
    binding, saved = f"libstorage_ops_binding_{end}", f"{SAVED}{end}"
    cuda = f"libstorage_ops_cu{cuda_version.partition('.')[0]}.so" if cuda_version else None
    if minor < OLDEST_TORCH:
        reason = f"torch {torch_version} is older than 2.10"
        return LoadPlan((), dict.fromkeys(present, reason), {} if present else {CPU: reason})
    chosen, skipped, missing = [], {}, {}
    for name in present:
        if name in (CPU, cuda) or (name in (binding, saved) and release):
            chosen.append(name)
        elif name == ALIAS:
            if minor >= ALIAS_TORCH:
                chosen.append(name)
            else:
                skipped[name] = f"torch {torch_version} cannot swap storages (2.12 can)"
        elif name in (binding, saved):
            skipped[name] = f"torch {torch_version} is not a release, its classes may differ"
        elif of_a_minor := re.fullmatch(r"libstorage_ops_(?:binding|saved)_(\d+)_(\d+)\.so", name):
            built_for = ".".join(of_a_minor.groups())
            skipped[name] = f"built for torch {built_for}, this is {torch_version}"
        elif cuda is None:
            skipped[name] = f"torch {torch_version} has no CUDA"
        else:
            skipped[name] = f"built for another CUDA than torch's {cuda_version}"
    expected = [CPU, binding, saved, *([cuda] if cuda else [])]
    for name in expected:
        if name not in present:
            missing[name] = "no such file (not built, or not part of this package)"
    return LoadPlan(tuple(chosen), skipped, missing)


def switched_off(value: str) -> set[str]:
    """Return the kinds of libraries that a value of STORAGE_OPS_DISABLE_NATIVE switches off.

    Args:
        value: "1" for all kinds, or some of them, such as "saved" or "binding,saved".

    Raises:
        ValueError: the value is neither, nor "0" or empty.
    """
    if value in ("", "0", "1"):
        return set(KINDS) if value == "1" else set()
    kinds = {kind.strip() for kind in value.split(",")}
    if not kinds <= set(KINDS):
        raise ValueError(
            f"{DISABLE} is {value!r}, expected 1, or some of {', '.join(KINDS)} with commas."
        )
    return kinds


def _kind_of(name: str) -> str:
    return re.split(r"[_.\d]", name)[2]  # a minor of torch or CUDA may follow


def load() -> Status:
    """Load the libraries that `select` chooses. Failures are recorded in the status."""
    import torch

    result = Status()
    value = os.environ.get(DISABLE, "")
    try:
        off = switched_off(value)
    except ValueError:  # `warning` tells the user
        off = set()
    files = {path.name for path in FOLDER.glob("*.so")}
    disabled = {name for name in files if _kind_of(name) in off}
    plan = select(torch.__version__, torch.version.cuda, files - disabled)
    result.skipped = {**plan.skipped, **dict.fromkeys(sorted(disabled), f"{DISABLE}={value}")}
    result.missing = {n: why for n, why in plan.missing.items() if _kind_of(n) not in off}
    for name in plan.load:
        if name.startswith(SAVED) and "t" in sys.abiflags:
            result.skipped[name] = "it needs a CPython with a GIL"
            continue
        try:
            if name.startswith(SAVED):
                _load_module(SAVED_TENSORS, FOLDER / name)
            else:
                torch.ops.load_library(FOLDER / name)
        except (OSError, ImportError) as error:  # an import of storage_ops must not fail
            result.skipped[name] = f"loading failed: {error}"
        else:
            result.loaded.append(name)
    if any("binding" in name for name in result.loaded):
        result.storage_path = "binding"
    elif ALIAS in result.loaded and hasattr(torch.UntypedStorage, "_swap_data_ptr_"):
        result.storage_path = "alias"
    return result


def _load_module(name: str, path: Path) -> None:
    """Load a library that is a Python module.

    Raises:
        ImportError: it does not load.
    """
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)


def is_pure_by_choice(build: Mapping[str, str]) -> bool:
    """Return True if a build without native libraries was chosen, or this is not Linux."""
    return build.get("pure") == NO_NATIVE or not sys.platform.startswith("linux")


def warning(status: Status) -> str:
    """Return the warning of an import that unintentionally loaded no native library, or "".

    A value of STORAGE_OPS_DISABLE_NATIVE that means nothing is warned of, too.
    """
    try:
        switched_off(os.environ.get(DISABLE, ""))
    except ValueError as error:
        return str(error)
    if status.loaded or CPU not in status.missing or is_pure_by_choice(build_info()):
        return ""
    return (
        "storage_ops has no native libraries here: it is slower, and sharing a storage copies its "
        "bytes. Run `python -m storage_ops info`, which says why and what to do."
    )


def build_info() -> dict[str, str]:
    """Return how the libraries were built, from the compiled module or its JSON twin, or {}.

    A pure-Python package has the key "pure", which says why no library was built.
    """
    try:
        compiled: Any = importlib.import_module("storage_ops._build_info")
        # The finder of an editable installation may return the module of another checkout.
        if Path(compiled.__file__).parent != FOLDER.parent:
            raise ImportError(f"{compiled.__file__} is of another tree.")
    except ImportError:
        twin = FOLDER / "build_info.json"
        return dict(json.loads(twin.read_text())) if twin.exists() else {}
    keys = ("version", "compiler", "cuda", "cuda_archs", "torch_target", "torch_built_with")
    facts = {key: str(getattr(compiled, key)) for key in (*keys, "bindings")}
    return {**facts, "cpu_capability": compiled.cpu_capability()}


def version() -> str:
    """Return this package's version, or "unknown" if it is neither built nor installed."""
    try:
        return build_info().get("version") or importlib.metadata.version("storage_ops")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def hidden() -> Path | None:
    """Return the folder of an installed storage_ops whose libraries the imported one lacks.

    This happens if python starts in a checkout after `pip install .`: python imports the sources. A
    package that was built without libraries does not count.
    """
    if any(FOLDER.glob("*.so")) or build_info():
        return None
    folders = (
        Path(str(distribution.locate_file("storage_ops")))
        for distribution in importlib.metadata.distributions(name="storage_ops")
    )
    return next((folder for folder in folders if any((folder / FOLDER.name).glob("*.so"))), None)
