"""Call a function as a region, in C++ where the call is usual.

`run` is how checkpointed modules call their forward. A call is usual if its arguments are plain
tensors, numbers, strings and tuples of them, and no mode is active. The library must also be able
to note the state before the call. Then its `PlainRegion` runs and recomputes the function
(`csrc/checkpoint/plain_region.cpp`).

It becomes a `Region` as soon as something is unusual. Examples are another state before the
recompute, a backward pass inside the forward, and compiled autograd. A tensor that another region
discards is one, too.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from storage_ops import _library
from storage_ops.checkpoint.region.backward_pass import current_group
from storage_ops.checkpoint.region.errors import explain_difference, explain_lost_memory
from storage_ops.checkpoint.region.inputs import Inputs, forget_hooks, leaves_of
from storage_ops.checkpoint.region.options import Options, contexts_of
from storage_ops.checkpoint.region.region import Region, serials
from storage_ops.checkpoint.saved import guard, saved_tensors
from storage_ops.checkpoint.saved.outputs import DiscardableOutput, producers
from storage_ops.checkpoint.saved.ref_counts import RefCounts
from storage_ops.checkpoint.saved.saved import Saved, explain_transform
from storage_ops.checkpoint.state.snapshot import Snapshot, is_as_before, snapshot_before
from storage_ops.foundation import collectives, fsdp
from storage_ops.foundation.eager import eager
from storage_ops.storage.storage import discard_storage, share_storage


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
    plain = plain_region(fn, args, kwargs, options, name)
    if plain is None:
        return Region(fn, args, kwargs, options, name).forward(args, kwargs)
    issued = collectives.number_issued()
    outputs = plain.forward(args, kwargs)
    if collectives.number_issued() != issued:
        plain.region().note_communication(leaves_of(outputs))
    return outputs


def plain_region(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    name: str = "",
) -> Any:
    """Return the library's object for a usual call, or None.

    Args:
        fn, args, kwargs: the call.
        options: the settings of the region.
        name: its name in errors. By default that of the function.
    """
    if _native is None or not options.is_usual or fsdp.is_used():
        return None
    inputs = _native.KeptInputs(args, kwargs)
    if inputs is None or inputs.has_producer():
        return None
    snapshot = snapshot_before(fn, [], (), options.preserve_rng_state)
    if snapshot is None:
        return None
    name = name or getattr(fn, "__qualname__", type(fn).__qualname__)
    contexts = contexts_of(options.context_fn) if options.context_fn else ()
    checks = options.determinism_check != "none"
    return _native.PlainRegion(
        fn, inputs, *snapshot, F.scaled_dot_product_attention, contexts, options, name,
        next(serials), options.early_stop, checks, options.checksums,
    )  # fmt: skip


def resume(
    plain: Any, args: tuple[Any, ...], kwargs: dict[str, Any], unusual: list[Any]
) -> tuple[Any, Region]:
    """Return an output that is not a usual one, and the region that takes over from `plain`.

    Args:
        plain: the library's object.
        args, kwargs: the arguments of the call.
        unusual: the list that `forward_and_discard` has returned.
    """
    region: Region = plain.region()
    assert region._inputs is not None
    issued, start = unusual.pop(), unusual.pop()
    region._inputs.tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    return region.returned(unusual, start, issued), region


@eager
def _make(*parts: Any) -> Region:
    """Return the region that takes over from a `PlainRegion` with these parts."""
    fn, options, name, serial, contexts, inputs, native, facts, attention, *rest = parts
    saved, running, recomputed, task, output = rest
    region = Region.__new__(Region)
    region.name, region.options, region._serial, region._fn = name, options, serial, fn
    region._inputs = None if inputs is None else Inputs.of_library(inputs)
    region._state = None if native is None else Snapshot(native, facts, attention, running)
    region._captured = []
    region.set_up(contexts or (), saved)
    region._running = running
    if recomputed is not None:
        region._recomputed, region._task = recomputed, task
    if output is not None:
        _give_output(region, *output)
    return region


def _give_output(
    region: Region,
    key: int,
    handle: Tensor,
    output: weakref.ref[Tensor] | None,
    version: int,
    description: Saved,
    uses: int,
    is_discarded: bool,
) -> None:
    """Give a region the output that the library has noted or discarded."""
    handle.untyped_storage()  # `RefCounts` counts the Python object of a storage
    entry = DiscardableOutput(0, key, handle, output or _freed, version, description, _FIRST)
    region.outputs.uses[key] = uses
    if is_discarded:
        region.outputs.discarded = [entry]
    else:
        region.outputs.discardable = [entry]
    producers[key] = weakref.ref(region)


def _freed() -> None:
    """Return None, as a weak reference to a tensor that was freed."""


def _discard(handle: Tensor, name: str) -> None:
    """Free the bytes of the output of a region."""
    discard_storage(handle, guard=guard.message(name), allow_leaf=True)


def _explain(name: str, fn: Callable[..., object], error: BaseException) -> None:
    """Raise a better error than that of a recompute, if there is one."""
    if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
        explain_lost_memory(name, fn, error)


def _check(recomputed: Any, name: str, contexts: tuple[Any, ...]) -> None:
    """Raise if a region did not save the same tensors in its forward and in its recompute."""
    saved_tensors.check(recomputed, name, lambda: explain_difference(contexts))


# The references to an output that only its region and one name reference, and to the handle.
_FIRST = RefCounts(2, 1, 1)


def set_up_consumers(finish: Any, pack: Any, unpack: Any, packed: Any, module: str) -> None:
    """Give the library the functions for consumers of outputs.

    Args:
        finish: discards the output of a region after its consumer, if nothing references it.
        pack, unpack: the hooks of a consumer.
        packed: returns the object that `unpack` gets, for a tensor, its version and its region.
        module: the module of these functions.
    """
    global _native
    _native = sys.modules.get(_library.SAVED_TENSORS)
    if _native is not None:
        _native.setup_regions(
            _make, explain_transform, _explain, _check, forget_hooks, current_group, is_as_before,
            collectives.number_issued, collectives.GROUPS, _discard, share_storage,
            finish, pack, unpack, packed, module,
            torch._C._dynamo.eval_frame.set_eval_frame,
        )  # fmt: skip


_native: Any = None  # the library's module, once it is set up
