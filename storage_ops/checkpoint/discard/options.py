"""Keyword arguments of discarding checkpoints, with their types.

`tests/test_types.py` compares the names with those that the functions take.
"""

from __future__ import annotations

from typing import Any

from typing_extensions import TypedDict

from storage_ops.checkpoint.region.region import ContextFn, DeterminismCheck


class DiscardOptions(TypedDict, total=False):
    """Arguments of `OutputDiscardCheckpoint`."""

    preserve_rng_state: bool
    determinism_check: DeterminismCheck
    debug: bool
    context_fn: ContextFn | None
    retain_input_tensors: bool
    fp8: Any
    ckpt_manager: Any
