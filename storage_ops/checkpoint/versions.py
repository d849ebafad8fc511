"""Whether tensors that a region reads without being given them are what they were in forward."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from storage_ops.checkpoint.guard import storage_key
from storage_ops.checkpoint.saved import fail


class Versions:
    """How often tensors were modified in place, by the time that a region has run."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Remember tensors without keeping them alive."""
        # Those made in inference mode do not count.
        self._seen = [(weakref.ref(t), t._version) for t in tensors if not t.is_inference()]

    def settle(self) -> None:
        """Forget tensors that the region has modified itself, as a batch norm does."""
        self._seen = [(ref, version) for ref, version in self._seen if _is(ref, version)]

    def check(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """Around the repetition of region `name`: raises when it reads a tensor that was modified.

        What is reached need not be read. So ops are looked at, but only where something changed.
        """
        changed = [ref() for ref, version in self._seen if not _is(ref, version)]
        keys = {storage_key(t) for t in changed} - {None}
        return _Reads(name, keys) if keys else contextlib.nullcontext()


def _is(ref: weakref.ref[Tensor], version: int) -> bool:
    t = ref()
    return t is None or t._version == version


class _Reads(TorchDispatchMode):
    def __init__(self, name: str, keys: set[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name, self._keys = name, keys

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and storage_key(leaf) in self._keys:
                fail(
                    f"a tensor of shape {tuple(leaf.shape)} that {self._name} uses was modified in "
                    "place between forward and recompute"
                )
        return func(*args, **(kwargs or {}))
