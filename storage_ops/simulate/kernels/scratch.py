"""Records the temporary memory of ops."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from storage_ops.foundation.ledger import Block, Ledger
from storage_ops.foundation.op_names import Op
from storage_ops.foundation.ops import Args, facts_of

See = Callable[[Tensor], None]


class Scratch:
    """Records the temporary memory of one call of an op.

    A kernel is a function `kernel(scratch, args, out, see)` in the table of facts. It calls `see`
    for each result when the op allocates the result. It frees everything that it allocates.

    Attributes:
        ledger: the ledger that records the memory.
        name: the op.
    """

    def __init__(self, ledger: Ledger, op: Op) -> None:
        self.ledger, self.name = ledger, str(op)

    def take(self, *tensors: Tensor, times: int = 1) -> list[Block]:
        """Allocate a block for each tensor, `times` as large."""
        return [b for t in tensors for b in self.take_bytes(t, t.nbytes * times)]

    def take_bytes(self, like: Tensor, nbytes: int) -> list[Block]:
        """Allocate a block of `nbytes` bytes for work on the tensor `like`."""
        return [self.ledger.take(self.ledger.block(like, nbytes, self.name))]

    def give_back(self, blocks: list[Block]) -> None:
        """Free blocks of `take` and `take_bytes`."""
        for block in blocks:
            self.ledger.give_back(block)

    def use(self, like: Tensor, nbytes: int) -> None:
        """Allocate `nbytes` bytes and free them."""
        self.ledger.temporary(like, self.name, nbytes)

    def contiguous(
        self, *tensors: Tensor, memory_format: torch.memory_format = torch.contiguous_format
    ) -> list[Block]:
        """Allocate a copy of each tensor that is not contiguous in a memory format."""
        return self._copies(t for t in tensors if not t.is_contiguous(memory_format=memory_format))

    def for_blas(self, *matrices: Tensor) -> list[Block]:
        """Allocate a copy of each matrix, or batch of them, whose strides BLAS does not support."""
        return self._copies(t for t in matrices if not _is_for_blas(t))

    def _copies(self, tensors: Iterable[Tensor]) -> list[Block]:
        return [b for t in tensors for b in self.take_bytes(t, t.numel() * t.itemsize)]


def see_all(out: Tensor | Iterable[Tensor | None], see: See) -> None:
    """Record the storages of all results of an op."""
    for result in [out] if isinstance(out, Tensor) else out:
        if result is not None:
            see(result)


def factors_of(args: Args) -> tuple[Tensor, Tensor]:
    """Return the two factors of a matrix product. A dtype of the result may follow them."""
    left, right = [t for t in args if isinstance(t, Tensor)][-2:]
    return left, right


def _is_for_blas(t: Tensor) -> bool:
    """Return True if rows or columns of a matrix are contiguous, and do not overlap."""
    (rows, columns), (down, across) = t.shape[-2:], t.stride()[-2:]
    by_rows = across == 1 and down >= max(1, columns)
    return by_rows or (down == 1 and across >= max(1, rows)) or not t.numel()


# For the input, the weight and the bias.
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
Kernel = Callable[[Scratch, Args, Any, See], None]


def of_contiguous(*places: int) -> Kernel:
    """Return the kernel of an op that reads contiguous copies of the arguments at `places`."""

    def kernel(scratch: Scratch, args: Args, out: Any, see: See) -> None:
        see_all(out, see)
        scratch.give_back(scratch.contiguous(*(args[place] for place in places)))

    return kernel


def book(ledger: Ledger, op: Op, args: Args, out: object, on_gpu: bool, is_wrapped: bool) -> None:
    """Record the allocations of an op that fake tensors do not show.

    Args:
        ledger: the ledger to record them in.
        op, args, out: the call and its result.
        on_gpu: whether the op's GPU kernel runs.
        is_wrapped: whether a tensor subclass called the op for its inner tensors.
    """
    facts = facts_of(op)
    for kernel in (
        None if is_wrapped else facts.scratch,
        facts.scratch_on_gpu if on_gpu else facts.scratch_on_cpu,
    ):
        if kernel is not None:
            kernel(Scratch(ledger, op), args, out, lambda t: ledger.see(t, str(op)))
