"""Memory of a graph over time, from the life of each tensor in it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from storage_ops.graph.nodes import storages


@dataclass(frozen=True)
class Schedule:
    """What a graph allocates beyond its inputs.

    Attributes:
        peak_bytes: the highest level.
        peak_node: the name of the node that runs at that moment.
        timeline: the bytes that live while each node runs, by the name of the node.
    """

    peak_bytes: int
    peak_node: str
    timeline: dict[str, int]


def schedule(gm: fx.GraphModule) -> Schedule:
    """Predict the memory of a graph that runs its nodes in order.

    A storage lives from the node that makes it to the last node that reads it or a view of it; what
    the graph returns lives to the end. Inputs, constants and the scratch memory inside ops do not
    count. Dimensions that are dynamic count with the size they had when traced.

    Args:
        gm: a graph of `trace_step` or `make_fx`, with a value in the `meta` of each node.

    Returns:
        The peak in bytes and the level at every node.

    Raises:
        ValueError: the nodes have no values.

    Example:
        >>> step = storage_ops.graph.trace_step(lambda x: (x + 1).sum(), torch.ones(256))
        >>> storage_ops.graph.schedule(step.gm).peak_bytes
        1028
    """
    nodes = list(gm.graph.nodes)
    if not any("val" in node.meta for node in nodes):
        raise ValueError(
            "schedule: no node of the graph has a 'val' in its meta; expected a graph of "
            "trace_step or make_fx"
        )
    last: dict[int, int] = {}
    size: dict[int, int] = {}
    held: set[int] = set()
    begins: list[list[int]] = []
    for at, node in enumerate(nodes):
        own = dict(storages(node.meta.get("val")))
        if node.op in ("placeholder", "get_attr"):
            held.update(own)
        begins.append([key for key in own if key not in size and key not in held])
        size.update(own)
        for read in (node, *node.all_input_nodes):
            for key, _ in storages(read.meta.get("val")):
                last[key] = at
    ends: list[list[int]] = [[] for _ in nodes]
    for key, at in last.items():
        if key not in held:
            ends[at].append(key)
    level, timeline = 0, {}
    for at, node in enumerate(nodes):
        level += sum(size[key] for key in begins[at])
        timeline[node.name] = level
        level -= sum(size[key] for key in ends[at])
    peak = max(timeline, key=lambda name: timeline[name], default="")
    return Schedule(timeline.get(peak, 0), peak, timeline)
