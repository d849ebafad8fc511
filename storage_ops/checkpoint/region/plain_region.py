"""Call a function as a region, in C++ where the call is usual.

`run` is how checkpointed modules call their forward. A call is usual if its arguments are plain
tensors, no mode is active, and the library can note the state before it. Then the library's
`PlainRegion` runs it and recomputes it (`csrc/checkpoint/plain_region.cpp`). It becomes a `Region`
as soon as something is unusual: another state before the recompute, a second backward pass, a
backward pass inside the forward, compiled autograd, or a tensor that another region discards.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from storage_ops import _library
from storage_ops.checkpoint.region import region
from storage_ops.checkpoint.region.backward_pass import current_group
from storage_ops.checkpoint.region.inputs import (
    Inputs,
    explain_lost_memory,
    forget_hooks,
    leaves_of,
)
from storage_ops.checkpoint.region.options import Options
from storage_ops.checkpoint.region.region import Region
from storage_ops.checkpoint.saved import saved_tensors
from storage_ops.checkpoint.saved.outputs import producers
from storage_ops.checkpoint.saved.saved import explain_transform
from storage_ops.checkpoint.state.execution import is_disabled
from storage_ops.checkpoint.state.snapshot import Snapshot, snapshot_before
from storage_ops.foundation import collectives, fsdp


def run(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    name: str,
) -> Any:
    """Return `fn(*args, **kwargs)`. It is recomputed in backward, and its outputs are kept.

    Args:
        fn, args, kwargs: the call.
        options: the settings of the region.
        name: its name in errors.
    """
    plain = _plain_region(fn, args, kwargs, options, name)
    if plain is None:
        return Region(fn, args, kwargs, options, name).forward(args, kwargs)
    issued = collectives.number_issued()
    try:
        outputs = plain.forward(args)
    except RuntimeError as error:
        explain_transform(name, error)
        raise
    if collectives.number_issued() != issued:
        plain.region().note_communication(leaves_of(outputs))
    return outputs


def _plain_region(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    name: str,
) -> Any:
    """Return the library's object for a usual call, or None."""
    if _native is None or kwargs or producers or not options.is_usual or fsdp.is_used():
        return None
    inputs = _native.KeptInputs(args)
    if inputs is None:
        return None
    snapshot = snapshot_before(fn, [], args, options.preserve_rng_state)
    if snapshot is None:
        return None
    contexts = options.context_fn() if options.context_fn else ()
    checks = options.determinism_check != "none"
    return _native.PlainRegion(
        fn, inputs, *snapshot, F.scaled_dot_product_attention, contexts, options, name,
        next(region.serials), options.early_stop, checks,
    )  # fmt: skip


def _make(parts: tuple[Any, ...], task: int) -> Region:
    """Return the region that takes over from a `PlainRegion`.

    Args:
        parts: its parts.
        task: the graph task of its recomputed tensors, or -1.
    """
    fn, options, name, serial, contexts, inputs, native, facts, attention, *rest = parts
    saved, running, recomputed = rest
    made = Region.__new__(Region)
    made.name, made.options, made._serial, made._fn = name, options, serial, fn
    made._inputs = None if inputs is None else Inputs.of_library(inputs)
    made._state = None if native is None else Snapshot(native, facts, attention, running)
    made._captured = []
    made.set_up(contexts or (), saved)
    made._running = running
    if recomputed is not None:
        made._recomputed, made._task = recomputed, task
    return made


def _explain(name: str, fn: Callable[..., object], error: BaseException) -> None:
    """Raise a better error than that of a recompute, if there is one."""
    if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
        explain_lost_memory(name, fn, error)


def _check(recomputed: Any, name: str, contexts: tuple[Any, ...]) -> None:
    """Raise if a region did not save the same tensors in its forward and in its recompute."""
    saved_tensors.check(recomputed, name, lambda: region.explain_difference(contexts))


def _set_up() -> Any:
    """Return the library's module, or None without the library."""
    native: Any = sys.modules.get(_library.SAVED_TENSORS)
    if native is not None:
        native.setup_regions(_make, _explain, _check, forget_hooks, current_group, is_disabled, F)
    return native


_native = _set_up()
