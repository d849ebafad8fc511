"""Limit rows of discarding regions, in which the output of one is the input of the next.

The first backward that needs the output of a row's last region repeats every region before it whose
output is missing. It holds what each of them saves until its own backward. So a row of large layers
would take as much memory as without checkpoints. There an output is kept, as an ordinary checkpoint
keeps it, and the row ends.

A row also ends at a region that has run collectives. Ranks may save different bytes, and rows that
differ would repeat these collectives in another order on each rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from storage_ops.checkpoint.saved.guard import storage_key, with_bytes

if TYPE_CHECKING:
    from storage_ops.checkpoint.region.region import Region
    from storage_ops.checkpoint.saved.outputs import DiscardableOutput

# The most memory of recomputing a row at once, relative to recomputing region after region with all
# outputs kept.
_LIMIT = 1.25


class SavedBytes:
    """The bytes that a region allocates and saves, inputs, parameters and outputs not included."""

    def __init__(self) -> None:
        self.total = 0
        # A weak reference keeps the address of the storage in use, but not its bytes.
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def add(self, t: Tensor, key: int | None) -> None:
        """Note a saved tensor and the key of its storage."""
        if key is None or key in self._storages:
            return
        base = t if t._base is None else t._base
        # The class comes first, because isinstance calls Parameter's metaclass, which is slow.
        if type(base) is not Tensor and isinstance(base, nn.Parameter):
            return
        storage = with_bytes(t).untyped_storage()
        self._storages[key] = StorageWeakRef(storage), storage.nbytes()

    def finish(self, inputs: Iterable[Tensor], outputs: Iterable[DiscardableOutput]) -> None:
        """Set `total`, without the storages of `inputs` and of `outputs`."""
        for key in (*map(storage_key, inputs), *(each.key for each in outputs)):
            if key is not None:
                self._storages.pop(key, None)
        self.total = sum(nbytes for _, nbytes in self._storages.values())
        self._storages = {}


@dataclass(eq=False)
class _Row:
    """Regions that are repeated together: bytes that they save, and bytes of their outputs."""

    saved: int = 0
    most_saved: int = 0
    outputs: int = 0

    def add(self, other: _Row) -> None:
        self.saved += other.saved
        self.most_saved = max(self.most_saved, other.most_saved)
        self.outputs += other.outputs

    def is_costly(self) -> bool:
        return self.outputs + self.saved > _LIMIT * (self.outputs + self.most_saved)


def keep_ends_of_rows(regions: Iterable[Region]) -> None:
    """Keep outputs that end a row, so that a row takes little more memory than one region.

    Args:
        regions: the regions of one scope, in the order of the forward, before it discards.
    """
    rows: dict[Region, _Row] = {}
    for region in regions:
        producers = [p for p in region.producers if p in rows and _is_discarded(p)]
        _keep(p for p in producers if p.communicates)
        before = {id(rows[p]): rows[p] for p in producers if not p.communicates}
        saved = 0 if region.allocated is None else region.allocated.total
        row = _Row(saved, saved)
        for each in before.values():
            row.add(each)
        if before and row.is_costly():
            _keep(producers)
            row = _Row(saved, saved)
        row.outputs += _bytes_of_outputs(region)
        rows[region] = row


def _keep(regions: Iterable[Region]) -> None:
    for entry in (entry for region in regions for entry in region.outputs.discardable):
        entry.is_referenced = True


def _is_discarded(region: Region) -> bool:
    return any(
        region.outputs.uses.get(entry.key) and not entry.is_referenced
        for entry in region.outputs.discardable
    )


def _bytes_of_outputs(region: Region) -> int:
    handles = {entry.key: entry.handle for entry in region.outputs.discardable}
    return sum(t.numel() * t.element_size() for t in handles.values())
