"""Memory of a graph over time, from the life of each tensor in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from storage_ops.graph.nodes import storages
from storage_ops.memory.estimate_ledger import Block, Ledger


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
    made = {node: _blocks(node) for node in nodes}
    given = {key for node in nodes if node.op in ("placeholder", "get_attr") for key in made[node]}
    last: dict[int, int] = {}
    for at, node in enumerate(nodes):
        for read in (node, *node.all_input_nodes):
            last.update(dict.fromkeys(made[read], at))
    ending: list[list[int]] = [[] for _ in nodes]
    for key, at in last.items():
        ending[at].append(key)
    ledger, blocks, moments = Ledger(round_up=int), dict[int, Block](), dict[str, int]()
    for node, keys in zip(nodes, ending, strict=True):
        for key, block in made[node].items():
            if key not in given and key not in blocks:
                blocks[key] = ledger.take(block)
        moments[node.name] = ledger.mark()
        for key in keys:
            if key in blocks:
                ledger.give_back(blocks[key])
    levels = ledger.levels()
    timeline = {name: levels[moment] for name, moment in moments.items()}
    peak = max(timeline, key=lambda name: timeline[name], default="")
    return Schedule(timeline.get(peak, 0), peak, timeline)


def _blocks(node: fx.Node) -> dict[int, Block]:
    """A block for each storage of a node's value."""
    found = storages(node.meta.get("val"))
    return {key: Block(nbytes, (nbytes,), torch.uint8, node.name) for key, nbytes in found}
