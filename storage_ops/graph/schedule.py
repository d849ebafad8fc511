"""Predicts the memory of a graph over time, from the lifetime of each tensor in it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from storage_ops.foundation.lifetimes import Moment, levels_during
from storage_ops.graph.nodes import check_graph, storages


@dataclass(frozen=True)
class Schedule:
    """Memory that a graph allocates beyond its inputs.

    Attributes:
        peak_bytes: the highest level.
        peak_node: the name of the node that runs at the peak.
        timeline: the bytes in memory while each node runs, by the name of the node.
    """

    peak_bytes: int
    peak_node: str
    timeline: dict[str, int]


def schedule(gm: fx.GraphModule) -> Schedule:
    """Predict the memory of a graph that runs its nodes in order.

    A storage lives from the node that creates it to the last node that reads it or a view of it.
    Values that the graph returns live to the end. Inputs, constants and the scratch memory inside
    ops do not count. Dynamic dimensions have their size at the trace.

    Args:
        gm: a graph of `trace_step` or `make_fx`, with a value in the `meta` of each node.

    Returns:
        The peak in bytes and the level at every node.

    Raises:
        TypeError: `gm` is no GraphModule. ValueError: its nodes have no values.

    Example:
        >>> step = storage_ops.graph.trace_step(lambda x: (x + 1).sum(), torch.ones(256))
        >>> storage_ops.graph.schedule(step.gm).peak_bytes
        1028
    """
    check_graph("schedule", gm)
    nodes = list(gm.graph.nodes)
    if not any("val" in node.meta for node in nodes):
        raise ValueError(
            "schedule: no node of the graph has a 'val' in its meta. Expected a graph of "
            "trace_step or make_fx."
        )
    storages_of = {node: dict(storages(node.meta.get("val"))) for node in nodes}
    input_keys = {
        key for node in nodes if node.op in ("placeholder", "get_attr") for key in storages_of[node]
    }
    levels = levels_during([_moment(node, storages_of, input_keys) for node in nodes])
    timeline = dict(zip((node.name for node in nodes), levels, strict=True))
    peak = max(timeline, key=lambda name: timeline[name], default="")
    return Schedule(timeline.get(peak, 0), peak, timeline)


def _moment(node: fx.Node, made: dict[fx.Node, dict[int, int]], given: set[int]) -> Moment:
    makes = {key: nbytes for key, nbytes in made[node].items() if key not in given}
    return Moment(node.name, makes, [key for read in node.all_input_nodes for key in made[read]])
