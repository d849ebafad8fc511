"""A loss that `torch.compile(..., backend="storage_ops")` compiles, whose budget is part of a plan.

Its budget is an option of the backend. A plan changes that, and lets Dynamo forget what it has
compiled of the loss, so that the next call compiles it anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from storage_ops.fitting.heads import LOSS_NAME
from storage_ops.fitting.units import Unit
from storage_ops.simulate.compiled import backend_of, with_budget

_ATTRIBUTE = "storage_ops_loss"  # of the backend of a compiled loss: itself, while there is one


class CompiledLoss(nn.Module):
    """Stands for a compiled loss among the layers of a model."""

    def __init__(self, backend: Any, function: Callable[..., Any]) -> None:
        super().__init__()
        self._backend, self._function = backend, function
        self._own: dict[str, Any] | None = None  # what the backend was called with before a plan

    @property
    def is_budgeted(self) -> bool:
        """Whether its budget is that of a plan."""
        return self._own is not None

    def budgeted(self, memory_budget: int | None) -> None:
        """Let the loss keep to a budget, or to its own choice for None."""
        own = self._own = dict(self._backend.kwargs)
        options = with_budget(own.get("options") or {}, memory_budget)
        self._compiled_with({**own, "options": options})

    def restored(self) -> None:
        """Undo `budgeted`, if it was done."""
        if self._own is not None:
            self._compiled_with(self._own)
            self._own = None

    def _compiled_with(self, keywords: dict[str, Any]) -> None:
        from torch._dynamo.eval_frame import remove_from_cache

        self._backend.kwargs = keywords
        remove_from_cache(self._function)


def compiled_loss(loss: Any) -> Unit | None:
    """What stands for a loss, the same each time; None of one that the backend does not compile."""
    backend = backend_of(loss)
    if backend is None:
        return None
    stands = vars(backend).setdefault(
        _ATTRIBUTE, CompiledLoss(backend, loss._torchdynamo_orig_callable)
    )
    return Unit(LOSS_NAME, stands, "compiled")
