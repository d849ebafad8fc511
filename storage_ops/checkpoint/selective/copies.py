"""Copies of bytes between a device and host memory that run beside the work of the device.

A *copy* begins when it is asked for and may end much later; nobody reads its target, frees its
source or writes to either before `wait`. Three kinds have the same two methods: those of a GPU run
on streams of their own, those of a simulation only book memory, and `simulated_copies` lets a CPU
stand for a GPU with a link of some speed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_POISON = 255  # as bytes of floating-point numbers it is NaN


class Copy(Protocol):
    """One copy, under way."""

    target: Any

    def wait(self) -> None:
        """Let what is computed from now on come after the copy."""


class Copies(Protocol):
    """What carries bytes both ways."""

    def to_host(self, t: Tensor) -> Copy:
        """Copy the whole storage of a tensor; the target is for `to_device`."""

    def to_device(self, host: Any, t: Tensor) -> Copy:
        """Copy what `to_host` made into a new tensor of bytes on the device of `t`."""


def copies_for(t: Tensor) -> Copies | None:
    """What carries the bytes of a tensor; None where there is no other memory to carry them to."""
    if isinstance(t, FakeTensor):
        modes = _get_current_dispatch_mode_stack()
        return next((c for m in modes if (c := getattr(m, "copies", None)) is not None), None)
    if t.is_cuda:
        return _of_gpu(t.device)
    return active() if t.device.type == "cpu" else None


def bytes_of(t: Tensor) -> Tensor:
    """All bytes of the storage of a tensor, as a tensor without a history."""
    with torch.no_grad():
        return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())


def read_as(t: Tensor, target: Tensor) -> Tensor:
    """Return the view of a vector of bytes that reads them as `t` reads its storage."""
    whole = target[: len(target) // t.element_size() * t.element_size()].view(t.dtype)
    return whole.as_strided(t.size(), t.stride(), t.storage_offset())


@functools.cache
def _of_gpu(device: torch.device) -> Copies:
    return _GpuCopies(device)


class _GpuCopies:
    """Copies of a GPU: one stream for each direction, which its link serves at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def to_host(self, t: Tensor) -> Copy:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a policy says 'offload' while a CUDA graph is captured, in which host memory "
                "cannot be allocated; expected a policy that saves or recomputes"
            )
        source = bytes_of(t)
        host = torch.empty(len(source), dtype=torch.uint8, pin_memory=True)
        return self._copied(source, host, self._out)

    def to_device(self, host: Any, t: Tensor) -> Copy:
        # Allocated on the stream that will read it. What this memory held before may still be
        # read there, so the copy waits for that stream.
        return self._copied(host, torch.empty_like(host, device=self._device), self._back)

    def _copied(self, source: Tensor, target: Tensor, stream: torch.cuda.Stream) -> Copy:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            return _GpuCopy(source, target, stream, stream.record_event())


class _GpuCopy:
    def __init__(self, source: Tensor, target: Any, stream: Any, done: torch.cuda.Event) -> None:
        self.target = target
        self._source, self._stream = source, stream
        self._done: torch.cuda.Event | None = done

    def wait(self) -> None:
        if self._done is not None:
            current = torch.cuda.current_stream(self._stream.device)
            current.wait_event(self._done)
            self._done = None
            if self.target.is_cuda:  # read here, and allocated on what may be another stream
                self.target.record_stream(current)

    def __del__(self) -> None:
        # Dropped under way, as after an exception: the allocator must not hand the memory out to
        # the stream that it belongs to before the copy has ended. Host memory torch looks after.
        if self._done is not None:
            for t in (self._source, self.target):
                if t.is_cuda:
                    t.record_stream(self._stream)


class BookedCopies:
    """Copies of a simulation: what is on the device is booked, and host memory is not.

    Attributes:
        sent_bytes: to host memory.
    """

    def __init__(self) -> None:
        self.sent_bytes = 0

    def to_host(self, t: Tensor) -> Copy:
        """Nothing but the number of bytes."""
        nbytes = t.untyped_storage().nbytes()
        self.sent_bytes += nbytes
        return _BookedCopy(nbytes)

    def to_device(self, host: int, t: Tensor) -> Copy:
        """A new tensor of so many bytes."""
        return _BookedCopy(torch.empty(host, dtype=torch.uint8, device=t.device))


