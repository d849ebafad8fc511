"""Remember how the modules of a region are called: their hooks, and a `forward` set on an instance.

Libraries add hooks around a forward and remove them before the backward, such as the adapters that
PEFT chooses for each row of a batch. Hooks belong to the call, as its arguments do, so a recompute
runs the hooks that the forward ran. Hooks that were added later do not run.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.lazy import LazyModuleMixin

from storage_ops.checkpoint.state.containers import MISSING, Undo, copy_of, has, put, set_item
from storage_ops.foundation.walk import CONTAINERS, cells_of, is_of_torch, items_of

_OF_A_MODULE = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
)
_modules: Any = torch_module
HOOKS_OF_ALL_MODULES: tuple[dict[Any, Any], ...] = (
    _modules._global_forward_pre_hooks,
    _modules._global_forward_hooks,
    _modules._global_forward_hooks_with_kwargs,
    _modules._global_forward_hooks_always_called,
    _modules._global_backward_pre_hooks,
    _modules._global_backward_hooks,
)
_NONE: tuple[dict[Any, Any], ...] = tuple({} for _ in _OF_A_MODULE)


class Calls:
    """The way in which modules are called now, for a recompute."""

    def __init__(self, modules: list[nn.Module], may_have_hooks: bool = True) -> None:
        """Remember the hooks of `modules`, and the hooks that torch calls for every module."""
        self._modules = modules
        hooked = _hooked(modules) if may_have_hooks else []  # mostly none
        self._hooks = {module: [dict(hooks) for hooks in _hooks_of(module)] for module in hooked}
        self._forwards = {module: vars(module).get("forward", MISSING) for module in hooked}
        # A lazy module removes its hook in its first call, and cannot run the hook again.
        self._lazy = {module for module in hooked if isinstance(module, LazyModuleMixin)}
        everywhere = may_have_hooks and any(HOOKS_OF_ALL_MODULES)
        self._global = [dict(hooks) for hooks in HOOKS_OF_ALL_MODULES] if everywhere else None

    def restore(self, undo: Undo) -> None:
        """Call the modules as in the forward; `undo` gets the functions that undo this."""
        returned: list[Any] = []  # callables that were removed since the forward
        for module in {**self._hooks, **dict.fromkeys(_hooked(self._modules))}:
            if module not in self._lazy:
                before = self._hooks.get(module, _NONE)
                returned += _exchange(_hooks_of(module), before, undo)
            forward = self._forwards.get(module, MISSING)
            if vars(module).get("forward", MISSING) is not forward:
                set_item(vars(module), "forward", forward, undo)
                returned.append(forward)
        if self._global is not None or any(HOOKS_OF_ALL_MODULES):
            returned += _exchange(HOOKS_OF_ALL_MODULES, self._global or _NONE, undo)
        # A hook may record outputs in a list that its owner reads after the forward. The list must
        # not get the outputs of the recompute, which would keep its graph alive.
        for container in _recorders(returned):
            undo.append(functools.partial(put, container, copy_of(container)))


def _hooked(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules with hooks, or with a `forward` set on the instance."""
    return [
        module
        for module in modules
        if module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    ]


def _hooks_of(module: nn.Module) -> tuple[dict[Any, Any], ...]:
    return tuple(getattr(module, name) for name in _OF_A_MODULE)


def _exchange(
    held: Iterable[dict[Any, Any]], before: Iterable[dict[Any, Any]], undo: Undo
) -> list[Any]:
    """Put earlier hooks into the dictionaries `held`; return the hooks that were not in them."""
    returned = []
    for hooks, earlier in zip(held, before, strict=False):
        if not has(hooks, earlier):
            returned += [hook for key, hook in earlier.items() if key not in hooks]
            undo.append(functools.partial(put, hooks, dict(hooks)))
            put(hooks, earlier)
    return returned


def _recorders(callables: list[Any]) -> Iterator[Any]:
    """Yield the containers that callables name, and short containers in them, once each."""
    stack, seen = list(callables), set()
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if type(value) in CONTAINERS:
            yield value
            stack += [each for each in items_of(value) if type(each) in CONTAINERS]
        elif isinstance(value, functools.partial):
            stack += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, FunctionType):
            stack += _named_by(value)
        elif isinstance(value, MethodType):
            stack += [value.__func__]
            owner = value.__self__
            if not isinstance(owner, nn.Module) and not is_of_torch(type(owner)):
                stack.append(getattr(owner, "__dict__", None))


def _named_by(function: FunctionType) -> list[Any]:
    """Return the values that a function closes over, and its defaults."""
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return [value for _, _, value in cells_of(function)] + list(defaults)
