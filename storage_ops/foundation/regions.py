"""Marks on the nodes of a graph under trace: in which checkpointed region each was recorded.

The marks are this package's own. They live under one key of `node.meta`, are written when a node is
made and never through the tracer's current metadata, so they cannot leak to the nodes that follow.
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
_NO_NUMBER = (1 << 64) - 1  # that autograd gives to the accumulation of a gradient
Policy = Callable[..., Any]
T = TypeVar("T")
_ids = itertools.count()


@dataclass(frozen=True)
class Level:
    """One region around a node.

    Attributes:
        region: a number that no other region of the process has.
        decision: what the region's policy says of the node; None without a policy.
        discards: whether the outputs of the region are recomputed for their users as well.
    """

    region: int
    decision: CheckpointPolicy | None
    discards: bool


@dataclass(frozen=True)
class Mark:
    """Where a node was recorded.

    Attributes:
        path: the regions around it, outermost first.
        backward: the number of the backward pass it belongs to; -1 in a forward.
        owner: for a node of a backward pass, the regions around the forward op it is the gradient
            of, outermost first.
        step: the number of the autograd node that ran; -1 in a forward.
    """

    path: tuple[Level, ...] = ()
    backward: int = -1
    owner: tuple[int, ...] = ()
    step: int = -1


OUTSIDE = Mark()


def mark_of(node: fx.Node) -> Mark:
    """The mark of a node; that of a plain forward node where there is none."""
    mark: Mark = node.meta.get(KEY, OUTSIDE)
    return mark


@dataclass(frozen=True)
class _Open:
    region: int
    policy: Policy | None
    discards: bool


class RegionRecorder:
    """Marks every node a tracer makes, from the regions that are open at that moment."""

    def __init__(self, tracer: Any) -> None:
        self._open: list[_Open] = []
        # Autograd nodes are numbered as they are made, by each thread on its own, and on a GPU a
        # backward runs in another. The regions around the op that made one are those that were open
        # from the last of these numbers that is not above its own.
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
        """The recorder of a tracer, made at the first call."""
        if not hasattr(tracer, "_storage_ops_recorder"):
            tracer._storage_ops_recorder = RegionRecorder(tracer)
        recorder: RegionRecorder = tracer._storage_ops_recorder
        return recorder

    @contextlib.contextmanager
    def region(self, policy: Policy | None, discards: bool) -> Iterator[None]:
        """Nodes made in a with block belong to a new region."""
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
        """Whether a region is open."""
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
        """The regions that made the autograd node that runs now, and its number."""
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
            return  # the items of an op with several outputs are copied with it
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
            f"the policy of a checkpointed region returned {decision!r} for {node.target}; "
            "expected a torch.utils.checkpoint.CheckpointPolicy or a bool"
        )
    return decision


def _next_number() -> int:
    """The number that autograd will give to the next node it makes."""
    autograd: Any = torch.autograd
    number: int = autograd._get_sequence_nr()
    return number


def _value(node: fx.Node) -> Any:
    return node.meta.get("val", node)


def tracing() -> bool:
    """Whether operations are being recorded into a graph by make_fx or `trace_step`.

    Example:
        >>> storage_ops.graph.regions.tracing()
        False
    """
    return get_proxy_mode() is not None


def inside() -> bool:
    """Whether what is recorded now belongs to a checkpointed region.

    Example:
        >>> storage_ops.graph.regions.inside()
        False
    """
    mode = get_proxy_mode()
    return mode is not None and RegionRecorder.of(mode.tracer).inside


@contextlib.contextmanager
def region(policy: Policy | None = None, discards: bool = False) -> Iterator[None]:
    """Mark what a with block records as a checkpointed region; does nothing without a trace.

    Args:
        policy: as for `torch.utils.checkpoint.create_selective_checkpoint_contexts`; None
            recomputes every op.
        discards: the region's outputs are not kept for their users in backward either.

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
    """Run `fn(*args, **kwargs)` once, marked as a checkpointed region; see `region`.

    Example:
        >>> storage_ops.graph.regions.mark(torch.add, (torch.ones(1), 1))
        tensor([2.])
    """
    with region(policy, discards):
        return fn(*args, **(kwargs or {}))
