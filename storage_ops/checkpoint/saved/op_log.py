"""Which ops a region ran, and where its repetition began to run others: for `debug=True`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import SAC_IGNORED_OPS

from storage_ops.checkpoint.saved import guard
from storage_ops.foundation.op_names import Op
from storage_ops.foundation.ops import Args, Kwargs


class OpLog(TorchDispatchMode):
    """Notes the name of every op in a block, and the line that ran it.

    Attributes:
        ops: pairs of a name and "file:line".
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[tuple[str, str]] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Code that is compiled already runs as it is."""
        return True

    def __torch_dispatch__(
        self, op: Op, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        if op not in SAC_IGNORED_OPS:  # such as the detach of what is saved
            self.ops.append((str(op), guard.where()))
        return op(*args, **(kwargs or {}))

    def difference(self, again: OpLog) -> str:
        """Where a repetition ran another op than this log has; empty if it ran the same."""
        pairs = itertools.zip_longest(self.ops, again.ops, fillvalue=("none", "no line"))
        for index, ((name, line), (other, other_line)) in enumerate(pairs):
            if name != other:
                return (
                    f"; op {index} was {name} at {line} in forward and {other} at {other_line} "
                    "when it was recomputed"
                )
        return f"; the {len(self.ops)} ops were the same, with other arguments"
