"""What a forward depends on besides its arguments: random-number generators and autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AutocastState:
    """Autocast of one device type."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache: bool


@dataclass(frozen=True)
class ExecutionState:
    """State captured before a region runs, to run it again the same way."""

    autocast: tuple[AutocastState, ...]
    cpu_rng: torch.Tensor | None
    device_rng: dict[torch.device, torch.Tensor]

    @staticmethod
    def capture(tensors: Iterable[torch.Tensor], preserve_rng_state: bool) -> ExecutionState:
        """Capture the state for a region that reads `tensors`."""
        devices = {t.device for t in tensors if t.device.type not in ("cpu", "meta")}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            # A region may draw numbers on the GPU without having an argument there.
            devices.add(torch.device("cuda", torch.cuda.current_device()))
        types = sorted({"cpu", *(device.type for device in devices)})
        cache = torch.is_autocast_cache_enabled()
        autocast = tuple(
            AutocastState(t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t), cache)
            for t in types
        )
        if not preserve_rng_state:
            return ExecutionState(autocast, None, {})
        device_rng = {d: torch.get_device_module(d).get_rng_state(d) for d in devices}
        return ExecutionState(autocast, torch.get_rng_state(), device_rng)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Run a with block under this state; what was current comes back afterwards."""
        with contextlib.ExitStack() as stack:
            for a in self.autocast:
                stack.enter_context(
                    torch.autocast(a.device_type, a.dtype, enabled=a.enabled, cache_enabled=a.cache)
                )
            if self.cpu_rng is not None:
                stack.callback(torch.set_rng_state, torch.get_rng_state())
                torch.set_rng_state(self.cpu_rng)
            for device, state in self.device_rng.items():
                module = torch.get_device_module(device)
                stack.callback(module.set_rng_state, module.get_rng_state(device), device)
                module.set_rng_state(state, device)
            yield
