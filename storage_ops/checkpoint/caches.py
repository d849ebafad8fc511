"""Key-value caches that layers of transformers are given: they would keep what a region frees."""

from __future__ import annotations

import functools
import warnings
from typing import Any

from torch import nn

_CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")


def without_cache(module: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a layer that is checkpointed in training, without an empty cache.

    Models make one by default (`use_cache=True`), in training too, where nobody reads it, and keep
    the keys and values of every layer in it until their output is dropped.
    `gradient_checkpointing_enable()` of transformers leaves it out as well. A cache that holds
    something belongs to the computation and stays.
    """
    given = [name for name in _CACHES if hasattr(kwargs.get(name), "get_seq_length")]
    if not given or not module.training:
        return kwargs
    layer = next((m.layer_idx for m in module.modules() if hasattr(m, "layer_idx")), 0)
    empty = [name for name in given if not kwargs[name].get_seq_length(layer)]
    if not empty:
        return kwargs
    switched = {"use_cache": False} if "use_cache" in kwargs else {}
    return {**kwargs, **dict.fromkeys(empty), **switched}


@functools.cache
def warn_once(kind: str) -> None:
    """Say, the first time, that layers of a class run without the cache that their model made."""
    warnings.warn(
        f"{kind} is checkpointed, and its model was called with use_cache=True: in training the "
        "layer runs without the cache, as with gradient_checkpointing_enable(). use_cache=False "
        "says so",
        stacklevel=5,
    )
