"""Results of a traced function as a flat list of graph outputs, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_unflatten

Build = Callable[[Sequence[Any]], Any]


class Packer:
    """Collects what a graph must return.

    Attributes:
        outputs: plain tensors and numbers of the trace, in the order the graph returns them.
        constants: values that are neither, returned as they are at each call.
    """

    def __init__(self, lift: Callable[[Any], Any]) -> None:
        self._lift = lift
        self.outputs: list[Any] = []
        self.constants: list[Any] = []

    def tree(self, value: object) -> Build:
        """Add a pytree; returns what makes it again from the graph's outputs."""
        leaves, spec = tree_flatten(value)
        builds = [self.leaf(leaf) for leaf in leaves]
        return lambda outputs: tree_unflatten([build(outputs) for build in builds], spec)

    def leaf(self, value: object) -> Build:
        """Add one value: a tensor, a wrapper subclass, a number of the trace, or a constant."""
        if isinstance(value, Tensor) and is_traceable_wrapper_subclass(value):
            return self._subclass(value)
        if not isinstance(value, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
            self.constants.append(value)
            return lambda outputs: value
        place = len(self.outputs)
        self.outputs.append(self._lift(value))
        return lambda outputs: outputs[place]

    def _subclass(self, value: Any) -> Build:
        names, context = value.__tensor_flatten__()
        parts = {name: self.leaf(getattr(value, name)) for name in names}
        size, stride, kind = value.size(), value.stride(), type(value)

        def build(outputs: Sequence[Any]) -> Any:
            inner = {name: part(outputs) for name, part in parts.items()}
            return kind.__tensor_unflatten__(inner, context, size, stride)

        return build
