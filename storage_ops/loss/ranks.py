"""Linear cross-entropy with a slice of the vocabulary on every rank.

Each rank forms the logits of its own classes. What the ranks exchange is a few numbers per token,
the state of the rows, and at the end the gradient of the input, to which every slice contributes.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

_distributed: Any = dist
if dist.is_available():
    from torch.distributed import distributed_c10d as _distributed

# Sizes of slices that every rank of a group is known to have. Asking costs a collective and, on a
# GPU, a wait for the device.
_equal: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()


def name_of(process_group: Any) -> str:
    """The name by which the op's kernels find a group again; "" for no group."""
    return "" if process_group is None else str(process_group.group_name)


class Ranks:
    """Who holds the vocabulary: here one process, all of it. `Several` are those of a group."""

    several = False

    def check_equal(self, weight: Tensor) -> None:
        """Raise on every rank if slices differ in size, at a group's first call with this size."""

    def place(self, classes: int) -> tuple[int, int]:
        """First class of this rank, and the number of classes of all ranks."""
        return 0, classes

    def add_up(self, t: Tensor) -> Tensor:
        """The sum of a tensor over the ranks, in place."""
        return t

    def merge(self, state: Tensor, argmax: Tensor | None, ignored: Tensor, vocabulary: int) -> None:
        """Merge the state of rows over the ranks, in place: the sum formulas of row_math.h."""


class Several(Ranks):
    """The ranks of a process group, each with a slice of the vocabulary of the same size."""

    several = True

    def __init__(self, name: str):
        self._group = _distributed._resolve_process_group(name)

    def check_equal(self, weight: Tensor) -> None:
        """See `Ranks`. Else ranks would disagree about where slices begin, and about the plan."""
        group, classes = self._group, len(weight)
        known = _equal.setdefault(group, set())
        capturing = weight.is_cuda and torch.cuda.is_current_stream_capturing()
        # Nothing can be read in a capture: its warm-up has checked.
        if classes in known or capturing:
            return
        sizes = torch.tensor([classes, -classes], device=weight.device)
        dist.all_reduce(sizes, dist.ReduceOp.MAX, group)
        most, least = sizes.tolist()
        if most != -least:
            raise ValueError(
                f"linear_cross_entropy: linear_weight has {classes} classes on rank "
                f"{dist.get_rank(group)} of process_group, and from {-least} to {most} on all "
                f"ranks; "
                f"expected equal slices: pad the vocabulary to a multiple of "
                f"{dist.get_world_size(group)}"
            )
        known.add(classes)

    def place(self, classes: int) -> tuple[int, int]:
        """See `Ranks`."""
        group = self._group
        return dist.get_rank(group) * classes, dist.get_world_size(group) * classes

    def add_up(self, t: Tensor) -> Tensor:
        """See `Ranks`."""
        dist.all_reduce(t, dist.ReduceOp.SUM, self._group)
        return t

    def merge(self, state: Tensor, argmax: Tensor | None, ignored: Tensor, vocabulary: int) -> None:
        """See `Ranks`."""
        group = self._group
        shift, total, slope, dot, mass, _ = state.unbind(0)
        largest = torch.where(total == 0, -torch.inf, shift)
        # The maximum of ranks may drop a nan: whether there is one is a number of its own.
        nan = largest.isnan()
        both = torch.stack((largest.masked_fill(nan, torch.inf), nan.to(largest.dtype)))
        dist.all_reduce(both, dist.ReduceOp.MAX, group)
        merged = both[0].masked_fill(both[1] > 0, torch.nan)
        if argmax is not None:
            argmax.masked_fill_(~torch.where(merged.isnan(), nan, largest == merged), vocabulary)
            dist.all_reduce(argmax, dist.ReduceOp.MIN, group)
            argmax.masked_fill_(argmax == vocabulary, 0).masked_fill_(ignored, -1)
        new = torch.where(merged == -torch.inf, 0, merged)
        by = torch.where(total == 0, 0, shift - new)
        factor = by.exp()
        moved = slope + torch.where(
            total == 0, 0, total * by
        )  # infinite where the distance is large
        slope.copy_(torch.where(factor == 0, 0, factor * moved))
        dot.add_(torch.where(mass == 0, 0, mass * (shift - new)))
        total.mul_(factor)
        rest = state[1:].contiguous()
        dist.all_reduce(rest, dist.ReduceOp.SUM, group)
        state[1:] = rest
        state[0] = new
        state.masked_fill_(ignored, 0)[1].masked_fill_(ignored, 1)


def ranks_of(name: str) -> Ranks:
    """The ranks of a group by its name; those of "" are this process alone."""
    return Several(name) if name else Ranks()
