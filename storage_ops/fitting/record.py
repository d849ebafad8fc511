"""Simulates a step of a model whose layers are stand-ins, to find the memory besides them.

A stand-in holds the inputs of its layer and returns tensors like its outputs. In backward it
returns gradients. Each distinct layer runs once, to learn its outputs. So the step takes hardly
longer with many layers. The caller adds the memory of the layers themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from storage_ops.checkpoint.state.caches import without_cache
from storage_ops.checkpoint.state.unchanged import undo_changes
from storage_ops.fitting.step import OpTimes, StepLedger
from storage_ops.fitting.units import Unit
from storage_ops.foundation.autocast import autocast_dtypes
from storage_ops.foundation.ledger import Block
from storage_ops.foundation.ops import Args, Kwargs
from storage_ops.foundation.tensor_spec import TensorSpec
from storage_ops.progress import say
from storage_ops.simulate.gradients import (
    earlier_gradients,
    with_dense_gradients,
    without_gradients,
)
from storage_ops.simulate.kernels.cuda import keep_workspaces
from storage_ops.simulate.layers.casts import casts_uncached
from storage_ops.simulate.layers.graph_ends import next_node, reads_history
from storage_ops.simulate.layers.variants import Variants
from storage_ops.simulate.mode import Simulation
from storage_ops.simulate.module_kinds import SIMPLE, Kinds
from storage_ops.simulate.ranks.collectives import is_spread
from storage_ops.simulate.ranks.fsdp import (
    forwards_forgotten,
    gathered_inside,
    sharded_parameters,
)
from storage_ops.simulate.rates import SimulatedDevice
from storage_ops.simulate.step import arguments, check_value, outside_autocast
from storage_ops.simulate.values.assume import Assumption
from storage_ops.simulate.values.known import Known
from storage_ops.simulate.values.wrappers import is_wrapper


@dataclass(frozen=True)
class Like(TensorSpec):
    """A tensor without its bytes, and the values on which sizes may depend."""

    known: Known | None = None

    @staticmethod
    def of(t: Tensor, simulation: Simulation | None = None) -> Like:
        """Describe a strided tensor. Its values, such as lengths, are known inside a simulation."""
        known = None if simulation is None else simulation.values.known(simulation.twins.of(t))
        return Like(tuple(t.shape), t.stride(), t.dtype, t.device, t.requires_grad, known)

    def make(self, simulation: Simulation | None = None) -> Tensor:
        """Create a tensor like it, without a history. Values are set inside a simulation."""
        tensor = super().make()
        if simulation is not None and self.known is not None:
            simulation.values.assign(tensor, self.known)
        return tensor


@dataclass
class LayerCall:
    """One call of a layer in a step. Moments are numbers of events.

    Attributes:
        unit: the layer.
        kind: equal for calls that do the same.
        args: its arguments and keywords, with a `Like` in place of each tensor.
        forward, backward: first and last moment.
        gradient_bytes: bytes of the gradients that the backward gets.
        gradients: these gradients, one for each output that has one.
        autocast: kinds of devices for which autocast is on, and the dtypes.
        gathered: the parameters that FSDP has gathered before the call, by name.
        inputs: the blocks of the tensors among the arguments.
        shared: the input blocks that other code holds in place of the call.
        saved: the blocks of outputs that the layer saves for its backward, by their numbers.
        lasting: the saved blocks that other code also holds until the backward, so that they count
            once.
        is_cast: whether an earlier call of the layer has made autocast's casts of its parameters.
        joins: whether its gradients of parameters are added to those of a later call of the layer.
        adds: whether they are added to gradients of earlier batches.
    """

    unit: Unit
    kind: tuple[Any, ...]
    args: tuple[Any, Any]
    forward: tuple[int, int] = (0, 0)
    backward: tuple[int, int] | None = None
    gradient_bytes: int = 0
    gradients: tuple[Like, ...] = ()
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    gathered: dict[str, Like] = field(default_factory=dict)
    inputs: list[Block | None] = field(default_factory=list)
    shared: tuple[int, ...] = ()
    saved: dict[int, Block] = field(default_factory=dict)
    lasting: tuple[int, ...] = ()
    is_cast: bool = False
    joins: bool = False
    adds: bool = False


@dataclass
class StepRecording:
    """A step without its layers.

    Attributes:
        calls: calls of layers, in order.
        levels: bytes in memory at each moment.
        start: the first moment of the step.
        turn: the moment at which the backward of the loss begins.
        seconds: seconds of everything except the layers.
    """

    calls: list[LayerCall] = field(default_factory=list)
    levels: list[int] = field(default_factory=list)
    start: int = 0
    turn: int = 0
    seconds: float = 0.0


# What a layer returns: the leaves, how they are nested, and the numbers of those that it saves.
_Outputs = tuple[list[Any], Any, list[int]]


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, recorder: Recorder, call: LayerCall, outputs: Sequence[Like], *tensors: Tensor
    ) -> Any:
        ctx.recorder, ctx.call = recorder, call
        inputs = tensors[: sum(isinstance(a, Like) for a in tree_leaves(call.args))]
        ctx.save_for_backward(*inputs)
        ctx.num_inputs = len(inputs)
        names = enumerate(_plain_parameters(call.unit.module), len(inputs))
        ctx.fresh = {i for i, name in names if name in call.gathered}
        ctx.likes = [Like.of(t) for t in tensors]
        results = [like.make(recorder.simulation) for like in outputs]
        ctx.mark_non_differentiable(
            *(t for t, like in zip(results, outputs, strict=True) if not like.needs_grad)
        )
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        recorder, call = ctx.recorder, ctx.call
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"fit: layer {call.unit.name} is differentiated with create_graph=True, and second "
                "derivatives through a layer are not simulated. Select checkpoints by hand, and "
                "check them with will_it_fit."
            )
        before = recorder.step_ledger.mark()
        upstream = [g for g in gradients if g is not None]
        blocks = {block for g in upstream for block in recorder.simulation.blocks_of(g)}
        call.gradients = tuple(map(Like.of, upstream))
        call.gradient_bytes = sum(block.nbytes for block in blocks)
        needed = ctx.needs_input_grad[3:]
        recorder.note_sums(call)
        if call.joins or call.adds:
            # Gradients of parameters are added to others within the layer, and freed. Those that
            # FSDP still has to reduce stay.
            needed = [
                needs and (i < ctx.num_inputs or i in ctx.fresh) for i, needs in enumerate(needed)
            ]
        input_gradients = [
            torch.empty(like.shape, dtype=like.dtype, device=like.device) if needs else None
            for like, needs in zip(ctx.likes, needed, strict=True)
        ]
        for p in recorder.sharded_inside(call):
            p.grad = torch.empty_like(p) if p.grad is None else p.grad
        call.backward = before, recorder.step_ledger.mark()
        return (None, None, None, *input_gradients)


class Recorder:
    """Runs a step with stand-ins in place of layers."""

    def __init__(
        self, units: list[Unit], kinds: Kinds, device: SimulatedDevice, accumulate: bool,
        assumption: Assumption,
    ) -> None:  # fmt: skip
        """Start without records. `accumulate`: as in `fit`."""
        self.step_ledger = StepLedger(device, assumption)
        self._workspace, self.accumulate = device.workspace, accumulate
        self.recording = StepRecording()
        self._units = units
        self._times = OpTimes(device.rates)
        self._kinds = kinds
        self._sharded: set[int] = set()  # the ids of parameters that FSDP gathers
        self._outputs = Variants[_Outputs | None]()
        self.simulation: Simulation

    def run(
        self,
        model: nn.Module,
        batch: object,
        loss: Callable[[Any], Tensor],
        optimizer: Optimizer | None,
    ) -> StepRecording:
        """Simulate a step of a model, and leave its modules unchanged."""
        step_ledger, replaced = self.step_ledger, []
        args, kwargs = arguments(batch)
        self._sharded = set(sharded_parameters(model))
        spread = {
            unit.name: [n for n, p in unit.module.named_parameters() if is_spread(p)]
            for unit in self._units
        }
        try:
            for unit in self._units:
                plain = unit.module.forward
                vars(unit.module)["forward"] = self._stand_in(unit, plain, spread[unit.name])
                replaced.append(unit.module)
            holders = model, loss, optimizer
            with (
                without_gradients(model.parameters()),
                step_ledger.open(holders, args, kwargs) as (simulation, *given),
            ):
                self.simulation = simulation
                step_ledger.run(self._step, model, given, loss, optimizer)
                self._outputs.clear()
                if simulation.multiplies:
                    keep_workspaces(step_ledger.ledger, self._workspace)
                self.recording.levels = step_ledger.levels()
                self._find_shared()
        finally:
            for module in replaced:
                vars(module).pop("forward", None)
        return self.recording

    def _step(
        self,
        model: nn.Module,
        given: list[Any],
        loss: Callable[[Any], Tensor],
        optimizer: Any,
    ) -> None:
        parameters = with_dense_gradients(model)
        is_first = optimizer is not None and not optimizer.state
        if is_first:
            earlier_gradients(parameters)
            optimizer.step()
            for p in parameters:
                p.grad = None
        if self.accumulate:
            earlier_gradients(parameters)
        self.recording.start = self.step_ledger.mark()
        args, kwargs = given
        with self._times:
            value = loss(model(*args, **kwargs))
            check_value(value)
            self.recording.turn = self.step_ledger.mark()
            with outside_autocast():
                value.backward()
            del value
        self.recording.seconds = self._times.seconds
        if is_first:
            self._forget_states(optimizer, [p for p in parameters if p.grad is None])
        if optimizer is not None:
            with outside_autocast():
                optimizer.step()

    def _forget_states(self, optimizer: Optimizer, unused: list[nn.Parameter]) -> None:
        """Drop the optimizer state of parameters without a gradient, as no step creates it."""
        for t in tree_leaves([optimizer.state.get(p) for p in unused]):
            if isinstance(t, Tensor):
                for block in self.simulation.blocks_of(t):
                    block.nbytes = 0

    def _find_shared(self) -> None:
        """Note the inputs that other code also holds, which the stand-in's backward does not free.

        A layer that saves its output, such as one that ends in a ReLU, holds the input of the next
        layer.
        """
        saved = {block for call in self.recording.calls for block in call.saved.values()}
        uses = Counter(block for call in self.recording.calls for block in call.inputs)
        taken = [taken for _, _, taken in self.step_ledger.ledger.events]
        freed = {
            b: i for i, (_, b, taken) in enumerate(self.step_ledger.ledger.events) if not taken
        }
        for call in self.recording.calls:
            after = call.backward[1] if call.backward is not None else 0
            shared = []
            for i, block in enumerate(call.inputs):
                at = freed.get(block, 0) if block is not None and uses[block] == 1 else 0
                if at < after or block in saved or any(taken[after:at]):
                    shared.append(i)
            call.shared = tuple(shared)
            call.lasting = self._find_lasting(call, freed)
            call.inputs, call.saved = [], {}
            call.kind = (
                *call.kind, call.shared, call.lasting, call.gradients,
                call.is_cast, call.joins, call.adds,
            )  # fmt: skip

    def _find_lasting(self, call: LayerCall, freed: dict[Block, int]) -> tuple[int, ...]:
        """Return the saved outputs that are in memory until the backward in any case.

        They stay until the layer's own backward, also if all other code frees them earlier.
        """
        levels, lasting = self.recording.levels, []
        for number, block in call.saved.items():
            at = freed.get(block, len(levels))
            if call.backward is None or at < self.recording.turn:
                continue
            lasting.append(number)
            for moment in range(at + 1, call.backward[0]):
                levels[moment] += block.nbytes
        return tuple(lasting)

    def _others(self, call: LayerCall) -> list[LayerCall]:
        """Return the other calls of the layer of a call, so far."""
        return [c for c in self.recording.calls if c.unit is call.unit and c is not call]

    def note_sums(self, call: LayerCall) -> None:
        """Record to which gradients a call, whose backward runs, adds those of its parameters.

        Autograd adds the gradients of all calls of a layer, and then those of earlier batches.
        """
        have_run = [other.backward is not None for other in self._others(call)]
        call.joins, call.adds = any(have_run), self.accumulate and all(have_run)

    def sharded_inside(self, call: LayerCall) -> list[nn.Parameter]:
        """Return the trained parameters that FSDP gathers while the layer of a call runs."""
        return [
            p
            for name, p in call.unit.module.named_parameters()
            if p.requires_grad and id(p) in self._sharded and name not in call.gathered
        ]

    def _stand_in(
        self, unit: Unit, plain: Callable[..., Any], spread: list[str]
    ) -> Callable[..., Any]:
        def forward(*args: object, **kwargs: object) -> Any:
            if not torch.is_grad_enabled():
                return plain(*args, **kwargs)
            # A later run would see what this one leaves in a cache. Checkpointed layers get none.
            args, kwargs = without_cache(unit.module, args, kwargs, always=True)
            inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            named = dict(unit.module.named_parameters())
            inside = [p for p in named.values() if is_spread(p)]
            refused = [t for t in inputs if is_wrapper(t)]
            refused += [p for p in inside if id(p) not in self._sharded]
            if refused:
                raise RuntimeError(
                    f"fit: layer {unit.name} computes with a {type(refused[0]).__name__}, such as "
                    "parallelize_module makes, and no such layer is simulated by itself. Select "
                    "checkpoints by hand, and check them with will_it_fit."
                )
            autocast = autocast_dtypes()
            like = tree_map_only(Tensor, self._like, (args, kwargs))
            settings = (x if isinstance(x, Like) else repr(x) for x in tree_leaves(like))
            gathered = {name: Like.of(named[name]) for name in spread if not is_spread(named[name])}
            start = self.step_ledger.mark()
            kind, run = self._run_once(
                unit, (*settings, autocast, *gathered.items()),
                lambda held: self._outputs_of(unit, plain, args, kwargs, inputs, held),
            )  # fmt: skip
            if run is None:
                return plain(*args, **kwargs)
            results, tree, saved = run
            call = LayerCall(unit, kind, like, autocast=autocast, gathered=gathered)
            call.is_cast = any(other.autocast for other in self._others(call))
            blocks = self.simulation.blocks_of
            call.inputs = [next(iter(blocks(t)), None) for t in inputs]
            before = self._times.seconds
            # Autograd does not know of parameters that are gathered inside the layer.
            anchor = [torch.empty(0, requires_grad=True)] if self.sharded_inside(call) else []
            new = iter(_StandIn.apply(  # type: ignore[no-untyped-call]
                self, call, [m for m in results if isinstance(m, Like)], *inputs,
                *_plain_parameters(unit.module).values(), *anchor,
            ))  # fmt: skip
            self._times.seconds = before
            call.forward = start, self.step_ledger.mark()
            self.recording.calls.append(call)
            values = [
                next(new)
                if isinstance(m, Like)
                else inputs[m.number]
                if isinstance(m, _InputOutput)
                else m
                for m in results
            ]
            call.saved = {i: block for i in saved for block in blocks(values[i])}
            return tree_unflatten(values, tree)

        return forward

    def _like(self, t: Tensor) -> Like:
        return Like.of(t, self.simulation)

    def _outputs_of(
        self, unit: Unit, plain: Callable[..., Any], args: Args, kwargs: Kwargs,
        inputs: list[Tensor], held: list[object],
    ) -> _Outputs | None:  # fmt: skip
        """Run a layer. Return its outputs without memory, and which ones it saved.

        Return None if the output is an object that may contain tensors. Also return None if
        gradients leave the layer otherwise than by its arguments, such as by a tensor attribute.
        The call then has no side effects, because it will run again.
        """
        entries, since = {t.grad_fn for t in inputs}, next_node()
        undo, start = undo_changes([unit.module, args, kwargs]), self.step_ledger.mark()
        # Autocast would keep casts for the rest of the forward, which Probe counts.
        with forwards_forgotten(unit.module), casts_uncached():
            leaves, tree = tree_flatten(plain(*args, **kwargs))
            own = [*unit.module.parameters(), *gathered_inside(unit.module), *inputs]
        differentiable = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
        is_known = all(isinstance(leaf, (Tensor, *SIMPLE)) for leaf in leaves)
        if not is_known or reads_history(differentiable, entries, own, since):
            for restore in undo:
                restore()
            return None
        held += [t.grad_fn for t in differentiable]
        places = {id(t): i for i, t in enumerate(inputs)}
        outputs = [
            leaf if not isinstance(leaf, Tensor)
            else _InputOutput(places[id(leaf)]) if id(leaf) in places
            else self._like(leaf)
            for leaf in leaves
        ]  # fmt: skip
        blocks = {i: self.simulation.blocks_of(t) for i, t in enumerate(leaves)
                  if isinstance(outputs[i], Like) and t.requires_grad}  # fmt: skip
        del leaves, differentiable  # the graph in `held` keeps what the layer saved
        events = self.step_ledger.ledger.events[start:]
        left = {b for _, b, taken in events if taken} - {b for _, b, taken in events if not taken}
        return outputs, tree, [i for i, own in blocks.items() if left.intersection(own)]

    def _run_once(
        self, unit: Unit, key: tuple[Any, ...], run: Callable[[list[object]], _Outputs | None]
    ) -> tuple[tuple[Any, ...], _Outputs | None]:
        """Return the kind of a call, and the outputs of the first call of that kind."""
        kind = self._kinds.kind_of(unit.module)
        known = self._outputs.find(kind, key, self.simulation)
        if known is None:
            say(unit.name)
            before = self._times.seconds
            known = self._outputs.run(kind, key, self.simulation, run)
            self._times.seconds = before
        variant, outputs = known
        return (kind.group, *key, variant), outputs


def _plain_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters of a module that are not shards, by name."""
    named = module.named_parameters()
    return {name: p for name, p in named if p.requires_grad and not is_spread(p)}


@dataclass(frozen=True)
class _InputOutput:
    """An output of a layer that is one of its inputs."""

    number: int
