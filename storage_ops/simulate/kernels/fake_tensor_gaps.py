"""What torch does otherwise for fake tensors than for real ones, on any device.

* The gradient of a choice (`gather`, `x[i]`, `max`, `topk`, ...) is written into zeros in place;
  for a subclass of Tensor, as fake ones are, it is a copy of the zeros. So it is for real ones
  under torch.func, and inside of DTensors, for which none of this is asked.
* Autograd adds a gradient to the one that arrived before it in place, if nothing else holds that.
  Under a dispatch mode it makes a new tensor.
* The mean or sum of `mse_loss` and its kin is a number in memory as large as all losses, for as
  long as the number lives.
* `logsumexp` has the exponentials in memory.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from storage_ops.foundation.ledger import Block, Ledger
from storage_ops.simulate.kernels.scratch import Scratch

_aten = torch.ops.aten
IN_PLACE = {
    _aten.add.Tensor: _aten.add_.Tensor,
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
_SIMULATES = ("mode", "kernels", "values", "patches", "ranks")
_OURS = (
    *(f"storage_ops.simulate.{part}" for part in _SIMULATES),
    "storage_ops.fitting.step",
    "torch._ops",
)


def as_real(func: Any, block: Block | None, args: Any) -> Any:
    """What real tensors have in place of one of IN_PLACE; `block`: of its first argument."""
    node = torch._C._current_autograd_node()
    if node is None or block is None:
        return func
    if func is _aten.add.Tensor:
        is_same = _adds_up(node, block) and _is_lent_to_nobody(*args[:2])
    else:
        is_same = bool(_CHOICES.fullmatch(node.name())) and block.made_by in _ZEROS
    if is_same and _is_called_by_autograd() and not _is_transformed():
        return IN_PLACE[func]
    return func


def _adds_up(node: Any, block: Block) -> bool:
    """Return True if a node has run, and autograd adds its result to an earlier gradient.

    The formula of a node may add too, but to a tensor that it has made itself.
    """
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    return block.node != node._sequence_nr() or len(set(edges)) < len(edges)


def _is_lent_to_nobody(old: Any, new: Any) -> bool:
    """Return True if autograd alone holds an earlier gradient, and may write to it."""
    if torch.is_grad_enabled() or not (isinstance(old, Tensor) and isinstance(new, Tensor)):
        return False
    # Python refers to a storage that it looks at. Autograd holds the new gradient once.
    storages = torch._C._storage_Use_Count(old.untyped_storage()._cdata)
    alone = storages == 2 and old._use_count() <= new._use_count()  # type: ignore[attr-defined]
    alone = alone and sys.getrefcount(old) <= sys.getrefcount(new)
    return alone and old.shape == new.shape and is_dense(old.shape, old.stride())


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return True if a tensor of this layout fills its memory, each element once."""
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


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
