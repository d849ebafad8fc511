"""Errors of a recompute that say what the user can do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from storage_ops.checkpoint.saved.saved import fail
from storage_ops.foundation import fsdp

# In torch's errors for tensors without memory, from views and from kernels.
_FREED = ("out of bounds for storage of size 0", "its data is not allocated yet")


def explain_lost_memory(region: str, fn: Callable[..., object], error: RuntimeError) -> None:
    """Raise an error that says who freed memory that a recompute reads, if that is known.

    Args:
        region: the name of the region.
        fn: its function.
        error: the error of the recompute.
    """
    if any(message in str(error) for message in _FREED):
        fail(
            f"{region} is recomputed after the memory of a tensor that it reads was freed, as "
            "FullyShardedDataParallel (FSDP1) does with parameters. Use fully_shard (FSDP2) or "
            "SHARD_GRAD_OP, or select the regions after the modules were wrapped."
        )
    if fsdp.lacks_parameters(fn):
        fail(
            f"{region} is recomputed after DeepSpeed (ZeRO stage 3) has partitioned a parameter of "
            "it, which the hooks of another module gather. Use regions of whole layers, such as "
            "full or selective checkpoints, or use stage 2."
        )


def explain_difference(contexts: tuple[Any, ...], debug: bool = False) -> str:
    """Return the difference that the contexts of a region have noted, for an error.

    Args:
        contexts: the context managers of the options.
        debug: whether the region is in debug mode.
    """
    noted: str = getattr(contexts[1], "difference", "") if contexts else ""
    if noted:
        return f" Difference: {noted}."
    return "" if debug else " Set debug=True to see the first op that differs."
