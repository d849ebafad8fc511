"""Autocast in recordings of layers.

Autocast casts a parameter once, and keeps the cast until its outermost block ends. A recording must
not change that cache, because modules outside of the layer use it, too. So a layer is recorded
without the cache, but only if the result is the same. Each parameter must be cast at most once, and
autograd must keep the cast for the backward anyway.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence

import torch
from torch import nn

from storage_ops.foundation.autocast import autocast_dtypes
from storage_ops.foundation.ledger import Block
from storage_ops.simulate.module_kinds import NotComparable


@contextlib.contextmanager
def casts_uncached() -> Iterator[None]:
    """Let autocast neither read nor fill its cache in a with block."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextlib.contextmanager
def autocast_off() -> Iterator[None]:
    """Turn autocast off in a with block, as in a backward, without clearing its cache."""
    on = [kind for kind, _ in autocast_dtypes()]
    for kind in on:
        torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        for kind in on:
            torch.set_autocast_enabled(kind, True)


def check_casts(
    events: Iterable[tuple[object, Block, bool]], parameters: Iterable[nn.Parameter]
) -> None:
    """Check that the casts of parameters in a forward equal those with a cache.

    Args:
        events: the allocations and releases of the forward.
        parameters: the parameters of the layer.

    Raises:
        NotComparable: a cast was freed in the forward, or a parameter may have been cast twice.
    """
    if not autocast_dtypes():
        return
    uncast = Counter(tuple(p.shape) for p in parameters)
    shapes = set(uncast)
    for _, block, is_allocation in events:
        if not _is_cast(block, shapes):
            continue
        uncast[block.shape] -= 1
        if not is_allocation or uncast[block.shape] < 0:
            raise NotComparable


def casts_in(
    events: Sequence[tuple[object, Block, bool]], parameters: Iterable[nn.Parameter]
) -> list[Block]:
    """Return the casts of parameters that a forward has made and not freed.

    Args:
        events: the allocations and releases of the forward.
        parameters: the parameters of the layer.
    """
    uncast = Counter(tuple(p.shape) for p in parameters)
    freed = {block for _, block, is_allocation in events if not is_allocation}
    casts = []
    for _, block, _ in events:
        if block not in freed and _is_cast(block, uncast) and uncast[block.shape] > 0:
            uncast[block.shape] -= 1
            casts.append(block)
    return casts


def _is_cast(block: Block, shapes: Container[tuple[int, ...]]) -> bool:
    """Return whether a block may be the cast of a parameter with one of these shapes."""
    return block.made_by == "aten._to_copy.default" and block.shape in shapes
