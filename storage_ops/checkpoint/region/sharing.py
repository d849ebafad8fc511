"""Copy stateless modules, which several layers and models may share.

One `nn.SiLU()` as a default argument of a constructor stands in every layer of every model. A
checkpoint of one layer must not change the other layers. So the layer gets a copy of such a module,
and the shared module stays as it is.
"""

from __future__ import annotations

import dis
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_STANDS_FOR = "_stands_for"  # the attribute of a copy that names the shared module
_OWN = frozenset((*vars(nn.Module()), _STANDS_FOR))
_SIMPLE = (bool, int, float, str, type(None), torch.dtype, torch.device, types.FunctionType,
           types.BuiltinFunctionType)  # fmt: skip


def is_stateless(module: nn.Module) -> bool:
    """Return True if a copy of a module can take its place, since its calls change nothing."""
    attributes = vars(module)
    inside = (module._parameters, module._buffers, module._modules)
    if any(value is not None for found in inside for value in found.values()):
        return False
    if "forward" in attributes or module._compiled_call_impl is not None:
        return False
    if isinstance(module, torch.jit.ScriptModule) or not _is_constant(type(module)):
        return False
    values = [value for key, value in attributes.items() if key not in _OWN]
    values += [part for value in values if isinstance(value, tuple) for part in value]
    return all(isinstance(value, (*_SIMPLE, tuple)) for value in values)


def separate(module: nn.Module, holder: nn.Module) -> Any:
    """Put a copy of a stateless module into its places in a holder, and return the copy.

    The copy shares the hooks. One that is registered on either module later belongs to both.
    """
    copied: Any = object.__new__(type(module))
    vars(copied).update(vars(module))
    vars(copied)[_STANDS_FOR] = module
    for children in _children_of(holder):
        children.update((key, copied) for key, child in children.items() if child is module)
    return copied


def rejoin(holder: nn.Module) -> None:
    """Undo `separate` for all plain modules in a holder; each has the attributes of its copy."""
    for children in _children_of(holder):
        for key, child in children.items():
            shared = None if child is None else vars(child).get(_STANDS_FOR)
            if shared is not None and type(child) is type(shared):
                values = {k: v for k, v in vars(child).items() if k != _STANDS_FOR}
                vars(shared).update(values)
                children[key] = shared


def _children_of(holder: nn.Module) -> Iterator[dict[str, nn.Module | None]]:
    """Yield the children of a module that runs its lists of modules itself, and of these lists."""
    yield holder._modules
    for child in holder._modules.values():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _children_of(child)


# Weak, because a class that a function defines lives as long as its instances.
_constant: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def _is_constant(cls: type) -> bool:
    """Return True if no method of a class, special ones left out, sets an attribute."""
    if cls not in _constant:
        bases = cls.__mro__[: cls.__mro__.index(nn.Module)]
        functions = [
            value
            for base in bases
            for name, value in vars(base).items()
            if isinstance(value, types.FunctionType) and not name.startswith("__")
        ]
        _constant[cls] = not any(
            step.opname in ("STORE_ATTR", "DELETE_ATTR")
            for function in functions
            for step in dis.get_instructions(function)
        )
    return _constant[cls]
