"""Policies that depend on the op, and perhaps on its number or the shape of a right factor.

The library of saved tensors can follow such a policy (`native.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from storage_ops.checkpoint.selective import policies
from storage_ops.checkpoint.selective.policies import Policy
from storage_ops.foundation.op_names import all_names, op_named, packet_of
from storage_ops.foundation.ops import described, facts_of, family_of

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


class Calls(NamedTuple):
    """Calls of an op, by their numbers in a region.

    Attributes:
        family: the name under which calls are counted, which other ops may have, too.
        saved: the numbers of the calls whose results are saved on the device, from 0.
        offloaded: those of the calls whose results are saved in host memory.
    """

    family: str
    saved: frozenset[int]
    offloaded: frozenset[int] = frozenset()

    def with_those_of(self, other: Calls) -> Calls:
        """Return the calls of both. A result is on the device if one of them saves it there."""
        saved = self.saved | other.saved
        return Calls(self.family, saved, (self.offloaded | other.offloaded) - saved)

    def away(self) -> Calls:
        """Return the same calls, all in host memory."""
        return Calls(self.family, frozenset(), self.saved | self.offloaded)


class OpsSaved(NamedTuple):
    """A policy that depends on ops, shapes and numbers of calls.

    Attributes:
        chosen: for each op whose results it saves, the shapes of the right factor for which it
            does, or the calls.
        k: it saves the first of these results and every k-th after it. 1 if calls are chosen.
        offloaded: the ops, with shapes, whose saved results are in host memory.
    """

    chosen: dict[str, Shapes | Calls]
    k: int = 1
    offloaded: frozenset[str] = frozenset()

    @property
    def shapes(self) -> dict[str, Shapes]:
        """Return the shapes of the ops that are chosen by shapes."""
        return {name: each for name, each in self.chosen.items() if isinstance(each, Shapes)}

    @property
    def calls(self) -> dict[str, Calls]:
        """Return the calls of the ops that are chosen by calls."""
        return {name: each for name, each in self.chosen.items() if isinstance(each, Calls)}


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
    if isinstance(policy, policies._SaveCalls):
        return _of_calls(policy)
    if isinstance(policy, policies._EveryKth):
        inner = ops_saved(policy.policy)
        if inner is None or inner.k != 1 or inner.calls:
            return None
        return inner._replace(k=policy.k)
    if isinstance(policy, policies._Offload):
        inner = ops_saved(policy.policy)
        if inner is None:
            return None
        away = {name: calls.away() for name, calls in inner.calls.items()}
        return OpsSaved({**inner.chosen, **away}, inner.k, frozenset(inner.shapes))
    if isinstance(policy, policies._Union):
        return _union(*map(ops_saved, policy.parts))
    if isinstance(policy, policies._Difference):
        return _difference(ops_saved(policy.policy), ops_saved(policy.other))
    return None


def _of_calls(policy: policies._SaveCalls) -> OpsSaved | None:
    numbers: dict[str, set[int]] = {}
    for family, number in policy.calls:
        numbers.setdefault(family, set()).add(number)
    names = [name for name in all_names() if family_of(name) in numbers]
    if not all(name.startswith("aten::") or packet_of(name) in described() for name in names):
        return None
    families = {name: family_of(name) for name in _known(policy, names)}
    return OpsSaved(
        {name: Calls(each, frozenset(numbers[each])) for name, each in families.items()}
    )


def _union(*parts: OpsSaved | None) -> OpsSaved | None:
    known = [part for part in parts if part is not None and part.k == 1]
    if len(known) < len(parts):
        return None
    chosen: dict[str, Shapes | Calls] = {}
    for part in known:
        for name, each in part.chosen.items():
            if each == NONE:
                continue
            before = chosen.get(name, each)
            if type(before) is not type(each):
                return None
            other: Any = each
            chosen[name] = before.with_those_of(other)
    # A result is on the device if one of the policies saves it there.
    offloaded = frozenset[str]().union(*(part.offloaded for part in known))
    for part in known:
        kept = frozenset(part.shapes) - part.offloaded
        if any(part.shapes[name] != ALL for name in offloaded & kept):
            return None
        offloaded -= kept
    return OpsSaved(chosen, offloaded=offloaded & frozenset(chosen))


def _difference(first: OpsSaved | None, other: OpsSaved | None) -> OpsSaved | None:
    if first is None or other is None or first.k * other.k != 1 or first.calls or other.calls:
        return None
    without = other.shapes
    left = {name: each.without(without.get(name, NONE)) for name, each in first.shapes.items()}
    shapes: dict[str, Shapes | Calls] = {name: each for name, each in left.items() if each != NONE}
    return OpsSaved(shapes, offloaded=first.offloaded & frozenset(shapes))


class Row(NamedTuple):
    """An op of a policy, as the library reads it.

    Attributes:
        name: the op.
        right: the position of the right factor; -1 if its shape does not matter.
        others: whether the op is saved for shapes that are not named.
        named: some shapes.
        offloads: whether all results are in host memory.
        family: the name under which calls are counted; "" if their numbers do not matter.
        saved, offloaded: the numbers of calls whose results are saved.
    """

    name: str
    right: int
    others: bool
    named: list[Shape]
    offloads: bool
    family: str
    saved: list[int]
    offloaded: list[int]


def rows_of(ops: OpsSaved) -> list[Row]:
    """Return a row for each op."""
    rows = []
    for name, each in sorted(ops.chosen.items()):
        shapes, calls = (each, None) if isinstance(each, Shapes) else (ALL, each)
        rows.append(
            Row(
                name,
                -1 if shapes == ALL else _right(name),
                shapes.others,
                sorted(shapes.named),
                name in ops.offloaded,
                "" if calls is None else calls.family,
                [] if calls is None else sorted(calls.saved),
                [] if calls is None else sorted(calls.offloaded),
            )
        )
    return rows


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
