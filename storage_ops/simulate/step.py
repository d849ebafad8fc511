"""Simulates one whole training step of a model: its peak, and the owners of these bytes."""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from storage_ops._subclass import check_module
from storage_ops.checkpoint.layers.config_policy import class_of, uncompiled
from storage_ops.foundation.autocast import autocast_dtypes
from storage_ops.foundation.ledger import Block, Ledger
from storage_ops.foundation.ops import Args, Kwargs
from storage_ops.measure.calls import ONE_AT_A_TIME
from storage_ops.measure.measurement import Measurement
from storage_ops.measure.owners import GRADIENTS, STATE, by_kind, owners_table
from storage_ops.progress import say
from storage_ops.quantities import Tabular, readable
from storage_ops.simulate.captured import Captured, unwrapped
from storage_ops.simulate.compiled import as_it_runs
from storage_ops.simulate.estimate import call_simulated, simulating_model
from storage_ops.simulate.gradients import (
    check_gradients_are_on,
    earlier_gradients,
    with_dense_gradients,
    without_gradients,
)
from storage_ops.simulate.layers.replay import NotReplayable
from storage_ops.simulate.layers.replay_cache import Quick
from storage_ops.simulate.mode import Simulation
from storage_ops.simulate.module_kinds import NotComparable
from storage_ops.simulate.ranks.collectives import (
    is_distributed,
    is_sharded_alone,
    updated_locally,
)
from storage_ops.simulate.rates import SimulatedDevice
from storage_ops.simulate.values.assume import Assumption

if TYPE_CHECKING:
    from storage_ops.tables import Grid

_ATTEMPTS = 2  # simulations with equal layers simulated once, before all of them run
LOSS = "loss"  # the owner of the loss's tensors, in place of a module's name


class _StepOptions(NamedTuple):
    """The objects and options of a simulation."""

    args: Any
    kwargs: Any
    loss: Any
    optimizer: Optimizer | None
    device: SimulatedDevice
    assumption: Assumption
    accumulate: bool  # whether gradients exist from the start


@dataclass
class StepEstimate(Tabular, Measurement):
    """The memory of one training step, with everything on the device. Prints as a table.

    Attributes:
        peak_bytes: the highest level.
        kept_bytes: the level after the optimizer's step: parameters, gradients, state, the batch
            and workspaces.
        timeline: the level after every allocation and release. The seconds are those of the
            simulation.
        by_owner: bytes at the peak by their owner, largest first. Their sum is `peak_bytes`. Owners
            are "parameters", "buffers", "gradients", "optimizer state", "batch" and "temporaries".
            A known GPU has "workspaces of cuBLAS". FSDP2 has "gathered parameters" and "gradients
            to reduce", and DDP "gradient buckets". "activations of " has the name of the innermost
            module whose call allocated them and returned before they were freed.
        at_peak: the blocks at the peak, largest first.
        sent_bytes: bytes that this rank sends to others in the step, as in `Estimate`.
        batch: the index of this batch in the given list, or 0 without a list.
    """

    by_owner: dict[str, int] = field(default_factory=dict)
    at_peak: list[Block] = field(default_factory=list, repr=False)
    sent_bytes: dict[str, int] = field(default_factory=dict)
    batch: int = 0

    def by_kind(self) -> dict[str, int]:
        """Return `by_owner`, summed over similar layers, such as "activations of layers.*.mlp"."""
        return by_kind(self.by_owner)

    def table(self, title: str) -> Grid:
        """Return a table of the memory at the peak."""
        caption = "in memory at the peak of a step; without the CUDA context"
        return owners_table(title, self.by_owner, caption)

    def __rich__(self) -> Grid:
        return self.table(f"peak {readable(self.peak_bytes, up=True)}")


