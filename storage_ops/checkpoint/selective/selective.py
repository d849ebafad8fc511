"""Saves results of ops in the forward of a region, as a policy decides, and reuses them.

The two modes do the same as torch's own pair in eager mode, and more. If a saved op drew random
numbers, the recompute advances the generator, so that a later dropout repeats its mask. If the
region modifies a saved result in place, it is recomputed instead. A graph can be retained, and a
policy that saves nothing warns. torch.compile only supports torch's own pair, and gets it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

from storage_ops._callers import warn_caller
from storage_ops._op_arguments import tensors_in, with_tensors
from storage_ops.checkpoint.region.backward_pass import is_retained
from storage_ops.checkpoint.region.region import Region
from storage_ops.checkpoint.saved import saved_tensors
from storage_ops.checkpoint.saved.guard import by_storage, storage_key
from storage_ops.checkpoint.saved.light_mode import LightMode
from storage_ops.checkpoint.saved.matching import Cursor, Log
from storage_ops.checkpoint.saved.ref_counts import is_shared_by_at_most
from storage_ops.checkpoint.selective import native, offload, policies
from storage_ops.checkpoint.selective.collectives import FROM_ANYBODY, Sent, written_by
from storage_ops.checkpoint.selective.offload import Away, Trip
from storage_ops.checkpoint.selective.policies import OFFLOAD, Policy, begin, saves
from storage_ops.checkpoint.state.execution import rng_of
from storage_ops.foundation.op_names import Op, is_mutating, name_of, readable
from storage_ops.foundation.ops import Args, Kwargs, OpFacts, facts_of

# A function that sets the state, and the state.
RandomState = list[tuple[Callable[[Tensor], object], Tensor]]
_UNKNOWN = None, False
Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


def contexts(
    policy: Policy,
    region: str = "a region",
    preserve_rng_state: bool = True,
    respect_saved_tensors_hooks: bool = False,
) -> tuple[Any, Any]:
    """Return the pair of contexts that makes `torch.utils.checkpoint` follow a policy.

    Args:
        policy: a policy of `storage_ops.policies`, or a function of that form.
        region: the name of the region in warnings and errors.
        preserve_rng_state: the same value as in the call of `checkpoint`.
        respect_saved_tensors_hooks: whether saved results are passed to the saved-tensor hooks
            around the region, such as `torch.autograd.graph.save_on_cpu`.

    Example:
        >>> from functools import partial
        >>> from torch.utils.checkpoint import checkpoint
        >>> from storage_ops import policies
        >>> x = torch.randn(4, 4, requires_grad=True)
        >>> context_fn = partial(policies.contexts, policies.matmuls)
        >>> f = lambda x: (x @ x).sin()
        >>> checkpoint(f, x, use_reentrant=False, context_fn=context_fn).sum().backward()
    """
    if torch.compiler.is_compiling() or _is_traced():
        decide = _ForCompile(begin(policy), region)
        forward, recompute = create_selective_checkpoint_contexts(decide)
        forward.__class__ = _ending(type(forward))  # type: ignore[arg-type]
        return forward, recompute
    hooks = None
    # An enclosing checkpoint would drop the tensors.
    if respect_saved_tensors_hooks and not Region.is_saved_by_another():
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    natively = native.contexts(policy, region, preserve_rng_state) if hooks is None else None
    if natively is not None:
        return natively
    saved = _Saved(region, preserve_rng_state, hooks=hooks)
    return _Recording(begin(policy), saved, policies.asked_about(policy)), _Replaying(saved)


def _is_traced() -> bool:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


@dataclass
class _ForCompile:
    """A policy in the form that torch's modes call, with the ops that it was called for."""

    policy: Policy
    region: str
    calls: Counter[str] = field(default_factory=Counter)
    saves_any: bool = False

    def __call__(self, ctx: object, op: Op, *args: object, **kwargs: object) -> CheckpointPolicy:
        self.calls[name_of(op)] += 1
        decision = saves_result(self.policy, ctx, op, args, kwargs)
        if decision == OFFLOAD:
            raise RuntimeError(
                "The policy of the selective checkpoint says 'offload' for "
                f"{readable(name_of(op))} in {self.region}, which is compiled or traced. Only "
                "eager code brings bytes back from host memory. Use a policy that saves or "
                "recomputes."
            )
        if decision:
            self.saves_any = True
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE


