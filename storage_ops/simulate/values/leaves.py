"""The state of a tensor that a step may change without an op: gradient, flag, hooks and version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@dataclass
class Leaf:
    """A leaf tensor, and its state before a simulation."""

    tensor: Any
    gradient: Tensor | None
    requires_grad: bool
    hooks: list[tuple[str, dict[int, Any] | None]]
    version: _unsafe_preserve_version_counter

    @staticmethod
    def of(t: Tensor) -> Leaf:
        """Return the current state of a tensor."""
        hooks = [(name, getattr(t, name, None)) for name in _HOOKS]
        copies = [(name, None if own is None else dict(own)) for name, own in hooks]
        return Leaf(t, t.grad, t.requires_grad, copies, _kept_version(t))

    def restore(self) -> None:
        """Restore the state of the tensor."""
        t = self.tensor
        # No byte of it has changed, so a backward may use it as a saved tensor.
        self.version.__exit__()
        if t.requires_grad != self.requires_grad:
            t.requires_grad_(self.requires_grad)
        t.grad = self.gradient
        for name, before in self.hooks:
            now = getattr(t, name, None)
            if now is not None and dict(now) != (before or {}):
                # Autograd keeps this dictionary of hooks, so a new one would not reach it.
                now.clear()
                now.update(before or {})


def _kept_version(t: Tensor) -> _unsafe_preserve_version_counter:
    return _unsafe_preserve_version_counter(() if t.is_inference() else t)
