"""Frees the output of a checkpointed layer when the module that contains the layer returns.

All consumers of the output inside this module, the *holder*, have run by then. The holder's call is
an `OutputDiscardChain`, which finds the tensors that consumers saved, and keeps referenced outputs.
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
    """The call of a holder. Its callers may have received its outputs, so their variables count."""

    _variables = False

    def __init__(self, **options: Unpack[DiscardOptions]) -> None:
        super().__init__(**options)
        self._options = replace(self._options, counts_saved=True)

    def _discard_used(self, block: ConsumerHooks, hook_tensors: tuple[Tensor, ...]) -> None:
        for region in self._regions:
            for entry in region.outputs.discardable:
                # Code with a reference to the output may modify it.
                entry.is_referenced = entry.is_referenced or entry.is_modified
        keep_ends_of_rows(self._regions)
        super()._discard_used(block, hook_tensors)


@dataclass
class Pretended:
    """The storages that a discard would free.

    Attributes:
        storages: the keys of storages.
        kept_classes: the classes of outputs without a storage to free, because they wrap tensors.
    """

    storages: set[int] = field(default_factory=set)
    kept_classes: set[str] = field(default_factory=set)

    def add(self, outputs: object, inputs: object) -> None:
        """Record the outputs of a layer."""
        leaves = leaves_of(outputs)
        self.storages.update(by_storage(leaves).keys() - by_storage(leaves_of(inputs)).keys())
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and storage_key(leaf) is None:
                self.kept_classes.add(type(leaf).__name__)


class _Scopes(threading.local):
    """The calls of holders in progress, innermost last."""

    def __init__(self) -> None:
        self.open: list[_Scope] = []
        self.pretended: Pretended | None = None


_scopes = _Scopes()


class DiscardHolder(Replaced):
    """A module that frees the outputs of its layers when its call returns or raises.

    The class of the module is changed, because a hook after its forward would not run when the call
    ends with a KeyboardInterrupt.
    """

    # Options of `OutputDiscardChain`. On an instance, None means that nothing is freed.
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
    """Call a layer whose output the innermost holder frees. Without a holder it is kept."""
    if _scopes.pretended is not None:
        outputs = torch_checkpoint(functools.partial(fn, **kwargs), *args, use_reentrant=False)
        _scopes.pretended.add(outputs, (args, kwargs))
        return outputs
    if _scopes.open:
        return _scopes.open[-1].run(fn, args, kwargs, name)
    with _Scope() as scope:
        return scope.run(fn, args, kwargs, name)


def is_open() -> bool:
    """Return True while the call of a holder is in progress."""
    return bool(_scopes.open)


def hold(module: Any, **options: object) -> None:
    """Let a module free the outputs of its layers. `options`: those of `OutputDiscardChain`."""
    if not isinstance(module, DiscardHolder):
        DiscardHolder.change(module)
    module._discarding = options


def release(module: nn.Module) -> None:
    """Undo `hold`. The class stays if another class was put on top of it."""
    vars(module).pop("_discarding", None)
    DiscardHolder.change_back(module)


def options_of(module: nn.Module) -> dict[str, Any] | None:
    """Return the options of `hold`, or None if it was not called."""
    return module._discarding if isinstance(module, DiscardHolder) else None


@contextlib.contextmanager
def pretend() -> Iterator[Pretended]:
    """Free nothing in a with block, and record what would be freed. Fakes have no bytes to free."""
    _scopes.pretended = Pretended()
    try:
        yield _scopes.pretended
    finally:
        _scopes.pretended = None
