"""Copies between a device and host memory that overlap with the work of the device.

A *copy* begins when it is requested and may end much later. Until `wait`, no code may read its
target, free its source or write to either. Copies of a GPU run on streams of their own. Copies of a
simulation only record memory. A CPU has no other memory and copies nothing, unless tests install a
`Link`.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


class Copy(Protocol):
    """One pending copy."""

    target: Any

    def wait(self) -> None:
        """Let later computation wait for the copy."""


class Copies(Protocol):
    """An interface for copies in both directions."""

    def to_host(self, t: Tensor) -> Copy:
        """Copy the whole storage of a tensor. The copy's target is for `to_device`."""

    def to_device(self, host: Any, t: Tensor) -> Copy:
        """Copy the result of `to_host` into a new tensor of bytes on the device of `t`."""


def copies_for(t: Tensor) -> Copies | None:
    """Return the copy engine for a tensor, or None if there is no other memory for its bytes."""
    if isinstance(t, FakeTensor):
        modes = _get_current_dispatch_mode_stack()
        return next((c for m in modes if (c := getattr(m, "copies", None)) is not None), None)
    if t.is_cuda:
        return _of_gpu(t.device)
    return active() if t.device.type == "cpu" else None


def bytes_of(t: Tensor) -> Tensor:
    """Return all bytes of the storage of a tensor, as a tensor without a history."""
    with torch.no_grad():
        return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())


def read_as(t: Tensor, target: Tensor) -> Tensor:
    """Return a view of a vector of bytes with the layout of `t` in its storage."""
    whole = target[: len(target) // t.element_size() * t.element_size()].view(t.dtype)
    return whole.as_strided(t.size(), t.stride(), t.storage_offset())


@functools.cache
def _of_gpu(device: torch.device) -> Copies:
    return _GpuCopies(device)


class _GpuCopies:
    """Copies of a GPU, with one stream for each direction, because its link serves both at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def to_host(self, t: Tensor) -> Copy:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "A policy says 'offload' while a CUDA graph is captured, when host memory cannot "
                "be allocated. Use a policy that saves or recomputes."
            )
        source = bytes_of(t)
        host = torch.empty(len(source), dtype=torch.uint8, pin_memory=True)
        return self._copied(source, host, self._out)

    def to_device(self, host: Tensor, t: Tensor) -> Copy:
        # Allocated on the stream that reads it. That stream may still read earlier contents of this
        # memory, so the copy waits for it.
        return self._copied(host, torch.empty_like(host, device=self._device), self._back)

    def _copied(self, source: Tensor, target: Tensor, stream: torch.cuda.Stream) -> Copy:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            return _GpuCopy(source, target, stream, stream.record_event())


class _GpuCopy:
    def __init__(
        self, source: Tensor, target: Tensor, stream: torch.cuda.Stream, done: torch.cuda.Event
    ) -> None:
        self.target = target
        self._source, self._stream = source, stream
        self._done: torch.cuda.Event | None = done

    def wait(self) -> None:
        if self._done is not None:
            current = torch.cuda.current_stream(self._stream.device)
            current.wait_event(self._done)
            self._done = None
            if self.target.is_cuda:  # read on this stream, but perhaps allocated on another
                self.target.record_stream(current)

    def __del__(self) -> None:
        # If the copy is dropped early, as after an exception, the allocator must not reuse the
        # memory before the copy has ended. torch takes care of host memory.
        if self._done is not None:
            for t in (self._source, self.target):
                if t.is_cuda:
                    t.record_stream(self._stream)


class BookedCopies:
    """Copies of a simulation, which record device memory but not host memory.

    Attributes:
        sent_bytes: bytes sent to host memory.
    """

    def __init__(self) -> None:
        self.sent_bytes = 0

    def to_host(self, t: Tensor) -> Copy:
        """Return the number of bytes."""
        nbytes = t.untyped_storage().nbytes()
        self.sent_bytes += nbytes
        return _BookedCopy(nbytes)

    def to_device(self, host: int, t: Tensor) -> Copy:
        """Return a new tensor of this many bytes."""
        return _BookedCopy(torch.empty(host, dtype=torch.uint8, device=t.device))


class _BookedCopy:
    def __init__(self, target: int | Tensor) -> None:
        self.target = target

    def wait(self) -> None:
        """Do nothing, because nothing is copied."""


class Link(Copies, Protocol):
    """Copies over a link of known speed, with which a CPU represents a GPU."""

    bytes_per_second: float


links: list[Link] = []  # for CPU tensors, innermost last; tests append to it


def active() -> Link | None:
    """Return the innermost link, or None outside of tests."""
    return links[-1] if links else None
