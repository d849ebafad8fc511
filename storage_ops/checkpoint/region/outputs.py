"""The outputs of one region: which of them can be discarded, and which are discarded now."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from storage_ops.checkpoint.region.options import Options
from storage_ops.checkpoint.saved import guard
from storage_ops.checkpoint.saved.guard import storage_key
from storage_ops.checkpoint.saved.outputs import DiscardableOutput, discardable_outputs, producers
from storage_ops.checkpoint.saved.saved import Saved, fail
from storage_ops.storage.storage import discard_storage, is_own, share_storage

if TYPE_CHECKING:
    from storage_ops.checkpoint.region.region import Region


class Outputs:
    """The outputs whose storages a region allocated.

    Attributes:
        discardable: the outputs that `discard` may free.
        discarded: the outputs that were freed, until `bind` restores them.
        uses: for the key of a storage, how many saved tensors of consumers share it.
    """

    def __init__(self, region: str, options: Options) -> None:
        self.discardable: Sequence[DiscardableOutput] = ()
        self.discarded: Sequence[DiscardableOutput] = ()
        self.uses: dict[int, int] = {}
        self._region, self._options = region, options

    def __del__(self) -> None:
        for entry in (*self.discardable, *self.discarded):
            producers.pop(entry.key, None)

    def find(
        self,
        region: Region,
        leaves: list[Any],
        attributes: dict[str, Any],
        inputs: Iterable[Tensor],
        start: int | None,
    ) -> None:
        """Find the outputs that can be discarded, when the region returns.

        Args:
            region: the region, which becomes the producer of their storages.
            leaves, attributes, inputs, start: the arguments of `discardable_outputs`.
        """
        self.discardable = discardable_outputs(leaves, attributes, inputs, start)
        for entry in self.discardable:
            entry.description = Saved(leaves[entry.index], self._options.checksums)
            producers[entry.key] = weakref.ref(region)

    def include(self, t: object) -> bool:
        """Return True if a tensor is an output that can be discarded, or a view of one."""
        return storage_key(t) in {entry.key for entry in self.discardable}

    def add_use(self, key: int) -> None:
        """Note that a consumer saves a tensor that shares this storage."""
        self.uses[key] = self.uses.get(key, 0) + 1

    def remove_use(self, key: int) -> None:
        """Note that a saved tensor of a consumer that shared this storage was freed."""
        if key in self.uses:  # not if the library has bound the output back before
            self.uses[key] -= 1

    def free_to_discard(self, keep: Iterable[Any]) -> list[DiscardableOutput]:
        """Return the outputs that nothing but the region and its consumers needs.

        Args:
            keep: tensors whose storages must not be freed.

        Raises:
            RuntimeError: one of the outputs was modified in place.
        """
        kept = {storage_key(leaf) for leaf in keep}
        for entry in self.discardable:
            # A consumer may have shown the output to numpy, or put it into shared memory.
            if entry.is_referenced or not is_own(entry.handle):
                kept.add(entry.key)
        free = [entry for entry in self.discardable if entry.key not in kept]
        for entry in free:
            if entry.is_modified:
                fail(
                    f"output {entry.index} of {self._region} was modified in place after the "
                    "region, so the recompute could not restore it. Nothing was freed. Modify a "
                    "clone instead."
                )
        return free

    def discard(self, entries: Iterable[DiscardableOutput]) -> None:
        """Free outputs. In debug mode, Python functions that read them raise an error."""
        message = guard.message(self._region)
        for entry in entries:
            discard_storage(entry.handle, guard=message, allow_leaf=True)
            self.discarded = (*self.discarded, entry)
        if self._options.debug:
            for entry in entries:
                guard.watch(entry.output(), message)

    def forget(self) -> None:
        """Let go of the outputs that were not discarded."""
        waiting = {entry.key for entry in self.discarded}
        for entry in self.discardable:
            if entry.key not in waiting:
                producers.pop(entry.key, None)
        self.discardable = []

    def bind(self, recomputed: list[Any]) -> None:
        """Bind recomputed outputs to the discarded ones, if all of them fit."""
        for entry in self.discarded:
            first = entry.description
            assert first is not None
            again = recomputed[entry.index] if entry.index < len(recomputed) else None
            found = Saved(again, self._options.checksums) if isinstance(again, Tensor) else None
            if found is None or not first.is_like(found):
                fail(
                    f"output {entry.index} of {self._region} was {first} in forward and is "
                    f"{found or 'no tensor'} when it is recomputed. The region must return the "
                    "same outputs both times."
                )
        bound: set[int] = set()
        for entry in self.discarded:
            if entry.key not in bound:
                bound.add(entry.key)
                share_storage(entry.handle, recomputed[entry.index].detach())
            if self._options.debug:
                guard.unwatch(entry.output())
            producers.pop(entry.key, None)
        self.discarded = []
