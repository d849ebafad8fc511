"""Every call of a model's modules, seen from outside, with no hook on any of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

Around = Callable[[nn.Module, str, Callable[..., Any], Any, Any], Any]


@contextlib.contextmanager
def around_calls(model: nn.Module, around: Around) -> Iterator[None]:
    """Let `around(module, name, call, args, kwargs)` stand for each call of a module, in a block.

    `call(*args, **kwargs)` is the call itself, with its hooks and whatever else the class does
    around it: that of the outermost `__call__` which a class of the model defines. Only in this
    thread.
    """
    names = {id(module): name for name, module in model.named_modules()}
    definers = {next(c for c in type(m).__mro__ if "__call__" in vars(c)) for m in model.modules()}
    thread = threading.get_ident()
    inside: list[nn.Module] = []  # an inner __call__ of the same module is part of the call

    def over(plain: Any) -> Any:
        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return plain(self, *args, **kwargs)
            is_part = inside and inside[-1] is self
            if is_part or threading.get_ident() != thread or id(self) not in names:
                return plain(self, *args, **kwargs)

            def call(*args: Any, **kwargs: Any) -> Any:
                inside.append(self)
                try:
                    return plain(self, *args, **kwargs)
                finally:
                    inside.pop()

            return around(self, names[id(self)], call, args, kwargs)

        return __call__

    with contextlib.ExitStack() as stack:
        for cls in definers:
            plain = vars(cls)["__call__"]
            stack.callback(setattr, cls, "__call__", plain)
            cls.__call__ = over(plain)  # type: ignore[method-assign]
        yield


def outermost(modules: Collection[nn.Module]) -> list[nn.Module]:
    """The modules that are in no other of them."""
    inside = {id(child) for module in modules for child in module.children()}
    return [module for module in modules if id(module) not in inside]
