"""The table of peak memory, before and after, at the end of all examples."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table

from storage_ops.memory import Measurement

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def report(title: str, measured: dict[str, Measurement]) -> None:
    """Print the peak of each case in MiB above the memory before it."""
    first = next(iter(measured.values())).peak_bytes
    table = Table("", "peak", "of the first", title=f"{title} ({DEVICE})")
    for name, run in measured.items():
        table.add_row(name, f"{run.peak_bytes / 2**20:.0f} MiB", f"{run.peak_bytes / first:.2f}")
    Console().print(table)
