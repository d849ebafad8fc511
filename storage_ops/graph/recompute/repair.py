"""Finds regions in graphs in which make_fx recorded torch's own checkpointing.

Two things go wrong in such graphs. Under trace, selective checkpointing saves every result, so
nothing is recomputed. But it tags its ops, and the results that backward takes from its cache show
which ops form a region. Plain checkpointing is recorded twice, as it runs. It sets the state of the
random-number generator in between, which is not recorded. So its recompute draws new numbers.
"""

from __future__ import annotations

import bisect
import itertools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy

from storage_ops.foundation.regions import KEY, Level, Mark
from storage_ops.graph.nodes import ALIASES, copy_of, is_call, item_of, written
from storage_ops.graph.recompute import rng
from storage_ops.graph.recompute.functionalize import is_new
from storage_ops.graph.recompute.verify import REPEATS

aten = torch.ops.aten
_INSTEAD = "Trace the function with storage_ops.graph.trace_step instead of make_fx."
_regions = itertools.count(-1, -1)


def repair(gm: fx.GraphModule, mode: FakeTensorMode) -> fx.GraphModule:
    """Mark the regions of a foreign graph, and let its recomputes draw the forward's numbers.

    Warn if the graph does not show what was checkpointed, or which random ops belong together.

    Returns:
        A copy of the original graph, with notes that let `verify_equal` run it as eager mode would.
    """
    marked = _mark_tagged(gm.graph)
    repeats = _find_repeats(gm.graph)
    eager = copy_of(gm)
    for node, noted in zip(gm.graph.nodes, eager.graph.nodes, strict=True):
        if node in repeats.unclear:
            noted.meta[REPEATS] = None
        for first, repeats_of_op in repeats.random:
            if node in repeats_of_op:
                noted.meta[REPEATS] = first.name
    for first, repeats_of_op in repeats.random:
        rng.replay(gm.graph, first, repeats_of_op, mode)
    if repeats.unclear:
        warnings.warn(
            f"remat: {', '.join(node.name for node in repeats.unclear)} may recompute random "
            "numbers, and the graph does not say which. If so, its gradients are wrong. "
            + _INSTEAD,
            stacklevel=4,
        )
    if not marked and not repeats.found:
        warnings.warn(
            "remat: the graph does not say what was checkpointed, so nothing is recomputed. "
            + _INSTEAD,
            stacklevel=4,
        )
    return eager


def _mark_tagged(graph: fx.Graph) -> bool:
    """Turn the tags of selective checkpointing into marks. Return True if there were any."""
    order = {node: at for at, node in enumerate(graph.nodes)}
    cached: dict[fx.Node, fx.Node] = {}  # a value in the cache -> the op whose result it is
    latest: fx.Node | None = None
    for node in order:
        source = node.args[0] if node.target in ALIASES else None
        op = item_of(source) or source if isinstance(source, fx.Node) else None
        if latest is not None and op is latest:
            cached[node] = latest
        elif latest is None or item_of(node) is not latest:  # entries directly follow their op
            tagged = isinstance(node.meta.get("recompute"), CheckpointPolicy)
            latest = node if tagged else None
    readers = [
        (order[reader], order[op], entry, reader)
        for entry, op in cached.items()
        for reader in entry.users
        if reader.target in ALIASES
    ]
    # Each recompute takes the region's results in the order of their creation.
    starts: list[int] = []
    previous = None
    for _, created, _, _ in sorted(readers, key=lambda reader: reader[0]):
        if previous is None or created < previous:
            starts.append(created)
        previous = created
    if not starts:
        return False
    starts = sorted(set(starts))
    numbers = [next(_regions) for _ in starts]

    def region(op: fx.Node) -> int:
        return numbers[max(0, bisect.bisect_right(starts, order[op]) - 1)]

    for entry, op in cached.items():
        number = region(op)
        op.meta[KEY] = Mark((Level(number, op.meta["recompute"], False),))
        for node in (entry, entry.args[0]):
            if isinstance(node, fx.Node) and node is not op:
                node.meta[KEY] = Mark((Level(number, None, False),))
    for _, _, entry, reader in readers:
        reader.meta[KEY] = Mark((), 0, (region(cached[entry]),))
    return True


@dataclass
class _Repeats:
    """Nodes that a graph computes more than once, the first time in a forward.

    Attributes:
        found: whether there is any such node.
        random: random ops of forwards, each with the ops that must repeat its numbers.
        unclear: random ops for which the graph does not say whether they repeat numbers.
    """

    found: bool
    random: list[tuple[fx.Node, list[fx.Node]]]
    unclear: list[fx.Node]


def _find_repeats(graph: fx.Graph) -> _Repeats:
    forward, elsewhere = _leads_to_backward(graph), _leads_past_gradients(graph)
    groups: dict[int, list[fx.Node]] = {}
    for node, number in _numbers(graph):
        if node.op == "call_function" and (node in forward or node not in elsewhere):
            groups.setdefault(number, []).append(node)
    repeats = _Repeats(False, [], [])
    drawn = {node.target for nodes in groups.values() for node in nodes if node in forward}
    for nodes in groups.values():
        first = [node for node in nodes if node in forward]
        repeated = [node for node in nodes if node not in forward]
        repeats.found = repeats.found or bool(first and repeated)
        if not repeated or not rng.is_random(repeated[0]) or repeated[0].target not in drawn:
            continue
        if len(first) == 1 and all(_can_replay(node) for node in (*first, *repeated)):
            repeats.random.append((first[0], repeated))
        else:
            repeats.unclear.append(repeated[0])
    return repeats


def _can_replay(node: fx.Node) -> bool:
    """Return True if a random op is not in place, or fills a new tensor that only it reads."""
    if rng.has_own_generator(node):
        return False
    return all(isinstance(target, fx.Node) and is_new(target) for target in written(node))


def _leads_to_backward(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes of forwards: the nodes where a backward pass begins, and their ancestors."""
    nodes: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if _begins_backward(node):
            nodes.update(node.all_input_nodes)
        if node in nodes:
            nodes.update(node.all_input_nodes)
    return nodes


def _leads_past_gradients(graph: fx.Graph) -> set[fx.Node]:
    """Return the ancestors of returned values that are not gradients.

    They include no recompute.
    """
    gradients: set[fx.Node] = set()
    for node in graph.nodes:
        if _begins_backward(node) or not gradients.isdisjoint(node.all_input_nodes):
            gradients.add(node)
    (output,) = graph.find_nodes(op="output")
    gradients.discard(output)
    into, past = set(gradients), {output}
    for node in reversed(graph.nodes):
        if not into.isdisjoint(node.users):
            into.add(node)
        elif node not in into and not past.isdisjoint(node.users):
            past.add(node)
    return past


def _begins_backward(node: fx.Node) -> bool:
    return is_call(node, aten.ones_like.default) and _is_scalar(node)


def _is_scalar(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.numel() == 1


def _numbers(graph: fx.Graph) -> Iterator[tuple[fx.Node, int]]:
    """Yield every node with a number. Nodes with the same op and arguments share a number."""
    known: dict[str, int] = {}
    numbers: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        if node.target in ALIASES:
            numbers[node] = numbers[node.args[0]]
            continue
        if node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: f"%{numbers[n]}")
            key = f"{node.target} {args} {kwargs}"
        else:
            key = f"{node.op} {node.target}"  # each use of an attribute has its own node
        numbers[node] = known.setdefault(key, len(known))
        yield node, numbers[node]
