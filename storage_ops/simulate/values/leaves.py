"""The state of a tensor that a step may change without an op: gradient, flag and hooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@dataclass
class Leaf:
    """A leaf tensor, and its state before a simulation."""

    tensor: Any
    gradient: Tensor | None
    requires_grad: bool
    hooks: list[tuple[str, dict[int, Any] | None]]

    @staticmethod
    def of(t: Tensor) -> Leaf:
        """Return the current state of a tensor."""
        hooks = [(name, getattr(t, name, None)) for name in _HOOKS]
        copies = [(name, None if own is None else dict(own)) for name, own in hooks]
        return Leaf(t, t.grad, t.requires_grad, copies)

    def restore(self) -> None:
        """Restore the state of the tensor."""
        t = self.tensor
        if t.requires_grad != self.requires_grad:
            t.requires_grad_(self.requires_grad)
        t.grad = self.gradient
        for name, before in self.hooks:
            now = getattr(t, name, None)
            if now is not None and dict(now) != (before or {}):
                # Autograd keeps this dictionary of hooks, so a new one would not reach it.
                now.clear()
                now.update(before or {})
