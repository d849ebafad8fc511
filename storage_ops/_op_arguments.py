"""Find the tensors among the arguments and results of an op.

The arguments are values of a schema: tensors, lists of tensors, and values without tensors.
`torch.utils._pytree` supports more kinds of trees, but takes several times as long for every op of
a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

_NESTING = (list, tuple, dict)


def tensors_in(value: object) -> list[Tensor]:
    """Return the tensors of a value, in order."""
    tensors: list[Tensor] = []
    _add_tensors((value,), tensors)
    return tensors


def _add_tensors(values: Iterable[object], tensors: list[Tensor]) -> None:
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, _NESTING):
            _add_tensors(value, tensors)


def with_tensors(
    change: Callable[[Any], Any], value: object, kinds: type | tuple[type, ...] = Tensor
) -> Any:
    """Return the value with each of its tensors, or other objects of these kinds, changed."""
    if isinstance(value, kinds):
        return change(value)
    if isinstance(value, (list, tuple)):
        parts = [with_tensors(change, part, kinds) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    if isinstance(value, dict):
        return {name: with_tensors(change, part, kinds) for name, part in value.items()}
    return value
