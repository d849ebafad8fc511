"""Laws of degree: how a factor of an op's arguments becomes a factor of its result."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from torch import fx

from storage_ops.autochunk.nodes import argument, tensors
from storage_ops.autochunk.state import Conflict

Degree: TypeAlias = int | None  # of homogeneity; None: the value is zero, which has every degree
DegreeLaw: TypeAlias = Callable[[fx.Node, Callable[[Any], Degree]], Degree]


def common(degrees: Iterable[Degree]) -> Degree:
    """The degree that all share. Terms of a sum must."""
    found = {d for d in degrees if d is not None}
    if len(found) > 1:
        raise Conflict("adds what grows with the upstream gradient to what does not")
    return found.pop() if found else None


def linear(node: fx.Node, degree: Callable[[Any], Degree]) -> Degree:
    """f(c x) = c f(x), in all tensors at once; numbers among the arguments are of degree 0."""
    return common(degree(a) for a in tensors(node))


def additive(node: fx.Node, degree: Callable[[Any], Degree]) -> Degree:
    """c x + c y = c (x + y)."""
    return common(degree(a) for a in node.args[:2])


def fused(node: fx.Node, degree: Callable[[Any], Degree]) -> Degree:
    """(c x) y + c z = c (x y + z)."""
    return common((bilinear(node, degree), degree(node.args[2])))


def selecting(node: fx.Node, degree: Callable[[Any], Degree]) -> Degree:
    """where(m, c x, c y) = c where(m, x, y)."""
    constant(degree(node.args[0]))
    return common(degree(a) for a in node.args[1:3])


def filling(node: fx.Node, degree: Callable[[Any], Degree]) -> Degree:
    """masked_fill(c x, m, v) = c masked_fill(x, m, v) if v is 0."""
    constant(degree(node.args[1]))
    return common(degree(a) for a in (node.args[0], node.args[2]))


def constant(degree: Degree) -> None:
    """Raise for a degree other than 0."""
    if degree:
        raise Conflict("is not linear in the upstream gradient")


def nonlinear(node: fx.Node, degree: Callable[[Any], Degree]) -> Degree:
    """No law: no argument may carry a factor."""
    for a in tensors(node):
        constant(degree(a))
    return 0


def bilinear(node: fx.Node, degree: Callable[[Any], Degree]) -> Degree:
    """(c x) y = x (c y) = c (x y)."""
    left, right = (degree(a) for a in node.args[:2])
    if left is None or right is None:
        return None
    if left + right > 1:
        raise Conflict("is quadratic in the upstream gradient")
    return left + right


def dividing(node: fx.Node, degree: Callable[[Any], Degree]) -> Degree:
    """(c x) / y = c (x / y)."""
    constant(degree(node.args[1]))
    return degree(node.args[0])


def affine(node: fx.Node, degree: Callable[[Any], Degree]) -> Degree:
    """c bias + (c x) y = c (bias + x y)."""
    product = bilinear_of(degree(node.args[1]), degree(node.args[2]))
    return common((degree(node.args[0]), product))


def bilinear_of(left: Degree, right: Degree) -> Degree:
    """The degree of a product."""
    return None if left is None or right is None else left + right


def gradient(node: fx.Node, degree: Callable[[Any], Degree]) -> Degree:
    """A backward op: linear in its first argument, the gradient."""
    for a in tensors(node):
        if a is not node.args[0]:
            constant(degree(a))
    return degree(node.args[0])


def indexing(node: fx.Node, degree: Callable[[Any], Degree]) -> Degree:
    """Gathers linearly; the index has no factor."""
    constant(degree(node.args[2]))
    return degree(node.args[0])


def padded(node: fx.Node, degree: Callable[[Any], Degree]) -> Degree:
    """pad(c x, v) = c pad(x, v) if v is 0."""
    return common((degree(node.args[0]), degree(argument(node, 2, "value", 0))))


def taking(node: fx.Node, degree: Callable[[Any], Degree]) -> Degree:
    """(c x)[i] = c x[i]."""
    for index in node.args[1]:  # type: ignore[union-attr]
        constant(degree(index))
    return degree(node.args[0])


def putting(node: fx.Node, degree: Callable[[Any], Degree]) -> Degree:
    """put(c x, i, c y) = c put(x, i, y)."""
    for index in node.args[1]:  # type: ignore[union-attr]
        constant(degree(index))
    return common((degree(node.args[0]), degree(node.args[2])))


def scattering(node: fx.Node, degree: Callable[[Any], Degree]) -> Degree:
    """scatter(c x, i, c y) = c scatter(x, i, y)."""
    constant(degree(node.args[2]))
    return common((degree(node.args[0]), degree(node.args[3])))
