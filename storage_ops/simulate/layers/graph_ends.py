"""Separates the autograd graph of one call, so that the call can run alone.

`enter` creates the inputs of the call. `leave` creates the gradients of its outputs. The nodes of
the call are in between, and no others. `reads_history` checks this. `gradients_taken`
takes the gradients of the inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

Gradients = Sequence[Tensor | None]
Edges = list[tuple[int, Tensor | None]]  # numbers of inputs, each with a gradient


class _Enter(torch.autograd.Function):
    """Makes tensors the inputs of a call.

    They are not leaves, because autograd would keep the gradients of leaves to the end.
    """

    @staticmethod
    def forward(ctx: Any, inputs: list[Tensor], anchor: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return tuple(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return None, None


class _Leave(torch.autograd.Function):
    """Takes the outputs of a call, and creates their gradients."""

    @staticmethod
    def forward(ctx: Any, make: Callable[[], Gradients], *outputs: Tensor) -> Tensor:
        ctx.make = make
        return outputs[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return None, *ctx.make()


def enter(inputs: list[Tensor], anchor: Tensor) -> list[Tensor]:
    """Return tensors without a history as inputs that require gradients.

    Args:
        inputs: the tensors.
        anchor: an empty tensor without a history.
    """
    with torch.enable_grad():
        entered = _Enter.apply(inputs, anchor.requires_grad_())  # type: ignore[no-untyped-call]
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


@contextlib.contextmanager
def gradients_taken(
    last: Tensor, entry: Any, begin: Callable[[], None], take: Callable[[Edges], None]
) -> Iterator[None]:
    """Take the gradients of the inputs from a backward in a with block, without adding them up.

    In a larger graph, autograd adds each of them to gradients from elsewhere, as soon as a node of
    the call has computed it.

    Args:
        last: the result of `leave`.
        entry: the autograd node of the inputs, or None if none needs a gradient.
        begin: called before each node runs.
        take: called after a node has run that computes gradients of inputs, with these gradients.
    """
    with contextlib.ExitStack() as stack:
        for node in nodes_behind(last):
            stack.callback(node.register_prehook(lambda _: begin()).remove)
            places = [(k, i) for k, (to, i) in enumerate(node.next_functions) if to is entry]
            if places and entry is not None:
                stack.callback(node.register_hook(partial(_take, take, places)).remove)
        del node
        yield


def _take(
    take: Callable[[Edges], None], places: list[tuple[int, int]], gradients: Gradients, _: Gradients
) -> Gradients:
    """Return the gradients that a node has computed, without those of the call's inputs."""
    take([(number, gradients[k]) for k, number in places])
    taken = {k for k, _ in places}
    return tuple(None if k in taken else t for k, t in enumerate(gradients))


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


def nodes_behind(last: Tensor) -> set[Any]:
    """Return the autograd nodes behind a tensor."""
    nodes: set[Any] = set()
    queue = [last.grad_fn]
    while queue:
        node = queue.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            queue += [following for following, _ in node.next_functions]
    return nodes