@functools.cache
def _ending(mode: type) -> type:
    """Return a subclass of torch's caching mode that warns at its end if calls are missing."""

    def __exit__(self: Any, kind: object, error: object, trace: object) -> None:
        mode.__exit__(self, kind, error, trace)  # type: ignore[attr-defined]
        decide = self.policy_fn
        if kind is not None:
            return
        if not decide.saves_any:
            native.warn_of_nothing(decide.region, decide.calls)
            return
        missing: list[str] = getattr(decide.policy, "never_made", list)()
        if missing:
            names = ", ".join(map(readable, missing))
            warn_caller(
                f"{decide.region} makes fewer calls of {names} where it is compiled than the "
                "policy of its selective checkpoint saves, so they are recomputed. Use a policy "
                "for compiled code."
            )

    # Without this attribute, torch 2.10 and 2.11 refuse higher-order ops in the mode.
    members = {"__exit__": __exit__, "supports_higher_order_operators": True}
    return type("SelectiveMode", (mode,), members)


def saves_result(
    policy: Policy, ctx: object, op: Op, args: Args, kwargs: Kwargs
) -> bool | Literal["offload"]:
    """Return True if the result of an op is saved, or "offload" if in host memory.

    The policy decides for ops whose results can be saved. An op that modifies an argument must run
    again for its effect. Views and uninitialised tensors have no values to save.
    """
    decision = saves(policy, ctx, op, args, kwargs)
    if not decision or not facts_of(op).saveable:
        return False
    if decision == OFFLOAD and facts_of(op).collective == "functional":
        return True  # its bytes come after the op
    return decision


@dataclass
class _Result:
    """The saved result of an op, and the generator states after it."""

    value: Any
    random: RandomState
    # All tensors with these bytes, and their versions. Most views share their version counter with
    # the value. The result of aten._unsafe_view, the last op of a 3-D product, has its own.
    versions: list[tuple[Tensor, int]] = field(default_factory=list)
    offloads: bool = False
    trips: list[Trip] = field(default_factory=list)  # offloads of its bytes
    sent: Sent | None = None  # the collective that wrote the value into its arguments
    is_overwritten: bool = False  # by such a collective, without a version bump

    def watch(self, t: Tensor) -> None:
        self.versions.append((t, t._version))

    def is_modified(self) -> bool:
        return self.is_overwritten or any(t._version != version for t, version in self.versions)

    def copy_if_held(self) -> None:
        """Copy the result of a collective if its bytes have other users, such as a buffer."""
        ours = Counter(map(storage_key, tensors_in(self.value)))
        alone = all(is_shared_by_at_most(key, n) for key, n in ours.items() if key)
        if self.sent is not None and not alone:
            self.sent.wait()
            self.value, self.versions = with_tensors(Tensor.clone, self.value), []

    def depart(self) -> None:
        """Begin to copy the bytes to host memory, if they have no other users."""
        self.trips = offload.trips_of(tensors_in(self.value), [t for t, _ in self.versions])

    def pack(self, hooks: Hooks) -> None:
        """Pass the tensors to saved-tensor hooks. Later modifications are not detected."""
        self.versions = []
        self.value = with_tensors(lambda t: _Packed(hooks[0](t), hooks[1]), self.value)

    def read(self) -> Any:
        """Return the result of the op. Its tensors have no history."""
        offload.arrive(self.trips)
        return with_tensors(_unpacked, self.value, (Tensor, _Packed))


@dataclass
class _Packed:
    """A tensor that saved-tensor hooks have packed."""

    kept: Any
    unpack: Callable[[Any], Tensor]


def _unpacked(value: Tensor | _Packed) -> Tensor:
    return _detached(value if isinstance(value, Tensor) else value.unpack(value.kept))


@dataclass
class _Saved:
    """The saved results of a region, by their positions in the log of its forward."""

    region: str
    preserve_rng_state: bool
    log: Log = field(default_factory=Log)
    results: dict[int, _Result] = field(default_factory=dict)
    hooks: Hooks | None = None
    away: Away | None = None  # the part in host memory
    # Whether a backward pass inside the forward repeats a part of the region.
    is_repeating: bool = False
    # Whether a pass with retain_graph has read the results. Passes for other parts may follow, such
    # as for the weights alone, and none is known to be the last.
    is_shared: bool = False


