"""Layouts: one chunk of tokens has a slice of a value's rows, a term of a sum, or all of it.

The tokens are the rows of the product that amplifies its input. They come in groups of `step`
tokens, and a chunk takes a range of groups. A group has one token unless an op mixes the tokens of
a sequence.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from storage_ops.autochunk.fx_graph.nodes import Size
from storage_ops.autochunk.reasons import Conflict


class Regroup(Exception):
    """The ends of chunks must be multiples of more tokens than `step`."""

    def __init__(self, step: Size):
        super().__init__(f"it needs chunks of whole groups of {step} tokens")
        self.step = step


@dataclass(frozen=True)
class Rows:
    """The elements of dimensions lo to hi - 1, in row-major order, belong to groups in order.

    Attributes:
        per: the number of elements of a group.
        outer: how many times the groups repeat, one after another. In a span it is 1.
    """

    lo: int
    hi: int
    per: Size = 1
    outer: Size = 1


@dataclass(frozen=True)
class Whole:
    """The whole value, the same for every chunk."""


@dataclass(frozen=True)
class Partial:
    """A term of a sum for each chunk.

    Attributes:
        mean: whether the sum is divided by the number of its elements, for a mean.
    """

    mean: bool = False


@dataclass(frozen=True)
class Spread:
    """Rows, after the value has been expanded to `sizes`."""

    rows: Rows
    sizes: tuple[Size, ...]


Layout: TypeAlias = Rows | Whole | Partial | Spread


def same(left: Size, right: Size) -> bool:
    """Return True if two sizes are equal for every value of their symbols."""
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(left == right))


def less(left: Size, right: Size) -> bool:
    """Return True if a size is smaller than another for every value of their symbols."""
    if isinstance(left, int) and isinstance(right, int):
        return left < right
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(left < right))


def divides(size: Size, other: Size) -> bool:
    """Return True if `size` divides `other` for every value of their symbols."""
    if isinstance(size, int) and isinstance(other, int):
        return size > 0 and other % size == 0
    return same(size, 1) or same(size, other)


def equal(left: Layout | None, right: Layout | None) -> bool:
    """Return True if two layouts are the same."""
    if isinstance(left, Rows) and isinstance(right, Rows):
        places = (left.lo, left.hi) == (right.lo, right.hi)
        return places and same(left.per, right.per) and same(left.outer, right.outer)
    if isinstance(left, Spread) or isinstance(right, Spread):
        return False
    return left == right


def canonical(rows: Rows, shape: Sequence[Size]) -> Rows:
    """Return the same rows with as few dimensions as possible.

    Dimensions that a chunk never cuts are removed from the rows.
    """
    lo, hi, per, outer = rows.lo, rows.hi, rows.per, rows.outer
    while hi - lo > 1 and divides(shape[lo], outer):
        outer = quotient(outer, shape[lo])
        lo += 1
    while hi - lo > 1 and divides(shape[hi - 1], per):
        hi -= 1
        per = quotient(per, shape[hi])
    return Rows(lo, hi, per, outer)


def reshape(rows: Rows, old: Sequence[Size], new: Sequence[Size]) -> Rows:
    """Return the rows of a tensor after a view of it."""
    for first, finest in itertools.product(
        range(rows.lo, -1, -1), range(rows.hi, len(old) + 1)
    ):  # fmt: skip
        before, count = math.prod(old[:first]), math.prod(old[first:finest])
        outer = rows.outer * math.prod(old[first : rows.lo])
        per = rows.per * math.prod(old[rows.hi : finest])
        for lo in range(len(new)):
            if not same(math.prod(new[:lo]), before):
                continue
            for hi in range(lo + 1, len(new) + 1):
                if same(math.prod(new[lo:hi]), count):
                    return canonical(Rows(lo, hi, per, outer), new)
    raise Conflict(f"the view from {tuple(old)} to {tuple(new)} mixes tokens")


def quotient(size: Size, divisor: Size) -> Size:
    """Return the quotient of a size and a size that divides it."""
    return 1 if same(size, divisor) else size if same(divisor, 1) else size // divisor
