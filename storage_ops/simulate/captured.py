"""Finds the tensors in memory before a call: arguments, and tensors that functions reach."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map_only

from storage_ops.foundation.ops import Args, Kwargs
from storage_ops.foundation.values import (
    CONTAINER,
    FUNCTION,
    METHOD,
    MODULE,
    OBJECT,
    OPAQUE,
    PARTIAL,
    TENSOR,
    TUPLE,
    is_opaque,
    package_of,
)
from storage_ops.foundation.walk import GRADIENT, REGISTERED, Visit, walk
from storage_ops.measure.calls import outermost
from storage_ops.simulate.mode import Simulation
from storage_ops.simulate.ranks.fsdp import reshard

# A count of steps from which RAdam rectifies. It is not 1.0, because NAdam would divide by zero.
_ANY_NUMBER = 100.0
_STEPPERS = (Optimizer, GradScaler, LRScheduler)


class Captured:
    """The tensors, functions, optimizers, scalers and schedulers that exist before a call."""

    def __init__(self, fn: object, args: Args, kwargs: Kwargs) -> None:
        self._given = fn, args, kwargs
        self._find()
        if reshard(self.modules):  # the modules have other parameters now
            self._find()

    def _find(self) -> None:
        fn, args, kwargs = self._given
        self.tensors: list[Tensor] = []
        self._modules: dict[nn.Module, None] = {}
        self.optimizers: list[Optimizer] = []
        self.steppers: list[GradScaler | LRScheduler] = []
        self.functions: list[Any] = []
        self._objects: list[Any] = []  # objects that functions name
        leaves = enumerate(tree_leaves((args, kwargs)))
        for visit in walk([("fn", fn), *((f"argument {i}", leaf) for i, leaf in leaves)]):
            if visit.is_first:
                self._note(visit)

    @property
    def modules(self) -> list[nn.Module]:
        """Return the modules of the call, with their submodules."""
        return list(self._modules)

    @property
    def holders(self) -> list[Any]:
        """Return objects that a call may change: modules, schedulers, arguments, named values."""
        return [*self._modules, *self.steppers, *self._given, *self._objects]

    @property
    def roots(self) -> list[nn.Module]:
        """Return the modules that are not submodules of another."""
        return outermost(self._modules)

    def _note(self, visit: Visit) -> None:
        value, kind = visit.value, visit.kind
        if kind == TENSOR:
            if _is_counted(visit):
                self.tensors.append(value)
        elif kind == MODULE:
            self._modules[value] = None
        elif isinstance(value, Optimizer):
            if unwrapped(value) is value:
                self.optimizers.append(value)
        elif isinstance(value, (GradScaler, LRScheduler)):
            self.steppers.append(value)
        elif kind == FUNCTION:
            if package_of(value) not in OPAQUE:
                self.functions.append(value)
        elif kind == OBJECT and not is_opaque(type(value)) and _is_named(visit):
            self._objects.append(value)


def _is_counted(visit: Visit) -> bool:
    """Return True if a tensor is known to be in memory before the call.

    Arguments and variables that functions name count. So do attributes of an object whose method is
    called, and tensors of modules, optimizers, schedulers and scalers. Tensors in other objects,
    and in containers that functions name, count when an op reads them.
    """
    if visit.access is GRADIENT:
        return False
    parent = visit.parent
    is_inside = parent is not None and parent.kind in (CONTAINER, TUPLE)
    while parent is not None and parent.kind in (CONTAINER, TUPLE):
        parent = parent.parent
    if parent is None or parent.kind == PARTIAL or isinstance(parent.value, _STEPPERS):
        return True
    if parent.kind == MODULE:
        return visit.access is REGISTERED
    if parent.kind == OBJECT:
        is_called = parent.parent is None or parent.parent.kind == METHOD
        return is_called and not is_inside
    return parent.kind == FUNCTION and not is_inside


def _is_named(visit: Visit) -> bool:
    """Return True if a function names the value, or names a container of the value."""
    parent = visit.parent
    if parent is not None and parent.kind in (CONTAINER, TUPLE):
        parent = parent.parent
    return parent is not None and parent.kind == FUNCTION


def unwrapped(optimizer: object) -> Any:
    """Return the optimizer inside a wrapper, such as one of `Accelerator.prepare`, or itself."""
    while "param_groups" not in vars(optimizer):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, Optimizer):
            break
        optimizer = inner
    return optimizer


def on_one_device(
    simulation: Simulation, captured: Captured, args: Args, kwargs: Kwargs
) -> tuple[Any, Any]:
    """Move tensor arguments to the meta device if the parameters are on it."""
    if not any(t.is_meta for t in captured.tensors):
        return args, kwargs
    moved: dict[int, Tensor] = {}

    def move(t: Tensor) -> Tensor:
        if t.is_meta or isinstance(t, nn.Parameter):
            return t
        if id(t) not in moved:
            captured.tensors = [other for other in captured.tensors if other is not t]
            moved[id(t)] = simulation.twins.moved(t, torch.device("meta"))
        return moved[id(t)]

    result: tuple[Any, Any] = tree_map_only(Tensor, move, (args, kwargs))
    return result


def _handles_all_at_once(kind: type[Optimizer]) -> bool:
    """Return True if an optimizer lets torch choose when `foreach` is None. Adafactor does not."""
    classes = kind.__mro__[: kind.__mro__.index(Optimizer)]
    modules = [sys.modules.get(cls.__module__) for cls in classes]
    return any(hasattr(module, "_default_to_fused_or_foreach") for module in modules)


@contextlib.contextmanager
def simulated_optimizers(
    captured: Captured, simulation: Simulation, on_gpu: bool
) -> Iterator[None]:
    """Let every optimizer in this thread step as on that device. Undo the effects afterwards.

    If `captured` does not have an optimizer, such as one in a global of another package, it is
    added to `captured.optimizers` at its first step.
    """
    thread = threading.get_ident()
    with contextlib.ExitStack() as stack:

        def simulate(optimizer: Optimizer) -> None:
            stack.enter_context(_simulated_steps(optimizer, simulation, on_gpu))

        def before_step(optimizer: Optimizer, *_: object) -> None:
            is_known = any(optimizer is known for known in captured.optimizers)
            if not is_known and threading.get_ident() == thread:
                captured.optimizers.append(optimizer)
                simulate(optimizer)

        for optimizer in captured.optimizers:
            simulate(optimizer)
        stack.callback(register_optimizer_step_pre_hook(before_step).remove)
        yield


class _NumbersOfStep:
    """Provides the unknown numbers that an optimizer reads in `step()`, such as counts of steps.

    No shape depends on such numbers. But an optimizer with a line search decides by them how often
    it calls its closure, so its step is an error. The closure itself runs like any other code.
    """

    def __init__(self, optimizer: Optimizer, simulation: Simulation) -> None:
        self._name = type(optimizer).__name__
        self._simulation = simulation
        # One entry per step, because `step()` of a subclass calls its base: has a closure, has
        # read.
        self._steps: list[list[bool]] = []

    def begin(
        self, _: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """Begin a step, as a pre-hook. Return its arguments, with a closure that is followed."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        self._steps.append([callable(closure), False])
        self._simulation.any_number = self._number
        if not callable(closure):
            return args, kwargs
        followed = self._followed(closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": followed}
        return (args[0], followed, *args[2:]), kwargs

    def end(self, *_: object) -> None:
        """End a step, as a post-hook."""
        self._steps.pop()
        self._simulation.any_number = self._number if self._steps else None

    def _number(self, t: Tensor) -> float:
        step = self._steps[-1]
        step[1] = True
        if step[0] and t.dtype == torch.bool:
            self._refuse()
        return _ANY_NUMBER

    def _followed(self, closure: Callable[[], object]) -> Callable[[], object]:
        def run() -> object:
            if self._steps[-1][1]:
                self._refuse()
            self._simulation.any_number = None
            try:
                return closure()
            finally:
                self._simulation.any_number = self._number

        return run

    def _refuse(self) -> None:
        raise RuntimeError(
            f"estimate: {self._name}.step decides by values how often it calls its closure, and a "
            "simulation has no values. Pass an optimizer that updates from the gradients of one "
            "backward, or simulate only the closure."
        )


@contextlib.contextmanager
def _simulated_steps(optimizer: Optimizer, simulation: Simulation, on_gpu: bool) -> Iterator[None]:
    """Let an optimizer step as for parameters on that device. Undo the effects afterwards.

    On a GPU most of torch's optimizers process all parameters at once by default. The `capturable`
    option would need a real GPU.
    """
    numbers = _NumbersOfStep(optimizer, simulation)
    hooks = (
        optimizer.register_step_pre_hook(numbers.begin),
        optimizer.register_step_post_hook(numbers.end),
    )
    state = {key: dict(value) for key, value in optimizer.state.items()}
    groups = [dict(group) for group in optimizer.param_groups]
    at_once = on_gpu and _handles_all_at_once(type(optimizer))
    for group in optimizer.param_groups:
        if at_once and group.get("foreach", False) is None:
            group["foreach"] = not group.get("fused") and not group.get("differentiable")
        if group.get("capturable"):
            group["capturable"] = False
    try:
        yield
    finally:
        simulation.any_number = None
        for hook in hooks:
            hook.remove()
        del optimizer.param_groups[len(groups) :]
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(before)
        optimizer.state.clear()
        optimizer.state.update(state)
