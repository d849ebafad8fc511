"""Call a function inside of context managers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from storage_ops import _library


def _call_in(
    contexts: tuple[Any, ...],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Return `fn(*args, **kwargs)`, called inside of context managers, outermost first."""
    with contexts[0]:
        if len(contexts) == 1:
            return fn(*args, **kwargs)
        return _call_in(contexts[1:], fn, args, kwargs)


_native: Any = sys.modules.get(_library.SAVED_TENSORS)
# csrc/checkpoint/call_in.cpp does the same without a Python frame for each context manager.
call_in: Callable[..., Any] = _call_in if _native is None else _native.call_in
