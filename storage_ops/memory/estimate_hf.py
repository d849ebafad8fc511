"""Masks of transformers in a simulation: those of a run, not those of a trace."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

from storage_ops.memory.estimate_values import Values


@contextlib.contextmanager
def masks_as_in_a_run(values: Values) -> Iterator[None]:
    """Let transformers look at values that are known, in a with block.

    In a run it looks whether a mask is of use (sequences are packed, tokens are padding) and makes
    none otherwise, so that attention is causal by itself and keys and values are not repeated for
    their heads. It takes every fake tensor for one of a trace, whose values nobody knows.
    """
    module: Any = sys.modules.get("transformers.masking_utils")
    plain = getattr(module, "is_tracing", None)
    if plain is None:
        yield
        return

    def is_tracing(tensor: Any = None) -> bool:
        if isinstance(tensor, FakeTensor) and values.read(tensor) is not None:
            return False
        return bool(plain(tensor))

    module.is_tracing = is_tracing
    try:
        yield
    finally:
        module.is_tracing = plain
