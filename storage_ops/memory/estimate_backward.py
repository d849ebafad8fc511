"""Formulas of autograd that torch computes otherwise for tensors of a subclass, as fake ones are.

For plain tensors the gradient of a choice (`gather`, `x[i]`, `max`, `topk`, ...) is written into
zeros in place. For a subclass it is a copy of the zeros.
"""

from __future__ import annotations

from typing import Any

import torch

from storage_ops.memory.estimate_ledger import Block

_aten = torch.ops.aten
IN_PLACE = {
    _aten.index_add.default: _aten.index_add_.default,
    _aten.index_fill.int_Tensor: _aten.index_fill_.int_Tensor,
    _aten.index_put.default: _aten.index_put_.default,
    _aten.put.default: _aten.put_.default,
    _aten.scatter.src: _aten.scatter_.src,
    _aten.scatter_add.default: _aten.scatter_add_.default,
}
_ZEROS = {str(op) for op in (_aten.new_zeros.default, _aten.zeros.default, _aten.zeros_like.default)}
_CHOICES = (
    "Gather", "Index", "IndexSelect", "Take", "Max", "Min", "Cummax", "Cummin", "Kthvalue", "Median",
    "Nanmedian", "Mode", "Sort", "Topk", "Trace",
)  # fmt: skip


def as_plain(func: Any, block: Block | None) -> Any:
    """What plain tensors have in place of one of IN_PLACE; `block`: of its first argument."""
    if block is None or block.made_by not in _ZEROS:
        return func
    node = torch._C._current_autograd_node()
    if node is None or node.name().rstrip("0123456789").removesuffix("Backward") not in _CHOICES:
        return func
    return IN_PLACE[func]
