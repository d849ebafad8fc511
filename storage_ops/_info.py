"""What this installation is and what works in it."""

from __future__ import annotations

import platform
from typing import Any

import torch

from storage_ops import _library


def info(status: _library.Status) -> dict[str, Any]:
    """Collect versions, libraries and the paths in use."""
    ops = torch.ops.storage_ops
    probe = torch.ones(1)
    ops.discard_storage(probe)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    native = has_kernel("storage_ops::_cross_entropy_rows", "CPU")
    build = _library.build_info()
    return {
        "storage_ops": build.get("version", "pure Python"),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "storage_path": status.storage_path,
        "guard": bool(ops._arm_guard(probe, "probe")),
        "row_kernel": f"C++, {build.get('cpu_capability', 'generic')}" if native else "plain torch",
        "loaded": list(status.loaded),
        "skipped": dict(status.skipped),
        "missing": dict(status.missing),
        "build": build,
    }
