"""Results in host memory: all results of a region, from its forward to its backward.

When the forward of a region ends, the copies of its results begin. They end with the forward of the
next region with a policy, and then the storages are discarded. So the next region overlaps with the
copies. In backward the bytes are fetched one region ahead, and bound back in place when they are
first read. A result that is needed before it has left stays on the device.

Only results without other references are offloaded, because discarding a storage affects all of its
users. After the first backward with retain_graph, the results stay on the device.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable

from torch import Tensor

from storage_ops.checkpoint.saved.guard import by_storage, storage_key
from storage_ops.checkpoint.saved.ref_counts import is_shared_by_at_most
from storage_ops.checkpoint.selective.copies import Copies, Copy, copies_for, read_as
from storage_ops.storage.storage import (
    discard_storage,
    is_discarded,
    is_own,
    locals_of,
    share_storage,
)

_MESSAGE = (
    "This result of a checkpointed region is in host memory, by a policy that says 'offload', and "
    "is read before the backward of the region."
)


class Trip:
    """The offload of one storage to host memory and back.

    Only the state of the storage says where the bytes are, so that an interruption is safe.
    """

    def __init__(self, t: Tensor, copies: Copies) -> None:
        self._tensor, self._copies = t, copies
        self._out: Copy | None = copies.to_host(t)
        self._back: Copy | None = None

    def leave(self) -> None:
        """Free the bytes on the device. They are in host memory by then."""
        if self._out is not None:
            self._out.wait()
            discard_storage(self._tensor, guard=_MESSAGE, allow_leaf=True)

    def fetch(self) -> None:
        """Begin to copy the bytes back if they were freed."""
        if self._out is not None and self._back is None and is_discarded(self._tensor):
            self._back = self._copies.to_device(self._out.target, self._tensor)

    def arrive(self) -> None:
        """Bring the bytes back to the device permanently."""
        self.fetch()
        if self._back is not None and is_discarded(self._tensor):
            self._back.wait()
            share_storage(self._tensor, read_as(self._tensor, self._back.target))
        elif self._out is not None:
            self._out.wait()  # it reads memory that may be freed next
        self._out = self._back = None


def trips_of(values: list[Tensor], others: Iterable[Tensor]) -> list[Trip]:
    """Begin to copy the bytes of a result to host memory, if they have no other users.

    Args:
        values: the tensors of the result.
        others: all other tensors with these bytes that the region knows.
    """
    trips = []
    ours = {id(t): t for t in (*values, *others)}
    for key, t in by_storage(values).items():
        references = sum(storage_key(each) == key for each in ours.values())
        inside = locals_of("offload", "a result", t)
        copies = copies_for(inside[0]) if len(inside) == 1 else None
        if (
            copies is not None
            and not is_discarded(t)
            and is_own(inside[0])
            and is_shared_by_at_most(key, references)
        ):
            trips.append(Trip(inside[0], copies))
    return trips


def arrive(trips: list[Trip]) -> None:
    """Bring the bytes of a result back to the device permanently. Empty the list."""
    while trips:
        trips[0].arrive()
        trips.pop(0)


class Away:
    """The offloaded results of one region."""

    def __init__(self, trips: Iterable[Trip]) -> None:
        self._trips = list(trips)
        self._has_left = False
        self._before: Callable[[], Away | None] = _last.region
        _last.region = weakref.ref(self)

    def leave(self) -> None:
        """Free the bytes of all results on the device, only once."""
        for trip in () if self._has_left else self._trips:
            trip.leave()
        self._has_left = True

    def fetch(self) -> None:
        """Begin to bring back all results, and then those of the region before."""
        for trip in self._trips:
            trip.fetch()
        before = self._before()
        if before is not None:
            for trip in before._trips:
                trip.fetch()


def region_ended() -> None:
    """At the end of a region's forward, free the results that the region before has offloaded."""
    before = _last.region()
    if before is not None:
        before.leave()


def _nothing() -> None:
    return None


class _Last(threading.local):
    """The last region in this thread that offloaded results."""

    region: Callable[[], Away | None] = staticmethod(_nothing)  # a weak reference


_last = _Last()
