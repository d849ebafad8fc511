"""Policies that depend only on the op, or on the op and the shape of a product's right factor.

The library of saved tensors can follow such a policy (`native.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from storage_ops.checkpoint.selective import policies
from storage_ops.checkpoint.selective.policies import Policy
from storage_ops.foundation.op_names import all_names, op_named, packet_of
from storage_ops.foundation.ops import described, facts_of

Shape = tuple[int, ...]


class Shapes(NamedTuple):
    """A set of shapes.

    Attributes:
        named: some shapes.
        others: whether the set has all shapes but the named ones.
    """

    named: frozenset[Shape] = frozenset()
    others: bool = True

    def without(self, other: Shapes) -> Shapes:
        """Return the shapes of this set that are not in another."""
        return ~(~self).with_those_of(other)

    def with_those_of(self, other: Shapes) -> Shapes:
        """Return the shapes of both sets."""
        if self.others:
            kept = other.named if other.others else frozenset[Shape]()
            rest = self.named & kept if other.others else self.named - other.named
            return Shapes(rest)
        if other.others:
            return other.with_those_of(self)
        return Shapes(self.named | other.named, others=False)

    def __invert__(self) -> Shapes:
        return Shapes(self.named, not self.others)


ALL, NONE = Shapes(), Shapes(others=False)


class OpsSaved(NamedTuple):
    """A policy that depends on ops and shapes.

    Attributes:
        shapes: for each op whose results it saves, the shapes of the right factor for which it
            does.
        k: it saves the first of these results and every k-th after it.
        offloaded: the ops whose saved results are in host memory.
    """

    shapes: dict[str, Shapes]
    k: int = 1
    offloaded: frozenset[str] = frozenset()


def ops_saved(policy: Policy) -> OpsSaved | None:
    """Return the ops whose results a policy saves. None if it inspects calls or names many ops."""
    if policy is policies.matmuls or policy is policies.attention:
        return OpsSaved(dict.fromkeys(_names_of_rows(policy), ALL))
    if isinstance(policy, policies._Save):
        named = all(name.startswith("aten::") for name in policy.names)
        return OpsSaved(dict.fromkeys(_known(policy, policy.names), ALL)) if named else None
    if isinstance(policy, policies._SaveShapes):
        shapes = Shapes(policy.shapes, others=False)
        return OpsSaved({name: shapes for name in _names_of_rows(policy) if _right(name) >= 0})
    if isinstance(policy, policies._EveryKth):
        inner = ops_saved(policy.policy)
        return inner._replace(k=policy.k) if inner is not None and inner.k == 1 else None
    if isinstance(policy, policies._Offload):
        inner = ops_saved(policy.policy)
        return None if inner is None else inner._replace(offloaded=frozenset(inner.shapes))
    if isinstance(policy, policies._Union):
        parts = [ops_saved(part) for part in policy.parts]
    elif isinstance(policy, policies._Difference):
        parts = [ops_saved(policy.policy), ops_saved(policy.other)]
    else:
        return None
    if any(part is None or part.k != 1 for part in parts):
        return None
    first, *others = (part.shapes for part in parts if part is not None)
    saved = dict(first)
    for other in others:
        for name, shapes in other.items():
            before = saved.get(name, NONE)
            is_union = isinstance(policy, policies._Union)
            saved[name] = before.with_those_of(shapes) if is_union else before.without(shapes)
    known = [part for part in parts if part is not None]
    if isinstance(policy, policies._Difference):
        offloaded = known[0].offloaded
    else:  # a result is on the device if one of the policies saves it there
        offloaded = frozenset[str]().union(*(part.offloaded for part in known))
        for part in known:
            kept = frozenset(part.shapes) - part.offloaded
            if any(part.shapes[name] != ALL for name in offloaded & kept):
                return None
            offloaded -= kept
    shapes_of = {name: shapes for name, shapes in saved.items() if shapes != NONE}
    return OpsSaved(shapes_of, offloaded=offloaded & frozenset(shapes_of))


def rows_of(ops: OpsSaved) -> list[tuple[str, int, bool, list[Shape], bool]]:
    """Return a tuple for each op, which the library reads.

    It has the name, the position of the right factor, whether shapes that are not named are saved,
    the named shapes, and whether results are offloaded. The position is -1 if the op is saved for
    all shapes.
    """
    return [
        (
            name,
            -1 if shapes == ALL else _right(name),
            shapes.others,
            sorted(shapes.named),
            name in ops.offloaded,
        )
        for name, shapes in sorted(ops.shapes.items())
    ]


def _right(name: str) -> int:
    """Return the position of the right factor of a product of two matrices; -1 for other ops."""
    op = op_named(name)
    product = None if op is None else facts_of(op).product
    return product.right if product is not None and product.form == "matrices" else -1


def _names_of_rows(policy: Policy) -> frozenset[str]:
    """Return the ops that a policy saves and the table of ops names."""
    packets = {packet_of(name) for name in described() if not name.startswith("tag::")}
    return _known(policy, (name for name in all_names() if packet_of(name) in packets))


def _known(policy: Policy, names: Iterable[str]) -> frozenset[str]:
    """Return the ops among these that exist, run by themselves and have a result to save."""
    return frozenset(
        name
        for name in names
        if (op := op_named(name)) is not None
        and not op._schema.is_mutable
        and facts_of(op).saveable
        and not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
        and policies.may_save(policy, op)
    )
