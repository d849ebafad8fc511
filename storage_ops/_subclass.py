"""Modules that change their class: subclasses with the name of the class that they replace."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any, SupportsIndex

from torch import nn
from torch.nn.utils import parametrize


def check_module(module: object, argument: str = "`model`") -> None:
    """Raise a TypeError for an argument that is not a module."""
    if not isinstance(module, nn.Module):
        kind = type(module).__name__
        raise TypeError(f"{argument} is {module!r}, a {kind}. Expected a torch.nn.Module.")


def like(original: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator like functools.wraps that sets a signature instead of __wrapped__.

    Trainer and generate() of transformers read the signature. accelerate follows __wrapped__ to
    remove its own wrappers, and would remove this one.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        functools.update_wrapper(function, original)
        del function.__wrapped__  # type: ignore[attr-defined]
        function.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
        return function

    return decorate


class Replaced(nn.Module):
    """First base of the classes that modules change to.

    A module changes to `kind.over(type(module))`, where `kind` is a subclass of this one. Copies
    and pickles of the module are of such a class, too.
    """

    # Each class that `over` makes has the class that it replaces, that class's forward as it is
    # defined, and the subclass of this one.
    _original: Any
    _replaced: Any
    _kind: Any

    @staticmethod
    def forward_over(original: Callable[..., Any]) -> Callable[..., Any] | None:
        """Return the forward that replaces the original class's forward, or None."""
        return None

    @classmethod
    def over(cls, original: type[nn.Module]) -> Any:
        """Return the subclass of this kind and `original`, under the name of `original`.

        Each class has one such subclass, until another forward is assigned to the class.
        """
        subclass = _subclasses.get((cls, original))
        if subclass is None or subclass._replaced is not _defined_forward(original):
            subclass = _subclasses[cls, original] = cls._make(original)
        return subclass

    @classmethod
    def change(cls, module: nn.Module) -> None:
        """Change the class of a module to one of this kind.

        Raises:
            TypeError: the module cannot change its class.
        """
        original: Any = type(module)
        try:
            _change(module, cls.over)
        except TypeError as error:
            raise TypeError(
                f"The class of {original.__name__} cannot change: {error}. Expected an ordinary "
                "subclass of torch.nn.Module."
            ) from error

    @classmethod
    def change_back(cls, module: nn.Module) -> None:
        """Give a module its class back, unless another class was put on top of this kind's."""
        if vars(below_parametrizations(module)).get("_kind") is cls:
            _change(module, lambda made: made._original)

    @classmethod
    def _make(cls, original: type[nn.Module]) -> Any:
        body: dict[str, Any] = {
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
            "_original": original,
            "_replaced": _defined_forward(original),
            "_kind": cls,
        }
        forward = cls.forward_over(_forward_of(original))
        if forward is not None:
            body["forward"] = forward
        later = getattr(original, "cls_to_become", None)
        if later is not None:  # a lazy module changes its class at its first forward
            body["cls_to_become"] = cls.over(later)
        return type(original.__name__, (cls, original), body)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        # Classes that `over` makes cannot be pickled by name. If another library has put its own
        # class on top, that library pickles it.
        kinds, cls = [], type(self)
        while "_original" in vars(cls):
            kinds.append(cls._kind)
            cls = cls._original
        if not kinds:
            return reduced
        function, args, *rest = reduced
        args = tuple(cls if arg is type(self) else arg for arg in args)
        return (_rebuild, (function, args, tuple(kinds)), *rest)


def _defined_forward(cls: type[nn.Module]) -> Any:
    return inspect.getattr_static(cls, "forward")


def _forward_of(cls: type[nn.Module]) -> Callable[..., Any]:
    """Return the forward of a class as a function of the module and the arguments."""
    defined = _defined_forward(cls)
    if isinstance(defined, classmethod):
        of_class = defined.__func__
        return lambda self, *args, **kwargs: of_class(type(self), *args, **kwargs)
    if isinstance(defined, staticmethod) or not hasattr(defined, "__get__"):
        call = getattr(defined, "__func__", defined)  # or an object that is called
        return lambda self, *args, **kwargs: call(*args, **kwargs)
    return cls.forward


def runs(module: nn.Module, forward: Callable[..., Any]) -> bool:
    """Return True if a module runs a forward, directly or below the classes of `Replaced`."""
    if type(module).forward is not forward:
        cls = below_parametrizations(module)
        while "_original" in vars(cls):
            cls = cls._original
        if cls.forward is not forward:
            return False
    # A checkpointed module keeps a forward that was set on the instance as `_own_forward`.
    return "forward" not in vars(module) and "_own_forward" not in vars(module)


def is_parametrization(cls: type) -> bool:
    """Return True for a class that `torch.nn.utils.parametrize` puts on top of a module's class."""
    return cls.__name__.startswith("Parametrized") and cls.__module__ == parametrize.__name__


def below_parametrizations(module: nn.Module) -> Any:
    """Return the class of a module without its parametrizations.

    The class that torch puts on top references the module, so a cache must not keep it.
    """
    cls: Any = type(module)
    return cls.__bases__[0] if is_parametrization(cls) else cls


def _change(module: nn.Module, new: Callable[[Any], Any]) -> None:
    """Change the class of a module below its parametrizations, which torch removes from the top."""
    top, below = type(module), below_parametrizations(module)
    if below is top:
        module.__class__ = new(top)
        return
    body = {n: v for n, v in vars(top).items() if n not in ("__dict__", "__weakref__")}
    module.__class__ = type(top.__name__, (new(below),), body)


# Weak, because a class that a function defines is deleted with the values that it refers to.
_subclasses: weakref.WeakValueDictionary[tuple[Any, Any], Any] = weakref.WeakValueDictionary()


def _rebuild(function: Callable[..., Any], args: tuple[Any, ...], kinds: tuple[Any, ...]) -> Any:
    module = function(*args)
    for kind in reversed(kinds):
        module.__class__ = kind.over(type(module))
    return module
