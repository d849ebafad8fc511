"""Autocast around a traced step: its casts are part of the graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch


class Autocast:
    """The autocast that was on around a trace, for some types of devices."""

    def __init__(self, device_types: Iterable[str]) -> None:
        self._traced = {name: _dtype(name) for name in sorted({*device_types})}

    def check(self) -> None:
        """Raise a ValueError unless the autocast around a call is that of the trace."""
        for name, traced in self._traced.items():
            now = _dtype(name)
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


def _dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype of a device's autocast, or None if autocast is off."""
    if not torch.amp.is_autocast_available(device_type):
        return None
    on = torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if on else None


def _text(dtype: torch.dtype | None) -> str:
    return "off" if dtype is None else f"on with {dtype}"
