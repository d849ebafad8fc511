"""Lets models of transformers take the same branches in a simulation as in a real run.

The models read values of masks and token ids, which a simulation may not know.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

from storage_ops.simulate.values.known import Values


@contextlib.contextmanager
def branches_of_a_run(values: Values) -> Iterator[None]:
    """Let transformers read known values in a with block, without warnings about padding.

    In a real run transformers checks whether a mask is necessary, because of packed sequences or
    padding. If not, it creates no mask, uses causal attention, and does not repeat keys and values
    for their heads. It treats every fake tensor as a tensor of a trace, whose values are unknown.
    """
    module: Any = sys.modules.get("transformers.masking_utils")
    if hasattr(module, "is_tracing"):
        names, replacement = ["is_tracing"], _is_tracing
    else:  # transformers 4 reads every mask, whose values a simulation may not know
        names = ["_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa"]
        replacement = _ignores_mask
    new: dict[tuple[Any, str], Callable[..., Any]] = {
        (module, name): replacement(getattr(module, name), values)
        for name in names
        if hasattr(module, name)
    }
    models: Any = sys.modules.get("transformers.modeling_utils")
    if models is not None:
        new[models.PreTrainedModel, "warn_if_padding_and_no_attention_mask"] = _without_warning
    plain = {(owner, name): getattr(owner, name) for owner, name in new}
    for (owner, name), function in new.items():
        setattr(owner, name, function)
    try:
        yield
    finally:
        for (owner, name), function in plain.items():
            setattr(owner, name, function)


def _is_tracing(plain: Callable[..., Any], values: Values) -> Callable[..., bool]:
    """Return transformers 5's `is_tracing`, changed to False for fake tensors with known values."""

    def is_tracing(tensor: object = None) -> bool:
        if isinstance(tensor, FakeTensor) and values.knows(tensor):
            return False
        return bool(plain(tensor))

    return is_tracing


def _ignores_mask(plain: Callable[..., Any], values: Values) -> Callable[..., bool]:
    """Return a function of transformers 4, changed to False for masks with unknown values."""

    def ignores_mask(padding_mask: object, *args: object, **kwargs: object) -> bool:
        if isinstance(padding_mask, FakeTensor) and not values.knows(padding_mask):
            return False
        return bool(plain(padding_mask, *args, **kwargs))

    return ignores_mask


def _without_warning(model: object, ids: object, mask: object) -> None:
    """Replace a method of models that reads token ids only to warn about padding."""
