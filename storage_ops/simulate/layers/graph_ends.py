"""Separates the autograd graph of one call, so that the call can run by itself.

`enter` makes the inputs of the call and takes their gradients. `leave` makes the gradients of its
outputs. Between them lie the nodes of the call and, as `reads_history` checks, no others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

Gradients = Sequence[Tensor | None]


class _Enter(torch.autograd.Function):
    """Makes given tensors the inputs of a call.

    They are not leaves, whose gradients autograd would hold to the end.
    """

    @staticmethod
    def forward(
        ctx: Any, arrive: Callable[[Gradients], None], inputs: list[Tensor], anchor: Tensor
    ) -> Any:
        ctx.arrive = arrive
        ctx.set_materialize_grads(False)
        return tuple(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.arrive(gradients)
        return None, None, None


class _Leave(torch.autograd.Function):
    """Takes the outputs of a call, and makes their gradients."""

    @staticmethod
    def forward(ctx: Any, make: Callable[[], Gradients], *outputs: Tensor) -> Tensor:
        ctx.make = make
        return outputs[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return None, *ctx.make()


def enter(
    inputs: list[Tensor], anchor: Tensor, arrive: Callable[[Gradients], None]
) -> list[Tensor]:
    """Return tensors without a history as inputs that need gradients.

    Args:
        inputs: the tensors.
        anchor: a tensor of no elements without a history.
        arrive: called with the gradients of the inputs in the backward of the call.
    """
    with torch.enable_grad():
        entered = _Enter.apply(arrive, inputs, anchor.requires_grad_())  # type: ignore[no-untyped-call]
    return list(entered)


def leave(outputs: Sequence[Tensor], make: Callable[[], Gradients]) -> Tensor:
    """Return a tensor of no elements from which `run_backward` runs the backward of a call.

    Args:
        outputs: those that need gradients, one at least.
        make: makes the gradient of each when the backward begins.
    """
    with torch.enable_grad():
        last: Tensor = _Leave.apply(make, *outputs)  # type: ignore[no-untyped-call]
    return last


def run_backward(last: Tensor) -> None:
    """Run the backward of the call whose outputs `leave` took."""
    last.backward(torch.empty_like(last))


def next_node() -> int:
    """Return the number of the next node of autograd that this thread makes."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def reads_history(
    outputs: list[Tensor], entries: set[Any], leaves: Iterable[Tensor], since: int
) -> bool:
    """Return True if the backward of a call goes through more than its arguments.

    Args:
        outputs: the outputs of the call.
        entries: the nodes of autograd that made the arguments.
        leaves: the parameters and arguments whose gradients it may make.
        since: the number of the first node that the call could make.
    """
    own = {id(t) for t in leaves}
    left = [t.grad_fn for t in outputs]
    seen = set(entries)
    while left:
        node: Any = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in own:
            return True
        if variable is None and node._sequence_nr() < since:
            return True
        left += [following for following, _ in node.next_functions]
    return False


def edges_behind(last: Tensor) -> tuple[Counter[Any], set[Any]]:
    """Return how many edges lead to each input of the nodes behind a tensor, and the nodes."""
    counts: Counter[Any] = Counter()
    nodes: set[Any] = set()
    left = [last.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in nodes:
            continue
        nodes.add(node)
        counts.update(edge for edge in node.next_functions if edge[0] is not None)
        left += [following for following, _ in node.next_functions]
    return counts, nodes
