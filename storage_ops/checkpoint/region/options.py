"""The settings of a region, and where calls can be regions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from storage_ops.checkpoint.state.execution import is_disabled

ContextFn = Callable[[], tuple[contextlib.AbstractContextManager[Any], ...]]
DeterminismCheck = Literal["default", "checksum", "none"]
CHECKS: tuple[DeterminismCheck, ...] = get_args(DeterminismCheck)


def contexts_of(context_fn: ContextFn) -> tuple[Any, ...]:
    """Return the context managers for the forward and for the recompute.

    Raises:
        TypeError: the function returns something else.
    """
    contexts = context_fn()
    if (
        not isinstance(contexts, (tuple, list))
        or len(contexts) != 2
        or not all(hasattr(context, "__exit__") for context in contexts)
    ):
        raise TypeError(
            f"`context_fn` returns {contexts!r}. Expected two context managers, for the forward "
            "and for the recompute."
        )
    return tuple(contexts)


@dataclass(frozen=True)
class Options:
    """The settings of a region besides its function and arguments."""

    preserve_rng_state: bool = True
    determinism_check: DeterminismCheck = "default"
    debug: bool = False
    context_fn: ContextFn | None = None
    early_stop: bool = True
    discards: bool = True
    counts_saved: bool = False

    @property
    def checksums(self) -> bool:
        """Return True if saved tensors are compared by checksums, too."""
        return self.determinism_check == "checksum"

    @property
    def is_usual(self) -> bool:
        """Return True if the library can run a region with these settings."""
        return not (self.debug or self.counts_saved)


def is_repeatable() -> bool:
    """Return True if calls can be regions now.

    They cannot without grad mode, where checkpoints are disabled, in a trace of torch.jit, or under
    a transform of torch.func, which allows no saved-tensor hooks. They cannot in
    `torch.autograd.graph.allow_mutation_on_saved_tensors` either. It copies saved tensors before
    they are written, but does not know the tensors that a recompute saves.
    """
    return (
        torch.is_grad_enabled()
        and not is_disabled()
        and not torch.autograd.graph._allow_mutation_on_saved_tensors_enabled
        and torch._C._get_tracing_state() is None
        and torch._C._functorch.peek_interpreter_stack() is None
    )
