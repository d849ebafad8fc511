"""Policies that are sets of ops or of their calls, applied without Python code for each op.

The library of saved tensors has kernels for the ops of such a policy (`policy_kernels.h` in
`csrc/checkpoint/`) and logs all other ops (`op_callback.h`). It does the same as the modes of
`selective`. Errors and warnings of both are in Python. The modes are needed for policies that
inspect arguments, for higher-order ops, for tensor subclasses, inside other modes, and without the
library.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import SAC_IGNORED_OPS

from storage_ops import _library
from storage_ops._callers import warn_caller
from storage_ops.checkpoint.saved.matching import (
    ORIGIN,
    VIEWS,
    describe_difference,
    describe_failure,
)
from storage_ops.checkpoint.selective import offload
from storage_ops.checkpoint.selective.op_sets import ops_saved, rows_of
from storage_ops.checkpoint.selective.policies import Policy
from storage_ops.foundation.eager import eager
from storage_ops.foundation.op_names import name_of, readable

# For each policy: the number of known library ops at that time, and the native policy or None.
_native_policies: Any = weakref.WeakKeyDictionary()
# The policy of the last region, as a weak reference, and its entry in `_native_policies`.
_last: tuple[Callable[[], Any], int, Any] = (lambda: None), -1, None


def contexts(policy: Policy, region: str, preserve_rng_state: bool) -> tuple[Any, Any] | None:
    """Return the pair of contexts for a region, or None if Python must apply the policy.

    Args:
        policy: the policy.
        region: the name of the region in warnings and errors.
        preserve_rng_state: whether ops after a saved op draw the random numbers of the forward.
    """
    if _native is None or torch._C._len_torch_dispatch_stack():
        return None
    native_policy = _native_policy(policy)
    if native_policy is None or native_policy.needs_python(region):
        return None
    results = _native.SavedResults(native_policy, region, preserve_rng_state)
    return results.forward(), results.recompute()


def _native_policy(policy: Policy) -> Any:
    global _last
    known = _native.ops_of_libraries()
    last, number, policy_object = _last
    if last() is policy and number == known:  # the hash of a policy may be slow
        return policy_object
    try:
        number, policy_object = _native_policies.get(policy, (-1, None))
    except TypeError:  # a user's policy without a hash, or without weak references
        return None
    if number != known:
        ops = ops_saved(policy)
        policy_object = None if ops is None else _native.policy(rows_of(ops), ops.k)
        number = _native.ops_of_libraries()
        _native_policies[policy] = number, policy_object
    _last = weakref.ref(policy), number, policy_object
    return policy_object


@eager
def noting(
    note: Callable[[Tensor], None], pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
) -> saved_tensors_hooks:
    """Return hooks that call `note` before each tensor that `pack` packs."""

    def pack_and_note(t: Tensor) -> Any:
        note(t)
        return pack(t)

    # The name tells inner regions that an enclosing checkpoint saves none of their tensors.
    pack_and_note.__module__ = getattr(pack, "__module__", "")
    return saved_tensors_hooks(pack_and_note, unpack)


def warn_of_nothing(region: str, calls: dict[str, int]) -> None:
    """Warn that a policy saves nothing in a region.

    Args:
        region: its name.
        calls: how often each op was called there.
    """
    if calls:
        ran = [f"{readable(name)} x{n}" for name, n in Counter(calls).most_common(8)]
        warn_caller(
            f"The policy of the selective checkpoint saves nothing in {region}, which is "
            f"recomputed as a whole. Its ops are {', '.join(ran)}."
        )


def warn_of_modified(region: str, names: Iterable[str]) -> None:
    """Warn that a region modifies results of these ops, so that they are not saved."""
    ops = ", ".join(sorted(map(readable, set(names))))
    warn_caller(
        f"{region} modifies in place results of {ops} that the policy of its selective checkpoint "
        "saves. They are recomputed instead, which takes longer and changes no gradient."
    )


def warn_of_modified_later(region: str, name: str) -> None:
    """Warn that a result of this op was modified after its region, so that the op runs again."""
    warn_caller(
        f"A result of {readable(name)} that the policy of a selective checkpoint saved in {region} "
        f"was modified in place after {region}. It is recomputed instead, which takes longer and "
        "changes no gradient. Modify a clone, or do not save the result."
    )


def _end(
    region: str,
    unsaved: list[str],
    modified: list[str],
    offloaded: list[tuple[list[Tensor], list[Tensor]]],
) -> tuple[offload.Away, list[list[offload.Trip]]] | None:
    """End the forward of a region.

    Args:
        region: its name.
        unsaved: the ops that ran, if no result was saved.
        modified: the ops whose results were modified in the region.
        offloaded: for each result that goes to host memory: its tensors, and all that share them.

    Returns:
        The results in host memory, and for each of `offloaded` its copies; None if there are none.
    """
    if unsaved:
        warn_of_nothing(region, Counter(unsaved))
    trips = [offload.trips_of(values, others) for values, others in offloaded]
    offload.region_ended()
    if modified:
        warn_of_modified(region, modified)
    return (offload.Away(trip for each in trips for trip in each), trips) if any(trips) else None


def _follow(note: Callable[[Tensor], None], hooks: tuple[Any, Any]) -> saved_tensors_hooks:
    """Call `note` before each tensor that Python hooks pack."""
    following = noting(note, *hooks)
    following.__enter__()
    return following


@eager
def _origin(t: Tensor) -> str | int:
    """Return the origin of the tensor that a leaf replaces, or 1 for another leaf."""
    origin: str | int = vars(t).get(ORIGIN, 1)
    return origin


def _set_up() -> Any:
    """Return the library's module, or None without the library."""
    native: Any = sys.modules.get(_library.SAVED_TENSORS)
    if native is not None:
        native.setup_results(
            describe_difference, describe_failure, warn_of_modified_later, _end, _follow,
            torch._C._autograd._top_saved_tensors_default_hooks, _origin, offload.arrive,
            sorted(map(name_of, SAC_IGNORED_OPS)), sorted(VIEWS),
        )  # fmt: skip
    return native


_native = _set_up()
