"""Output layers whose weight FSDP2, or DeepSpeed's ZeRO-3, gathers for a call.

Hooks of these libraries gather the weight before a call of the layer and free it afterwards, and
also in the backward. But the call of a patched layer only returns deferred logits, and the loss
reads the weight. So the call runs without hooks, and the loss runs as a call with hooks.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from storage_ops.integrations.deferred_forward import Forward

_LIBRARIES = ("deepspeed.", "torch.distributed.fsdp.")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _hooks_of(head: nn.Module) -> dict[str, Any]:
    return {name: vars(head)[name] for name in _HOOKS}


def is_hooked(head: nn.Module) -> bool:
    """Return True if other code runs around the layer, or in its backward."""
    return any(_hooks_of(head).values())


def is_gathered(head: nn.Module) -> bool:
    """Return True if all hooks of the layer belong to a library that gathers its weight."""
    hooks = [hook for by_id in _hooks_of(head).values() for hook in by_id.values()]
    return all(str(getattr(hook, "__module__", "")).startswith(_LIBRARIES) for hook in hooks)


class Gathering:
    """The hooks of an output layer, removed in a block, and functions that run inside them.

    Attributes:
        classes: the number of classes of the layer, whose weight may be empty now.
    """

    def __init__(self, head: Any) -> None:
        self._head = head
        self._hooks = _hooks_of(head)
        self.classes: int = head.out_features

    @contextlib.contextmanager
    def taken_off(self) -> Iterator[None]:
        """Call the layer without hooks in a with block."""
        with self._having({name: OrderedDict() for name in _HOOKS}):
            self._head._gathering = self
            try:
                yield
            finally:
                self._head._gathering = None

    @contextlib.contextmanager
    def _having(self, hooks: dict[str, Any]) -> Iterator[None]:
        before = _hooks_of(self._head)
        vars(self._head).update(hooks)
        try:
            yield
        finally:
            vars(self._head).update(before)

    def __call__(self, use: Callable[[Tensor], Any], hidden: Tensor) -> Any:
        """Call a function with hidden states while the layer's weight and bias are gathered."""
        self._head._use = use
        try:
            with self._having(self._hooks):
                return self._head(hidden)
        finally:
            self._head._use = None

    def check_labels(self, forward: Forward) -> None:
        """Raise an error for returned logits, because their loss comes after the weight is freed.

        Raises:
            RuntimeError: the logits are returned.
        """
        if forward.labels is None:
            raise RuntimeError(
                f'patch_causal_lm: {forward.model} with logits="deferred" is called without '
                "labels. The weight of its output layer is gathered for that call only "
                "(fully_shard on the layer, ZeRO-3). Pass labels, or shard the layer with the "
                "model around it."
            )

    @property
    def weight(self) -> Tensor:
        """Return the layer's current weight."""
        weight: Tensor = self._head.weight
        return weight

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits that the layer itself computes."""
        return nn.functional.linear(hidden, self._head.weight, self._head.bias)


@contextlib.contextmanager
def hooks_taken_off(heads: Iterable[Any]) -> Iterator[None]:
    """Call output layers without their hooks in a with block."""
    with contextlib.ExitStack() as stack:
        for head in filter(is_hooked, heads):
            stack.enter_context(Gathering(head).taken_off())
        yield
