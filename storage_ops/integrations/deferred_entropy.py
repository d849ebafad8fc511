"""Probabilities of deferred logits, for the entropy of tokens only.

Code with logits computes the entropy as `-(log_p.exp() * log_p).sum(-1)`. Each step of this
expression has a class here. Any other operation is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from storage_ops.integrations.deferred_forward import StandIn

if TYPE_CHECKING:
    from storage_ops.integrations.deferred_forward import Refused
    from storage_ops.integrations.deferred_logits import DeferredLogits


class _Step(StandIn):
    """A step of the entropy of `log_p`, the log-probabilities of deferred logits."""

    _methods: frozenset[Any] = frozenset()

    def __init__(self, log_p: DeferredLogits) -> None:
        self._log_p = log_p

    def _error(self, what: str) -> Refused:
        return self._log_p._error(f"{what} of probabilities outside of the entropy")

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Replace the tensor in `torch.sum(p * log_p, -1)`."""
        step = next(a for a in (*args, *(kwargs or {}).values()) if isinstance(a, _Step))
        if func in step._methods and step is args[0]:
            return getattr(step, func.__name__)(*args[1:], **(kwargs or {}))
        raise step._error(f"the function {getattr(func, '__name__', func)!r}")


class Probabilities(_Step):
    """Represents exp(log_p), to be multiplied by log_p."""

    _methods = frozenset((torch.mul,))

    def mul(self, other: object) -> _Products:
        """Return the terms of the entropy, without the minus sign."""
        if other is not self._log_p:
            raise self._error("a product with other tensors")
        return _Products(self._log_p)

    __mul__ = mul


class _Products(_Step):
    """Represents exp(log_p) * log_p, to be summed over the classes."""

    _methods = frozenset((torch.sum,))

    def sum(self, dim: object = None, keepdim: bool = False) -> Tensor:
        """Return minus the entropy of each token."""
        self._log_p._over_classes(f"a sum over {dim}", dim)
        entropy = -self._log_p.entropy()
        return entropy.unsqueeze(-1) if keepdim else entropy
