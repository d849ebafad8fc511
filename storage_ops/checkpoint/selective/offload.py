"""Results that wait in host memory: of one region all together, from its forward to its backward.

When the forward of a region has ended, copies of its results begin. They end with the forward of
the next region with a policy, and then the storages are discarded. So one region hides the copies
of the one before. In backward the bytes are asked for one region ahead, and bound back in place
where they are read first. A result that is needed before it has left stays.

Only results that nobody else holds leave: a storage is discarded for all who share it. A graph that
is retained has them on the device from then on.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable

from torch import Tensor

from storage_ops.checkpoint.selective.copies import Copies, Copy, read_as
from storage_ops.storage.storage import discard_storage, is_discarded, share_storage

_MESSAGE = (
    "This result of a checkpointed region is in host memory, by a policy that says 'offload', and "
    "is read before the backward of the region."
)


class Trip:
    """The bytes of one storage, on their way to host memory and back.

    Where they are, only the storage says, so an interruption leaves nothing half done.
    """

    def __init__(self, t: Tensor, copies: Copies) -> None:
        self._tensor, self._copies = t, copies
        self._out: Copy | None = copies.to_host(t)
        self._back: Copy | None = None

    def leave(self) -> None:
        """Free the bytes on the device; they are in host memory by then."""
        if self._out is not None:
            self._out.wait()
            discard_storage(self._tensor, guard=_MESSAGE, allow_leaf=True)

    def fetch(self) -> None:
        """Begin to copy the bytes back, if they are gone."""
        if self._out is not None and self._back is None and is_discarded(self._tensor):
            self._back = self._copies.to_device(self._out.target, self._tensor)

    def arrive(self) -> None:
        """Have the bytes on the device, for good."""
        self.fetch()
        if self._back is not None and is_discarded(self._tensor):
            self._back.wait()
            share_storage(self._tensor, read_as(self._tensor, self._back.target))
        elif self._out is not None:
            self._out.wait()  # it reads what may be freed next
        self._out = self._back = None


class Away:
    """The results of one region that are in host memory."""

    def __init__(self, trips: Iterable[Trip]) -> None:
        self._trips = list(trips)
        self._has_left = False
        self._before: Callable[[], Away | None] = _last.region
        _last.region = weakref.ref(self)

    def leave(self) -> None:
        """Free the bytes of all results on the device, once."""
        for trip in () if self._has_left else self._trips:
            trip.leave()
        self._has_left = True

    def fetch(self) -> None:
        """Begin to bring all results back, and after them those of the region before."""
        for trip in self._trips:
            trip.fetch()
        before = self._before()
        if before is not None:
            for trip in before._trips:
                trip.fetch()


def region_ended() -> None:
    """Free what the region before has sent away, as the forward of a region has ended."""
    before = _last.region()
    if before is not None:
        before.leave()


def _nothing() -> None:
    return None


class _Last(threading.local):
    """The region of this thread that was the last to send something away."""

    region: Callable[[], Away | None] = staticmethod(_nothing)  # a weak reference


_last = _Last()
