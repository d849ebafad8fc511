"""Differences between real and fake tensors in memory behaviour, on every device.

* The gradient of an indexing op (`gather`, `x[i]`, `max`, `topk`, ...) is written into zeros in
  place. For a subclass of Tensor, such as a fake one, it is a copy of the zeros. It is also a copy
  for real tensors under torch.func and inside DTensors. There this module changes nothing.
* Autograd adds a gradient to an earlier one in place, if it has the only reference to the earlier
  one. Under a dispatch mode it allocates a new tensor.
* Some gradient formulas write into a tensor that they have allocated, but not for fake tensors.
* The mean or sum of `mse_loss` and similar losses is one number, but its storage stays as large as
  all losses.
* `logsumexp` allocates the exponentials, and `isinf` the absolute values.
* `im2col` and `col2im` resize a tensor as large as their input, which does not shrink.
* Batch norm, `roll` and `channel_shuffle` on a CPU return the memory format of their input. Fakes
  have other strides, which would change whether `contiguous` and `reshape` copy.
* Some fakes raise errors for arguments that kernels accept.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.autograd.graph import _engine_run_backward

from storage_ops.foundation.ledger import Block
from storage_ops.foundation.op_names import Op, name_of
from storage_ops.foundation.ops import Args, describe
from storage_ops.simulate.kernels.scratch import Kernel, Scratch, See

_aten = torch.ops.aten
_ZEROS = set(map(str, (_aten.new_zeros.default, _aten.zeros.default, _aten.zeros_like.default)))
# Names of torch's own autograd nodes end in a number, those of Python Functions do not.
_CHOICES = re.compile(
    "(Gather|Index|IndexSelect|Take|Max|Min|Cummax|Cummin|Kthvalue|Median|Nanmedian|Mode|Sort|Topk"
    r"|Trace)Backward\d+"
)
# Formulas that write into their own tensors. The keys are the ops that fake tensors run instead.
_LOGIT_LOSSES = ("BinaryCrossEntropyWithLogitsBackward0",)
_FORMULAS: dict[Op, tuple[str, ...]] = {
    _aten.sub.Tensor: _LOGIT_LOSSES,
    _aten.mul.Tensor: _LOGIT_LOSSES,
    # Before torch 2.14.
    _aten.logical_and.default: ("ClampBackward0",) if torch.__version__ < "2.14" else (),
    # From torch 2.14 on. Before, they wrote no tensor of their own, or fakes do it as well.
    _aten.masked_fill.Scalar: (
        "ClampBackward0", "ClampMaxBackward1", "ClampMinBackward1", "FmaxBackward0",
        "FminBackward0", "MaximumBackward0", "MinimumBackward0",
    ),
}  # fmt: skip
# Frames of these files lie between an op and its caller in a simulation.
_SIMULATES = ("mode", "kernels", "values", "patches", "ranks")
_OURS = (
    *(f"storage_ops.simulate.{part}" for part in _SIMULATES),
    "storage_ops.fitting.step",
    "torch._ops",
    # torch wraps a dispatch mode so that the mode is not compiled.
    "torch._dynamo.eval_frame",
    "torch._compile",
)


def as_real(func: Op, in_place: Op, block: Block | None, args: Args) -> Op:
    """Return the op that real tensors run: `func`, or the in-place op of its table row.

    Args:
        func: an op with such a row.
        in_place: the in-place op of the row.
        block: the memory of the first argument.
        args: the arguments.
    """
    node = torch._C._current_autograd_node()
    if node is None or block is None:
        return func
    if func is _aten.add.Tensor:
        is_same = _adds_up(node, block) and _has_no_other_reference(*args[:2])
    elif func in _FORMULAS:
        is_own = node.name() in _FORMULAS[func] and block.node == node._sequence_nr()
        is_same = is_own and not torch.is_grad_enabled()
    else:
        is_same = bool(_CHOICES.fullmatch(node.name())) and block.made_by in _ZEROS
    if is_same and _is_called_by_autograd() and not _is_transformed():
        return in_place
    return func


def _adds_up(node: Any, block: Block) -> bool:
    """Return True if a node has run, and autograd adds its result to an earlier gradient.

    The formula of a node may add too, but to a tensor that it has allocated.
    """
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    return block.node != node._sequence_nr() or len(set(edges)) < len(edges)


def _has_no_other_reference(old: object, new: object) -> bool:
    """Return True if only autograd references the earlier gradient, so that it may write to it."""
    if torch.is_grad_enabled() or not (isinstance(old, Tensor) and isinstance(new, Tensor)):
        return False
    if old is new:  # a node that adds its inputs passes one gradient on to both of them
        return False
    # Reading a storage adds a reference from Python. Autograd has one reference to the new
    # gradient.
    storages = torch._C._storage_Use_Count(old.untyped_storage()._cdata)
    if storages != 2 or old._use_count() > new._use_count():  # type: ignore[attr-defined]
        return False
    if sys.getrefcount(old) > sys.getrefcount(new):
        return False
    return old.shape == new.shape and is_dense(old.shape, old.stride())


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return True if a tensor of this layout covers its memory, each element once."""
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def _is_called_by_autograd() -> bool:
    """Return True if autograd calls the op directly, not a hook, recompute or Function."""
    caller = next((f for f in _frames() if not _module_of(f).startswith(_OURS)), None)
    return caller is None or caller.f_code is _engine_run_backward.__code__  # None: its own thread


