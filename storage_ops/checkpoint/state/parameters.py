"""Note the versions of parameters, and which are frozen, in the forward. Compare them later.

The library of saved tensors does the same in C++.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from storage_ops import _library


class Noted:
    """Versions of parameters, and which of them were frozen, at one moment."""

    def __init__(self, parameters: list[Tensor]) -> None:
        """Note the versions of `parameters`, and which of them need a gradient."""
        self._parameters = parameters
        self._needed_grad = [t.requires_grad for t in parameters]
        self._versions: list[int] = []
        self.note_versions()

    def note_versions(self) -> None:
        """Note the versions again."""
        self._versions = [-1 if t.is_inference() else t._version for t in self._parameters]

    def written(self) -> list[tuple[int, int]]:
        """Return the index and the earlier version of each parameter that was written since."""
        pairs = enumerate(zip(self._parameters, self._versions, strict=True))
        return [(at, v) for at, (t, v) in pairs if v >= 0 and t._version != v]

    def frozen_or_not(self) -> list[tuple[int, bool]]:
        """Return the index and the earlier `requires_grad` of each parameter where it changed."""
        pairs = enumerate(zip(self._parameters, self._needed_grad, strict=True))
        return [(at, needed) for at, (t, needed) in pairs if t.requires_grad != needed]


def noted(parameters: list[Tensor]) -> Noted:
    """Return a new `Noted` for the parameters. It is the library's if possible."""
    if _native is None:
        return Noted(parameters)
    native: Noted = _native.Noted(parameters)
    return native


_native: Any = sys.modules.get(_library.SAVED_TENSORS)
