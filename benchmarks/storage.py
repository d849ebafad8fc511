"""The time of a call of the storage ops, by storage path and size."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.benchmark import Timer

import storage_ops
from benchmarks._harness import finish, parser, skip
from storage_ops.storage.kernels import storage_path

SIZES = {"32 B": 8, "4 MiB": 1 << 20}


def microseconds(statement: str, **names: object) -> float:
    """Return the median time of a statement."""
    timer = Timer(statement, globals={"storage_ops": storage_ops, "torch": torch, **names})
    return timer.blocked_autorange(min_run_time=0.3).median * 1e6


def all_rows(device: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of all storage paths."""
    facts = storage_ops.info()
    native = facts["storage_path"]
    for path in dict.fromkeys((native, "alias", "copy")):
        if path == "alias" and not any("alias" in name for name in facts["loaded"]):
            skip(path, "its library is not loaded")
            continue
        override = contextlib.nullcontext() if path == native else storage_path(path)
        with override:
            for size, count in SIZES.items():
                dst, src = (torch.empty(count, device=device) for _ in range(2))
                share = "storage_ops.share_storage(dst, src)"
                both = f"storage_ops.discard_storage(dst); {share}"
                raw = "torch.ops.storage_ops.share_storage.default(dst, src)"
                yield {
                    "case": f"{path}, {size}",
                    "share_storage (us)": round(microseconds(share, dst=dst, src=src), 2),
                    "raw op (us)": round(microseconds(raw, dst=dst, src=src), 2),
                    "discard + share (us)": round(microseconds(both, dst=dst, src=src), 2),
                }


def main() -> None:
    """Measure, write and print."""
    arguments = parser(__doc__).parse_args()
    finish("storage", all_rows(arguments.device), arguments)


if __name__ == "__main__":
    main()
