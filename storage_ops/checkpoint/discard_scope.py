"""When the output of a checkpointed layer is freed: as the module that holds it returns.

All that the holder computes from the output has run by then. Its forward is an
`OutputDiscardChain`, which finds by itself who has saved the outputs.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from storage_ops.checkpoint.chain import OutputDiscardChain
from storage_ops.checkpoint.region import maker_of
from storage_ops.checkpoint.selective import by_storage


class _Scopes(threading.local):
    """The forwards in progress of modules that hold such layers, innermost last."""

    def __init__(self) -> None:
        self.open: list[OutputDiscardChain] = []
        # While nothing is freed: the storages that would be, in all and by the innermost holder.
        self.pretended: set[int] | None = None


_scopes = _Scopes()


def run(fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a layer whose output the innermost holder will free; without a holder it is kept."""
    if _scopes.pretended is not None:
        outputs = torch_checkpoint(functools.partial(fn, **kwargs), *args, use_reentrant=False)
        _scopes.pretended.update(by_storage(outputs).keys() - by_storage((args, kwargs)).keys())
        return outputs
    if _scopes.open:
        return _scopes.open[-1].checkpoint(fn, *args, **kwargs)
    with OutputDiscardChain() as chain:
        return chain.checkpoint(fn, *args, **kwargs)


def hold(module: nn.Module, **options: Any) -> None:
    """Let a module free the outputs of the layers it holds; options of `OutputDiscardChain`."""
    if options_of(module) is None:
        module.register_forward_pre_hook(functools.partial(_open, options))
        module.register_forward_hook(_close, always_call=True)


def options_of(module: nn.Module) -> dict[str, Any] | None:
    """What `hold` was called with; None if it was not."""
    for hook in module._forward_pre_hooks.values():
        if getattr(hook, "func", None) is _open:
            options: dict[str, Any] = hook.args[0]  # type: ignore[attr-defined]
            return options
    return None


def release(module: nn.Module) -> None:
    """Undo `hold`."""
    for hooks, ours in ((module._forward_pre_hooks, _open), (module._forward_hooks, _close)):
        for key in [k for k, hook in hooks.items() if getattr(hook, "func", hook) is ours]:
            del hooks[key]
            module._forward_hooks_always_called.pop(key, None)


def _open(options: dict[str, Any], module: nn.Module, args: Any) -> None:
    if not torch.compiler.is_compiling() and _scopes.pretended is None:
        _scopes.open.append(OutputDiscardChain(**options))
        _scopes.open[-1].__enter__()


def _close(module: nn.Module, args: Any, outputs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    if _scopes.pretended is not None:
        _scopes.pretended.difference_update(by_storage(outputs))
    elif _scopes.open:
        chain = _scopes.open.pop()
        for leaf in tree_leaves(outputs):
            maker = maker_of(leaf)
            if (
                maker is not None and maker in chain._regions
            ):  # returned as it is, or as a view: not to be freed
                maker.forget_outputs()
        chain.__exit__(*sys.exc_info())


@contextlib.contextmanager
def pretend() -> Iterator[set[int]]:
    """Free nothing in a block, and name the storages that would be freed: fakes have no bytes."""
    _scopes.pretended = set()
    try:
        yield _scopes.pretended
    finally:
        _scopes.pretended = None
