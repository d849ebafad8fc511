"""Simulated tensors that outlive their simulation, because the user's program keeps them."""

from __future__ import annotations

import gc
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

from storage_ops._callers import warn_caller
from storage_ops.memory.estimate_ledger import Ledger


def warn_of_tensors_left(ledger: Ledger) -> None:
    """Warn if the program still holds simulated tensors after everything known was restored.

    Training that reads such a tensor fails later, far from the cause.
    """
    if not ledger.alive():
        return
    gc.collect(1)  # what is new: cycles were not collected during the simulation
    left = {storage._cdata for storage in ledger.alive()}
    tensors = [
        t for t in gc.get_objects()
        if type(t) is FakeTensor and t.untyped_storage()._cdata in left
    ]  # fmt: skip
    places = [(t, place) for t in tensors if (place := _place_of(t, tensors))]
    if places:
        first, place = places[0]
        warn_caller(
            f"estimate: fn left {len(places)} simulated tensors behind, one of shape "
            f"{tuple(first.shape)} in {place}. Reading them after the simulation fails. Expected a "
            "function that stores tensors only in modules, in its arguments and in variables that "
            "it names itself; those are restored"
        )


def _place_of(t: FakeTensor, ignored: list[Any]) -> str:
    """Describe a container or object that holds a tensor; "" if only frames and tensors do."""
    for holder in gc.get_referrers(t):
        if holder is ignored or isinstance(holder, FakeTensor):
            continue
        attributes = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
        for key, value in attributes.items():
            if value is t:
                return f"{type(holder).__name__}, under {key!r}"
        if isinstance(holder, (list, set)):
            return f"a {type(holder).__name__} of {len(holder)}"
    return ""
