"""What a region becomes where it cannot be repeated: a mark in the graph that is recorded.

Under torch.compile that is a checkpoint that shares its mark with all others: partitioners save
directly from one checkpoint to the next, which they tell by the number of the checkpoint on the
nodes (`ac_graph_id`). Regions have one number for all of them, so that a chain of regions is
recomputed as one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch.utils import checkpoint as torch_checkpoint

from storage_ops.graph import regions
from storage_ops.graph.torch_checkpoint import policy_of

_NUMBER = 1 << 40  # above those that torch counts up


def _recompute(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    return torch_checkpoint.CheckpointPolicy.PREFER_RECOMPUTE


@functools.cache
def _numbered(mode: type) -> type:
    """A subclass of torch's caching mode with one number, which torch cannot replace."""
    number = property(lambda self: _NUMBER, lambda self, value: None)
    return type("OutputDiscardMode", (mode,), {"ac_graph_id": number})


def _contexts() -> tuple[Any, Any]:
    forward, recompute = torch_checkpoint.create_selective_checkpoint_contexts(_recompute)
    forward.__class__ = _numbered(type(forward))  # type: ignore[arg-type]
    return forward, recompute


# Whether this torch takes the number of a checkpoint from its mode: 2.13 does, 2.10 does not.
_MODE = getattr(torch_checkpoint, "_CachingTorchDispatchMode", None)
_HAS_NUMBERS = _MODE is not None and "ac_graph_id" in inspect.signature(_MODE).parameters


def compiled_region(
    fn: Callable[..., Any], args: Any, kwargs: Any, preserve_rng_state: bool, context_fn: Any
) -> Any:
    """Call `fn` as a checkpoint that a partitioner recomputes, outputs included."""
    options: dict[str, Any] = {"preserve_rng_state": preserve_rng_state}
    if context_fn is not None:
        options["context_fn"] = context_fn
    elif _HAS_NUMBERS:
        options["context_fn"] = _contexts
    return torch_checkpoint.checkpoint(fn, *args, use_reentrant=False, **options, **kwargs)


def traced_region(
    fn: Callable[..., Any], args: Any, kwargs: Any, context_fn: Any, discards: bool
) -> Any:
    """Call `fn` once, and mark what a trace records of it as a region."""
    policy, forward = policy_of(context_fn or torch_checkpoint.noop_context_fn)
    with forward:
        return regions.mark(fn, args, kwargs, policy=policy, discards=discards)
