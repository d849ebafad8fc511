"""When the output of a checkpointed layer is freed: as the module that holds it returns.

All that the holder computes from the output has run by then. Its call is an `OutputDiscardChain`,
which finds by itself who has saved the outputs, and keeps those that anybody still holds.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from typing_extensions import Unpack

from storage_ops._subclass import Replaced
from storage_ops.checkpoint.discard.chain import OutputDiscardChain
from storage_ops.checkpoint.discard.consumers import ConsumerHooks
from storage_ops.checkpoint.discard.output_discard import DiscardOptions
from storage_ops.checkpoint.region.inputs import leaves_of
from storage_ops.checkpoint.region.rows import keep_ends_of_rows
from storage_ops.checkpoint.saved.guard import by_storage, storage_key


class _Scope(OutputDiscardChain):
    """The call of a holder; what its callers' variables name by then was handed to them."""

    _variables = False

    def __init__(self, **options: Unpack[DiscardOptions]) -> None:
        super().__init__(**options)
        self._options = replace(self._options, counts_saved=True)

    def _discard_used(self, block: ConsumerHooks, hook_tensors: tuple[Tensor, ...]) -> None:
        for region in self._regions:
            for entry in region.discardable:
                # Code that holds the output may modify it.
                entry.is_referenced = entry.is_referenced or entry.is_modified
        keep_ends_of_rows(self._regions)
        super()._discard_used(block, hook_tensors)


@dataclass
class Pretended:
    """The storages that a discard would free.

    Attributes:
        storages: the keys of storages.
        kept_classes: of outputs that have no storage to free, for they wrap other tensors.
    """

    storages: set[int] = field(default_factory=set)
    kept_classes: set[str] = field(default_factory=set)

    def add(self, outputs: object, inputs: object) -> None:
        """Note the outputs of a layer."""
        leaves = leaves_of(outputs)
        self.storages.update(by_storage(leaves).keys() - by_storage(leaves_of(inputs)).keys())
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and storage_key(leaf) is None:
                self.kept_classes.add(type(leaf).__name__)


class _Scopes(threading.local):
    """The calls in progress of modules that hold such layers, innermost last."""

    def __init__(self) -> None:
        self.open: list[_Scope] = []
        self.pretended: Pretended | None = None


_scopes = _Scopes()


class DiscardHolder(Replaced):
    """A module that frees the outputs of layers in it as its call returns, or ends by an error.

    The module itself, of another class: a hook after its forward would not run when the call ends
    by a KeyboardInterrupt.
    """

    # Options of `OutputDiscardChain`; None on an instance: nothing is freed.
    _discarding: dict[str, Any] | None = None

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Call the module."""
        if torch.compiler.is_compiling() or self._discarding is None:
            return super().__call__(*args, **kwargs)
        if _scopes.pretended is not None:
            outputs = super().__call__(*args, **kwargs)
            _scopes.pretended.storages.difference_update(by_storage(leaves_of(outputs)))
            return outputs
        scope = _Scope(**self._discarding)
        with scope:
            _scopes.open.append(scope)
            try:
                return super().__call__(*args, **kwargs)
            finally:
                _scopes.open.pop()


def run(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """Call a layer whose output the innermost holder will free; without a holder it is kept."""
    if _scopes.pretended is not None:
        outputs = torch_checkpoint(functools.partial(fn, **kwargs), *args, use_reentrant=False)
        _scopes.pretended.add(outputs, (args, kwargs))
        return outputs
    if _scopes.open:
        return _scopes.open[-1].run(fn, args, kwargs, name)
    with _Scope() as scope:
        return scope.run(fn, args, kwargs, name)


def is_open() -> bool:
    """Return True while a module that frees outputs of layers in it is being called."""
    return bool(_scopes.open)


def hold(module: Any, **options: object) -> None:
    """Let a module free the outputs of the layers it holds; options of `OutputDiscardChain`."""
    if not isinstance(module, DiscardHolder):
        DiscardHolder.change(module)
    module._discarding = options


def release(module: nn.Module) -> None:
    """Undo `hold`; the class stays where another was put above it."""
    vars(module).pop("_discarding", None)
    DiscardHolder.change_back(module)


def options_of(module: nn.Module) -> dict[str, Any] | None:
    """Return the options that `hold` was called with; None if it was not called."""
    return module._discarding if isinstance(module, DiscardHolder) else None


@contextlib.contextmanager
def pretend() -> Iterator[Pretended]:
    """Free nothing in a block, and note what would be freed: fakes have no bytes."""
    _scopes.pretended = Pretended()
    try:
        yield _scopes.pretended
    finally:
        _scopes.pretended = None
