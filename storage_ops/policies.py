"""Policies of selective checkpointing: which results are saved, and which are recomputed."""

from storage_ops.checkpoint.selective.policies import (
    Policy,
    attention,
    communication,
    difference,
    every_kth,
    every_other_mm,
    everything,
    matmuls,
    offload,
    save,
    save_calls,
    save_mm_shapes,
    union,
)
from storage_ops.checkpoint.selective.selective import contexts

__all__ = [
    "Policy",
    "attention",
    "communication",
    "contexts",
    "difference",
    "every_kth",
    "every_other_mm",
    "everything",
    "matmuls",
    "offload",
    "save",
    "save_calls",
    "save_mm_shapes",
    "union",
]
