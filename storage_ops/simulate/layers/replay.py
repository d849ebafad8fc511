"""Replays the effect of a recorded call on the ledger, without running its ops.

Each replay is one autograd node. It records the inner blocks, creates the tensors that leave the
call, and keeps inputs and outputs alive as long as the call's own nodes would.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_unflatten

from storage_ops.foundation.ledger import Block, ModuleCall
from storage_ops.simulate.layers.graph_ends import edges_behind
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
        results = self._carry_out(self.recording.forward, ())
        held = self.recording.held
        self._held |= {n: t.untyped_storage() for n, t in results.items() if n in held}
        return results

    def backward(self, gradients: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Replay the backward. Return the gradients of inputs, and set those of parameters."""
        recording = self.recording
        pairs = list(zip(self._parameters, recording.parameters, strict=True))
        if any(view is not None and p.grad is not None for p, view in pairs):
            raise NotReplayable(self.module)  # autograd would add to it
        if not recording.is_of(gradients):
            raise NotReplayable(self.module)
        for number in recording.written:
            gradient = gradients[number]
            if gradient is None or _uses(gradient) > _uses_of_the_last():
                raise NotReplayable(self.module)
            del gradient
        self._simulation.sent += recording.sent[1]
        input_gradients = self._carry_out(recording.backward, gradients)
        for p, view in pairs:
            if view is not None:
                p.grad = self._view(view, input_gradients, gradients)
        return [
            None if v is None else self._view(v, input_gradients, gradients)
            for v in recording.gradients.values()
        ]

    def _carry_out(
        self, events: list[tuple[int, bool]], gradients: tuple[Tensor | None, ...]
    ) -> dict[int, Tensor]:
        ledger, recording = self._simulation.ledger, self.recording
        tensors: dict[int, Tensor] = {}
        for number, is_allocation in events:
            slot = recording.slots[number]
            if slot.role == INSIDE:
                if is_allocation:
                    self._live[number] = ledger.take(self._block(slot))
                else:
                    ledger.give_back(self._live.pop(number))
            elif is_allocation:
                tensors[number] = t = recording.storage_of(number, self._simulation, self._device)
                ledger.see_as(t, self._block(slot))
                del t
            elif slot.role == GRAD_OUT:
                gradient = gradients[slot.number]
                if gradient is not None and _uses(gradient) <= _uses_of_the_last():
                    ledger.release(gradient)
            elif number in self._held:
                del self._held[number]
        return tensors

    def _block(self, slot: BlockSlot) -> Block:
        call = None if slot.call is None else ModuleCall(self._name + slot.call, 0)
        return replace(slot.block, call=call, _storages=0)

    def _view(
        self, view: View, tensors: dict[int, Tensor], gradients: tuple[Tensor | None, ...]
    ) -> Tensor | None:
        slot = self.recording.slots[view.slot]
        if slot.role == GRAD_OUT:
            return gradients[slot.number]
        return view.on(self._simulation, tensors[view.slot])

    def outputs(self, tensors: dict[int, Tensor]) -> list[Tensor]:
        """Return the created tensors among the results."""
        views = [view for view in self.recording.outputs if isinstance(view, View)]
        return distinct_views(self._simulation, views, tensors)


class _Replayed(torch.autograd.Function):
    """The autograd node of a replayed call."""

    @staticmethod
    def forward(ctx: Any, replay: Replay, *inputs: Tensor) -> Any:
        ctx.replay, ctx.count = replay, len(inputs)
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
        upstream = tuple(gradients[k] for k in ctx.differentiable)
        input_gradients = ctx.replay.backward(upstream)
        return (None, *input_gradients) if input_gradients else (None,) * (1 + ctx.count)


def check_edges(last: Tensor) -> None:
    """Check that gradients are added up in the order of the recordings.

    Raises:
        NotReplayable: an input gets gradients from outside a call, and from inside it gets several,
            or one before the end of the call's backward. Or a parameter gets gradients from several
            calls, and autograd holds their sum until the last one.
    """
    counts, nodes = edges_behind(last)
    replays: list[Replay] = []
    refused: list[nn.Module] = []
    used: set[int] = set()  # the ids of parameters, by other nodes
    for node in nodes:
        replay = getattr(node, "replay", None)
        if not isinstance(replay, Replay):
            leaves = (following for following, _ in node.next_functions)
            used.update(id(leaf.variable) for leaf in leaves if hasattr(leaf, "variable"))
            continue
        is_one = replay.recording.edges <= 1 and replay.recording.arrives_last
        if not is_one and any(counts[edge] > 1 for edge in node.next_functions):
            refused.append(replay.module)
        replays.append(replay)
    uses = Counter(used)
    uses.update(id(p) for replay in replays for p in replay.trained)
    refused += [r.module for r in replays if any(uses[id(p)] > 1 for p in r.trained)]
    if refused:
        raise NotReplayable(*refused)


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
        # If no input needs a gradient, a parameter makes the node part of the graph.
        entering = [inputs[i] for i in recording.gradients] or [
            next(p for p in module.parameters() if p.requires_grad)
        ]
        results = iter(_Replayed.apply(replay, *entering))  # type: ignore[no-untyped-call]
    else:
        results = iter(replay.outputs(replay.forward()))
    leaves = []
    for output in recording.outputs:
        if isinstance(output, View):
            leaves.append(next(results))
        else:
            leaves.append(inputs[output] if isinstance(output, int) else output[1])
    return tree_unflatten(leaves, recording.form)
