"""How long an op takes on a device, by the device's rates: a roofline.

A GPU overlaps arithmetic and traffic, and the host runs ahead of it. A CPU does one after the
other, and all that Python does for an op or a layer takes its time as well. In compiled code ops
of single elements and of rows are fused with what reads them, and Python does nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from storage_ops.checkpoint.selective.flops import flops_of
from storage_ops.fitting.actions import Action
from storage_ops.foundation.op_names import name_of, packet_of
from storage_ops.loss.devices import Rates

# On a CPU, measured with torch 2.13 on an AMD EPYC with AVX-512.
_CORES = 2  # of the rates, and of the times of elements below
_OP = 7e-6  # of an op in Python, with autograd and the views before it
_CACHED = 5.0  # times as fast as from memory are results that the allocator finds in the cache
_FRESH = 32 << 20  # glibc maps a larger block anew each time, at a page fault for each page:
_FAULTS = 3.0  # that takes as long as to move its bytes so many times
# Nanoseconds of one element of the result, beyond moving it; of other ops they are hardly seen.
_ELEMENT = {
    "bernoulli_": 2.1, "native_dropout": 2.1, "normal_": 1.2, "uniform_": 1.0, "rand": 1.0,
    "where": 1.5, "tanh": 1.0, "sin": 0.55, "cos": 0.55, "erf": 0.5, "log": 0.35, "exp": 0.3,
    "native_layer_norm": 0.3, "gelu": 0.3, "_softmax": 0.2, "_safe_softmax": 0.4,
    "_log_softmax": 0.6, "sqrt": 0.15, "silu": 0.1, "sigmoid": 0.1, "rsqrt": 0.1,
}  # fmt: skip
# What compiled code fuses with what is around it, besides ops of single elements.
_FUSED = frozenset((
    "_to_copy", "mean", "sum", "amax", "var_mean", "native_layer_norm", "native_group_norm",
    "_fused_rms_norm", "_softmax", "_safe_softmax", "native_dropout", "cat", "clone", "copy_",
    "bernoulli_", "uniform_", "normal_", "rand", "randn", "arange", "full", "full_like", "zeros",
    "zeros_like", "ones", "ones_like", "scalar_tensor", "embedding",
))  # fmt: skip
# What Python does for a checkpointed layer, and for one whose output is discarded, as often as it
# would ask a policy about an op in that time.
_REGION, _DISCARD = 50, 25


class Roofline:
    """Seconds on a device."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        # Times of what the cores share, over those of the rates.
        self.share = 1.0 if rates.overlaps else _CORES / torch.get_num_threads()

    def seconds(
        self,
        op: Any,
        args: Any,
        kwargs: Any,
        out: Any,
        first: Tensor,
        traffic: int,
        made: list[int],
    ) -> float:
        """Of an op that computes.

        Args:
            op, args, kwargs, out: the call and its result.
            first: a tensor of the result.
            traffic: bytes that it reads and writes.
            made: bytes of each new storage.
        """
        rates = self._rates
        arithmetic = flops_of(op, args, kwargs, out) / rates.flops(max(min(first.itemsize, 8), 2))
        if rates.fuses and _is_fused(op):
            return arithmetic
        if rates.overlaps:
            return max(arithmetic, traffic / rates.bandwidth) + rates.launch_seconds
        fresh = sum(nbytes for nbytes in made if nbytes > _FRESH)
        moving = (traffic / _CACHED + fresh * _FAULTS) / rates.bandwidth
        python = 0.0 if rates.fuses else _OP
        return (arithmetic + moving) * self.share + self._of_elements(op, first) + python

    def _of_elements(self, op: Any, first: Tensor) -> float:
        """Of the functions of a CPU that an op computes of each element."""
        return 1e-9 * first.numel() * _ELEMENT.get(_short_name(op), 0.0) * self.share

    def of_python(self, action: Action, calls: int) -> float:
        """Of what carries an action out, in a layer with so many calls of ops."""
        asks = len(action.discarded) * _DISCARD
        if action.mode in ("full", "selective"):
            asks += _REGION
        if action.mode == "selective":
            asks += 2 * calls  # in forward, and again
        return asks * self._rates.asking

    def is_worth_saving(self, seconds: float) -> bool:
        """Whether an op takes longer than Python does to save its result."""
        return seconds > self._rates.asking


def _is_fused(op: Any) -> bool:
    """Whether compiled code computes an op where its result is read."""
    return torch.Tag.pointwise in getattr(op, "tags", ()) or _short_name(op) in _FUSED


def _short_name(op: Any) -> str:
    return packet_of(name_of(op)).removeprefix("aten::")
