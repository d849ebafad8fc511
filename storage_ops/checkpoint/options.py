"""Keyword arguments of checkpoints by type.

`tests/test_types.py` compares their names with those that the functions take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typing_extensions import TypedDict

from storage_ops.checkpoint.config import Mode, PolicyChoice
from storage_ops.checkpoint.region import ContextFn, DeterminismCheck


class DiscardOptions(TypedDict, total=False):
    """Arguments of `OutputDiscardCheckpoint`."""

    preserve_rng_state: bool
    determinism_check: DeterminismCheck
    debug: bool
    context_fn: ContextFn | None
    retain_input_tensors: bool
    fp8: Any
    ckpt_manager: Any


class LayerOptions(TypedDict, total=False):
    """Arguments of `ActivationCheckpointConfig` that do not choose layers."""

    use_reentrant: bool
    ops_to_save: Sequence[Any] | None
    mode: Mode | None
    ops_to_recompute: Sequence[Any] | None
    mm_shapes_to_save: Sequence[str] | None
    mm_shapes_to_recompute: Sequence[str] | None
    policy: PolicyChoice
    preserve_rng_state: bool
    determinism_check: DeterminismCheck
    early_stop: bool
    debug: bool
    respect_saved_tensors_hooks: bool
    ops_to_offload: Sequence[Any] | None