def _is_transformed() -> bool:
    """Return True if torch.func is the caller. Its own flag is off while an op runs."""
    return any(_module_of(frame).startswith("torch._functorch") for frame in _frames())


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module_of(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name


def _logsumexp(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
    copies = 1 if args[0].is_floating_point() else 2
    scratch.use(args[0], args[0].numel() * out.itemsize * copies)


def count_losses(args: Args) -> int:
    """Return how many losses a call has before they are reduced."""
    return math.prod(torch.broadcast_shapes(args[0].shape, args[1].shape))


def _loss(at: int, is_kept: bool, allocates: bool) -> Kernel:
    """Return the scratch function of a loss.

    Args:
        at: the position of the reduction among the arguments.
        is_kept: whether the storage of the reduced loss is as large as all losses.
        allocates: whether the forward allocates another tensor for all losses.
    """

    def kernel(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
        if _is_transformed() or (len(args) > at and args[at] == 0):
            return  # not reduced
        losses = count_losses(args) * out.itemsize
        if is_kept:
            scratch.ledger.see_as(out, scratch.ledger.block(out, losses, scratch.name))
        if allocates:
            scratch.use(out, losses)

    return kernel


def _logit_losses(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
    """Compute log sigmoids, and losses from them."""
    losses = count_losses(args) * out.itemsize
    blocks = scratch.take_bytes(out, losses)
    if len(args) <= 4 or args[4] != 0:  # reduced
        scratch.use(out, losses)
    see(out)
    scratch.give_back(blocks)


def _soft_margin_backward(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
    """Compute the gradient of a soft margin from three tensors, and multiply the last one."""
    blocks = scratch.take(out, out, out)
    scratch.give_back(blocks[1:])
    see(out)
    scratch.give_back(blocks[:1])


def _isinf(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
    x: Tensor = args[0]
    taken = scratch.take_bytes(x, x.numel() * x.itemsize) if x.is_floating_point() else []
    see(out)
    scratch.give_back(taken)


def _safe_softmax(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
    """Compare every score with -inf, to find rows that are masked entirely."""
    see(out)
    scratch.use(out, out.numel())


def _resized(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
    if args[0].nbytes > out.nbytes:
        scratch.ledger.see_as(out, scratch.ledger.block(out, args[0].nbytes, scratch.name))
        return
    taken = scratch.take(args[0])
    see(out)
    scratch.give_back(taken)


# The functions below return results for fake tensors, or NotImplemented if torch's own is right.
def _histogram(x: Tensor, bins: int = 100, *_: float) -> Tensor:
    """Return the bins of a histogram. torch's fake refuses integers, which GPUs count."""
    return NotImplemented if x.is_floating_point() else x.new_empty(bins)


def _return_out(*_: object, out: Tensor, **__: object) -> Tensor:
    """Return `out`, because before torch 2.13 the fake of the op raises an error."""
    return out


def _return_none(*_: object, **__: object) -> None:
    """Return None. The op writes to its arguments, and this is faster than its registered fake."""


def _grouped_product(
    left: Tensor, right: Tensor, offsets: Tensor | None = None, *_: object, **__: object
) -> Tensor:
    """Return grouped products in rows, columns or matrices. torch's fake needs bfloat16."""
    if left.dtype == torch.bfloat16:
        return NotImplemented  # type: ignore[no-any-return]
    shape = (left.shape[-2], right.shape[-1])
    if left.dim() == right.dim() == 2 and offsets is not None:
        return left.new_empty((len(offsets), *shape))
    return left.new_empty((len(left), *shape) if left.dim() == right.dim() == 3 else shape)


def memory_format_of(x: Tensor) -> torch.memory_format:
    """Return the memory format of a tensor, contiguous if it has several."""
    return torch.contiguous_format if x.is_contiguous() else suggest_memory_format(x)


def _in_format_of(op: Op, position: int) -> Callable[..., object]:
    """Return a fake of `op` whose first result has the memory format of one of its arguments.

    The real kernel only has contiguous and channels_last results.
    """

    def result(*args: Any, **kwargs: Any) -> object:
        x: Tensor = args[position]
        out = op(*args, **kwargs)
        input_format = memory_format_of(x)
        first, *others = (out,) if isinstance(out, Tensor) else out
        if first is not None and not first.is_contiguous(memory_format=input_format):
            first = torch.empty_like(first, memory_format=input_format)
        return first if isinstance(out, Tensor) else (first, *others)

    return result


for _op, _position in (
    (_aten.native_batch_norm.default, 0),
    (_aten._native_batch_norm_legit.default, 0),
    (_aten._native_batch_norm_legit.no_stats, 0),
    (_aten._batch_norm_with_update.default, 0),
    (_aten.native_batch_norm_backward.default, 1),
    (_aten.roll.default, 0),
    (_aten.channel_shuffle.default, 0),
    (_aten.native_channel_shuffle.default, 0),
):
    describe(name_of(_op), result_on_cpu=_in_format_of(_op, _position))
describe("add.Tensor", in_place=_aten.add_.Tensor)
describe("index_add.default", in_place=_aten.index_add_.default)
describe("index_fill.int_Tensor", in_place=_aten.index_fill_.int_Tensor)
describe("index_put.default", in_place=_aten.index_put_.default)
describe("put.default", in_place=_aten.put_.default)
describe("scatter.src", in_place=_aten.scatter_.src)
describe("scatter_add.default", in_place=_aten.scatter_add_.default)
describe("mse_loss.default smooth_l1_loss.default", scratch=_loss(2, True, True))
describe("huber_loss.default", scratch=_loss(2, False, True))
describe("soft_margin_loss.default", scratch=_loss(2, True, False))
describe("binary_cross_entropy.default", scratch=_loss(3, True, False))
describe("logsumexp.default", scratch=_logsumexp)
describe("sub.Tensor", in_place=_aten.sub_.Tensor)
describe("mul.Tensor", in_place=_aten.mul_.Tensor)
describe("logical_and.default", in_place=_aten.logical_and_.default)
describe("masked_fill.Scalar", in_place=_aten.masked_fill_.Scalar)
describe("binary_cross_entropy_with_logits.default", scratch=_logit_losses)
describe("soft_margin_loss_backward.default", scratch=_soft_margin_backward)
describe("isinf.default", scratch=_isinf)
describe("_safe_softmax.default", scratch=_safe_softmax)
describe("im2col.default col2im.default", scratch=_resized)
describe("histc.default", result=_histogram)
describe("addmm.dtype_out", result=_return_out)
describe("_grouped_mm.default", result=_grouped_product)
describe(
    "storage_ops::_cross_entropy_rows storage_ops::_divergence_rows storage_ops::_product"
    " storage_ops::_scale storage_ops::_transposed_product",
    result=_return_none,
)
