"""Random ops of a graph, and how to run each again with the same numbers."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from storage_ops.graph.nodes import STATISTICS, argument, updates_statistics

aten = torch.ops.aten
_SEED_AND_OFFSET = 16  # bytes of the state of a GPU's generator


def is_random(node: fx.Node) -> bool:
    """Return True if a node draws random numbers, given the values of its arguments."""
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    names = {a.name for a in target._schema.arguments}
    if "dropout_p" in names and argument(node, "dropout_p") == 0.0:
        return False
    off = (False, 0)
    return not any(name in names and argument(node, name) in off for name in ("train", "training"))


def must_replay(node: fx.Node) -> bool:
    """Return True if a node returns another result when it runs again."""
    return is_random(node) and not _keeps_all(node)


def _keeps_all(node: fx.Node) -> bool:
    """Return True if a node is a dropout that drops nothing.

    On some devices it draws numbers nevertheless.
    """
    return node.target is aten.native_dropout.default and argument(node, "p") == 0.0


def has_own_generator(node: fx.Node) -> bool:
    """Return True if a node draws from a generator argument instead of the device's generator."""
    target = node.target
    return isinstance(target, OpOverload) and argument(node, "generator") is not None


def without_side_effects(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments for a node that give the same result without side effects.

    A dropout of probability zero draws no numbers if `train` is False. A batch norm that uses the
    statistics of its batch reads no running statistics, and need not update them again.
    """
    args, kwargs = list(node.args), dict(node.kwargs)
    changes: dict[str, Any] = {}
    if _keeps_all(node):
        changes = {"train": False}
    elif updates_statistics(node):
        changes = dict.fromkeys(STATISTICS)
    for place, declared in enumerate(node.target._schema.arguments if changes else ()):  # type: ignore[union-attr]
        if declared.name in changes:
            if place < len(args):
                args[place] = changes[declared.name]
            else:
                kwargs[declared.name] = changes[declared.name]
    return tuple(args), kwargs


def replay(graph: fx.Graph, node: fx.Node, copies: list[fx.Node], mode: FakeTensorMode) -> None:
    """Make `copies` of a random node run with the generator state of the node.

    The state is saved before the node runs, and restored after each copy. So later numbers are the
    same as in a step that recomputes nothing.
    """
    op: Any = node.target
    with graph.inserting_before(node):
        both = graph.call_function(run_and_save_rng_state, (op, *node.args), dict(node.kwargs))
        state = graph.call_function(operator.getitem, (both, 0))
        result = graph.call_function(operator.getitem, (both, 1))
    device = device_of(node)
    with mode:
        size = torch.get_rng_state().numel() if device.type == "cpu" else _SEED_AND_OFFSET
        state.meta["val"] = torch.empty(size, dtype=torch.uint8, device="cpu")
    both.meta = {**node.meta, "val": (state.meta["val"], node.meta["val"])}
    result.meta = dict(node.meta)
    node.replace_all_uses_with(result)
    for copy in copies:
        copy.args = (state, op, *copy.args)
        copy.target = run_with_rng_state
    graph.erase_node(node)


def device_of(node: fx.Node) -> torch.device:
    """Return the device of a random op's generator, that of the last tensor in its result."""
    tensors = [leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]
    return tensors[-1].device if tensors else torch.device("cpu")


def gpu_of_replays(graph: fx.Graph) -> torch.device | None:
    """Return the GPU whose generator state a graph saves. It must be current when the graph runs.

    Raises:
        RuntimeError: there are several GPUs.
    """
    saving = [node for node in graph.nodes if node.target is run_and_save_rng_state]
    devices = {device_of(node) for node in saving} - {torch.device("cpu")}
    if len(devices) > 1:
        raise RuntimeError(
            f"remat: random ops on {sorted(map(str, devices))} must be run again. Expected random "
            "ops on one GPU, because torch saves the state of the current GPU only."
        )
    return next(iter(devices), None)
