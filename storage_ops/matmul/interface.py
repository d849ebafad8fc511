"""The interface of the loss's matrix products. It needs no torch, for plans without torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from storage_ops.loss.planning.devices import Rates

# Rows or classes that are computed in fp32 at a time, before they are rounded or added.
SLICE = 1024


class Kind(Enum):
    """The three products of a tile."""

    LOGITS = "logits"
    INPUT = "input"
    WEIGHT = "weight"


@dataclass(frozen=True)
class Matmul(ABC):
    """The products of a tile of logits for one dtype on one kind of device.

    Attributes:
        itemsize: bytes of an element of the operands.
        threads: the number of CPU threads that compute products, each with scratch memory.
    """

    itemsize: int
    threads: int = 1

    cuda = False
    # Products are computed in fp32 and rounded, because 16-bit sums would be no faster.
    upcasts = False
    # Scratch memory is per thread, so a budget can limit the threads.
    limits_threads = False
    # Up to this number of classes, the input's gradient takes more scratch. 0: never.
    one_pass = 0

    @abstractmethod
    def logits(self, x: Tensor, w: Tensor, out: Tensor) -> None:
        """Compute out (rows, classes) = x (rows, D) @ w (classes, D).T. `out` may be wide."""

    @abstractmethod
    def input_gradient(self, dz: Tensor, w: Tensor, out: Tensor, add: bool) -> None:
        """Compute out (rows, D) = dz (rows, classes) @ w (classes, D), or out += with `add`.

        `out` may be wide.
        """

    @abstractmethod
    def weight_gradient(self, dz: Tensor, x: Tensor, out: Tensor, add: bool) -> None:
        """Compute out (classes, D) = dz (rows, classes).T @ x (rows, D), or out += with `add`.

        `out` may be wide, and dz may be overwritten.
        """

    @abstractmethod
    def scratch_bytes(self, kind: Kind, rows: int, classes: int, hidden: int, wide: bool) -> int:
        """Return the bytes that a product allocates besides its operands and its result."""

    @abstractmethod
    def seconds(
        self, kind: Kind, rows: int, classes: int, hidden: int, wide: bool,
        moved: float, sums: float, rates: Rates,
    ) -> float:  # fmt: skip
        """Return the seconds that a product takes.

        Args:
            moved: bytes that the product reads and writes for operands and result.
            sums: bytes of the sums that the result is added to.
        """

    def rate(self, rates: Rates) -> float:
        """Return the FLOP/s of large products."""
        return rates.flops(self.itemsize, self.upcasts)
