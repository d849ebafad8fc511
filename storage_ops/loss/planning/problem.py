"""The problem that the planner of linear cross-entropy solves. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from storage_ops.matmul import Matmul
from storage_ops.quantities import next_multiple

Reduction = Literal["mean", "sum", "none"]
Grad = Literal["input", "weight", "bias"]  # arguments of the loss that need a gradient

REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)
GRADS: tuple[Grad, ...] = get_args(Grad)


@dataclass(frozen=True)
class Problem:
    """All that a plan depends on: sizes, options, and the matrix products.

    Attributes:
        tokens, hidden, vocab: N, D and V of `input (N, D) @ linear_weight (V, D).T`.
        matmul: the products, with the size of an element of input and weight.
        left_out: ignored rows of the input, which `tokens` does not count.
        grads: whether input, weight and bias need gradients.
        sums_fp32: whether gradients of 16-bit arguments are summed in fp32.
        in_forward: whether the forward computes the gradients, because one upstream number scales
            them.
        rescales: whether a row's gradient is its probabilities times one number, minus the target's
            part.
        into: whether the weight's gradient is added to the caller's fp32 buffer, not returned.
        gathers: whether rows of ignored tokens are left out; `tokens` counts the others.
        masks: whether rows of the input are copied, to set those of weight 0 to 0.
        plain: whether the row kernel is plain torch, which copies some rows of a tile.
        wide_logits: whether tiles of logits are in fp32 for 16-bit arguments.
        picks: how many log-probabilities are requested for each token.
        top: how many of them belong to the largest logits.
        cast_bytes: bytes per element of a tile that the target, given as probabilities, is cast to.
        fixed_bytes: copies of arguments whose strides or dtype kernels do not accept.
        several: whether other ranks have classes, too. Then the state of rows is merged with
            theirs.
        alike: whether every rank has as many classes, and so the same steps. Then the state of a
            chunk is merged while the next chunk is multiplied, in a second tile.
        sums_wide: whether the input's gradient is summed in fp32 on another rank, which has more
            classes. Ranks add up gradients of one dtype.
        keeps: whether the last tile of the forward may stay until the backward, which begins with
            it.
        multiplied: the share of the classes that gradients are expected to be multiplied with.
            Below 1, tiles have scratch memory to select classes.
        selects_late: whether classes are selected by the gradient, after it has overwritten the
            logits of a tile.
    """

    tokens: int
    hidden: int
    vocab: int
    matmul: Matmul
    left_out: int = 0
    grads: tuple[bool, bool, bool] = (True, True, False)
    sums_fp32: bool = True
    in_forward: bool = True
    rescales: bool = True
    into: bool = False
    gathers: bool = False
    masks: bool = False
    plain: bool = False
    wide_logits: bool = False
    picks: int = 0
    top: int = 0
    cast_bytes: int = 0
    fixed_bytes: int = 0
    several: bool = False
    alike: bool = True
    sums_wide: bool = False
    keeps: bool = False
    multiplied: float = 1.0
    selects_late: bool = False

    @property
    def selects(self) -> bool:
        """Return True if classes may be left out of the gradient."""
        return self.multiplied < 1

    @property
    def gathers_gradient(self) -> bool:
        """Return True if only the multiplied part of a tile's gradient is computed.

        A bias needs the gradient of every class.
        """
        return self.selects and not (self.selects_late or self.grads[2])

    @property
    def itemsize(self) -> int:
        """Return the bytes per element of input and weight."""
        return self.matmul.itemsize

    @property
    def logit_bytes(self) -> int:
        """Return the bytes per logit of a tile."""
        return 4 if self.wide_logits else self.itemsize

    @property
    def arithmetic(self) -> int:
        """Return the bytes per element of numbers that are computed in full precision."""
        return max(self.itemsize, 4)

    @property
    def mixed(self) -> bool:
        """Return True if sums of gradients may be in a wider dtype than the returned gradients."""
        return self.itemsize < 4 and (self.sums_fp32 or self.matmul.upcasts)


def parts(total: int, size: int) -> int:
    """Return how many pieces of up to this size there are."""
    return -(-total // size) if total else 0


def padded(columns: int) -> int:
    """Return the number of elements from one row of a tile to the next.

    Rows start at multiples of 64 elements, because odd sizes make products slow. The distance is
    never a multiple of 512, because rows a power of two apart compete for the same cache sets.
    """
    width = next_multiple(columns, 64)
    return width + 64 if width % 512 == 0 else width
