"""Memory that an op takes only while it runs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from storage_ops.foundation.ledger import Block, Ledger


class Scratch:
    """Books it for one call of an op, which has to give back what it takes."""

    def __init__(self, ledger: Ledger, func: Any) -> None:
        self._ledger, self._name = ledger, str(func)

    def take(self, *tensors: Tensor, times: int = 1) -> list[Block]:
        """Blocks as large as tensors, each so many times."""
        return [b for t in tensors for b in self.take_bytes(t, t.nbytes * times)]

    def take_bytes(self, like: Tensor, nbytes: int) -> list[Block]:
        """A block of so many bytes, for what is done with a tensor."""
        return [self._ledger.take(self._ledger.block(like, nbytes, self._name))]

    def give_back(self, blocks: list[Block]) -> None:
        """End what `take` and `take_bytes` returned."""
        for block in blocks:
            self._ledger.give_back(block)

    def use(self, like: Tensor, nbytes: int) -> None:
        """Take so many bytes and give them back."""
        self._ledger.temporary(like, self._name, nbytes)
