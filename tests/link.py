"""A link of some speed between a CPU and other memory, so that offloading runs without a GPU."""

import contextlib
import ctypes
import time

import torch

from storage_ops.checkpoint.selective.copies import bytes_of, links

POISON = 255  # as bytes of floating-point numbers it is NaN


class SimulatedCopies:
    """Copies on a CPU as a link would make them.

    Attributes:
        log: ("to host" or "to device", bytes, when it began, when it ended, when it was waited
            for), in the order of the waits.
        waited_seconds: that work stood still for copies.
        bytes_per_second: of the link, in each direction.
    """

    def __init__(self, bytes_per_second, now, sleep):
        self.now, self.sleep = now, sleep
        self.log = []
        self.waited_seconds = 0.0
        self.bytes_per_second = bytes_per_second
        self._free = {"to host": 0.0, "to device": 0.0}  # when the link is, in each direction

    def to_host(self, t):
        """Into memory that holds NaN until then."""
        source = bytes_of(t)
        # Memory that torch has not allocated, so that nobody counts it as memory of the device.
        host = (ctypes.c_ubyte * len(source))()
        ctypes.memset(host, POISON, len(source))
        return SimulatedCopy(self, "to host", source, host)

    def to_device(self, host, t):
        """Into a tensor that holds NaN until then."""
        target = torch.full((len(host),), POISON, dtype=torch.uint8, device=t.device)
        return SimulatedCopy(self, "to device", host, target)

    def begin(self, way, nbytes):
        """When a copy that is asked for now begins, and when it ends."""
        start = max(self._free[way], self.now())
        self._free[way] = start + nbytes / self.bytes_per_second
        return start, self._free[way]


class SimulatedCopy:
    """The bytes come as late as they may: in `wait`."""

    def __init__(self, copies, way, source, target):
        self.target = target
        self._copies, self._way, self._source = copies, way, source
        self._begun, self._ends = copies.begin(way, len(source))

    def wait(self):
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


def _address(memory):
    return memory.data_ptr() if isinstance(memory, torch.Tensor) else ctypes.addressof(memory)


@contextlib.contextmanager
def simulated_copies(bytes_per_second, now=time.perf_counter, sleep=time.sleep):
    """Offload to memory that does not count, and bring bytes back as over a link.

    Each direction copies one storage at a time. Work waits for a copy that has not ended, and the
    target holds NaN until then.

    Args:
        bytes_per_second: of the link, in each direction.
        now, sleep: a clock, in seconds, and a function that lets time pass on it.
    """
    copies = SimulatedCopies(bytes_per_second, now, sleep)
    links.append(copies)
    try:
        yield copies
    finally:
        links.remove(copies)
