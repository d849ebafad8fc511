"""Modules that change their class: subclasses that go by the name of what they replace."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def like(original: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: as functools.wraps, with a signature in the place of __wrapped__.

    Trainer and generate() of transformers read the signature. accelerate follows __wrapped__ to
    remove its own wrappers, and would remove ours.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        functools.update_wrapper(function, original)
        del function.__wrapped__  # type: ignore[attr-defined]
        function.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
        return function

    return decorate


def subclass(base: Any, original: Any, forward: Callable[..., Any]) -> Any:
    """A subclass of `base` and `original` under the latter's name, which it has as `_original`."""
    body = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_original": original,
        "forward": forward,
    }
    return type(original.__name__, (base, original), body)
