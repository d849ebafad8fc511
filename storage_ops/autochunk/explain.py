"""`storage_ops.autochunk.explain`: reports why a function is chunked, or why not."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from storage_ops.autochunk.backend import backend, checked, collected
from storage_ops.quantities import InLines, readable


@dataclass(frozen=True)
class Explanation(InLines):
    """The effect of the auto-chunker on a function.

    Attributes:
        chunked: whether its logits exist only in chunks.
        num_chunks: the number of chunks of the logits, or 0 if not chunked.
        num_passes: how often the logits are computed. Chunks that wait for a sum over all tokens
            compute them again. So does a backward with several upstream gradients, or with one per
            token. Detach results that are only logged to avoid that. Linear cross-entropy counts as
            1. Another loss of log-probabilities, lse or entropy counts as 2.
        reason: the reason why it is not chunked, with the node, its op and its line of code, or "".
        peak_before: predicted peak bytes of forward and backward above their inputs.
        peak_after: predicted peak bytes of forward and backward after chunking.
    """

    chunked: bool
    num_chunks: int
    num_passes: int
    reason: str
    peak_before: int
    peak_after: int

    def __str__(self) -> str:
        before = readable(self.peak_before)
        if not self.chunked:
            return f"not chunked: {self.reason}\n  predicted peak  {before}"
        after = readable(self.peak_after)
        chunks = f"{self.num_chunks} chunk{'s' if self.num_chunks > 1 else ''}"
        if self.num_passes > 1:
            chunks += f", logits formed {self.num_passes} times"
        return f"{chunks}\n  predicted peak  {after}, was {before}"


def explain(
    f: Callable[..., Any],
    *args: object,
    num_chunks: int | None = None,
    memory_budget: int | float | str | None = None,
    **kwargs: object,
) -> Explanation:
    """Compile and call a function once, and report the effect of the auto-chunker.

    Args:
        f: a function, module or method. It is compiled forward and, if its arguments require
            gradients, backward.
        *args, **kwargs: the arguments of `f`.
        num_chunks: as in `chunk`.
        memory_budget: as in `chunk`.

    Returns:
        The explanation of the graph with the largest predicted peak, if there are several.

    Raises:
        TypeError, ValueError: `f` is no function, an option has the wrong type or value, or a
            misspelt option is no named argument of `f`.

    Example:
        >>> x, w = torch.randn(64, 8, requires_grad=True), torch.randn(500, 8)
        >>> found = storage_ops.autochunk.explain(lambda x, w: x @ w.t(), x, w, num_chunks=4)
        >>> found.chunked, found.reason
        (False, 'mm = aten.mm.default: ...')
    """
    if not callable(f):
        raise TypeError(f"explain: `f` is {f!r}, a {type(f).__name__}. Expected a function.")
    _check_spelling(f, kwargs)
    checked(num_chunks, memory_budget, True)
    options: dict[str, Any] = {"num_chunks": num_chunks, "memory_budget": memory_budget}

    def call(*args: object, **kwargs: object) -> Any:
        return f(*args, **kwargs)

    # The code object is a copy, because Dynamo would not compile the same code again.
    fresh = FunctionType(call.__code__.replace(), globals(), "call", None, call.__closure__)
    with collected() as reports:
        torch.compile(fresh, backend=backend, options=options)(*args, **kwargs)
    if not reports:
        return Explanation(False, 0, 0, "nothing was compiled", 0, 0)
    r = max(reports, key=lambda report: (report.chunked, report.peak_before))
    return Explanation(r.chunked, r.num_chunks, r.num_passes, r.reason, r.peak_before, r.peak_after)


def _check_spelling(f: Callable[..., Any], keywords: dict[str, Any]) -> None:
    """Raise a TypeError for a keyword similar to an option that is no named argument of `f`.

    A function with `**kwargs` would otherwise ignore the misspelt option.
    """
    call = f.forward if isinstance(f, torch.nn.Module) else f
    try:
        named = inspect.signature(call).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return
    for name in keywords:
        near = difflib.get_close_matches(name, ("num_chunks", "memory_budget"), n=1, cutoff=0.9)
        if name not in named and near:
            raise TypeError(
                f"explain: {getattr(f, '__name__', type(f).__name__)} has no argument `{name}`. "
                f"Did you mean {near[0]!r}?"
            )
