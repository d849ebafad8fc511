"""Observes every call of a model's modules without hooks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

Around = Callable[[nn.Module, str, Callable[..., Any], Any, Any], Any]


# Simulations replace functions of torch and classes of modules, and restore them afterwards. Two
# threads at a time could restore each other's replacements.
ONE_AT_A_TIME = threading.RLock()
# For each class, its own __call__ and the observers.
_watched: dict[type, tuple[Any, list[_Watch]]] = {}
_changing = threading.Lock()


@contextlib.contextmanager
def around_calls(model: nn.Module, around: Around) -> Iterator[None]:
    """Replace each call of a module by `around(module, name, call, args, kwargs)`, in a with block.

    `call(*args, **kwargs)` is the original call: the outermost `__call__` that a class of the model
    defines, with its hooks. Only calls in this thread are replaced.
    """
    definers = {next(c for c in type(m).__mro__ if "__call__" in vars(c)) for m in model.modules()}
    watch = _Watch(model, around)
    with contextlib.ExitStack() as stack:
        for cls in definers:
            stack.callback(_leave, cls, watch)
            _enter(cls, watch)
        yield


class _Watch:
    """Observes the calls of a model's modules in the thread that created it."""

    def __init__(self, model: nn.Module, around: Around) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._around, self._thread = around, threading.get_ident()
        # An inner __call__ of the same module is part of the call.
        self._inside: list[nn.Module] = []

    def over(self, plain: Callable[..., Any]) -> Any:
        """Return a `__call__` that lets `around` observe the class's `__call__`."""

        def __call__(module: nn.Module, *args: object, **kwargs: object) -> Any:
            is_part = self._inside and self._inside[-1] is module
            if is_part or threading.get_ident() != self._thread or id(module) not in self._names:
                return plain(module, *args, **kwargs)

            def call(*args: object, **kwargs: object) -> Any:
                self._inside.append(module)
                try:
                    return plain(module, *args, **kwargs)
                finally:
                    self._inside.pop()

            return self._around(module, self._names[id(module)], call, args, kwargs)

        return __call__


def _enter(cls: Any, watch: _Watch) -> None:
    with _changing:
        if cls not in _watched:
            plain: Any = vars(cls)["__call__"]
            watches: list[_Watch] = []
            _watched[cls] = plain, watches

            def __call__(self: nn.Module, *args: object, **kwargs: object) -> Any:
                call = plain
                for watch_of_class in () if torch.compiler.is_compiling() else tuple(watches):
                    call = watch_of_class.over(call)
                return call(self, *args, **kwargs)

            cls.__call__ = __call__
        _watched[cls][1].append(watch)


def _leave(cls: Any, watch: _Watch) -> None:
    with _changing:
        plain, watches = _watched.get(cls, (None, []))
        if watch in watches:  # an interrupt may have come before it was added
            watches.remove(watch)
        if plain is not None and not watches:
            cls.__call__ = plain
            del _watched[cls]


def outermost(modules: Collection[nn.Module]) -> list[nn.Module]:
    """Return the modules that are not submodules of another one in the list."""
    inside = {id(child) for module in modules for child in module.children()}
    return [module for module in modules if id(module) not in inside]
