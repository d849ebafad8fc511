"""The problem that a plan of linear cross-entropy is made for. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from storage_ops.matmul import Matmul

Reduction = Literal["mean", "sum", "none"]
Grad = Literal["input", "weight", "bias"]  # arguments of the loss that need a gradient

REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)
GRADS: tuple[Grad, ...] = get_args(Grad)


@dataclass(frozen=True)
class Problem:
    """All that a plan depends on: sizes, options, and who multiplies.

    Attributes:
        tokens, hidden, vocab: N, D and V of `input (N, D) @ linear_weight (V, D).T`.
        matmul: the products, with the size of an element of input and weight.
        left_out: rows of the input, beyond those tokens, that are ignored.
        grads: whether input, weight and bias need gradients.
        sums_fp32: gradients of 16-bit arguments are summed in fp32.
        in_forward: the gradients are made in the forward: one upstream number scales them.
        rescales: a row's gradient is its probabilities times one number, less its target's part.
        into: the gradient of the weight is added to a given fp32 buffer, not returned.
        gathers: rows of ignored tokens are left out; `tokens` counts the others.
        masks: rows of the input are copied, for those of weight 0 to be 0.
        plain: the row kernel is plain torch, which makes copies of some rows of a tile.
        wide_logits: tiles of logits are in fp32, of 16-bit arguments.
        picks: classes of each token whose log-probabilities are asked for.
        top: so many of them are those of the largest logits.
        cast_bytes: bytes per element of a tile that the target, given as probabilities, is cast to.
        fixed_bytes: copies of arguments whose strides or dtype no kernel takes.
        several: other ranks have classes too: the state of rows is merged with theirs.
        alike: every rank has as many, and so the same steps: the state of a chunk is merged while
            the next is multiplied, in a second tile.
        keeps: the last tile of the forward may stay until the backward, which begins with it.
        multiplied: the share of the classes that gradients are expected to be multiplied with;
            below 1: the others are left out, for which tiles have scratch memory.
        selects_late: classes are selected by the gradient, which overwrites the logits of a tile.
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
    keeps: bool = False
    multiplied: float = 1.0
    selects_late: bool = False

    @property
    def selects(self) -> bool:
        """Return True if classes may be left out of the gradient."""
        return self.multiplied < 1

    @property
    def gathers_gradient(self) -> bool:
        """Return True if only the part of a tile's gradient that is multiplied is computed.

        A bias has a gradient of every class.
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

    Rows start on 64 elements: odd sizes stay on the fast paths of products. Never a multiple of
    512: rows a power of two apart share their places in a cache.
    """
    width = -(-columns // 64) * 64
    return width + 64 if width % 512 == 0 else width
