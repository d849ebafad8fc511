"""Facts about this installation, what works in it, and what should work but does not."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from storage_ops import _library
from storage_ops.loss.planning.devices import has_row_kernel
from storage_ops.matmul import packed


def info(status: _library.Status) -> dict[str, Any]:
    """Collect versions, libraries, the paths in use, and problems."""
    ops = torch.ops.storage_ops
    probe, other = torch.ones(1), torch.zeros(1)
    address = other.data_ptr()
    ops.discard_storage(probe, "probe")
    guard = raises(probe.data_ptr)
    ops.share_storage(probe, other)
    on_cpu, on_cuda = has_row_kernel("cpu"), has_row_kernel("cuda")
    kinds = {"16-bit sums": torch.bfloat16, "fp32": torch.float32}
    own = [kind for kind, dtype in kinds.items() if packed.exists(dtype, "cpu")]
    own += ["bf16"] if packed.rounds(torch.bfloat16) else []
    gpu = torch.cuda.is_available()
    build = _library.build_info()
    # "": the package has no compiled module for this CPython.
    unit = build.get("cpu_capability", "")
    facts: dict[str, Any] = {
        "storage_ops": _library.version() + _purity(build),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "gpu_arch": "{}.{}".format(*torch.cuda.get_device_capability()) if gpu else None,
        "storage_path": status.storage_path,
        "zero_copy": probe.data_ptr() == address,
        "guard": guard,
        "saved_tensors": "C++" if _library.SAVED_TENSORS in sys.modules else "Python",
        "row_kernel": f"C++{unit and f', {unit}'}" if on_cpu else "plain torch",
        "cpu_products": f"C++ for {', '.join(own)}" if own else "those of torch",
        "row_kernel_cuda": toolkit(build, torch.version.cuda) if on_cuda else "plain torch",
        "loaded": list(status.loaded),
        "skipped": dict(status.skipped),
        "missing": dict(status.missing),
        "build": build,
    }
    if (installed := _library.hidden()) is not None:
        complaints = [
            f"{_library.FOLDER.parent} was imported, a source tree without libraries. The "
            f"installed package is {installed}. Start python in another folder, or install with "
            "`-e`."
        ]
    else:
        complaints = problems(facts)
    return {**facts, "problems": complaints}


def _purity(build: Mapping[str, str]) -> str:
    if build.get("compiler"):
        return ""
    return ", pure Python" + (f": {build['pure']}" if "pure" in build else "")


def raises(read: Callable[[], object]) -> bool:
    """Return True if reading a discarded tensor raises an error."""
    try:
        read()
    except RuntimeError:
        return True
    return False


def problems(facts: Mapping[str, Any]) -> list[str]:
    """Return one sentence for each part that should work on this machine but does not.

    Args:
        facts: the result of `info`. A package that was built as pure Python by choice, or whose
            native libraries are switched off, is slow but complete. That is no problem.
    """
    version, skipped, missing = facts["torch"], facts["skipped"], facts["missing"]
    if any("older than" in reason for reason in (*skipped.values(), *missing.values())):
        return [f"torch {version} is older than 2.10, the oldest supported version. Update torch."]
    complaints = [
        f"{name}: {why}." for name, why in skipped.items() if why.startswith("loading failed")
    ]
    if any(why.startswith(_library.DISABLE) for why in skipped.values()):
        return complaints
    build = facts["build"]
    if not build.get("compiler"):
        if _library.CPU in missing and not _library.is_pure_by_choice(build):
            complaints.append(_without_libraries(missing, build))
        return complaints
    if _library.CPU in missing:
        complaints.append(f"{_library.CPU} is missing. Reinstall storage_ops.")
    if facts["storage_path"] == "copy":
        complaints.append(
            f"Sharing a storage copies its bytes: there is no storage binding for torch {version} "
            "here, and the alias library cannot take over. Update storage_ops, or build it from "
            "source."
        )
    elif not facts["zero_copy"]:
        complaints.append(
            f"Sharing a storage copied its bytes on the path {facts['storage_path']!r}, which is a "
            "defect. Please report it."
        )
    if facts["gpu"]:
        major = str(facts["torch_cuda"]).partition(".")[0]
        if facts["row_kernel_cuda"] == "plain torch":
            complaints.append(
                f"{facts['gpu']} is present, but no kernels for CUDA {major} are loaded. Install a "
                "build of storage_ops for this CUDA version."
            )
        elif not runs_on(facts["gpu_arch"], facts["build"].get("cuda_archs", "")):
            archs = facts["build"].get("cuda_archs")
            complaints.append(
                f"{facts['gpu']} is sm {facts['gpu_arch']}, but the kernels were built for "
                f"{archs}. Build from source with TORCH_CUDA_ARCH_LIST."
            )
    return complaints


def _without_libraries(missing: Mapping[str, str], build: Mapping[str, str]) -> str:
    """Return a sentence about missing libraries of an uncompiled package, with a remedy."""
    why = build.get("pure", "they were never built")
    return (
        f"The native libraries are missing ({', '.join(missing)}): {why}. The loss runs in plain "
        "torch operations, slower. Sharing a storage copies its bytes. Reads of discarded tensors "
        "are not detected. Install a C++ compiler (g++) and then storage_ops again, from its "
        "sources with `pip install --no-build-isolation --force-reinstall --no-deps .`, or install "
        f"a wheel. If pure Python is intended, build with {_library.NO_NATIVE}."
    )


def toolkit(build: Mapping[str, str], torch_cuda: str | None) -> str:
    """Return the toolkit of the loaded CUDA library. A package can have one for every CUDA major.

    Example:
        >>> toolkit({"cuda": "13.0 12.8"}, "12.6")
        'CUDA 12.8'
    """
    major = str(torch_cuda).partition(".")[0]
    versions = [v for v in build.get("cuda", "").split() if v.partition(".")[0] == major]
    return " ".join(["CUDA", *versions])


def runs_on(arch: str, built_for: str) -> bool:
    """Return True if kernels run on a GPU: binaries within a major, PTX on everything later.

    Example:
        >>> runs_on("8.7", "8.0;9.0"), runs_on("12.1", "8.0;9.0"), runs_on("12.1", "8.0;9.0+PTX")
        (True, False, True)
    """
    device = tuple(int(part) for part in arch.split("."))
    for entry in built_for.replace(";", " ").split():
        parts = re.fullmatch(r"([\d.]+)([a-z]?)(\+PTX)?", entry)
        number, suffix, ptx = parts.groups() if parts else ("0", "", "")
        built = tuple(int(part) for part in number.split("."))
        if built == device or (not suffix and built < device and (ptx or built[0] == device[0])):
            return True
    return False
