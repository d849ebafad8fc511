"""Caches of keys and values, which a layer of transformers appends to each time that it runs.

A checkpointed layer runs twice, and would find more in the cache than in its forward. As with the
checkpoints of transformers, it gets none while it trains, and is not checkpointed where it does
not. The library is not imported: its caches are known by where their class is defined.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

from torch import nn

_DEFINED_IN = "transformers.cache_utils"


def has_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a cache is among the arguments of a layer."""
    return any(map(_is_cache, args)) or any(map(_is_cache, kwargs.values()))


def without_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a layer that trains, with None in place of caches; says so once."""
    _say(type(module).__name__)
    kept = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
    if kept.get("use_cache"):
        kept["use_cache"] = False
    return tuple(None if _is_cache(value) else value for value in args), kept


def _is_cache(value: Any) -> bool:
    return any(base.__module__ == _DEFINED_IN for base in type(value).__mro__)


@functools.cache
def _say(layer: str) -> None:
    warnings.warn(
        f"{layer} is checkpointed and trains: it gets no cache of keys and values, which it would "
        "append to again when it is recomputed, and past_key_values stay empty; use_cache=False "
        "says the same",
        stacklevel=5,
    )
