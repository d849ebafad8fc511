"""What a call finds in memory: its arguments, and what its function holds on to."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterable, Iterator
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map_only

from storage_ops.checkpoint.code_writes import package_of
from storage_ops.checkpoint.left_behind import cells_of, content_of
from storage_ops.checkpoint.reachable import CONTAINERS, LONG, MAPPINGS
from storage_ops.checkpoint.unchanged import NOT_LOOKED_INTO
from storage_ops.memory.estimate_calls import outermost
from storage_ops.memory.estimate_modes import Simulation

_HOLDERS = (nn.Module, Optimizer, GradScaler, LRScheduler)
_DEEP = 3  # containers and objects between a name and a module or an optimizer


class Held:
    """The tensors, functions, optimizers, scalers and schedulers that are there before."""

    def __init__(self, fn: Any, args: Any, kwargs: Any) -> None:
        self.tensors: list[Tensor] = []
        self._modules: dict[nn.Module, None] = {}
        self.optimizers: list[Optimizer] = []
        self.steppers: list[GradScaler | LRScheduler] = []
        self._given = fn, args, kwargs
        self.functions: list[Any] = []
        self._objects: list[Any] = []  # that functions name
        self._seen: set[int] = set()
        self._look([fn, *tree_leaves((args, kwargs))])

    @property
    def modules(self) -> list[nn.Module]:
        """Those that were found, and the modules in them."""
        return list(self._modules)

    @property
    def holders(self) -> list[Any]:
        """What a call may change: modules, schedulers, what is given, and what functions name."""
        steppers = [vars(stepper) for stepper in self.steppers]
        return [*self._modules, *steppers, *self._given, *self._objects]

    @property
    def roots(self) -> list[nn.Module]:
        """The modules that are in no other."""
        return outermost(self._modules)

    def _look(self, values: Iterable[Any]) -> None:
        for given in values:
            value = unwrapped(given) if isinstance(given, Optimizer) else given
            if id(value) in self._seen:
                continue
            self._seen.add(id(value))
            if isinstance(value, Tensor):
                self.tensors.append(value)
                self._look(_hooks_of(value))  # an optimizer may step where a gradient is there
            elif isinstance(value, nn.Module):
                self._modules.update(dict.fromkeys(value.modules()))
                self._look([*value.parameters(), *value.buffers()])
            elif isinstance(value, Optimizer):
                self.optimizers.append(value)
                self._look(tree_leaves([group["params"] for group in value.param_groups]))
                self._look(tree_leaves(list(value.state.values())))
            elif isinstance(value, (GradScaler, LRScheduler)):
                self.steppers.append(value)
                self._look(vars(value).values())
            elif isinstance(value, functools.partial):
                self._look([value.func, *tree_leaves((value.args, value.keywords))])
            elif isinstance(value, (list, tuple, dict)):
                self._look(tree_leaves(value))
            elif callable(value):
                self.functions.append(value)
                self._objects += objects_of(value)
                self._look(list(reached_by(value)))


def unwrapped(optimizer: Any) -> Any:
    """The optimizer in one that stands for it, as `Accelerator.prepare` returns it, or itself."""
    while "param_groups" not in vars(optimizer):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, Optimizer):
            break
        optimizer = inner
    return optimizer


def _hooks_of(t: Any) -> list[Any]:
    """What backward calls with the gradient of a tensor, or once it is added up."""
    given = t._backward_hooks, getattr(t, "_post_accumulate_grad_hooks", None)
    return [hook for hooks in given if hooks for hook in hooks.values()]


def objects_of(fn: Any) -> Iterator[Any]:
    """Yield the objects, such as trainers, that a function or method names.

    Containers that it names are not among them: they are how a caller learns what a run did.
    """
    code = getattr(fn, "__code__", None)
    named = () if code is None else code.co_names
    values = [content_of(cell) for cell in cells_of(fn)]
    values += [fn.__globals__[name] for name in named if name in fn.__globals__]
    for value in values:
        for each in _inside(value) if type(value) in CONTAINERS else [value]:
            if type(each) not in CONTAINERS and _is_looked_into(each):
                yield each


def _is_looked_into(value: Any) -> bool:
    return type(value) is SimpleNamespace or package_of(type(value)) not in NOT_LOOKED_INTO


def _inside(container: Any) -> list[Any]:
    """Return the items of a container, or the values of a mapping, unless there are very many."""
    if len(container) > LONG:
        return []
    return list(container.values() if type(container) in MAPPINGS else container)


def reached_by(fn: Any) -> Iterator[Any]:
    """What a function, method or callable object refers to."""
    owner = getattr(fn, "__self__", fn)
    code = getattr(fn, "__code__", None)
    package = package_of(fn if code is not None else type(owner))
    for cell in cells_of(fn):
        yield content_of(cell)
        yield from _holders_in(content_of(cell), _DEEP)
    yield from getattr(fn, "__defaults__", None) or ()
    yield owner if isinstance(owner, _HOLDERS) else None
    named = [*getattr(owner, "__dict__", {}).values()]
    if code is not None:
        named += [fn.__globals__.get(name) for name in code.co_names]
    for value in named:
        is_helper = isinstance(value, FunctionType) and package_of(value) == package
        if isinstance(value, Tensor) or (is_helper and package not in NOT_LOOKED_INTO):
            yield value
        else:
            yield from _holders_in(value, _DEEP)


def _holders_in(value: Any, depth: int) -> Iterator[Any]:
    """Yield modules, optimizers, scalers and schedulers in short containers and in objects.

    Objects of torch and of Python are not looked into, but plain namespaces are.
    """
    inside: Iterable[Any] = ()
    if isinstance(value, _HOLDERS):
        yield value
    elif type(value) in CONTAINERS or isinstance(value, tuple):
        inside = _inside(value)
    elif _is_looked_into(value):
        inside = list(getattr(value, "__dict__", {}).values())
    if depth:
        for each in inside:
            yield from _holders_in(each, depth - 1)


def on_one_device(simulation: Simulation, held: Held, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Take tensors among the arguments to the meta device, if that is where parameters are."""
    if not any(t.is_meta for t in held.tensors):
        return args, kwargs
    moved: dict[int, Tensor] = {}

    def move(t: Tensor) -> Tensor:
        if t.is_meta or isinstance(t, nn.Parameter):
            return t
        if id(t) not in moved:
            held.tensors = [other for other in held.tensors if other is not t]
            moved[id(t)] = simulation.moved(t, torch.device("meta"))
        return moved[id(t)]

    result: tuple[Any, Any] = tree_map_only(Tensor, move, (args, kwargs))
    return result


