"""Simulates one layer with an action: bytes kept, peaks of forward and backward, seconds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from storage_ops.checkpoint.layers.wrapper import CheckpointWrapper
from storage_ops.checkpoint.selective.offload import region_ended
from storage_ops.fitting.actions import Action
from storage_ops.fitting.record import LayerCall, Like
from storage_ops.fitting.step import Op, OpTimes, StepLedger
from storage_ops.foundation.ledger import Block
from storage_ops.simulate.gradients import earlier_gradients, later_gradients, without_gradients
from storage_ops.simulate.layers.casts import casts_in
from storage_ops.simulate.layers.graph_ends import enter, leave, run_backward
from storage_ops.simulate.mode import Simulation
from storage_ops.simulate.ranks.fsdp import layer_alone
from storage_ops.simulate.rates import SimulatedDevice
from storage_ops.simulate.step import outside_autocast
from storage_ops.simulate.values.assume import Assumption


@dataclass(frozen=True)
class Cost:
    """The cost of a call of a layer, besides its inputs.

    Attributes:
        kept: bytes between forward and backward, without the outputs. Negative if an input is
            freed.
        forward, backward: bytes at the highest level of each. They include the outputs, and the
            gradients that backward starts from.
        seconds: seconds of all its ops, forward and backward, of Python code for the action, and of
            waiting for copies between the device and host memory.
        forward_seconds: seconds of its forward, in which copies can hide.
        away: bytes in host memory between forward and backward.
        casts: bytes of autocast's casts of parameters that stay from the call to the end of the
            forward, besides `kept`.
    """

    kept: int
    forward: int
    backward: int
    seconds: float
    forward_seconds: float = 0.0
    away: int = 0
    casts: int = 0


def _ends_of(outputs: list[Tensor], likes: tuple[Like, ...]) -> tuple[Tensor | None, Tensor | None]:
    """Return where the backward starts, and the end of the graphs that it does not run.

    Outputs that the loss does not use have no gradients. If only some have, shapes tell them apart.
    """
    left, used, unused = list(likes), list[Tensor](), list[Tensor]()
    gradients: list[Like] = []
    for t in outputs:
        like = next((like for like in left if like.shape == tuple(t.shape)), None)
        if like is None:
            unused.append(t)
        else:
            left.remove(like)
            gradients.append(like)
            used.append(t)
    last = leave(used, lambda: [like.make() for like in gradients]) if used else None
    return last, leave(unused, list) if unused else None


def _forget_earlier_graphs(layer: nn.Module) -> None:
    """Detach tensors that a layer has kept from an earlier step, such as a recurrent state.

    A model replaces them before it calls the layer, so that no backward reaches the earlier step.
    """
    for module in layer.modules():
        for attributes in (vars(module), module._buffers):
            for name, value in attributes.items():
                if isinstance(value, Tensor) and value.grad_fn is not None:
                    attributes[name] = value.detach()


class Probe:
    """Runs a layer by itself."""

    def __init__(self, call: LayerCall, device: SimulatedDevice, assumption: Assumption) -> None:
        self._call, self._device, self._rates = call, device, device.rates
        self._assumption = assumption
        self._forward = 0.0, 0  # seconds and ops of the forward that ran last
        self._lasting: set[Block] = set()  # its outputs that others hold, too
        self.logits = 0  # bytes of the largest logits that a loss in the layer does without

    def cost(self, action: Action) -> Cost:
        """Return the cost of the layer with an action."""
        module = self._call.unit.module
        try:
            action.apply(module)
            times = OpTimes(self._rates)
            cost = self._run(times, action)
            self.logits = max(self.logits, times.logits)
            return cost
        finally:
            action.undo(module)

    def ops(self) -> tuple[list[Op], int]:
        """Return the forward's ops, and how many of them a full checkpoint runs again."""
        times, module = OpTimes(self._rates), self._call.unit.module
        forward: list[Op] = []

        @contextlib.contextmanager
        def recompute() -> Iterator[None]:
            forward.extend(times.ops)
            times.ops.clear()
            with times.logging():
                yield

        CheckpointWrapper(module, context_fn=lambda: (times.logging(), recompute()))
        try:
            self._run(times, Action("full"))
        finally:
            Action("full").undo(module)
        return forward or times.ops, len(times.ops) if forward else 0

    def _run(self, times: OpTimes, action: Action) -> Cost:
        module = self._call.unit.module
        step_ledger = StepLedger(self._device, self._assumption)
        with (
            without_gradients(module.parameters()),
            outside_autocast(),  # the layer runs in an autocast block of its own
            step_ledger.open(module, (), {}) as (simulation, *_),
        ):
            marks: list[int] = []
            whole = {name: like.make() for name, like in self._call.gathered.items()}
            _forget_earlier_graphs(module)
            with layer_alone(module, whole) as called:
                step_ledger.run(self._once, called, simulation, step_ledger, times, marks)
            ready, after, with_casts, without_casts, before = marks
            events = step_ledger.ledger.events
            if self._call.is_cast:
                for block in casts_in(events[ready:with_casts], module.parameters()):
                    block.nbytes = 0
            levels = step_ledger.levels()
            copies = simulation.copies
        away = 0 if copies is None else copies.sent_bytes
        in_forward, calls = self._forward
        base = levels[ready]
        # Copies hide in a forward and in a backward; what does not is waited for.
        copying = away / self._rates.link if away else 0.0
        parts = in_forward, times.seconds - in_forward
        host = times.roofline.of_host(action, calls)
        kept = levels[before] - base
        freed = {block for _, block, taken in events[:before] if not taken}
        kept -= sum(block.nbytes for block in self._lasting - freed)  # they count in the step
        # Compiled code forms the gradients of weights at the end of a layer's backward, and holds
        # what it forms them from until then.
        saved_bytes = max(kept, 0) if self._rates.fuses else 0
        return Cost(
            kept,
            max(levels[ready : after + 1]) - base,
            max(levels[before:]) - base + saved_bytes,
            times.seconds + host + sum(max(copying - part, 0.0) for part in parts),
            in_forward,
            away,
            levels[with_casts] - levels[without_casts],
        )

    def _once(
        self, layer: nn.Module, simulation: Simulation, step_ledger: StepLedger, times: OpTimes,
        marks: list[int],
    ) -> None:  # fmt: skip
        """Run forward and backward of the layer, with the moments between the parts."""
        call = self._call
        leaves, tree = tree_flatten(call.args)
        places = [i for i, like in enumerate(leaves) if isinstance(like, Like)]
        trained = [i for i in places if leaves[i].needs_grad]
        leaves = [leaf.make(simulation) if isinstance(leaf, Like) else leaf for leaf in leaves]
        if trained:
            anchor = torch.empty(0, device=leaves[trained[0]].device)
            entered = enter([leaves[i] for i in trained], anchor)
            for i, t in zip(trained, entered, strict=True):
                leaves[i] = t
            del entered, t
        others = [leaves[i] for number, i in enumerate(places) if number in call.shared]
        inputs = {id(leaves[i]) for i in places}
        args, kwargs = tree_unflatten(leaves, tree)
        del leaves
        named = call.unit.module.named_parameters()
        parameters = [p for name, p in named if name not in call.gathered]
        if call.adds:
            earlier_gradients(parameters)
        joins = later_gradients(parameters) if call.joins else contextlib.nullcontext()
        with joins, torch.enable_grad(), times:
            marks.append(step_ledger.mark())
            with contextlib.ExitStack() as stack:
                for device_type, dtype in call.autocast:
                    stack.enter_context(torch.autocast(device_type, dtype))
                outputs = layer(*args, **kwargs)
                self._forward = times.seconds, times.count
                marks.append(step_ledger.mark())
                region_ended()  # the next one
                marks.append(step_ledger.mark())
            marks.append(step_ledger.mark())  # autocast has freed its casts
            output_tensors = [t for t in tree_leaves(outputs) if isinstance(t, Tensor)]
            output_tensors = [t for t in output_tensors if id(t) not in inputs and t.requires_grad]
            lasting = [tree_leaves(outputs)[i] for i in call.lasting]
            self._lasting = {block for t in lasting for block in simulation.blocks_of(t)}
            last, unused = _ends_of(output_tensors, call.gradients)
            del outputs, output_tensors, lasting, args, kwargs
            marks.append(step_ledger.mark())
            if last is not None:
                run_backward(last)
        del others, unused