class _BookedCopy:
    def __init__(self, target: Any) -> None:
        self.target = target

    def wait(self) -> None:
        """Nothing is copied."""


class SimulatedCopies:
    """Copies on a CPU as a link would make them; see `simulated_copies`.

    Attributes:
        log: ("to host" or "to device", bytes, when it began, when it ended, when it was waited
            for), in the order of the waits.
        waited_seconds: that work stood still for copies.
        bytes_per_second: of the link, in each direction.
    """

    def __init__(
        self,
        bytes_per_second: float,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        if not bytes_per_second > 0:
            raise ValueError(
                f"simulated_copies: bytes_per_second is {bytes_per_second!r}; expected more than 0"
            )
        self.now, self.sleep = now, sleep
        self.log: list[tuple[str, int, float, float, float]] = []
        self.waited_seconds = 0.0
        self.bytes_per_second = bytes_per_second
        self._free = {"to host": 0.0, "to device": 0.0}  # when the link is, in each direction

    def to_host(self, t: Tensor) -> Copy:
        """Into memory that holds NaN until then."""
        source = bytes_of(t)
        # Memory that torch has not allocated, so that nobody counts it as memory of the device.
        host = (ctypes.c_ubyte * len(source))()
        ctypes.memset(host, _POISON, len(source))
        return _SimulatedCopy(self, "to host", source, host)

    def to_device(self, host: Any, t: Tensor) -> Copy:
        """Into a tensor that holds NaN until then."""
        target = torch.full((len(host),), _POISON, dtype=torch.uint8, device=t.device)
        return _SimulatedCopy(self, "to device", host, target)

    def begin(self, way: str, nbytes: int) -> tuple[float, float]:
        """When a copy that is asked for now begins, and when it ends."""
        start = max(self._free[way], self.now())
        self._free[way] = start + nbytes / self.bytes_per_second
        return start, self._free[way]


class _SimulatedCopy:
    """The bytes come as late as they may: in `wait`."""

    def __init__(self, copies: SimulatedCopies, way: str, source: Any, target: Any) -> None:
        self.target = target
        self._copies, self._way, self._source = copies, way, source
        self._begun, self._ends = copies.begin(way, len(source))

    def wait(self) -> None:
        source, self._source = self._source, None
        if source is None:
            return
        copies, nbytes = self._copies, len(source)
        asked = copies.now()
        if asked < self._ends:
            copies.sleep(self._ends - asked)
            copies.waited_seconds += self._ends - asked
        ctypes.memmove(_address(self.target), _address(source), nbytes)
        copies.log.append((self._way, nbytes, self._begun, self._ends, asked))


def _address(memory: Any) -> int:
    return memory.data_ptr() if isinstance(memory, Tensor) else ctypes.addressof(memory)


_active: list[SimulatedCopies] = []


def active() -> SimulatedCopies | None:
    """The innermost `simulated_copies`."""
    return _active[-1] if _active else None


@contextlib.contextmanager
def simulated_copies(
    bytes_per_second: float,
    now: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], object] = time.sleep,
) -> Iterator[SimulatedCopies]:
    """Let the CPU stand for a GPU in a with block, to try policies that say "offload" without one.

    Outside of it such a policy saves what is on a CPU, where there is no other memory. Inside,
    bytes go to memory that does not count and come back as over a link of some speed, in each
    direction one copy at a time: work stands still where it needs a copy that has not ended. Until
    then the target holds NaN.

    Args:
        bytes_per_second: of the link, in each direction.
        now, sleep: a clock, in seconds, and what lets time pass on it.

    Returns:
        What made the copies: `waited_seconds` is how long work stood still, and `log` has every
        copy.

    Raises:
        ValueError: bytes_per_second is not more than 0.

    Example:
        >>> from storage_ops import policies
        >>> policy = policies.offload(policies.matmuls)
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU())
        >>> layer = storage_ops.CheckpointWrapper(mlp, policy=policy)
        >>> with policies.simulated_copies(bytes_per_second=50e9) as copies:
        ...     y = layer(torch.randn(4, 16))
    """
    copies = SimulatedCopies(bytes_per_second, now, sleep)
    _active.append(copies)
    try:
        yield copies
    finally:
        _active.remove(copies)