def simulate_step(
    model: nn.Module,
    batch: object,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: type[Optimizer] | Optimizer | None = None,
    device: str | torch.device | None = None,
    assume: float | Mapping[str, float] | None = None,
    accumulate: bool = False,
) -> StepEstimate:
    """Simulate forward, loss, backward and optimizer step of a model. Return the memory.

    For a model on several ranks (`fully_shard`, DDP, `parallelize_module`) it simulates the step of
    this rank. No collective runs, so with torch's backend "fake" other ranks need not exist.

    The step is not the first one. Gradients were freed before it, as by `zero_grad()`, and the
    state that the optimizer creates in its first step exists. The model's output is freed once the
    loss exists. The model is simulated as it is: in its current mode, with its checkpoints and
    hooks. Model, batch and optimizer are restored afterwards.

    In a `torch.autocast` block, forward and loss run as in that block. Backward and optimizer run
    after it, as in training loops.

    Args:
        model: a model on any device, such as meta. Its bytes are neither needed nor changed.
        batch: a tensor, a tuple (`model(*batch)`), a dict (`model(**batch)`), or a list of these.
            The batch with the highest peak decides.
        loss: a function of the model's output that returns a scalar. None: the output itself if it
            is one, or its `loss`, or the sum of its numbers.
        optimizer: an optimizer of the model's parameters, or a class to call with the trained ones.
            None: the step ends with the backward.
        device: "cpu" or a GPU, such as "cuda" or "h100". Sizes are rounded and kernels are chosen
            as on this device. None: the device of the parameters, or of the batch if there are
            none, where the meta device means a GPU. Workspaces of cuBLAS count for a GPU that is
            named or installed.
        assume: as in `estimate`, for sizes that depend on values.
        accumulate: whether gradients of earlier batches exist, as with several batches for each
            step of the optimizer. Sparse ones do not count.

    Raises:
        TypeError, ValueError: an argument is wrong. The error names it.
        RuntimeError: as in `estimate`.

    Example:
        >>> mlp = torch.nn.Sequential(
        ...     torch.nn.Linear(1024, 4096, device="meta"),
        ...     torch.nn.GELU(),
        ...     torch.nn.Linear(4096, 1024, device="meta"),
        ... )
        >>> x = torch.empty(512, 1024, device="meta")
        >>> step = storage_ops.memory.simulate_step(mlp, x, optimizer=torch.optim.AdamW)
        >>> step.peak_bytes >> 20, step.by_owner["optimizer state"] >> 20
        (162, 64)
    """
    check_module(model)
    check_accumulate(accumulate)
    check_loss(loss)
    batches = batches_of(batch)
    simulated_device = SimulatedDevice.of(device, model, batches)
    assumption = Assumption(assume)
    loss = as_it_runs(loss)
    steps = []
    for index, batch_of_step in enumerate(batches):
        args, kwargs = arguments(batch_of_step)
        options = _StepOptions(
            args, kwargs, loss or loss_of, optimizer_of(model, optimizer), simulated_device,
            assumption, accumulate,
        )  # fmt: skip
        step = _quickly(model, options) or _simulate(model, options)
        step.batch = index
        step.subject = f"Step of {class_of(uncompiled(model)).__name__}"
        step.device = simulated_device.rates.name if device is None else str(device)
        steps.append(step)
    return max(steps, key=lambda step: step.peak_bytes)


def check_accumulate(accumulate: object) -> None:
    """Raise a TypeError if `accumulate` is not a bool, such as a number of batches."""
    if not isinstance(accumulate, bool):
        raise TypeError(
            f"`accumulate` is {accumulate!r}. Expected True if gradients of several batches are "
            "added up, or False."
        )


def batches_of(batch: object) -> list[Any]:
    """Return the batches of a list, or a list with the only batch.

    Raises:
        TypeError, ValueError: the list is empty, or a batch is of another kind.
    """
    batches = batch if isinstance(batch, list) else [batch]
    if not batches:
        raise ValueError("`batch` is an empty list. Expected at least one batch.")
    for single in batches:
        arguments(single)
    return batches


