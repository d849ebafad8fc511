"""One call of a function whose saved tensors and outputs are recomputed in backward.

The call builds the ordinary autograd graph, with saved-tensor hooks that keep an index in place of
each saved tensor. In backward the function runs once more: what it saves fills those places, and
what it returns is bound back into the storages that were discarded. So gradients flow through the
graph of the first call, and every autograd contract is torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from storage_ops.checkpoint.execution import ExecutionState
from storage_ops.ops.storage import discard_storage, is_discarded, share_storage


@dataclass(frozen=True)
class Saved:
    """What must be the same about a saved tensor in the forward and in its repetition."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    # A parameter, a buffer or a view of one: what changes it changes what is recomputed.
    is_leaf: bool = field(compare=False)
    version: int = field(compare=False)

    @staticmethod
    def of(t: Tensor) -> Saved:
        """Describe a tensor that autograd saves."""
        root = t if t._base is None else t._base
        return Saved(t.shape, t.dtype, t.device, root.is_leaf, t._version)

    def __str__(self) -> str:
        return f"{tuple(self.shape)} {self.dtype} on {self.device}"


class _HoldInputs(torch.autograd.Function):
    """Keeps the inputs of a region as saved tensors of a node.

    So an enclosing saved-tensor hook (offload, another checkpoint) handles them like any other
    activation, and torch notices when one is modified in place before the backward.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)


class Region:
    """A call of `fn(*args, **kwargs)` that can be repeated in backward."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        preserve_rng_state: bool,
        check_metadata: bool,
    ) -> None:
        """Remember the call and what it depends on; `forward` runs it."""
        flat, self._spec = tree_flatten((args, kwargs))
        inputs = [leaf for leaf in flat if isinstance(leaf, Tensor)]
        self.name = getattr(fn, "__qualname__", type(fn).__qualname__)
        self._fn: Callable[..., Any] | None = fn
        self._flat = [None if isinstance(leaf, Tensor) else leaf for leaf in flat]
        self._inputs_at = [i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor)]
        self._input_needs_grad = [t.requires_grad for t in inputs]
        self._state = ExecutionState.capture(inputs, preserve_rng_state)
        anchor = torch.empty(0, requires_grad=True)
        self._held: Any = _HoldInputs.apply(anchor, *inputs)  # type: ignore[no-untyped-call]
        self._check_metadata = check_metadata
        self._saved: list[Saved] = []
        # For the backward in progress: its task, what is not read yet, and whether to keep it all.
        self._task: int | None = None
        self._recomputed: dict[int, Tensor] = {}
        self._reread = False
        self._never_read: set[int] = set()
        # Outputs by their place among the flattened ones: made by this region (with their
        # versions), and discarded.
        self._made: list[tuple[int, Tensor, int]] = []
        self._handles: list[tuple[int, Tensor]] = []

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function on the arguments of this region; return what it returns."""
        assert self._fn is not None
        known = {_storage_id(leaf) for leaf in tree_leaves((args, kwargs))}
        start = torch._C._autograd._get_sequence_nr()
        with saved_tensors_hooks(self._pack, self._unpack):
            outputs = self._fn(*args, **kwargs)
        self._never_read = set(range(len(self._saved)))
        self._made = [
            (i, leaf.detach(), leaf._version)
            for i, leaf in enumerate(tree_leaves(outputs))
            if isinstance(leaf, Tensor)
            and _is_made_here(leaf, start)
            and _storage_id(leaf) not in known
        ]
        return outputs

    def discard(self, guard: str, keep: Iterable[Any] = ()) -> None:
        """Free the outputs that this region made; the recompute binds them back.

        Args:
            guard: the message of the error that a read before the recompute raises.
            keep: tensors whose storages must not be freed.
        """
        kept = {_storage_id(leaf) for leaf in keep}
        made = [entry for entry in self._made if _storage_id(entry[1]) not in kept]
        for index, handle, version in made:
            if handle._version != version:
                raise RuntimeError(
                    f"OutputDiscardCheckpoint: output {index} of {self.name} was modified in place "
                    "after the region; the recompute could not restore it, nothing was freed"
                )
        for index, handle, _ in made:
            discard_storage(handle, guard=guard)
            self._handles.append((index, handle))
        self.forget_outputs()

    def made(self, t: Tensor) -> bool:
        """Whether a tensor is an output that this region made, or a view of one."""
        return _storage_id(t) in {_storage_id(handle) for _, handle, _ in self._made}

    def forget_outputs(self) -> None:
        """Let go of the outputs that were not discarded."""
        self._made = []

    def on_gradient(self, gradient: Tensor) -> None:
        """Hook of a tensor whose gradient announces that the output will be needed."""
        if self._fn is not None:
            self.recompute()

    def recompute(self) -> None:
        """Repeat the forward, once per backward, and bind its outputs to the discarded ones."""
        task = torch._C._current_graph_task_id()
        if self._task == task != -1:
            return
        if self._fn is None:
            raise RuntimeError(
                f"OutputDiscardCheckpoint: the region {self.name} is needed in a second backward "
                "pass, but the first one freed it; use retain_graph=True"
            )
        again: list[tuple[Saved, Tensor]] = []
        inputs = zip(self._held.grad_fn.saved_tensors, self._input_needs_grad, strict=True)
        args, kwargs = self._arguments([t.detach().requires_grad_(need) for t, need in inputs])

        def pack(t: Tensor) -> None:
            again.append((Saved.of(t), t.detach()))

        with (
            self._state.restored(),
            torch.enable_grad(),
            saved_tensors_hooks(pack, _never_unpacked),
        ):
            outputs = tree_leaves(self._fn(*args, **kwargs))
        self._check(again)
        self._bind(outputs)
        self._recomputed = dict(enumerate(t for _, t in again))
        if task != -1:
            retained = torch._C._autograd._get_current_graph_task_keep_graph()
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(partial(self._end_backward, retained))
        self._task = task if task != -1 else None

    def _end_backward(self, retained: bool) -> None:
        """Let go of what one backward recomputed, and of everything when no other can follow."""
        self._task, self._reread, self._recomputed = None, False, {}
        if not retained and not self._never_read:
            self._fn, self._held, self._flat = None, None, []

    def _arguments(self, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        flat = list(self._flat)
        for position, t in zip(self._inputs_at, inputs, strict=True):
            flat[position] = t
        args, kwargs = tree_unflatten(flat, self._spec)
        return args, kwargs

    def _pack(self, t: Tensor) -> int:
        self._saved.append(Saved.of(t))
        return len(self._saved) - 1

    def _unpack(self, index: int) -> Tensor:
        # A place is emptied as it is read, so that a saved tensor dies with its node. A node that
        # reads twice makes the region run once more, and then nothing is emptied.
        self.recompute()
        if index not in self._recomputed:
            self._task, self._reread = None, True
            self.recompute()
        self._never_read.discard(index)
        return self._recomputed[index] if self._reread else self._recomputed.pop(index)

    def _check(self, again: list[tuple[Saved, Tensor]]) -> None:
        if not self._check_metadata:
            return
        if len(again) != len(self._saved):
            raise RuntimeError(
                f"OutputDiscardCheckpoint: {self.name} saved {len(self._saved)} tensors in forward "
                f"and {len(again)} when it was recomputed; it must do the same work both times"
            )
        for index, (first, (second, t)) in enumerate(zip(self._saved, again, strict=True)):
            if first != second:
                raise RuntimeError(
                    f"OutputDiscardCheckpoint: tensor {index} that {self.name} saves was {first} "
                    f"in forward and is {second} when it is recomputed"
                )
            if t._version != second.version:
                raise RuntimeError(
                    f"OutputDiscardCheckpoint: tensor {index} that {self.name} saves, {first}, was "
                    "modified in place after autograd had saved it"
                )
            if first.is_leaf and first.version != second.version:
                raise RuntimeError(
                    f"OutputDiscardCheckpoint: a tensor of shape {tuple(first.shape)} that "
                    f"{self.name} uses was modified in place between forward and recompute"
                )

    def _bind(self, outputs: list[Any]) -> None:
        for index, handle in self._handles:
            again = outputs[index]
            if again.shape != handle.shape or again.dtype != handle.dtype:
                raise RuntimeError(
                    f"OutputDiscardCheckpoint: output {index} of {self.name} was "
                    f"{tuple(handle.shape)} {handle.dtype} in forward and is "
                    f"{tuple(again.shape)} {again.dtype} when it is recomputed"
                )
        for index, handle in self._handles:
            if is_discarded(handle):
                share_storage(handle, outputs[index].detach())
        self._handles = []


def _never_unpacked(packed: None) -> Tensor:
    raise AssertionError("the graph of a recompute has no backward")


def _storage_id(value: Any) -> int | None:
    """What identifies the storage of a plain tensor; None for anything else."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return None
    return int(value.untyped_storage()._cdata)


def _is_made_here(output: Tensor, start: int) -> bool:
    """Whether the bytes of an output were made by the region that began at sequence number `start`.

    A parameter, or a view of a tensor from outside, must not be freed.
    """
    base = output if output._base is None else output._base
    node = base.grad_fn
    return node is not None and node._sequence_nr() >= start and output.layout == torch.strided
