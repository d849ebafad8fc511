"""The time of an op on a device, by the device's rates: a roofline.

A GPU overlaps arithmetic and traffic, and the host runs ahead of it. A CPU does one after the
other, and Python's work for an op or a layer adds to the time. In compiled code, ops of single
elements and of rows are fused into their readers, and Python does nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from storage_ops.fitting.actions import Action
from storage_ops.foundation.op_names import Op
from storage_ops.foundation.ops import Args, Kwargs, facts_of, flops_of
from storage_ops.loss.planning.devices import Rates

# On a CPU, measured with torch 2.13 on an AMD EPYC with AVX-512.
_CORES = 2  # cores for which the rates and the times per element were measured
_OP = 7e-6  # Python time of an op, including autograd and the views before it
_CACHED = 5.0  # speed of results that the allocator places in the cache, relative to memory
# glibc maps larger blocks anew for each allocation. Their page faults take as long as this many
# copies of the block.
_FRESH, _FAULTS = 32 << 20, 3.0
# Python time of a checkpointed layer, and of a layer whose output is discarded, as a number of
# policy decisions that take as long.
_REGION, _DISCARD = 50, 25


class Roofline:
    """Seconds on a device."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        # Time of work that the cores share, relative to the time with `_CORES`.
        self.share = 1.0 if rates.overlaps else _CORES / torch.get_num_threads()

    def seconds(
        self,
        op: Op,
        args: Args,
        kwargs: Kwargs,
        out: object,
        first: Tensor,
        traffic: int,
        made: list[int],
    ) -> float:
        """Return the seconds of an op that computes.

        Args:
            op, args, kwargs, out: the call and its result.
            first: a tensor of the result.
            traffic: bytes that it reads and writes.
            made: bytes of each new storage.
        """
        rates, facts = self._rates, facts_of(op)
        arithmetic = flops_of(op, args, kwargs, out) / rates.flops(max(min(first.itemsize, 8), 2))
        if rates.fuses and facts.is_fused:
            return arithmetic
        if rates.overlaps:
            return max(arithmetic, traffic / rates.bandwidth) + rates.launch_seconds
        fresh = sum(nbytes for nbytes in made if nbytes > _FRESH)
        moving = (traffic / _CACHED + fresh * _FAULTS) / rates.bandwidth
        python = 0.0 if rates.fuses else _OP
        return (
            (arithmetic + moving) * self.share
            + self._of_elements(facts.nanoseconds, first)
            + python
        )

    def _of_elements(self, nanoseconds: float, first: Tensor) -> float:
        """Return the seconds of the per-element math functions, such as tanh, on a CPU."""
        return 1e-9 * first.numel() * nanoseconds * self.share

    def of_python(self, action: Action, calls: int) -> float:
        """Return the Python overhead of an action, in a layer with this many calls of ops."""
        asks = len(action.discarded) * _DISCARD
        if action.mode in ("full", "selective"):
            asks += _REGION
        if action.mode == "selective":
            asks += 2 * calls  # in forward, and again
        return asks * self._rates.asking

    def is_worth_saving(self, seconds: float) -> bool:
        """Return True if an op takes longer than Python takes to save its result."""
        return seconds > self._rates.asking
