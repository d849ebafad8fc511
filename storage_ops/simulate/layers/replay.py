"""Replays the effect of a recorded call on the ledger, without running its ops.

A replay records the inner blocks, creates the tensors that leave the call, and keeps inputs and
outputs alive as long as the call's own nodes would. It is a chain of autograd nodes, because the
gradients of inputs leave at different moments: one node for each part of the backward.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_unflatten

from storage_ops.foundation.ledger import Block, ModuleCall
from storage_ops.simulate.layers.graph_ends import nodes_behind
from storage_ops.simulate.layers.recording import (
    GRAD_OUT,
    INPUT,
    INSIDE,
    BlockSlot,
    Recording,
    View,
    distinct_views,
)
from storage_ops.simulate.mode import Simulation
from storage_ops.simulate.module_kinds import NotComparable


class NotReplayable(NotComparable):
    """The gradients in a backward are not those of the recording."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.modules = modules  # whose calls were replayed


class Replay:
    """One replayed call of a recorded kind."""

    def __init__(
        self, simulation: Simulation, recording: Recording, module: nn.Module, name: str,
        inputs: list[Tensor],
    ) -> None:  # fmt: skip
        self._simulation, self.recording, self.module = simulation, recording, module
        self._parameters, self._name = list(module.parameters()), name
        self.trained = [p for p in self._parameters if p.requires_grad]
        self._device = next((t.device for t in (*self._parameters, *inputs)), torch.device("cpu"))
        self._live: dict[int, Block] = {}  # the inner blocks, by slot
        self._held: dict[int, torch.UntypedStorage] = {}
        self._tensors: dict[int, Tensor] = {}  # that leave the call, and gradients, by slot
        for number, slot in enumerate(recording.slots):
            if slot.role == INPUT and number in recording.held:
                self._held[number] = inputs[slot.number].untyped_storage()

    def __del__(self) -> None:
        # The replay's node is gone, and so are the blocks that the call's own nodes would have
        # kept.
        for block in self._live.values():
            self._simulation.ledger.give_back(block)

    def forward(self) -> dict[int, Tensor]:
        """Replay the forward. Return the tensors with storages of slots."""
        self._simulation.sent += self.recording.sent[0]
        self._carry_out(self.recording.forward)
        tensors, self._tensors = self._tensors, {}
        held = self.recording.held
        self._held |= {n: t.untyped_storage() for n, t in tensors.items() if n in held}
        return tensors

    def begin_backward(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Check and note the gradients of outputs."""
        recording = self.recording
        pairs = zip(self._parameters, recording.parameters, strict=True)
        if any(view is not None and p.grad is not None for p, view in pairs):
            raise NotReplayable(self.module)  # autograd would add to it
        if not recording.is_of(gradients):
            raise NotReplayable(self.module)
        for number in recording.written:
            gradient, *others = gradients[number], *gradients[:number], *gradients[number + 1 :]
            if gradient is None or not _is_last(gradient, others):
                raise NotReplayable(self.module)
            del gradient, others
        self._simulation.sent += recording.sent[1]
        for number, slot in enumerate(recording.slots):
            if slot.role == GRAD_OUT and (gradient := gradients[slot.number]) is not None:
                self._tensors[number] = gradient

    def backward(self, number: int) -> list[Tensor | None]:
        """Replay a part of the backward. Return the gradients that leave at its end.

        The last part sets the gradients of parameters.
        """
        parts, parameters = self.recording.backward, self.recording.parameters
        views = [view for _, view in parts[number].gradients]
        leaving = {view.slot for view in views if view is not None}
        freed = self._carry_out(parts[number].events, leaving, is_first=number == 0)
        gradients = [None if v is None else self._view(v, self._tensors | freed) for v in views]
        if number == len(parts) - 1:
            for p, v in zip(self._parameters, parameters, strict=True):
                if v is not None:
                    p.grad = self._view(v, self._tensors)
            self._tensors.clear()
        return gradients

    def _carry_out(
        self, events: list[tuple[int, bool]], leaving: Collection[int] = (), is_first: bool = False
    ) -> dict[int, Tensor]:
        """Take and free blocks of slots. Return the freed tensors of slots that are leaving."""
        ledger, recording = self._simulation.ledger, self.recording
        freed: dict[int, Tensor] = {}
        for number, is_allocation in events:
            slot = recording.slots[number]
            if slot.role == INSIDE:
                if is_allocation:
                    self._live[number] = ledger.take(self._block(slot))
                else:
                    ledger.give_back(self._live.pop(number))
            elif is_allocation:
                t = recording.storage_of(number, self._simulation, self._device)
                ledger.see_as(t, self._block(slot))
                self._tensors[number] = t
                del t
            elif number in self._held:
                del self._held[number]
            elif number in leaving:
                freed[number] = self._tensors.pop(number)
            elif number in self._tensors:
                t = self._tensors.pop(number)
                # Autograd has a reference to the gradient of an output until the first part ends.
                # The base of a view uses the storage, too.
                others = (*self._tensors.values(), *freed.values())
                if is_first and slot.role == GRAD_OUT and _is_last(t, others, t._is_view()):
                    ledger.release(t)
                del t, others
        return freed

    def _block(self, slot: BlockSlot) -> Block:
        call = None if slot.call is None else ModuleCall(self._name + slot.call, 0)
        return replace(slot.block, call=call, _storages=0)

    def _view(self, view: View, tensors: dict[int, Tensor]) -> Tensor:
        t = tensors[view.slot]
        if view.has_base:
            return view.with_new_history(self._simulation, t)
        if self.recording.slots[view.slot].role == GRAD_OUT:
            return t
        return view.on(self._simulation, t)

    def outputs(self, tensors: dict[int, Tensor]) -> list[Tensor]:
        """Return the created tensors among the results."""
        views = [view for view in self.recording.outputs if isinstance(view, View)]
        return distinct_views(self._simulation, views, tensors)


class _Replayed(torch.autograd.Function):
    """The autograd node of a replayed call, and of the first part of its backward."""

    @staticmethod
    def forward(ctx: Any, replay: Replay, following: Tensor, *inputs: Tensor) -> Any:
        ctx.replay = replay
        ctx.set_materialize_grads(False)
        recording = replay.recording
        outputs = replay.outputs(replay.forward())
        views = [view for view in recording.outputs if isinstance(view, View)]
        ctx.mark_non_differentiable(
            *(t for t, view in zip(outputs, views, strict=True) if not view.needs_grad)
        )
        ctx.differentiable = [k for k, view in enumerate(views) if view.needs_grad]
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.replay.begin_backward(tuple(gradients[k] for k in ctx.differentiable))
        del gradients
        return None, None, *ctx.replay.backward(0)


class _Part(torch.autograd.Function):
    """The autograd node of a later part of a backward. The parts before it depend on its result."""

    @staticmethod
    def forward(
        ctx: Any, replay: Replay, number: int, following: Tensor, *inputs: Tensor
    ) -> Tensor:
        ctx.replay, ctx.number = replay, number
        ctx.set_materialize_grads(False)
        return following.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> Any:
        return None, None, None, *ctx.replay.backward(ctx.number)


def check_graph(last: Tensor, replays: Mapping[nn.Module, int]) -> None:
    """Check that a backward is as if each call had nodes of its own.

    Args:
        last: the tensor from which the backward starts.
        replays: the modules with replayed calls, and how many of their calls have a backward.

    Raises:
        NotReplayable: a call is not part of the backward, so that its own nodes might have been
            freed earlier. Or a parameter gets gradients from several calls, and autograd holds
            their sum until the last one.
    """
    found: dict[int, Replay] = {}
    used: set[int] = set()  # the ids of parameters, by other nodes
    for node in nodes_behind(last):
        replay = getattr(node, "replay", None)
        if isinstance(replay, Replay):
            found[id(replay)] = replay
        else:
            leaves = (following for following, _ in node.next_functions)
            used.update(id(leaf.variable) for leaf in leaves if hasattr(leaf, "variable"))
    uses = Counter(used)
    uses.update(id(p) for replay in found.values() for p in replay.trained)
    refused = [r.module for r in found.values() if any(uses[id(p)] > 1 for p in r.trained)]
    calls = Counter(replay.module for replay in found.values())
    refused += [module for module, count in replays.items() if calls[module] < count]
    if refused:
        raise NotReplayable(*refused)


def _is_last(t: Tensor, others: Collection[Tensor | None], more: int = 0) -> bool:
    """Return True if only autograd references a gradient that a node has got, and its storage.

    Args:
        t: the gradient.
        others: other gradients of the node, of which none may be the same.
        more: the number of other references to the storage.
    """
    return _uses(t) <= _uses_of_the_last() + more and all(t is not other for other in others)


def _uses(t: Any) -> int:
    """Return the numbers of references to a node's gradient and to its storage."""
    storage: int = torch._C._storage_Use_Count(t.untyped_storage()._cdata)
    return int(t._use_count()) + storage


class _Counting(torch.autograd.Function):
    """A node that counts the references to a gradient that no other code keeps."""

    @staticmethod
    def forward(ctx: Any, counts: list[int], t: Tensor) -> Tensor:
        ctx.counts = counts
        return t.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        gradient = gradients[0]
        ctx.counts.append(_uses(gradient))
        return None, None


@functools.cache
def _uses_of_the_last() -> int:
    uses: list[int] = []
    with no_dispatch(), torch.enable_grad():
        t = torch.zeros(2, requires_grad=True)
        (_Counting.apply(uses, t) * t.detach()).sum().backward()  # type: ignore[no-untyped-call]
    return uses[0]


def replayed(
    simulation: Simulation, recording: Recording, module: nn.Module, name: str,
    inputs: list[Tensor],
) -> Any:  # fmt: skip
    """Replay a call from its recording. Return its result and the changes of caches."""
    replay = Replay(simulation, recording, module, name, inputs)
    if recording.needs_grad:
        following: Any = simulation.unseen(torch.empty, 0).requires_grad_()
        for number, part in reversed([*enumerate(recording.backward)][1:]):
            leaving = [inputs[i] for i, _ in part.gradients]
            following = _Part.apply(replay, number, following, *leaving)  # type: ignore[no-untyped-call]
        leaving = [inputs[i] for i, _ in recording.backward[0].gradients]
        results = iter(_Replayed.apply(replay, following, *leaving))  # type: ignore[no-untyped-call]
    else:
        results = iter(replay.outputs(replay.forward()))
    leaves = []
    for output in recording.outputs:
        if isinstance(output, View):
            leaves.append(next(results))
        else:
            leaves.append(inputs[output] if isinstance(output, int) else output[1])
    return tree_unflatten(leaves, recording.form)
