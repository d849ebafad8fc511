"""The table of peak memory, before and after, that all examples end with."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table

from storage_ops.memory import Measurement

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def report(title: str, measured: dict[str, Measurement]) -> None:
    """Print the peak of each way to do the same, in MiB above the memory before."""
    first = next(iter(measured.values())).peak_bytes
    table = Table("", "peak", "of the first", title=f"{title} ({DEVICE})")
    for name, found in measured.items():
        table.add_row(
            name, f"{found.peak_bytes / 2**20:.0f} MiB", f"{found.peak_bytes / first:.2f}"
        )
    Console().print(table)
