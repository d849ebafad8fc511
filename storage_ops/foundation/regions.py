"""Marks the nodes of a graph under trace with the checkpointed regions that they were recorded in.

`node.meta` has a mark under a key that only this package uses. It is written when a node is
created, and not through the tracer's current metadata. So a mark cannot leak to later nodes.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    SelectiveCheckpointContext,
)

__all__ = ["inside", "mark", "region", "tracing"]

KEY = "storage_ops_mark"
_NO_NUMBER = (1 << 64) - 1  # the number that autograd gives to nodes that accumulate a gradient
Policy = Callable[..., Any]
T = TypeVar("T")
_ids = itertools.count()
_pre_dispatch_modes: Any = torch._ops.mode_stack_state_for_pre_dispatch()


@dataclass(frozen=True)
class Level:
    """One region around a node.

    Attributes:
        region: a number that no other region of the process has.
        decision: the decision of the region's policy about the node. None without a policy.
        discards: whether the outputs of the region are discarded too, and recomputed for their
            users.
    """

    region: int
    decision: CheckpointPolicy | None
    discards: bool


@dataclass(frozen=True)
class Mark:
    """The regions and the backward pass that a node was recorded in.

    Attributes:
        path: the regions around the node, outermost first.
        backward: the number of the node's backward pass; -1 in a forward.
        owner: for a node of a backward pass, the regions around the forward op whose gradient it
            computes, outermost first.
        step: the number of the autograd node that ran; -1 in a forward.
    """

    path: tuple[Level, ...] = ()
    backward: int = -1
    owner: tuple[int, ...] = ()
    step: int = -1


OUTSIDE = Mark()


def mark_of(node: fx.Node) -> Mark:
    """Return the mark of a node. A node without one counts as a plain forward node."""
    mark: Mark = node.meta.get(KEY, OUTSIDE)
    return mark


@dataclass(frozen=True)
class _Open:
    region: int
    policy: Policy | None
    discards: bool


class RegionRecorder:
    """Marks every node that a tracer creates with the regions that are open at that moment."""

    def __init__(self, tracer: Any) -> None:
        self._open: list[_Open] = []
        # Each thread numbers its autograd nodes in the order of their creation. On a GPU the
        # backward runs in another thread. A node belongs to the regions that were open from the
        # last recorded number that is not above its own.
        self._starts: list[int] = []
        self._paths: list[tuple[int, ...]] = []
        self._undecided: fx.Node | None = None
        make = tracer.create_node

        def create_node(kind: str, target: object, *args: object, **kwargs: object) -> fx.Node:
            self._decide()
            node: fx.Node = make(kind, target, *args, **kwargs)
            if kind == "call_function":
                self._mark(node)
            return node

        tracer.create_node = create_node

    @staticmethod
    def of(tracer: Any) -> RegionRecorder:
        """Return the recorder of a tracer, created at the first call."""
        if not hasattr(tracer, "_storage_ops_recorder"):
            tracer._storage_ops_recorder = RegionRecorder(tracer)
        recorder: RegionRecorder = tracer._storage_ops_recorder
        return recorder

    @contextlib.contextmanager
    def region(self, policy: Policy | None, discards: bool) -> Iterator[None]:
        """Assign nodes that are created in a with block to a new region."""
        self._decide()
        opened = _Open(next(_ids), policy, discards)
        self._set_open([*self._open, opened])
        try:
            yield
        finally:
            self._decide()
            if opened in self._open:
                self._set_open(self._open[: self._open.index(opened)])

    @property
    def inside(self) -> bool:
        """Return True if a region is open."""
        return bool(self._open)

    def _set_open(self, regions: list[_Open]) -> None:
        self._open = regions
        self._starts.append(_next_number())
        self._paths.append(tuple(r.region for r in regions))

    def _mark(self, node: fx.Node) -> None:
        task = torch._C._current_graph_task_id()
        path = tuple(Level(r.region, None, r.discards) for r in self._open)
        if task != -1:
            node.meta[KEY] = Mark(path, task, *self._running())
        elif path:
            node.meta[KEY] = Mark(path)
        if any(r.policy is not None for r in self._open):
            self._undecided = node

    def _running(self) -> tuple[tuple[int, ...], int]:
        """Return the regions that created the autograd node that runs now, and its number."""
        running = torch._C._current_autograd_node()
        if running is None:
            return (), -1
        number = running._sequence_nr()
        if number == _NO_NUMBER:
            return (), -1
        at = bisect.bisect_right(self._starts, number) - 1
        return self._paths[at] if at >= 0 else (), number

    def _decide(self) -> None:
        """Ask the policies about the last op, whose output is known only now."""
        node, self._undecided = self._undecided, None
        if node is None or not isinstance(node.target, torch._ops.OpOverload):
            return  # getitem nodes of an op with several outputs are copied with the op
        mark = mark_of(node)
        path = tuple(
            Level(level.region, _decision(opened.policy, node), level.discards)
            for level, opened in zip(mark.path, self._open, strict=False)
        )
        node.meta[KEY] = replace(mark, path=path)


def _decision(policy: Policy | None, node: fx.Node) -> CheckpointPolicy | None:
    if policy is None or node.target in SAC_IGNORED_OPS:
        return None
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), _value)
    # op_output exists from torch 2.13.
    ctx: Any = SelectiveCheckpointContext(is_recompute=False)
    ctx.op_output = node.meta.get("val")
    decision = policy(ctx, node.target, *args, **kwargs)
    if isinstance(decision, bool):
        return CheckpointPolicy.MUST_SAVE if decision else CheckpointPolicy.PREFER_RECOMPUTE
    if not isinstance(decision, CheckpointPolicy):
        raise TypeError(
            f"The policy of a checkpointed region returned {decision!r} for {node.target}. "
            "Expected a torch.utils.checkpoint.CheckpointPolicy or a bool."
        )
    return decision


def _next_number() -> int:
    """Return the number that autograd will give to the next node it creates."""
    autograd: Any = torch.autograd
    number: int = autograd._get_sequence_nr()
    return number


def _value(node: fx.Node) -> Any:
    return node.meta.get("val", node)


def tracing() -> bool:
    """Return True if make_fx or `trace_step` is recording ops into a graph.

    Example:
        >>> storage_ops.graph.regions.tracing()
        False
    """
    # The same as torch's `get_proxy_mode`, with fewer calls.
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    return mode is not None or _pre_dispatch_modes.get(0) is not None


def inside() -> bool:
    """Return True if operations recorded now belong to a checkpointed region.

    Example:
        >>> storage_ops.graph.regions.inside()
        False
    """
    mode = get_proxy_mode()
    return mode is not None and RegionRecorder.of(mode.tracer).inside


@contextlib.contextmanager
def region(policy: Policy | None = None, discards: bool = False) -> Iterator[None]:
    """Mark the ops in a with block as a checkpointed region. Without a trace this does nothing.

    Args:
        policy: as for `torch.utils.checkpoint.create_selective_checkpoint_contexts`; None
            recomputes every op.
        discards: recompute the region's outputs for their users in backward, too.

    Example:
        >>> with storage_ops.graph.regions.region():
        ...     y = torch.ones(2).sin()
    """
    mode = get_proxy_mode()
    if mode is None or not torch.is_grad_enabled():
        yield
        return
    with RegionRecorder.of(mode.tracer).region(policy, discards):
        yield


def mark(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    policy: Policy | None = None,
    discards: bool = False,
) -> T:
    """Run `fn(*args, **kwargs)` once, marked as a checkpointed region as in `region`.

    Example:
        >>> storage_ops.graph.regions.mark(torch.add, (torch.ones(1), 1))
        tensor([2.])
    """
    with region(policy, discards):
        return fn(*args, **(kwargs or {}))
