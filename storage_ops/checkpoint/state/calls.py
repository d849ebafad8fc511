"""Restore the hooks of modules, and a `forward` set on an instance, for the recompute.

Some libraries add hooks before a forward and remove them before the backward. PEFT, for example,
chooses adapters for each row of a batch this way. Hooks belong to the call, like its arguments. So
a recompute runs the hooks that the forward ran, and does not run hooks that were added later.
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
from storage_ops.foundation.functions import cells_of
from storage_ops.foundation.values import CONTAINERS, is_of_torch, items_of

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
    """The present hooks of modules, and `forward` functions set on instances."""

    def __init__(self, modules: list[nn.Module], may_have_hooks: bool = True) -> None:
        """Remember the hooks of `modules`, and the hooks that torch calls for every module.

        Args:
            modules: the modules.
            may_have_hooks: False if it is known that there are no hooks.
        """
        self._modules = modules
        hooked = _hooked(modules) if may_have_hooks else []  # usually empty
        self._hooks = {module: [dict(hooks) for hooks in _hooks_of(module)] for module in hooked}
        self._forwards = {module: vars(module).get("forward", MISSING) for module in hooked}
        # A lazy module removes its hook in its first call, and cannot run the hook again.
        self._lazy = {module for module in hooked if isinstance(module, LazyModuleMixin)}
        has_global = may_have_hooks and any(HOOKS_OF_ALL_MODULES)
        self._global = [dict(hooks) for hooks in HOOKS_OF_ALL_MODULES] if has_global else None

    def restore(self, undo: Undo) -> None:
        """Set the hooks and functions of the forward. Append functions that undo this to `undo`."""
        restored: list[Any] = []  # hooks and functions that were removed since the forward
        for module in {**self._hooks, **dict.fromkeys(_hooked(self._modules))}:
            if module not in self._lazy:
                before = self._hooks.get(module, _NONE)
                restored += _exchange(_hooks_of(module), before, undo)
            forward = self._forwards.get(module, MISSING)
            if vars(module).get("forward", MISSING) is not forward:
                set_item(vars(module), "forward", forward, undo)
                restored.append(forward)
        if self._global is not None or any(HOOKS_OF_ALL_MODULES):
            restored += _exchange(HOOKS_OF_ALL_MODULES, self._global or _NONE, undo)
        # A hook may record outputs in a list that its owner reads after the forward. The list must
        # not get the outputs of the recompute, which would keep its graph alive.
        for container in _recorders(restored):
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
    present: Iterable[dict[Any, Any]], before: Iterable[dict[Any, Any]], undo: Undo
) -> list[Any]:
    """Set the dictionaries `present` to the hooks `before`. Return the hooks that were missing."""
    restored = []
    for hooks, earlier in zip(present, before, strict=False):
        if not has(hooks, earlier):
            restored += [hook for key, hook in earlier.items() if key not in hooks]
            undo.append(functools.partial(put, hooks, dict(hooks)))
            put(hooks, earlier)
    return restored


def _recorders(callables: list[Any]) -> Iterator[Any]:
    """Yield the containers that callables reference, and short containers in them, each once."""
    stack, seen = list(callables), set()
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if type(value) in CONTAINERS:
            yield value
            stack += [item for item in items_of(value) if type(item) in CONTAINERS]
        elif isinstance(value, functools.partial):
            stack += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, FunctionType):
            stack += _closure_and_defaults(value)
        elif isinstance(value, MethodType):
            stack += [value.__func__]
            owner = value.__self__
            if not isinstance(owner, nn.Module) and not is_of_torch(type(owner)):
                stack.append(getattr(owner, "__dict__", None))


def _closure_and_defaults(function: FunctionType) -> list[Any]:
    """Return the values in the closure of a function, and its defaults."""
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return [value for _, _, value in cells_of(function)] + list(defaults)
