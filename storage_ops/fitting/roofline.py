"""The time of an op on a device: a measured time, or a roofline by the device's rates.

A GPU overlaps arithmetic and traffic, and the host runs ahead of it. A CPU does one after the
other, and the host's work for an op or a layer adds to the time. In compiled code, ops of single
elements and of rows are fused into their readers, and the host does nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from storage_ops.fitting.actions import Action
from storage_ops.foundation.op_names import Op
from storage_ops.foundation.ops import Args, Kwargs, OpFacts, facts_of, flops_of
from storage_ops.loss.planning.devices import Rates
from storage_ops.loss.planning.op_times import MULTIPLYING

# On a CPU without a calibration, measured with torch 2.13 on an AMD EPYC with AVX-512.
_CORES = 2  # cores for which the rates and the times per element were measured
_CACHED = 5.0  # speed of results that the allocator places in the cache, relative to memory
# glibc maps larger blocks anew for each allocation. Their page faults take as long as this many
# copies of the block.
_FRESH, _FAULTS = 32 << 20, 3.0


class Roofline:
    """Seconds on a device."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        # Time of work that the cores share, relative to the time with `_CORES`.
        self._share = 1.0 if rates.overlaps else _CORES / torch.get_num_threads()

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
        flops = flops_of(op, args, kwargs, out)
        arithmetic = flops / rates.flops(max(min(first.itemsize, 8), 2))
        if rates.fuses and facts.is_fused:
            return arithmetic
        launch = rates.launch_seconds if rates.overlaps else rates.host.op
        measured = self._measured(facts, flops, first, traffic)
        if measured is not None:
            return measured + launch
        if rates.overlaps:
            return max(arithmetic, traffic / rates.bandwidth) + launch
        fresh = sum(nbytes for nbytes in made if nbytes > _FRESH)
        moving = (traffic / _CACHED + fresh * _FAULTS) / rates.bandwidth
        of_elements = 1e-9 * first.numel() * facts.nanoseconds
        return (arithmetic + moving + of_elements) * self._share + launch

    def _measured(self, facts: OpFacts, flops: int, first: Tensor, traffic: int) -> float | None:
        """Return the seconds by measured times, or None if there are none for such an op."""
        times, dtype = self._rates.op_times, str(first.dtype).removeprefix("torch.")
        if not times:
            return None
        moving = times.traffic(dtype, traffic)
        if not flops:
            own = times.seconds(facts.family, dtype, traffic, any_dtype=True)
            return moving if own is None and not facts.nanoseconds else own
        own = times.seconds(facts.family, dtype, flops)
        if own is None and facts.product is not None:
            own = times.seconds(MULTIPLYING, dtype, flops)
        return None if own is None else max(own, moving or 0.0)

    def relative_time(self, flops: int, dtype: torch.dtype) -> float:
        """Return the time of a matrix product relative to the time by the table's rates."""
        name = str(dtype).removeprefix("torch.")
        measured = self._rates.op_times.seconds(MULTIPLYING, name, flops)
        if measured is None:
            return self._share
        return measured * self._rates.flops(dtype.itemsize) / flops

    def of_host(self, action: Action, calls: int) -> float:
        """Return the host's seconds for an action, in a layer with this many calls of ops."""
        host = self._rates.host
        seconds = len(action.discarded) * host.discard
        if action.mode in ("full", "selective"):
            seconds += host.region
        if action.mode == "selective":
            seconds += 2 * calls * host.decision  # in forward, and again
        return seconds

    def is_worth_saving(self, seconds: float) -> bool:
        """Return True if an op takes longer than the host takes to save its result."""
        return seconds > self._rates.host.decision