class _Following(LightMode):
    """A mode that is notified of each tensor that autograd saves for the region."""

    _hooks: Any = None

    def _enter(self, note: Callable[[Tensor], None]) -> Any:
        """Enter the mode. Call `note` before each tensor that a checkpoint's hook packs."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        self._hooks = None if top is None else native.noting(note, *top)
        if self._hooks is not None:
            self._hooks.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        finally:
            hooks, self._hooks = self._hooks, None
            if hooks is not None:
                hooks.__exit__(kind, error, trace)


class _Recording(_Following):
    """Active in the forward of a region."""

    def __init__(self, policy: Policy, saved: _Saved, asked: policies.Asked) -> None:
        super().__init__()
        self._policy, self._asked = policy, asked
        self._saved = saved
        self._on_storage: dict[int, _Result] = {}

    def __enter__(self) -> Any:
        # The kernels see an op before every mode, but a mode inside a region must see it first.
        saved_tensors.leave_to_python()
        return self._enter(self._saved.log.add_saved_tensor)

    def dispatch(self, op: Op, args: Args, kwargs: Kwargs) -> Any:
        """Run the op, and save its result if the policy wants it."""
        facts, saved = facts_of(op), self._saved
        if saved.is_repeating or _ignores(facts, args):
            return op(*args, **kwargs)
        # Added before it runs, so that an op that raises counts, too.
        position = saved.log.add(facts)
        out = op(*args, **kwargs)
        known, asks = self._asked.get(facts.name, _UNKNOWN)
        if known is not facts:
            asks = policies.may_save(self._policy, op) or bool(facts.collective)
            self._asked[facts.name] = facts, asks
        if not asks and not (self._on_storage and facts.may_share):
            saved.log.describe(position, facts.name, args, kwargs, False)
            return out
        ctx = SelectiveCheckpointContext(is_recompute=False)
        ctx.op_output = out  # torch 2.10 does not set it
        if facts.collective == "in place":
            self._note_collective(position, facts.name, ctx, op, args, kwargs)
            return out
        if out is None and is_mutating(op):  # torch._foreach_mul_: a mode hides its version bump
            for key in by_storage(tensors_in(args[:1])).keys() & self._on_storage.keys():
                self._on_storage[key].is_overwritten = True
        decision = saves_result(self._policy, ctx, op, args, kwargs)
        saved.log.describe(position, facts.name, args, kwargs, bool(decision))
        if not (decision or (self._on_storage and facts.may_share)):
            return out
        tensors = tensors_in(out)
        # Inference tensors have no versions, so writes are not detected.
        if any(t.is_inference() for t in tensors):
            return out
        by_key = by_storage(tensors)
        for key, t in by_key.items():
            if key in self._on_storage:
                self._on_storage[key].watch(_detached(t))
        if not decision or not tensors:  # a number takes no memory
            return out
        # A result in the bytes of an argument need not be saved, and writes to it are not detected.
        if by_key.keys().isdisjoint(by_storage(tensors_in((args, kwargs)))):
            value = with_tensors(_detached, out)
            random: RandomState = []
            if facts.may_draw and saved.preserve_rng_state:
                random = _random_state(tensors, (*args, *kwargs.values()))
            result = _Result(value, random, offloads=decision == OFFLOAD)
            saved.results[position] = result
            for t in tensors_in(value):
                result.watch(t)
            self._on_storage |= dict.fromkeys(by_key, result)
        return out

    def _note_collective(
        self, position: int, name: str, ctx: Any, op: Op, args: Args, kwargs: Kwargs
    ) -> None:
        """Save a collective's results if the policy says so. Drop results that it overwrites."""
        is_saved = bool(saves(self._policy, ctx, op, args, kwargs)) and name != FROM_ANYBODY
        self._saved.log.describe(position, name, args, kwargs, is_saved)
        value = [_detached(t) for t in written_by(name, args)]
        storages = by_storage(value)
        for key in storages.keys() & self._on_storage.keys():
            self._on_storage.pop(key).is_overwritten = True
        if is_saved:
            result = _Result(value, [], sent=Sent(ctx.op_output))
            self._saved.results[position] = result
            for t in value:
                result.watch(t)
            self._on_storage |= dict.fromkeys(storages, result)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        super().__exit__(kind, error, trace)
        if kind is not None:
            return
        self._on_storage.clear()
        saved = self._saved
        saved.log.finish()
        if not saved.results:
            native.warn_of_nothing(saved.region, saved.log.counts())
        modified = {at: r for at, r in saved.results.items() if r.is_modified()}
        for at in modified:
            del saved.results[at]
        for result in saved.results.values():
            if result.sent is not None:
                result.copy_if_held()
        if saved.hooks is not None:
            for result in saved.results.values():
                result.pack(saved.hooks)
        else:
            self._send_away()
        if modified:
            native.warn_of_modified(saved.region, [saved.log.name_at(at) for at in modified])

    def _send_away(self) -> None:
        trips: list[Trip] = []
        for result in self._saved.results.values():
            if result.offloads:
                result.depart()
                trips += result.trips
        offload.region_ended()
        if trips:
            self._saved.away = Away(trips)


