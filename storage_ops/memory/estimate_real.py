"""What torch does otherwise for fake tensors than for real ones, on any device.

* The gradient of a choice (`gather`, `x[i]`, `max`, `topk`, ...) is written into zeros in place;
  for a subclass of Tensor, as fake ones are, it is a copy of the zeros.
* The mean or sum of `mse_loss` and its kin is a number in memory as large as all losses, for as
  long as the number lives.
* `logsumexp` has the exponentials in memory.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor

from storage_ops.memory.estimate_ledger import Block, Ledger
from storage_ops.memory.estimate_scratch import Scratch

_aten = torch.ops.aten
IN_PLACE = {
    _aten.index_add.default: _aten.index_add_.default,
    _aten.index_fill.int_Tensor: _aten.index_fill_.int_Tensor,
    _aten.index_put.default: _aten.index_put_.default,
    _aten.put.default: _aten.put_.default,
    _aten.scatter.src: _aten.scatter_.src,
    _aten.scatter_add.default: _aten.scatter_add_.default,
}
_ZEROS = set(map(str, (_aten.new_zeros.default, _aten.zeros.default, _aten.zeros_like.default)))
# The names of nodes of torch's own end in a number, those of Functions in Python do not.
_CHOICES = re.compile(
    "(Gather|Index|IndexSelect|Take|Max|Min|Cummax|Cummin|Kthvalue|Median|Nanmedian|Mode|Sort|Topk"
    r"|Trace)Backward\d+"
)
# Losses, by where their reduction is among the arguments, and whether another tensor has them too.
_LOSSES = {
    _aten.mse_loss.default: (2, True),
    _aten.smooth_l1_loss.default: (2, True),
    _aten.binary_cross_entropy.default: (3, False),
}


def as_plain(func: Any, block: Block | None) -> Any:
    """What plain tensors have in place of one of IN_PLACE; `block`: of its first argument."""
    if block is None or block.made_by not in _ZEROS:
        return func
    node = torch._C._current_autograd_node()
    if node is None or not _CHOICES.fullmatch(node.name()):
        return func
    return IN_PLACE[func]


def book(ledger: Ledger, func: Any, args: Any, out: Any) -> None:
    """Book what real tensors take for an op besides what fake ones show."""
    if func in _LOSSES:
        _book_loss(ledger, func, args, out)
    elif func is _aten.logsumexp.default:
        Scratch(ledger, func).use(args[0], args[0].numel() * out.itemsize)


def _book_loss(ledger: Ledger, func: Any, args: Any, out: Tensor) -> None:
    at, twice = _LOSSES[func]
    if len(args) > at and args[at] == 0:
        return  # not reduced
    losses = math.prod(torch.broadcast_shapes(args[0].shape, args[1].shape)) * out.itemsize
    ledger.see_as(out, ledger.block(out, losses, str(func)))
    if twice:
        Scratch(ledger, func).use(out, losses)
