"""Tensors that are kept until backward reads them, and what is restored for that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from storage_ops.checkpoint.saved.guard import storage_key
from storage_ops.checkpoint.saved.saved import fail, without_graph

if TYPE_CHECKING:
    from storage_ops.checkpoint.region.region import Region


class Kept:
    """A saved tensor as it is; torch does not look at the versions of what a hook has packed."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = without_graph(tensor)  # autograd puts the node back
        self.version = tensor._version

    def read(self) -> Tensor:
        """The tensor, unless it was modified in place."""
        if self.tensor._version != self.version:
            fail(
                f"a tensor of shape {tuple(self.tensor.shape)} that a consumer has saved was "
                f"modified in place: it is at version {self.tensor._version}, expected "
                f"{self.version}"
            )
        return self.tensor


class Use(Kept):
    """A saved tensor that shares the storage of an output, and the region that made it."""

    __slots__ = ("key", "region")

    def __init__(self, tensor: Tensor, region: Region) -> None:
        super().__init__(tensor.detach())  # of the bytes only, not of the tensor that others have
        self.key = storage_key(tensor) or 0
        region.uses[self.key] = region.uses.get(self.key, 0) + 1
        self.region = region

    def __del__(self) -> None:
        if hasattr(self, "region"):  # an error in __init__ has counted nothing
            self.region.uses[self.key] -= 1

    def read(self) -> Tensor:
        """The tensor with its bytes, which are recomputed when they are needed first."""
        self.region.restore()
        return super().read()
