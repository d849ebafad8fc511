"""Leave out key-value caches of transformers, which would keep tensors that a region frees."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from storage_ops._callers import warn_caller

# Dynamo cannot ask a symbolic number or a slice for an attribute.
_NO_CACHES = (Tensor, int, float, slice)


def without_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], always: bool = False
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a checkpointed layer in training, without empty caches.

    Models create a cache by default (`use_cache=True`), in training too, although training does not
    read the cache. It keeps the keys and values of every layer until the model's output is freed.
    `gradient_checkpointing_enable()` of transformers leaves the cache out too. A cache with
    contents belongs to the computation and stays. Without an empty cache, the arguments are
    returned unchanged.

    Args:
        module: the layer.
        args, kwargs: its arguments.
        always: whether to leave out empty caches in eval mode too.
    """
    caches = [
        value
        for value in (*args, *kwargs.values())
        if not isinstance(value, _NO_CACHES) and hasattr(value, "get_seq_length")
    ]
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
    """Return True if a cache has no contents for a layer."""
    try:
        return not cache.get_seq_length(layer)
    except ValueError:  # a layer such as Mamba's, which has states instead of a length
        states = getattr(cache.layers[layer], "has_previous_state", False)
        return not (any(states.values()) if isinstance(states, dict) else states)


def warn_once(kind: str) -> None:
    """Warn once for a class of layers that they run without the cache of their model.

    There is no warning under a dispatch mode. `fit` tries checkpoints under a mode, and its user
    has not checkpointed a layer.
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
