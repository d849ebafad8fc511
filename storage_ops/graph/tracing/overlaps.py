"""Finds arguments of a call that share memory with other inputs, unlike in the trace.

A graph copies a tensor that a recompute reads after the step has modified it. It does so for the
tensors that shared memory in the trace.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from storage_ops.graph.nodes import storages, written_at


class Overlaps:
    """The inputs of a graph, and the memory that they share in the trace.

    Attributes:
        modified: whether the graph modifies each input.
    """

    def __init__(self, graph: fx.Graph) -> None:
        inputs = [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]
        writes = written_at(dict.fromkeys(graph.nodes, 0))
        self._keys = [{key for key, _ in storages(t)} for t in inputs]
        self.modified = [not keys.isdisjoint(writes) for keys in self._keys]

    def find(self, inputs: Sequence[Tensor], arguments: int) -> tuple[int, int] | None:
        """Return the places of an argument and another input that share memory only in this call.

        One of them is modified.

        Args:
            inputs: the inputs of a call. The arguments come first.
            arguments: the number of arguments.
        """
        if not arguments or not any(self.modified):
            return None
        starts = [_start(t) for t in inputs]
        for place, t in enumerate(inputs[:arguments]):
            if not starts[place]:
                continue
            storage = t.untyped_storage()
            begin = storage.data_ptr()
            end = begin + storage.nbytes()
            for other, start in enumerate(starts):
                if (
                    begin <= start < end
                    and other != place
                    and (self.modified[place] or self.modified[other])
                    and self._keys[place].isdisjoint(self._keys[other])
                    and _overlap(t, inputs[other])
                ):
                    return place, other
        return None


def _start(t: Tensor) -> int:
    """Return the address of a tensor's first element, or 0 for a tensor without memory."""
    return t.data_ptr() if t.layout == torch.strided else 0


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return True if one range of bytes, from first to last element, overlaps another."""
    if one.device != other.device or not one.numel() or not other.numel():
        return False
    (begin, end), (first, last) = map(_range, (one, other))
    return begin < last and first < end


def _range(t: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()
