"""Reads torch.compile's tags on the ops of checkpoints and on the nodes of backward passes."""

from __future__ import annotations

import itertools

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from storage_ops.foundation.regions import KEY, Level, Mark
from storage_ops.graph.nodes import item_of

TAG = "recompute"
# Keys of `node.meta` that mark the nodes of a backward pass.
PHASE_KEYS = ("autograd_backward", "partitioner_tag")
_NUMBER = "ac_graph_id"
_RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
_regions = itertools.count(-1, -1)


def mark_tagged(graph: fx.Graph) -> bool:
    """Turn the tags of a graph into marks. Return True if torch.compile has tagged the graph.

    An op tagged as recomputed is recomputed for all its readers in backward passes. It does not
    matter whether a reader belongs to the gradient of its own checkpoint or of a later one. Values
    that one checkpoint passes to a later one are kept. Values that it passes to a backward hook are
    kept, too, because a recompute may be impossible without the hook. Only recomputed ops keep
    their tags, because a partitioner that finds other tags would recompute again.
    """
    calls = [node for node in graph.nodes if node.op == "call_function"]
    chosen = any(_annotation(node, "phase") == "backward" for node in calls)
    backward = {node for node in calls if _is_backward(node, chosen)}
    tagged = [node for node in calls if _is_tagged(node)]
    if not tagged or not (backward or any(_NUMBER in node.meta for node in tagged)):
        return False
    decided = {node: node.meta.pop(TAG) for node in tagged if node not in backward}
    recomputed = {
        n: n.meta.get(_NUMBER, 0) for n, policy in decided.items() if policy in _RECOMPUTED
    }
    regions = {checkpoint: next(_regions) for checkpoint in sorted(set(recomputed.values()))}
    for node, checkpoint in recomputed.items():
        readers = [recomputed[user] for user in node.users if user in recomputed]
        given_to_hook = node.meta.get("has_backward_hook", False) and not readers
        if not given_to_hook and not any(later > checkpoint for later in readers):
            node.meta[KEY] = Mark((Level(regions[checkpoint], decided[node], True),))
    for number, (is_backward, run) in enumerate(itertools.groupby(calls, backward.__contains__)):
        for node in run if is_backward else ():
            node.meta[KEY] = Mark((), number)
    return True


def raise_items(graph: fx.Graph) -> None:
    """Move the items of an op right after it, so that no item keeps the others in memory."""
    for node in reversed(list(graph.nodes)):
        source = item_of(node)
        if source is not None and source.op == "call_function":
            source.append(node)


def _is_tagged(node: fx.Node) -> bool:
    """Return True if torch.compile tagged a node.

    Tags of other origin lack the number of a checkpoint.
    """
    policy = isinstance(node.meta.get(TAG), CheckpointPolicy)
    return policy and node.meta.get(_NUMBER, 0) is not None


def _is_backward(node: fx.Node, chosen: bool) -> bool:
    """Return True if a node belongs to a backward pass, or to one that the user has `chosen`."""
    if chosen:
        return _annotation(node, "phase") == "backward"
    return (
        bool(node.meta.get("autograd_backward"))
        or node.meta.get("partitioner_tag") == "is_backward"
        or _annotation(node, "remat_pass_tag") == "is_backward"
    )


def _annotation(node: fx.Node, key: str) -> object:
    """Return the value that a user put on a node with torch.fx.traceback.annotate."""
    return (node.meta.get("custom") or {}).get(key)
