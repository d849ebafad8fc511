"""Outputs that a region may discard, their producers, and saved tensors that share their storage.

A *discardable output* has a storage that the region allocated, and that nothing else references
when the region returns. `producers` maps such storages to their live regions. If a consumer saves
an output, a `SavedOutput` takes its place, which restores the bytes when backward reads it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from storage_ops.checkpoint.saved.guard import storage_key
from storage_ops.checkpoint.saved.ref_counts import RefCounts
from storage_ops.checkpoint.saved.saved import Saved, fail, without_graph
from storage_ops.storage.storage import is_own, wait_for

if TYPE_CHECKING:
    from storage_ops.checkpoint.region.region import Region

_NO_REFERENCES = RefCounts(0, 0, 0)


@dataclass(slots=True, eq=False)
class DiscardableOutput:
    """An output whose storage a region allocated.

    Attributes:
        index: position among the flattened outputs.
        key: the number that identifies the storage.
        handle: a detached alias, which keeps the storage alive but not the graph.
        output: returns the tensor that the region returned, or None if it was freed.
        version: the version of the tensor when the region returned.
        description: the tensor when the region returned; its checksum if the options ask for one.
        first_counts: references to the output when the region returned.
        is_referenced: whether code other than consumers references the output. Then it is kept.
    """

    index: int
    key: int
    handle: Tensor
    output: Callable[[], Tensor | None]
    version: int
    description: Saved | None = None
    first_counts: RefCounts = _NO_REFERENCES
    is_referenced: bool = False

    @property
    def is_modified(self) -> bool:
        """Return True if the output was modified in place. A recompute cannot restore that."""
        if self.handle._version != self.version:
            return True
        first = self.description
        if first is None or first.checksum is None:
            return False
        return not first.is_like(Saved(self.handle, checksum=True))


def discardable_outputs(
    leaves: list[Any], attributes: dict[str, Any], inputs: Iterable[Tensor], start: int | None
) -> list[DiscardableOutput]:
    """Return the outputs of a region whose storage nothing else references.

    Args:
        leaves: the leaves of the region's result. The region must have no other reference to them.
        attributes: the attributes of the result. An object may have a leaf both as an item and as
            an attribute.
        inputs: the tensors among the region's arguments.
        start: sequence number of the region's first autograd node; None if no output needs grad.
    """
    outputs = _candidates(leaves, {None, *map(storage_key, inputs)}, start)
    referenced = _referenced_storages(outputs, leaves, attributes) if outputs else set()
    return [entry for entry in outputs if entry.key not in referenced]


def _candidates(
    leaves: list[Any], outside: set[int | None], start: int | None
) -> list[DiscardableOutput]:
    for leaf in leaves:
        # A running collective references the storage, and writes it when it ends.
        wait_for(leaf)
    outputs: list[DiscardableOutput] = []
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            continue
        key = storage_key(leaf)
        if key is None or key in outside or not is_own(leaf):
            continue
        if start is not None:
            node = _origin(leaf)
            # Parameters, and views of tensors from outside of the region, must not be freed.
            if leaf.layout is not torch.strided or node is None or node._sequence_nr() < start:
                continue
        outputs.append(
            DiscardableOutput(index, key, leaf.detach(), weakref.ref(leaf), leaf._version)
        )
    return outputs


def _referenced_storages(
    outputs: list[DiscardableOutput], leaves: list[Any], attributes: dict[str, Any]
) -> set[int]:
    """Return the keys of the storages that a module, a caller or a policy references.

    Tensors from outside of the region are referenced too: a parameter, a cache, or a tensor that
    the caller passed for the result.
    """
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    names = [*map(id, tensors), *map(id, tensors), *map(id, attributes.values())]
    roots = {id(t): t for leaf in tensors for t in (leaf, leaf._base) if t is not None}
    del tensors
    keys = {i: key for i, t in roots.items() if (key := storage_key(t)) is not None}
    counts = {i: RefCounts.counted(key, weakref.ref(roots[i])) for i, key in keys.items()}
    # `roots` itself is one more reference.
    referenced = {key for i, key in keys.items() if counts[i].names > names.count(i) + 1}
    handles = [o.key for o in outputs for t in (o.handle, o.handle._base) if t is not None]
    own = [*keys.values(), *handles]
    for entry in outputs:
        entry.first_counts = counts[id(leaves[entry.index])]
        if entry.first_counts.tensors > own.count(entry.key):
            referenced.add(entry.key)
    return referenced


def _origin(output: Tensor) -> Any:
    """Return the autograd node of the op that allocated an output's storage.

    For a view, this is the node of its base. If the base has no history, return the view's node:
    some autograd Functions return such views, for example `to_local` of DTensor.
    """
    base = output._base
    if base is None or (base.grad_fn is None and not base.requires_grad):
        return output.grad_fn
    return base.grad_fn


# Maps the key of a storage to the live region that produced the storage. A region removes its
# entries when it can no longer recompute them, or is freed.
producers: dict[int, weakref.ref[Region]] = {}


def producer_of(t: object) -> Region | None:
    """Return the region that can recompute the storage of `t`; None if no region can."""
    return producer_of_storage(storage_key(t)) if producers else None


def producer_of_storage(key: int | None) -> Region | None:
    """Return the region that can recompute a storage; None if no region can."""
    region = None if key is None else producers.get(key)
    return None if region is None else region()


class SavedTensor:
    """A saved tensor and its version. torch compares no versions of tensors that a hook packs."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = without_graph(tensor)  # autograd sets the node again
        self.version = tensor._version

    def read(self) -> Tensor:
        """Return the tensor. Raise if it was modified in place."""
        if self.tensor._version != self.version:
            fail(
                f"a tensor of shape {tuple(self.tensor.shape)} that a consumer has saved was "
                f"modified in place. It is at version {self.tensor._version}, expected "
                f"{self.version}. Modify a clone instead."
            )
        return self.tensor


class SavedOutput(SavedTensor):
    """A saved tensor that shares the storage of an output, and the region that produced it."""

    __slots__ = ("key", "region")

    def __init__(self, tensor: Tensor, region: Region) -> None:
        # An alias, so that only the storage has another reference, and not the tensor.
        super().__init__(tensor.detach())
        self.key = storage_key(tensor) or 0
        region.outputs.add_use(self.key)
        self.region = region

    def __del__(self) -> None:
        if hasattr(self, "region"):  # else __init__ raised before it counted
            self.region.outputs.remove_use(self.key)

    def read(self) -> Tensor:
        """Return the tensor, after the region has recomputed its bytes if necessary."""
        self.region.restore()
        return super().read()