def arguments(batch: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments for a call of a model with a batch.

    Raises:
        TypeError: the batch is of another kind.
    """
    if isinstance(batch, Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, tuple):
        return batch, {}
    raise TypeError(
        f"`batch` is a {type(batch).__name__}. Expected a tensor, a tuple, a dict, or a list of "
        "these."
    )


def optimizer_of(
    model: nn.Module, optimizer: type[Optimizer] | Optimizer | None
) -> Optimizer | None:
    """Return an optimizer of the model's trained parameters.

    Raises:
        TypeError: the argument is neither an optimizer nor an optimizer class.
    """
    if optimizer is None:
        return None
    if isinstance(optimizer, Optimizer):
        plain: Optimizer = unwrapped(optimizer)
        _check_step(plain)
        return plain
    trained = [p for p in model.parameters() if p.requires_grad]
    make: Any = optimizer
    created = make(trained) if callable(make) and trained else None
    if trained and not isinstance(created, Optimizer):
        raise TypeError(
            f"`optimizer` is {optimizer!r}. Expected a torch.optim.Optimizer, its class, such as "
            "torch.optim.AdamW, or None."
        )
    _check_step(created)
    return created


def _check_step(optimizer: Optimizer | None) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            "`optimizer` is an LBFGS, whose step() runs the model several times by a closure. "
            "Expected an optimizer that updates from the gradients of one backward."
        )


def check_loss(loss: object) -> None:
    """Raise a TypeError for a loss that is not a function of one argument, a model's output."""
    if loss is None:
        return
    form = "a function of the model's output, such as lambda output: cross_entropy(output, labels)"
    if not callable(loss):
        raise TypeError(f"`loss` is {loss!r}. Expected {form}, or None.")
    called = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        signature = inspect.signature(called)
    except ValueError:  # a C function has no signature
        return
    try:
        signature.bind(None)
    except TypeError as error:
        name = getattr(loss, "__qualname__", type(loss).__name__)
        raise TypeError(f"`loss` is {name}{signature}: {error}. Expected {form}.") from None


def loss_of(output: object) -> Tensor:
    """Return the scalar from which backward starts if the caller passed no loss."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    numbers = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    if not numbers:
        check_gradients_are_on()
        raise ValueError(
            "`loss` is None, and no output of the model requires grad. Pass a function of the "
            "output that returns a scalar."
        )
    first = numbers[0]
    if len(numbers) == 1 and first.numel() == 1:
        return first
    return sum((t.sum() for t in numbers[1:]), first.sum())


def _quickly(model: nn.Module, options: _StepOptions) -> StepEstimate | None:
    """Simulate equal layers once. Return None if the result might differ from `_simulate`'s."""
    if is_distributed(model) and not is_sharded_alone(model):
        return None
    refused: set[nn.Module] = set()
    for _ in range(_ATTEMPTS):
        quick = Quick(model, options.accumulate, refused)
        try:
            step = _simulate(model, options, quick)
        except NotReplayable as error:
            # The last submodule may get the same gradient.
            refused.update(part for module in error.modules for part in module.modules())
        except Exception:
            if quick.count == 0 and not quick.is_spoiled:
                raise
            return None
        else:
            return None if quick.is_spoiled else step
    return None


def _simulate(model: nn.Module, options: _StepOptions, quick: Quick | None = None) -> StepEstimate:
    args, kwargs, loss, optimizer, device, assumption, accumulate = options
    captured = Captured((model, loss, optimizer), args, kwargs)

    def around(
        module: nn.Module, name: str, call: Callable[..., Any], args: Args, kwargs: Kwargs
    ) -> Any:
        say(name or type(module).__name__)
        if quick is not None:
            done, result = quick.call(simulation, module, name, call, args, kwargs)
            if done:
                return result
        with simulation.ledger.call(name):
            return call(*args, **kwargs)

    def step(*args: object, **kwargs: object) -> None:
        if accumulate:
            earlier_gradients(with_dense_gradients(model))
            roles.note_gradients(model.parameters())
            _move_to_start(ledger, roles.blocks(GRADIENTS))
        _backward(loss, model, args, kwargs, ledger, quick)
        roles.note_gradients(model.parameters())
        if optimizer is not None:
            with updated_locally(optimizer), outside_autocast():
                optimizer.step()
        roles.note_optimizers(captured.optimizers)  # includes those that step in hooks

    simulated = simulating_model(
        model, captured, args, kwargs, device, assumption, "simulating a step", around
    )
    gradients = without_gradients(model.parameters())
    with ONE_AT_A_TIME, gradients, simulated as (simulation, roles, args, kwargs):
        ledger = simulation.ledger
        earlier = _blocks_of_states(captured, simulation)
        try:
            call_simulated(step, args, kwargs)
        except NotComparable as error:
            # The tensors in the frames of this attempt would be searched for in all objects.
            traceback.clear_frames(error.__traceback__)
            raise
        # Tensors of the state that the step has replaced. The new ones exist from the start.
        _remove(ledger, earlier.difference(roles.of))
        _move_to_start(ledger, roles.blocks(STATE).difference(ledger.inputs))
        roles.add_workspaces(device)
        estimated = StepEstimate(**roles.totals())
    if quick is not None:
        quick.check_discards(ledger)
    return estimated


def _blocks_of_states(captured: Captured, simulation: Simulation) -> set[Block]:
    states = tree_leaves([list(optimizer.state.values()) for optimizer in captured.optimizers])
    tensors = [t for t in states if isinstance(t, Tensor)]
    return {block for t in tensors for block in simulation.blocks_of(t)}


def _backward(
    loss: Callable[[Any], Tensor], model: nn.Module, args: Args, kwargs: Kwargs, ledger: Ledger,
    quick: Quick | None,
) -> None:  # fmt: skip
    output = model(*args, **kwargs)
    with ledger.call(LOSS):
        value = loss(output)
        del output
    check_value(value)
    if quick is not None:
        quick.check(value, ledger)
    with outside_autocast():
        value.backward()


@contextlib.contextmanager
def outside_autocast() -> Iterator[None]:
    """Leave every `torch.autocast` block of the caller in a with block, and enter it afterwards.

    Training loops run forward and loss in such a block, and backward and optimizer after it.
    Autocast frees its cached casts of parameters when its outermost block ends. So an inner block
    with `enabled=False` is not the same.
    """
    on = [kind for kind, _ in autocast_dtypes()]
    nesting = 0
    try:
        while torch.autocast_decrement_nesting() >= 0:
            nesting += 1
        torch.autocast_increment_nesting()
        torch.clear_autocast_cache()
        for kind in on:
            torch.set_autocast_enabled(kind, False)
        yield
    finally:
        torch.clear_autocast_cache()
        for kind in on:
            torch.set_autocast_enabled(kind, True)
        for _ in range(nesting):
            torch.autocast_increment_nesting()


def check_value(value: object) -> None:
    """Raise a ValueError for a loss that is not a scalar, or depends on no trained parameter."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else value
        raise ValueError(f"`loss` returned {shown}. Expected a scalar tensor.")
    if not value.requires_grad:
        check_gradients_are_on()
        raise ValueError(
            "`loss` returned a tensor that needs no gradient. Expected a tensor that depends on a "
            "parameter with requires_grad."
        )


def _move_to_start(ledger: Ledger, blocks: set[Block]) -> None:
    """Record that blocks exist from the start, because an earlier step or batch created them."""
    _remove(ledger, blocks)
    ledger.inputs += blocks


def _remove(ledger: Ledger, blocks: set[Block]) -> None:
    ledger.inputs = [block for block in ledger.inputs if block not in blocks]
    ledger.events = [event for event in ledger.events if event[1] not in blocks]
