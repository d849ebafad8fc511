"""The interface of the loss's matrix products. It needs no torch, so plans for a GPU need none."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from storage_ops.loss.planning.devices import Rates

SLICE = 1024  # rows or classes that are formed in fp32 at a time, before they are rounded or added


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
        threads: CPU threads that products have scratch for; no more than that compute.
    """

    itemsize: int
    threads: int = 1

    cuda = False
    # Products are formed in fp32 and rounded: sums in 16 bits would be no faster.
    upcasts = False
    # Scratch is by thread, and can be limited to some of them.
    limits_threads = False
    # Classes up to which the input's gradient takes more scratch than with more of them; 0: never.
    one_pass = 0

    @abstractmethod
    def logits(self, x: Tensor, w: Tensor, out: Tensor) -> None:
        """Compute out (rows, classes) = x (rows, D) @ w (classes, D).T. `out` may be wide."""

    @abstractmethod
    def input_gradient(self, dz: Tensor, w: Tensor, out: Tensor, add: bool) -> None:
        """Compute out (rows, D) = dz (rows, classes) @ w (classes, D), or add that to it.

        `out` may be wide.
        """

    @abstractmethod
    def weight_gradient(self, dz: Tensor, x: Tensor, out: Tensor, add: bool) -> None:
        """Compute out (classes, D) = dz (rows, classes).T @ x (rows, D), or add that to it.

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
            moved: bytes of operands and result that are read and written.
            sums: bytes of the sums that the result is added to.
        """

    def rate(self, rates: Rates) -> float:
        """Return the FLOP/s of large products."""
        return rates.flops(self.itemsize, self.upcasts)