class _Replaying(_Following):
    """Active while a region is recomputed.

    Attributes:
        difference: the first op that differs from the forward, or "".
    """

    def __init__(self, saved: _Saved) -> None:
        super().__init__()
        self._saved = saved
        self._cursor = Cursor(saved.log, saved.region)

    @property
    def difference(self) -> str:
        return self._cursor.difference

    def __enter__(self) -> Any:
        saved = self._saved
        self._cursor = Cursor(saved.log, saved.region)
        if not saved.log.is_complete:
            saved.is_repeating = True
            return self._enter(_nothing)
        if saved.away is not None:
            saved.away.fetch()
        return self._enter(self._cursor.see_saved_tensor)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._saved.is_repeating = False
        super().__exit__(kind, error, trace)

    def dispatch(self, op: Op, args: Args, kwargs: Kwargs) -> Any:
        """Return the saved result of the op, or run it."""
        facts, saved = facts_of(op), self._saved
        if saved.is_repeating or _ignores(facts, args):
            return op(*args, **kwargs)
        position = self._cursor.find(facts, args, kwargs)
        result = None if position is None else saved.results.get(position)
        if position is None or result is None:
            return op(*args, **kwargs)
        if result.is_modified():
            native.warn_of_modified_later(saved.region, facts.name)
            return op(*args, **kwargs)
        for put, state in result.random:
            put(state)
        if not _is_needed_again(saved):
            del saved.results[position]
        self._cursor.use(position)
        if result.sent is not None:
            return result.sent.repeat(args, result.read(), facts.name)
        return result.read()


def _nothing(t: Tensor) -> None:
    pass


def _is_needed_again(saved: _Saved) -> bool:
    """Return True if another backward pass may need the values that this one reads.

    A saved tensor that is read outside of a backward pass is still needed by the pass.
    """
    if torch._C._current_graph_task_id() == -1:
        return True
    saved.is_shared = saved.is_shared or is_retained()
    return saved.is_shared


def _detached(t: Tensor) -> Tensor:
    """Return a tensor with the same bytes and version counter, without its autograd history.

    Below autograd, detach creates a new version counter unless this dispatch key is included.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return t.detach()


def is_ignored(op: Op, args: Args) -> bool:
    """Return True for an op that may run in the forward but not in the recompute.

    Autocast casts a leaf that requires grad, such as a parameter, at its first use. It keeps the
    cast for other regions.
    """
    return _ignores(facts_of(op), args)


def _ignores(facts: OpFacts, args: Args) -> bool:
    return facts.is_ignored or (facts.is_cast and _is_cast_once(args[0]))


def _is_cast_once(t: Tensor) -> bool:
    return isinstance(t, nn.Parameter) or (t.requires_grad and t.is_leaf)


def _random_state(results: list[Tensor], arguments: tuple[Any, ...]) -> RandomState:
    """Return the current states of the generators that an op which draws numbers may have used."""
    for value in arguments:
        if isinstance(value, torch.Generator):
            return [(value.set_state, value.get_state())]
    devices = {t.device for t in results if t.device.type != "meta"}
    return [(put, get()) for get, put in map(rng_of, devices)]
