"""Key-value caches that layers of transformers are given: they would keep what a region frees."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from storage_ops._callers import warn_caller


def without_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], always: bool = False
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a layer that is checkpointed in training, without an empty cache.

    Models make one by default (`use_cache=True`), in training too, where nobody reads it, and keep
    the keys and values of every layer in it until their output is dropped.
    `gradient_checkpointing_enable()` of transformers leaves it out as well. A cache that holds
    something belongs to the computation and stays. Arguments without one are the same objects.

    Args:
        module, args, kwargs: the layer and its call.
        always: in eval mode, too.
    """
    caches = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
    if not (caches and (module.training or always)):
        return args, kwargs
    layer = next((m.layer_idx for m in module.modules() if hasattr(m, "layer_idx")), 0)
    empty = [cache for cache in caches if _is_empty(cache, layer)]
    if not empty:
        return args, kwargs

    def without(value: object) -> Any:
        return None if any(value is cache for cache in empty) else value

    switched = {"use_cache": False} if "use_cache" in kwargs else {}
    named = {name: without(value) for name, value in kwargs.items()}
    return tuple(map(without, args)), {**named, **switched}


def _is_empty(cache: Any, layer: Any) -> bool:
    """Return True if a cache holds nothing of a layer."""
    try:
        return not cache.get_seq_length(layer)
    except ValueError:  # a layer such as Mamba's, which has states in place of a length
        states = getattr(cache.layers[layer], "has_previous_state", False)
        return not (any(states.values()) if isinstance(states, dict) else states)


def _is_cache(value: object) -> bool:
    return not isinstance(value, Tensor) and hasattr(value, "get_seq_length")


def warn_once(kind: str) -> None:
    """Say, the first time, that layers of a class run without the cache that their model made.

    Nothing is said under a dispatch mode: `fit` tries checkpoints in one, and a user who reads the
    warning then has checkpointed nothing.
    """
    if torch._C._len_torch_dispatch_stack() == 0:
        _warn_once(kind)


@functools.cache
def _warn_once(kind: str) -> None:
    warn_caller(
        f"{kind} is checkpointed, and its model was called with use_cache=True. In training the "
        "layer runs without the cache, as with gradient_checkpointing_enable(). Pass "
        "use_cache=False."
    )
