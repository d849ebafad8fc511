"""Autocast around a traced step: its casts are part of the graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from storage_ops.foundation.autocast import autocast_dtype


class Autocast:
    """The autocast that was on around a trace, for some types of devices."""

    def __init__(self, device_types: Iterable[str]) -> None:
        self._traced = {name: autocast_dtype(name) for name in sorted({*device_types})}

    def check(self) -> None:
        """Raise a ValueError unless the autocast around a call is that of the trace."""
        for name, traced in self._traced.items():
            now = autocast_dtype(name)
            if now != traced:
                raise ValueError(
                    f"traced step: the autocast of {name} is {_text(now)}. Expected "
                    f"{_text(traced)}, as when traced. Trace the function again, or call "
                    "torch.autocast inside of it."
                )

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Turn autocast off in a with block, so that the graph does not cast again."""
        with contextlib.ExitStack() as stack:
            for name, traced in self._traced.items():
                if traced is not None:
                    stack.enter_context(torch.autocast(name, enabled=False))
            yield


def _text(dtype: torch.dtype | None) -> str:
    return "off" if dtype is None else f"on with {dtype}"
