"""Losses whose budget is part of a plan.

These are `LinearCrossEntropyLoss`, patched models, and losses that `torch.compile(...,
backend="storage_ops")` compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from storage_ops.loss.module import LinearCrossEntropyLoss
from storage_ops.simulate.captured import Captured
from storage_ops.simulate.compiled import with_budget

LOSS_NAME = "(loss)"  # of a head that is in the loss; no module in a model has this name
OWN_OPTIONS = "_options_before_fit"  # of a head, or a patched model, with the budget of a plan


@dataclass(frozen=True)
class Patching:
    """The functions that replace the loss of another library's model.

    Attributes:
        is_patched: whether a model is patched.
        patch: patches a model; it takes `memory_budget`.
        unpatch: undoes `patch`.
        set_memory_budget: gives the loss of a patched model another budget.
        restore_memory_budget: undoes `set_memory_budget`.
    """

    is_patched: Callable[[nn.Module], bool]
    patch: Callable[..., Any]
    unpatch: Callable[[nn.Module], None]
    set_memory_budget: Callable[[nn.Module, int | None], None]
    restore_memory_budget: Callable[[nn.Module], None]


_registered: list[Patching] = []


def register_patching(patching: Patching) -> None:
    """Let plans patch models with these functions, which belong to a package above this one."""
    _registered[:] = [patching]


def patching() -> Patching:
    """Return the functions that were registered."""
    return _registered[0]


def heads_in(module: nn.Module) -> list[LinearCrossEntropyLoss]:
    """Return the heads in a module, which may be a head itself."""
    return [head for head in module.modules() if isinstance(head, LinearCrossEntropyLoss)]


def heads_of_loss(loss: object, model: nn.Module) -> dict[str, LinearCrossEntropyLoss]:
    """Return heads of a loss that are not in the model, by name: "(loss)", "(loss).1"."""
    heads_of_model = set(heads_in(model))
    modules = Captured(loss, (), {}).modules if loss is not None else []
    heads = [
        m for m in modules if isinstance(m, LinearCrossEntropyLoss) and m not in heads_of_model
    ]
    names = [LOSS_NAME, *(f"{LOSS_NAME}.{number}" for number in range(1, len(heads)))]
    return dict(zip(names, heads, strict=False))


def budgeted(head: LinearCrossEntropyLoss, memory_budget: int | None) -> None:
    """Give a head a budget, or its own choice for None. A plan of its own is replaced."""
    own = own_options(head)
    head.options = {**own, "plan": None, "memory_budget": memory_budget}
    vars(head)[OWN_OPTIONS] = own


def restored(head: LinearCrossEntropyLoss) -> None:
    """Undo `budgeted` if it was called."""
    head.options = own_options(head)
    vars(head).pop(OWN_OPTIONS, None)


def own_options(head: LinearCrossEntropyLoss) -> dict[str, Any]:
    """Return the options of a head without those of a plan of `fit`."""
    options: dict[str, Any] = vars(head).get(OWN_OPTIONS, head.options)
    return options


def is_budgeted(module: nn.Module) -> bool:
    """Return True if a module is a head, or a patched model, with the budget of a plan."""
    return OWN_OPTIONS in vars(module)


class CompiledLoss(nn.Module):
    """Represents a compiled loss among the layers of a model.

    Its budget is an option of the backend. A plan changes the option, and makes Dynamo forget the
    compiled code of the loss, so that the next call compiles it again.
    """

    def __init__(self, backend: Any, function: Callable[..., Any]) -> None:
        super().__init__()
        self._backend, self._function = backend, function
        self._own: dict[str, Any] | None = None  # what the backend was called with before a plan

    @property
    def is_budgeted(self) -> bool:
        """Return True if the loss has the budget of a plan."""
        return self._own is not None

    def budgeted(self, memory_budget: int | None) -> None:
        """Give the loss a budget, or its own choice for None."""
        own = self._own = dict(self._backend.kwargs)
        options = with_budget(own.get("options") or {}, memory_budget)
        self._compiled_with({**own, "options": options})

    def restored(self) -> None:
        """Undo `budgeted` if it was called."""
        if self._own is not None:
            self._compiled_with(self._own)
            self._own = None

    def _compiled_with(self, keywords: dict[str, Any]) -> None:
        from torch._dynamo.eval_frame import remove_from_cache

        self._backend.kwargs = keywords
        remove_from_cache(self._function)
