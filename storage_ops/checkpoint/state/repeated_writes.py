"""Skip writes that a recompute must not repeat, and refuse reads of changed bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from storage_ops.checkpoint.saved.guard import by_storage, storage_key
from storage_ops.checkpoint.saved.light_mode import LightMode
from storage_ops.checkpoint.saved.saved import fail, fail_modified, set_versions
from storage_ops.foundation.op_names import Op, is_view
from storage_ops.foundation.ops import Args, Kwargs

_RENORM = torch.ops.aten.embedding_renorm_.default


def fail_parameter(region: str, t: Tensor) -> NoReturn:
    """Raise the error for a region whose forward has written a parameter without a copy."""
    fail(
        f"{region} itself modifies a parameter of shape {tuple(t.shape)} in place, and no copy is "
        "kept, so the recompute cannot read what the forward read. Write outside of the region, or "
        "from the first forward on and at most 64 MiB of parameters. An embedding with max_norm "
        "writes its weight at each call. Call it once in the region, before other uses of the "
        "weight, and run the backward before its next call."
    )


class RepeatedWrites(LightMode):
    """Mode for a recompute that reaches written tensors without a copy of their earlier contents.

    An embedding with `max_norm` scales the rows that it looks up before it reads them. A second
    scaling would change the rows again, by rounding. So the recompute skips the op, and reads the
    rows that the forward has scaled.
    """

    def __init__(
        self, region: str, renormed: Iterable[Tensor], changed: Iterable[Tensor], checks: bool
    ) -> None:
        """Create the mode.

        Args:
            region: the name of the region, for errors.
            renormed: parameters that were written once, by the forward.
            changed: tensors that were written since the forward.
            checks: whether to raise if the recompute would read other contents than the forward.
        """
        super().__init__()
        self._region, self._checks = region, checks
        self._renormed = by_storage(renormed)
        self._errors: dict[int, Callable[[str, Tensor], NoReturn]] = {}
        if checks:
            self._changed = {**by_storage(changed), **self._renormed}
            self._errors = dict.fromkeys(self._changed, fail_modified)
            self._errors |= dict.fromkeys(self._renormed, fail_parameter)

    def dispatch(self, op: Op, args: Args, kwargs: Kwargs) -> Any:
        """Run an op. Skip the scaling of an embedding that the forward has already scaled."""
        if op is _RENORM and (key := self._key_of(args[0])) is not None:
            self._errors.pop(key, None)
            # Autograd increments the version after the op, so decrement it first.
            set_versions((args[0],), (args[0]._version - 1,))
            return args[0]
        if self._errors and not is_view(op):
            for key in by_storage(tree_leaves((args, kwargs))):
                if key in self._errors:
                    self._errors[key](self._region, self._changed[key])
        return op(*args, **kwargs)

    def _key_of(self, weight: Tensor) -> int | None:
        """Return the key of a parameter that the forward has written; None for another tensor."""
        key = storage_key(weight)
        if isinstance(weight, FakeTensor):  # simulations create a new fake tensor for each op
            same = (k for k, t in self._renormed.items() if t.shape == weight.shape)
            key = next(same, None)
        return key if key in self._renormed else None
