"""Separates the autograd graph of one call, so that the call can run alone.

`enter` creates the inputs of the call and receives their gradients. `leave` creates the gradients
of its outputs. The nodes of the call are in between, and no others. `reads_history` checks this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

Gradients = Sequence[Tensor | None]


class _Enter(torch.autograd.Function):
    """Makes tensors the inputs of a call.

    They are not leaves, because autograd would keep the gradients of leaves to the end.
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
    """Takes the outputs of a call, and creates their gradients."""

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
    """Return tensors without a history as inputs that require gradients.

    Args:
        inputs: the tensors.
        anchor: an empty tensor without a history.
        arrive: called with the gradients of the inputs in the backward of the call.
    """
    with torch.enable_grad():
        entered = _Enter.apply(arrive, inputs, anchor.requires_grad_())  # type: ignore[no-untyped-call]
    return list(entered)


def leave(outputs: Sequence[Tensor], make: Callable[[], Gradients]) -> Tensor:
    """Return an empty tensor from which `run_backward` runs the backward of a call.

    Args:
        outputs: the outputs that require gradients, at least one.
        make: creates their gradients when the backward begins.
    """
    with torch.enable_grad():
        last: Tensor = _Leave.apply(make, *outputs)  # type: ignore[no-untyped-call]
    return last


def run_backward(last: Tensor) -> None:
    """Run the backward of the call from the result of `leave`."""
    last.backward(torch.empty_like(last))


def next_node() -> int:
    """Return the number of the next autograd node that this thread creates."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def reads_history(
    outputs: list[Tensor], entries: set[Any], leaves: Iterable[Tensor], since: int
) -> bool:
    """Return True if the backward of a call goes beyond its arguments.

    Args:
        outputs: the outputs of the call.
        entries: the autograd nodes of the arguments.
        leaves: the parameters and arguments whose gradients the backward may compute.
        since: the number of the first node that the call could create.
    """
    own = {id(t) for t in leaves}
    queue = [t.grad_fn for t in outputs]
    seen = set(entries)
    while queue:
        node: Any = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in own:
            return True
        if variable is None and node._sequence_nr() < since:
            return True
        queue += [following for following, _ in node.next_functions]
    return False


def edges_behind(last: Tensor) -> tuple[Counter[Any], set[Any]]:
    """Return the number of edges to each input of the nodes behind a tensor, and the nodes."""
    counts: Counter[Any] = Counter()
    nodes: set[Any] = set()
    queue = [last.grad_fn]
    while queue:
        node = queue.pop()
        if node is None or node in nodes:
            continue
        nodes.add(node)
        counts.update(edge for edge in node.next_functions if edge[0] is not None)
        queue += [following for following, _ in node.next_functions]
    return counts, nodes
