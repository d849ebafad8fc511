"""Be one rank of several, on a process group that sends nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def one_of(ranks: int) -> Iterator[None]:
    """Be the first of these ranks in a with block. A single rank needs no process group."""
    if ranks == 1:
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
