"""Policies decide which results of a checkpointed region are saved, and which are recomputed.

A policy is a function of the form that `torch.utils.checkpoint` uses:

    def policy(ctx, op, *args, **kwargs) -> CheckpointPolicy | bool

It is called for every op of the forward, with the op's arguments. `ctx.op_output` is the op's
result. True, `CheckpointPolicy.MUST_SAVE` and `PREFER_SAVE` save the result. "offload" saves it in
host memory. Policies are combined like sets of saved ops: `union`, `difference`, `every_kth`. A
policy that counts ops has a method `begin()`, which is called for every region and returns a fresh
policy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from storage_ops.foundation.op_names import (
    Op,
    is_mutating,
    is_view,
    name_of,
    resolve,
)
from storage_ops.foundation.ops import Args, Kwargs, OpFacts, facts_of, family_of

Policy = Callable[..., CheckpointPolicy | bool | str]

_SAVING = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
_RECOMPUTING = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
OFFLOAD: Literal["offload"] = "offload"
# torch has a value for it from 2.13 on, but its eager mode ignores the value.
_OFFLOADING = (OFFLOAD, getattr(CheckpointPolicy, "MUST_CPU_OFFLOAD", OFFLOAD))
_Kept = bool | Literal["offload"]  # saved, recomputed, or saved in host memory


def _decision(save: bool) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


def _word(kept: _Kept) -> CheckpointPolicy | str:
    return kept if isinstance(kept, str) else _decision(kept)


def saves(policy: Policy, ctx: object, op: Op, args: Args, kwargs: Kwargs) -> _Kept:
    """Return True if a policy saves the result of an op, or "offload" if in host memory.

    Raises:
        ValueError: the policy returned neither a bool, nor "offload", nor a CheckpointPolicy that
            saves or recomputes.
        RuntimeError: the policy raised a TypeError, which an operator such as @ would hide.
    """
    try:
        decision = policy(ctx, op, *args, **kwargs)
    except TypeError as error:
        raise RuntimeError(
            f"The policy {policy!r} failed for {op}: {error}. Expected a function policy(ctx, op, "
            "*args, **kwargs)."
        ) from error
    if decision is True or decision in _SAVING:
        return True
    if decision is False or decision in _RECOMPUTING:
        return False
    if decision in _OFFLOADING:
        return OFFLOAD
    raise ValueError(
        f"The policy {policy!r} returned {decision!r} for {op}. Expected a bool, 'offload', or a "
        "CheckpointPolicy that saves or recomputes."
    )


def begin(policy: Policy) -> Policy:
    """Return the policy for one region: a fresh one if it counts, else the policy itself."""
    fresh: Policy = policy.begin() if hasattr(policy, "begin") else policy
    return fresh


def may_save(policy: Policy, op: Op) -> bool:
    """Return False if a policy never saves results of an op, so that it need not be called.

    Policies of this file that inspect calls, or combine others, have a method of this name.
    Policies that are functions depend only on the op. A user's policy is always called.
    """
    if any(policy is each for each in _OF_OPS):
        return saves(policy, None, op, (), {}) is True
    look: Callable[[Op], bool] | None = getattr(policy, "may_save", None)
    return look is None or look(op)


# For each op name, its facts, and whether a policy is asked about its calls.
Asked = dict[str, tuple[OpFacts | None, bool]]
_asked: Any = weakref.WeakKeyDictionary()


def asked_about(policy: Policy) -> Asked:
    """Return a cache of `may_save` for a policy, by op."""
    try:
        known: Asked | None = _asked.get(policy)
        if known is None:
            known = _asked[policy] = {}
    except TypeError:  # a user's policy without a hash, or without weak references
        return {}
    return known


def matmuls(ctx: object, op: Op, *args: object, **kwargs: object) -> CheckpointPolicy:
    """Save the results of matrix products, including batched, scaled and grouped ones."""
    return _decision(facts_of(op).product is not None)


def attention(ctx: object, op: Op, *args: object, **kwargs: object) -> CheckpointPolicy:
    """Save the results of fused attention kernels and of flex_attention."""
    return _decision(facts_of(op).is_attention)


def communication(ctx: object, op: Op, *args: object, **kwargs: object) -> CheckpointPolicy:
    """Save the results of collectives, functional or in place, to avoid communication again."""
    return _decision(bool(facts_of(op).collective))


def everything(ctx: object, op: Op, *args: object, **kwargs: object) -> CheckpointPolicy:
    """Save all results except views, which take no memory. Use `difference` to exclude ops."""
    return _decision(not (is_mutating(op) or is_view(op)))


_OF_OPS: tuple[Policy, ...] = (matmuls, attention, communication, everything)


@dataclass(frozen=True)
class _Save:
    names: frozenset[str]

    def __call__(self, ctx: object, op: Op, *args: object, **kwargs: object) -> CheckpointPolicy:
        return _decision(self.may_save(op))

    def may_save(self, op: Op) -> bool:
        return name_of(op) in self.names


def save(*ops: object) -> Policy:
    """Save the results of these ops.

    Args:
        ops: names ("aten.mm" means all its overloads, "aten.mm.default" one) or the ops themselves.

    Raises:
        ValueError: there is no such op, or it modifies its arguments. TypeError: not a name.

    Example:
        >>> from storage_ops import policies
        >>> policies.save("aten.mm", torch.ops.aten.addmm.default)(None, torch.ops.aten.mm.default)
        <CheckpointPolicy.MUST_SAVE: 0>
    """
    return _Save(resolve(ops, "save()"))


@dataclass(frozen=True)
class _SaveCalls:
    calls: frozenset[tuple[str, int]]

    def __call__(self, ctx: object, op: Op, *args: object, **kwargs: object) -> CheckpointPolicy:
        raise _not_begun("save_calls")

    def begin(self) -> Policy:
        return _CallCounter(self.calls)

    def may_save(self, op: Op) -> bool:
        return any(facts_of(op).family == name for name, _ in self.calls)


class _CallCounter:
    """Numbers the calls of each op in a region, as `_Counter` does."""

    def __init__(self, calls: frozenset[tuple[str, int]]) -> None:
        self._calls = calls
        self._names = {name for name, _ in calls}
        self._seen: dict[tuple[str, bool], int] = {}

    def __call__(
        self, ctx: SelectiveCheckpointContext, op: Op, *args: object, **kwargs: object
    ) -> CheckpointPolicy:
        name = facts_of(op).family
        if name not in self._names:
            return CheckpointPolicy.PREFER_RECOMPUTE
        key = name, bool(ctx.is_recompute)
        number = self._seen.get(key, 0)
        self._seen[key] = number + 1
        return _decision((name, number) in self._calls)

    def never_made(self) -> list[str]:
        """Return the names of ops with a call to save that the forward has not made."""
        missing = {
            name for name, number in self._calls if number >= self._seen.get((name, False), 0)
        }
        return sorted(missing)


def save_calls(calls: Iterable[tuple[str, int]]) -> Policy:
    """Save the results of single calls of ops, counted from 0 in every region.

    Args:
        calls: pairs of an op and the number of a call, which counts the calls of this op from 0.
            The op is the dispatcher's name, such as "aten::mm" for the default overload. Two names
            stand for several ops. "attention" is every fused kernel of attention, because devices
            have different ones. "grouped_mm" is every product of groups, because transformers has
            an op of its own for devices where torch has none.

    Raises:
        TypeError: `calls` has other items. ValueError: a number is not from 0 to 2**31 - 1.

    Example:
        >>> from storage_ops import policies
        >>> policy = policies.save_calls([("aten::mm", 0), ("attention", 0)])
    """
    numbered = set()
    for call in calls:
        if not (isinstance(call, (tuple, list)) and [type(v) for v in call] == [str, int]):
            raise TypeError(
                f"save_calls: `calls` has {call!r}. Expected pairs such as ('aten::mm', 0)."
            )
        if not 0 <= call[1] < 1 << 31:
            raise ValueError(
                f"save_calls: `calls` has {call!r}. Expected a number of a call from 0 to "
                "2**31 - 1."
            )
        numbered.add((family_of(call[0]), call[1]))
    return _SaveCalls(frozenset(numbered))


@dataclass(frozen=True)
class _SaveShapes:
    shapes: frozenset[tuple[int, ...]]

    def __call__(self, ctx: object, op: Op, *args: Any, **kwargs: object) -> CheckpointPolicy:
        product = facts_of(op).product
        if product is None or product.form != "matrices" or len(args) <= product.right:
            return CheckpointPolicy.PREFER_RECOMPUTE
        shape = tuple(args[product.right].shape)  # a symbolic size does not belong to a layer
        return _decision(all(type(n) is int for n in shape) and shape in self.shapes)

    def may_save(self, op: Op) -> bool:
        return facts_of(op).product is not None


def save_mm_shapes(shapes: Iterable[tuple[int, ...]]) -> Policy:
    """Save matrix products (mm, addmm) whose right factor has one of these shapes.

    Args:
        shapes: (in_features, out_features) of linear layers.

    Example:
        >>> from storage_ops import policies
        >>> policy = policies.save_mm_shapes([(16, 64)])
        >>> policy(None, torch.ops.aten.mm.default, torch.ones(2, 16), torch.ones(16, 64))
        <CheckpointPolicy.MUST_SAVE: 0>
    """
    return _SaveShapes(frozenset(tuple(int(n) for n in shape) for shape in shapes))


@dataclass(frozen=True)
class _Union:
    parts: tuple[Policy, ...]

    def __call__(
        self, ctx: object, op: Op, *args: object, **kwargs: object
    ) -> CheckpointPolicy | str:
        # Call each policy, because each may count.
        decisions = [saves(p, ctx, op, args, kwargs) for p in self.parts]
        return _decision(True) if True in decisions else _word(next(filter(None, decisions), False))

    def begin(self) -> Policy:
        return _Union(tuple(begin(p) for p in self.parts))

    def may_save(self, op: Op) -> bool:
        return any(may_save(p, op) for p in self.parts)


def _expect_policies(function: str, *policies: object) -> None:
    for policy in policies:
        if not callable(policy):
            raise TypeError(
                f"{function} got the policy {policy!r}, a {type(policy).__name__}. Expected a "
                "function policy(ctx, op, *args, **kwargs), such as policies.matmuls."
            )


def union(*policies: Policy) -> Policy:
    """Save the results that any of these policies saves, on the device if one saves them there.

    Raises:
        TypeError: a policy is not a function.

    Example:
        >>> from storage_ops import policies
        >>> policy = policies.union(policies.matmuls, policies.attention)
    """
    _expect_policies("union", *policies)
    return policies[0] if len(policies) == 1 else _Union(policies)


@dataclass(frozen=True)
class _Difference:
    policy: Policy
    other: Policy

    def __call__(
        self, ctx: object, op: Op, *args: object, **kwargs: object
    ) -> CheckpointPolicy | str:
        first, second = (saves(p, ctx, op, args, kwargs) for p in (self.policy, self.other))
        return _word(first if not second else False)

    def begin(self) -> Policy:
        return _Difference(begin(self.policy), begin(self.other))

    def may_save(self, op: Op) -> bool:
        # Call both, because each may count.
        return may_save(self.policy, op) or may_save(self.other, op)


def difference(policy: Policy, other: Policy) -> Policy:
    """Save the results that `policy` saves and `other` does not.

    Raises:
        TypeError: a policy is not a function.

    Example:
        >>> from storage_ops import policies
        >>> policy = policies.difference(policies.matmuls, policies.save("aten.bmm"))
    """
    _expect_policies("difference", policy, other)
    return _Difference(policy, other)


@dataclass(frozen=True)
class _Offload:
    policy: Policy

    def __call__(
        self, ctx: object, op: Op, *args: object, **kwargs: object
    ) -> CheckpointPolicy | str:
        return OFFLOAD if saves(self.policy, ctx, op, args, kwargs) else _decision(False)

    def begin(self) -> Policy:
        return _Offload(begin(self.policy))

    def may_save(self, op: Op) -> bool:
        return may_save(self.policy, op)


def offload(policy: Policy) -> Policy:
    """Save the results of `policy` in host memory, between a region's forward and its backward.

    The copies overlap with the work of the GPU. The copies to pinned host memory run during the
    forward of the next region with a policy. Then the bytes on the device are freed. The copies
    back run during the backward of the region after it. Copies cost no time if the link to the host
    moves the results of a region faster than a region runs, which `storage_ops.fit` computes.

    A result with other references at the end of its region's forward is saved on the device. An
    output of the region is an example. Results of collectives are also saved on the device. On a
    CPU there is no other memory, so all results are saved there. A retained graph keeps the bytes
    on the device from its first backward on. Code under torch.compile or `trace_step` raises an
    error for such a policy.

    Raises:
        TypeError: the policy is not a function.

    Example:
        >>> from storage_ops import policies
        >>> policy = policies.union(policies.attention, policies.offload(policies.matmuls))
    """
    _expect_policies("offload", policy)
    return _Offload(policy)


def _not_begun(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name} counts the ops of one region and was not told where that begins. Pass "
        "functools.partial(storage_ops.policies.contexts, policy) to checkpoint as context_fn."
    )


@dataclass(frozen=True)
class _EveryKth:
    policy: Policy
    k: int

    def __call__(self, ctx: object, op: Op, *args: object, **kwargs: object) -> CheckpointPolicy:
        raise _not_begun("every_kth")

    def begin(self) -> Policy:
        return _Counter(begin(self.policy), self.k)

    def may_save(self, op: Op) -> bool:
        return may_save(self.policy, op)


class _Counter:
    """Counts the ops of a region, in its forward and, in torch 2.10, in its recompute."""

    def __init__(self, policy: Policy, k: int) -> None:
        self._policy = policy
        self._k = k
        self._seen = {False: 0, True: 0}

    def __call__(
        self, ctx: SelectiveCheckpointContext, op: Op, *args: object, **kwargs: object
    ) -> CheckpointPolicy | str:
        decision = saves(self._policy, ctx, op, args, kwargs)
        if not decision:
            return CheckpointPolicy.PREFER_RECOMPUTE
        seen = self._seen[ctx.is_recompute]
        self._seen[ctx.is_recompute] += 1
        return _word(decision if seen % self._k == 0 else False)


def every_kth(policy: Policy, k: int) -> Policy:
    """Save the first of the results that `policy` saves, and every k-th after it.

    Each region starts its own count.

    Raises:
        TypeError: the policy is not a function.
        ValueError: k is less than 1.

    Example:
        >>> from storage_ops import policies
        >>> policy = policies.every_kth(policies.save("aten.mm"), 3)
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"every_kth: `k` is {k!r}. Expected a whole number of at least 1.")
    _expect_policies("every_kth", policy)
    return _EveryKth(policy, k)


every_other_mm = every_kth(matmuls, 2)

PolicyName = Literal["matmuls", "attention", "every_other_mm", "communication"]
NAMED: dict[str, Policy] = {name: globals()[name] for name in get_args(PolicyName)}
