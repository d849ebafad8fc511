"""What torch does otherwise for fake tensors than for real ones, on any device.

* The gradient of a choice (`gather`, `x[i]`, `max`, `topk`, ...) is written into zeros in place;
  for a subclass of Tensor, as fake ones are, it is a copy of the zeros. So it is for real ones
  under torch.func, and inside of DTensors, for which none of this is asked.
* The mean or sum of `mse_loss` and its kin is a number in memory as large as all losses, for as
  long as the number lives.
* `logsumexp` has the exponentials in memory.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from storage_ops.foundation.ledger import Block, Ledger
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
# Losses: where their reduction is among the arguments, whether the number has the memory of all,
# and whether another tensor has them in the forward.
_LOSSES = {
    _aten.mse_loss.default: (2, True, True),
    _aten.smooth_l1_loss.default: (2, True, True),
    _aten.huber_loss.default: (2, False, True),
    _aten.soft_margin_loss.default: (2, True, False),
    _aten.binary_cross_entropy.default: (3, True, False),
}
# Whose frames are between an op and who calls it in a simulation.
_OURS = ("storage_ops.memory.estimate_", "storage_ops.fitting.step", "torch._ops")


def as_real(func: Any, block: Block | None) -> Any:
    """What real tensors have in place of one of IN_PLACE; `block`: of its first argument."""
    node = torch._C._current_autograd_node()
    is_choice = node is not None and _CHOICES.fullmatch(node.name())
    is_fresh = block is not None and block.made_by in _ZEROS
    if is_choice and is_fresh and _is_called_by_autograd() and not _is_transformed():
        return IN_PLACE[func]
    return func


def _is_called_by_autograd() -> bool:
    """Whether no Python comes between: a hook, a recompute or a Function."""
    caller = next((f for f in _frames() if not _module_of(f).startswith(_OURS)), None)
    return caller is None or caller.f_code is _engine_run_backward.__code__  # None: its own thread


def _is_transformed() -> bool:
    """Whether torch.func calls; its own flag is off while it carries an op out."""
    return any(_module_of(frame).startswith("torch._functorch") for frame in _frames())


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module_of(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name


def book(ledger: Ledger, func: Any, args: Any, out: Any) -> None:
    """Book what real tensors take for an op besides what fake ones show."""
    if func in _LOSSES and not _is_transformed():
        _book_loss(ledger, func, args, out)
    elif func is _aten.logsumexp.default:
        copies = 1 if args[0].is_floating_point() else 2
        Scratch(ledger, func).use(args[0], args[0].numel() * out.itemsize * copies)


def _book_loss(ledger: Ledger, func: Any, args: Any, out: Tensor) -> None:
    at, is_kept, is_made = _LOSSES[func]
    if len(args) > at and args[at] == 0:
        return  # not reduced
    losses = math.prod(torch.broadcast_shapes(args[0].shape, args[1].shape)) * out.itemsize
    if is_kept:
        ledger.see_as(out, ledger.block(out, losses, str(func)))
    if is_made:
        Scratch(ledger, func).use(out, losses)
