"""What a call of the storage ops costs, by storage path and size."""

from __future__ import annotations

import contextlib

import torch
from torch.utils.benchmark import Timer

import storage_ops
from benchmarks._harness import finish, parser
from storage_ops.ops.storage_kernels import storage_path

SIZES = {"32 B": 8, "4 MiB": 1 << 20}


def microseconds(statement: str, **names: object) -> float:
    """Median time of a statement."""
    timer = Timer(statement, globals={"storage_ops": storage_ops, "torch": torch, **names})
    return timer.blocked_autorange(min_run_time=0.3).median * 1e6


def main() -> None:
    """Measure, write and print."""
    arguments = parser(__doc__).parse_args()
    native = storage_ops.info()["storage_path"]
    paths = [native, *(path for path in ("alias", "copy") if path != native)]
    rows = []
    for path in paths:
        override = contextlib.nullcontext() if path == native else storage_path(path)
        with override:
            for size, count in SIZES.items():
                dst, src = torch.empty(count), torch.empty(count)
                share = "storage_ops.share_storage(dst, src)"
                both = f"storage_ops.discard_storage(dst); {share}"
                raw = "torch.ops.storage_ops.share_storage.default(dst, src)"
                rows.append(
                    {
                        "case": f"{path}, {size}",
                        "share_storage (us)": round(microseconds(share, dst=dst, src=src), 2),
                        "raw op (us)": round(microseconds(raw, dst=dst, src=src), 2),
                        "discard + share (us)": round(microseconds(both, dst=dst, src=src), 2),
                    }
                )
    finish("storage", rows, arguments)


if __name__ == "__main__":
    main()
