"""Peak memory and memory over time of a block of code."""

from __future__ import annotations

import gc
import inspect
import os
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

# Activity of the CPU has the memory events of every device. Nothing else is asked for: CUPTI, which
# records calls of the CUDA runtime and what a GPU does, slows a block down and serves one profiler
# at a time. Where torch has no filters, the calls of the runtime are activity of the CPU.
_FILTERS = "activity_filters" in inspect.signature(torch.autograd.profiler.profile).parameters
_WITHOUT_CUPTI = {ProfilerActivity.CPU: ["CPU_OP", "CPU_INSTANT_EVENT", "USER_ANNOTATION"]}
ACTIVITIES: list[Any] = [_WITHOUT_CUPTI if _FILTERS else ProfilerActivity.CPU]


@dataclass(frozen=True)
class Sample:
    """Bytes allocated above the level at entry, from a moment on."""

    seconds: float
    nbytes: int


@dataclass
class Measurement:
    """What a `measure` block allocated; filled in when the block ends.

    Attributes:
        peak_bytes: highest level above the level at entry.
        kept_bytes: level at exit above the level at entry; negative if the block freed more.
        timeline: the level after every allocation and release, in order.
    """

    peak_bytes: int = 0
    kept_bytes: int = 0
    timeline: list[Sample] = field(default_factory=list)


class measure:
    """Context manager that measures the memory of a block.

    On the CPU the allocations that torch makes in this thread are counted, from the events of
    torch.profiler. Not seen are buffers inside math libraries, and releases of blocks that were
    allocated before the first `measure` of the process. On CUDA the peak is that of the caching
    allocator and the timeline comes from the same events. The block runs somewhat slower: do not
    time it.

    Args:
        device: the device whose memory is measured, "cpu" or a CUDA device.

    Raises:
        ValueError: another device. RuntimeError: a torch profiler is running already.

    Example:
        >>> with storage_ops.memory.measure(device="cpu") as m:
        ...     kept = torch.empty(256) + torch.empty(256)
        >>> m.peak_bytes, m.kept_bytes
        (3072, 1024)
    """

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self._device = torch.device(device)
        if self._device.type not in ("cpu", "cuda"):
            raise ValueError(f"measure: device is {device!r}; expected 'cpu' or a CUDA device")
        if self._device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"measure: device is {device!r}, but torch finds none; expected 'cpu'")
        self._result = Measurement()
        self._entry_bytes = 0

    def __enter__(self) -> Measurement:
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            raise RuntimeError(
                "measure: a torch profiler or another measure is running; expected none, for torch "
                "has one profiler at a time"
            )
        gc.collect()  # garbage of earlier code must not be freed inside the block
        # Kineto announces each start and stop on stderr unless told otherwise before the first.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._entry_bytes = torch.cuda.memory_allocated(self._device)
        self._profile = profile(activities=ACTIVITIES, profile_memory=True, acc_events=True)
        self._profile.__enter__()
        return self._result

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._profile.__exit__(kind, error, trace)
        self._read_events()
        if self._device.type == "cuda":
            allocated = torch.cuda.memory_allocated(self._device)
            peak = torch.cuda.max_memory_allocated(self._device)
            self._result.kept_bytes = allocated - self._entry_bytes
            self._result.peak_bytes = peak - self._entry_bytes

    def _read_events(self) -> None:
        on_cuda, index = self._device.type == "cuda", self._device.index
        if on_cuda and index is None:
            index = torch.cuda.current_device()
        profiler: Any = self._profile.profiler
        recorded = profiler.kineto_results.events()
        events = [
            (event.start_ns(), event.nbytes())
            for event in recorded
            if event.name() == "[memory]"
            and event.device_type().name == self._device.type.upper()
            and (not on_cuda or event.device_index() == index)
        ]
        del self._profile
        level, result = 0, self._result
        events.sort(key=lambda event: event[0])
        for start, nbytes in events:
            level += nbytes
            result.timeline.append(Sample((start - events[0][0]) / 1e9, level))
            result.peak_bytes = max(result.peak_bytes, level)
        result.kept_bytes = level
