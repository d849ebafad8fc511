"""A simulated link between a CPU and other memory, so that offloading runs without a GPU."""

import contextlib
import ctypes
import time

import torch

from storage_ops.checkpoint.selective.copies import bytes_of, links

POISON = 255  # as bytes of floating-point numbers it is NaN


class SimulatedCopies:
    """Copies on a CPU with the timing of a link.

    Attributes:
        log: ("to host" or "to device", bytes, time of its begin, end and wait), in the order of
            the waits.
        waited_seconds: time that work waited for copies.
        bytes_per_second: speed of the link in each direction.
    """

    def __init__(self, bytes_per_second, now, sleep):
        self.now, self.sleep = now, sleep
        self.log = []
        self.waited_seconds = 0.0
        self.bytes_per_second = bytes_per_second
        self._free = {"to host": 0.0, "to device": 0.0}  # the time, for each direction

    def to_host(self, t):
        """Copy into memory that holds NaN until the copy ends."""
        source = bytes_of(t)
        # Torch has not allocated this memory, so it does not count as memory of the device.
        host = (ctypes.c_ubyte * len(source))()
        ctypes.memset(host, POISON, len(source))
        return SimulatedCopy(self, "to host", source, host)

    def to_device(self, host, t):
        """Copy into a tensor that holds NaN until the copy ends."""
        target = torch.full((len(host),), POISON, dtype=torch.uint8, device=t.device)
        return SimulatedCopy(self, "to device", host, target)

    def begin(self, way, nbytes):
        """Return the times at which a copy requested now begins and ends."""
        start = max(self._free[way], self.now())
        self._free[way] = start + nbytes / self.bytes_per_second
        return start, self._free[way]


class SimulatedCopy:
    """A copy whose bytes arrive as late as allowed, in `wait`."""

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
    """Offload to memory that does not count, over a simulated link.

    Each direction copies one storage at a time. Work waits for an unfinished copy, whose target
    holds NaN until then.

    Args:
        bytes_per_second: speed of the link in each direction.
        now, sleep: a clock, in seconds, and a function that advances it.
    """
    copies = SimulatedCopies(bytes_per_second, now, sleep)
    links.append(copies)
    try:
        yield copies
    finally:
        links.remove(copies)
