"""Memory that an op takes only while it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from storage_ops.foundation.ledger import Block, Ledger

_aten = torch.ops.aten
CTC_BACKWARD = (_aten._ctc_loss_backward.default, _aten._ctc_loss_backward.Tensor)


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


def use_log_beta(
    scratch: Scratch, args: tuple[Any, ...], out: Tensor, see: Callable[[Tensor], None]
) -> None:
    """Take the backward variables of CTC, which are as large as the forward ones."""
    see(out)
    log_alpha: Tensor = args[6]
    scratch.use(log_alpha, log_alpha.nbytes)
