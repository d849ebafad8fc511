"""Names of ops, looked up in the dispatcher's registry.

The package names an op as the dispatcher does: `aten::mm`, `aten::mm.dtype`. Higher-order ops have
no schema. Their names are like `higher_order::flex_attention`.
"""

from __future__ import annotations

import difflib
import functools
import re
import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import torch

Overload: TypeAlias = "torch._ops.OpOverload[..., Any]"  # an op with a schema
Op: TypeAlias = "torch._ops.OpOverload[..., Any] | torch._ops.HigherOrderOperator"

HIGHER_ORDER = "higher_order"
# aten.mm, aten.mm.default, aten::mm, torch.ops.aten.mm.default
_SPELLINGS = re.compile(r"(?:torch\.ops\.)?(\w+)(?:\.|::)(\w+)(?:\.(\w+))?")


@functools.cache
def name_of(op: Op) -> str:
    """Return the dispatcher's name of an op that a policy decides about.

    Example:
        >>> from storage_ops.foundation.op_names import name_of
        >>> name_of(torch.ops.aten.mm.default), name_of(torch.ops.aten.mm.dtype)
        ('aten::mm', 'aten::mm.dtype')
    """
    name = str(op.name())  # type: ignore[no-untyped-call]
    return name if "::" in name else f"{HIGHER_ORDER}::{name}"


def readable(name: str) -> str:
    """Return the dispatcher's name as users write it: `aten.mm`."""
    return name.replace("::", ".")


def packet_of(name: str) -> str:
    """Return the name without the overload."""
    return name.partition(".")[0]


def all_names() -> list[str]:
    """Return the names of all ops that the dispatcher has."""
    names: list[str] = torch._C._dispatch_get_all_op_names()
    return names


def op_named(name: str) -> Overload | None:
    """Return the op with a dispatcher's name; None if Python cannot call such an op.

    Example:
        >>> from storage_ops.foundation.op_names import op_named
        >>> op_named("aten::mm.out")
        <OpOverload(op='aten.mm', overload='out')>
    """
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    op_packet = getattr(getattr(torch.ops, namespace), packet, None)
    return getattr(op_packet, overload or "default", None)


@functools.cache
def is_mutating(op: Op) -> bool:
    """Return True if the op modifies an argument in place."""
    return bool(getattr(getattr(op, "_schema", None), "is_mutable", False))


@functools.cache
def is_view(op: Op) -> bool:
    """Return True if an output of the op is a view of an argument, by its schema."""
    schema = getattr(op, "_schema", None)
    return schema is not None and any(
        r.alias_info is not None and not r.alias_info.is_write for r in schema.returns
    )


@functools.cache
def is_allocation(op: Op) -> bool:
    """Return True if the op returns uninitialised memory."""
    return name_of(op).startswith(("aten::empty", "aten::new_empty"))


def resolve(ops: Iterable[Any], field: str) -> frozenset[str]:
    """Return the dispatcher's names of all overloads that the given names mean.

    Args:
        ops: names such as "aten.mm" (all overloads that modify no argument), "aten.mm.default",
            "torch.ops.aten.mm.default", "aten::mm", or the ops themselves.
        field: the argument that has the names. Errors begin with it.

    Raises:
        TypeError: an item is neither a name nor an op.
        ValueError: there is no such op (names similar ones), or it modifies an argument.

    Example:
        >>> from storage_ops.foundation.op_names import resolve
        >>> sorted(resolve(["aten.mm"], "ops_to_save"))
        ['aten::mm', 'aten::mm.dtype']
        >>> sorted(resolve(["torch.ops.aten.mm.default"], "ops_to_save"))
        ['aten::mm']
    """
    if isinstance(ops, str):
        raise TypeError(f"`{field}` is the string {ops!r}. Expected a list of op names.")
    names: set[str] = set()
    for op in ops:
        names |= _resolve_one(op, field)
    return frozenset(names)


def _resolve_one(op: object, field: str) -> set[str]:
    if isinstance(op, torch._ops.HigherOrderOperator):
        return {name_of(op)}
    if isinstance(op, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        op = str(op)
    if not isinstance(op, str):
        raise TypeError(
            f"`{field}` contains {op!r}, a {type(op).__name__}. Expected the name of an op, such "
            "as 'aten.mm'."
        )
    match = _SPELLINGS.fullmatch(op.strip())
    if match is None:
        raise ValueError(
            f"`{field}` contains {op!r}. Expected the name of an op: namespace.name or "
            "namespace.name.overload, such as 'aten.mm'."
        )
    namespace, name, overload = match.groups()
    packet = f"{namespace}::{name}"
    if namespace == HIGHER_ORDER and name in torch._ops._higher_order_ops:
        return {packet}
    by_overload = _overloads(packet)
    if not by_overload:
        raise ValueError(f"`{field}` contains {op!r}: there is no such op.{_similar(packet)}")
    if overload is not None and overload not in by_overload:
        raise ValueError(
            f"`{field}` contains {op!r}: {readable(packet)} has no such overload. Expected one of "
            f"{', '.join(sorted(by_overload))}."
        )
    wanted = by_overload if overload is None else [overload]
    saveable = {by_overload[o].name for o in wanted if not by_overload[o].schema.is_mutable}
    if not saveable:
        raise ValueError(
            f"`{field}` contains {op!r}, which modifies its arguments in place. Expected an op "
            "whose result can be kept."
        )
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if all(has_kernel(name, "CompositeImplicitAutograd") for name in saveable):
        warnings.warn(
            f"`{field}` contains {op!r}, which autograd sees as several other ops. A policy is "
            "asked about those, and seldom about this one. Call explain_policy to list them.",
            stacklevel=2,
        )
    return saveable


class _Overload(NamedTuple):
    name: str
    schema: Any


def _overloads(packet: str) -> dict[str, _Overload]:
    """Return all overloads in the dispatcher. TorchScript has more."""
    known = set(all_names())
    by_overload = {}
    for schema in torch._C._jit_get_schemas_for_operator(packet):
        name = f"{packet}.{schema.overload_name}" if schema.overload_name else packet
        if name in known:
            by_overload[schema.overload_name or "default"] = _Overload(name, schema)
    return by_overload


def _similar(packet: str) -> str:
    packets = set(map(packet_of, all_names()))
    packets |= {f"{HIGHER_ORDER}::{name}" for name in torch._ops._higher_order_ops}
    namespace, _, name = packet.partition("::")
    near = [f"{namespace}::{n}" for n in difflib.get_close_matches(
        name, [p.partition("::")[2] for p in packets if p.startswith(f"{namespace}::")]
    )]  # fmt: skip
    near = near or difflib.get_close_matches(packet, packets)
    return f" Did you mean {', '.join(map(readable, near))}?" if near else ""