def _handles_all_at_once(kind: type[Optimizer]) -> bool:
    """Whether an optimizer asks torch what to do where `foreach` is None; Adafactor does not."""
    classes = kind.__mro__[: kind.__mro__.index(Optimizer)]
    modules = [sys.modules.get(each.__module__) for each in classes]
    return any(hasattr(module, "_default_to_fused_or_foreach") for module in modules)


@contextlib.contextmanager
def simulated_optimizers(held: Held, simulation: Simulation, on_gpu: bool) -> Iterator[None]:
    """Let every optimizer that steps in this thread step as for that device, and forget it.

    An optimizer that `held` missed, such as one in a global of another package, is found when it
    first steps, and joins `held.optimizers`.
    """
    thread = threading.get_ident()
    with contextlib.ExitStack() as stack:

        def simulate(optimizer: Optimizer) -> None:
            stack.enter_context(_simulated_steps(optimizer, simulation, on_gpu))

        def before_step(optimizer: Optimizer, *_: Any) -> None:
            is_known = any(optimizer is known for known in held.optimizers)
            if not is_known and threading.get_ident() == thread:
                held.optimizers.append(optimizer)
                simulate(optimizer)

        for optimizer in held.optimizers:
            simulate(optimizer)
        stack.callback(register_optimizer_step_pre_hook(before_step).remove)
        yield


@contextlib.contextmanager
def _simulated_steps(optimizer: Optimizer, simulation: Simulation, on_gpu: bool) -> Iterator[None]:
    """Let an optimizer step as it does for parameters on that device, and forget what it did.

    On a GPU most of torch's optimizers handle all parameters at once unless told otherwise. They
    read their step counts, on which no shape depends. That they are capturable needs the GPU.
    """

    def reads_counts(value: bool) -> None:
        simulation.any_value = value

    hooks = (
        optimizer.register_step_pre_hook(lambda *_: reads_counts(True)),
        optimizer.register_step_post_hook(lambda *_: reads_counts(False)),
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
        for hook in hooks:
            hook.remove()
        del optimizer.param_groups[len(groups) :]
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(before)
        optimizer.state.clear()
        optimizer.state.update(state)
