"""Packed sequences, whose batch sizes torch reads in C++ without an op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from storage_ops.simulate.mode import Simulation

_VF: Any = torch._VF
_RECURRENT: set[object] = {torch.gru, torch.lstm, torch.rnn_relu, torch.rnn_tanh}
OF_PACKED: set[object] = {*_RECURRENT, _VF._pack_padded_sequence, _VF._pad_packed_sequence}


def call_packed(simulation: Simulation, func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call a function of `OF_PACKED` in a simulation, with the values of the batch sizes.

    The parameters of a recurrent layer come after batch sizes and hidden states.
    """
    if func is _VF._pack_padded_sequence:
        return _Pack.apply(simulation, *args)  # type: ignore[no-untyped-call]
    if func in _RECURRENT and not isinstance(args[3], (list, tuple)):
        return func(*args)
    sizes = _values(simulation, args[1])
    if sizes is None:
        return func(*args)
    if func is _VF._pad_packed_sequence:
        return _padded(args[0], sizes.tolist(), *args[2:])
    return func(args[0], sizes, *args[2:])


def _values(simulation: Simulation, t: Tensor) -> Tensor | None:
    return simulation.values.read(simulation.twins.of(t))


class _Pack(torch.autograd.Function):
    """Packs sequences. The backward consists of ops."""

    @staticmethod
    def forward(
        ctx: Any, simulation: Simulation, x: Tensor, lengths: Tensor, batch_first: bool
    ) -> tuple[Tensor, Tensor]:
        packed, sizes = _VF._pack_padded_sequence(x, lengths, batch_first)
        known = _values(simulation, sizes)
        ctx.sizes = None if known is None else known.tolist()
        ctx.shape, ctx.batch_first = x.shape, batch_first
        ctx.mark_non_differentiable(sizes)
        return packed, sizes

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: None) -> tuple[None, Tensor, None, None]:
        shape = list(ctx.shape)
        if ctx.batch_first:
            shape[:2] = shape[1::-1]
        result, start = gradient.new_zeros(shape), 0
        for row, size in zip(result, ctx.sizes, strict=False):
            row[:size].copy_(gradient[start : start + size])
            start += size
        return None, result.transpose(0, 1) if ctx.batch_first else result, None, None


def _padded(
    data: Tensor, sizes: Sequence[int], batch_first: bool, padding: float, total: int
) -> tuple[Tensor, Tensor]:
    """Return padded sequences, and their lengths."""
    result = data.new_full((max(total, len(sizes)), sizes[0], *data.shape[1:]), padding)
    first = start = 0
    for last in range(1, len(sizes) + 1):
        size = sizes[first]
        if last == len(sizes) or sizes[last] != size:
            rows = data[start : start + (last - first) * size]
            result[first:last, :size].copy_(rows.view(last - first, size, *data.shape[1:]))
            first, start = last, start + (last - first) * size
    lengths = torch.tensor([sum(size > i for size in sizes) for i in range(sizes[0])])
    return result.transpose(0, 1) if batch_first else result, lengths
