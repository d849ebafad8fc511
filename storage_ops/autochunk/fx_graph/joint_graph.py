"""Keeps the backward of a joint graph correct, for second derivatives and dropout masks.

AOTAutograd raises an error for a second derivative only if a tensor that the backward reads leads
to the tensor that the caller asks for. A chunked graph computes its gradients in the forward, and
its backward reads nothing else. The second derivative would be zero without an error. `connect`
prevents that.

With `torch._functorch.config.activation_memory_budget` below 1, torch recomputes activations in the
backward. It may draw new random numbers, so that gradients belong to other dropout masks
(https://github.com/pytorch/pytorch/issues/190758). `save_random_numbers` prevents that.
"""

from __future__ import annotations

import sys

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from storage_ops.autochunk.fx_graph.edit import Calls
from storage_ops.autochunk.fx_graph.nodes import name_of, numel, returned, tangents_of, values_of

_CONNECT = torch.ops.storage_ops._connect.default
_LEAST = sys.float_info.min  # a budget of 0 would ignore which values must be saved


def disconnect(graph: fx.Graph) -> bool:
    """Remove the connections of the graph's ops, if there are any."""
    connects = [n for n in graph.nodes if name_of(n) == str(_CONNECT)]
    for node in connects:
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    return bool(connects)


def connect(graph: fx.Graph) -> None:
    """Let the backward of a joint graph read every input that has a gradient.

    The graph keeps these inputs, and no other memory, until its backward.
    """
    inputs = [n for n in graph.nodes if n.op == "placeholder" and "primals" in str(n.target)]
    tangents = [n for n in tangents_of(graph) if n.users]
    gradients = returned(graph)[-len(inputs) :] if inputs else []
    learns = [n for n, g in zip(inputs, gradients, strict=True) if isinstance(g, fx.Node)]
    if not tangents or not learns:
        return
    upstream = min(tangents, key=numel)
    first = next(n for n in graph.nodes if n in upstream.users)
    connected = Calls(graph, upstream, before=first)(_CONNECT, upstream, learns)
    upstream.replace_all_uses_with(connected, delete_user_cb=lambda user: user is not connected)


def save_random_numbers(graph: fx.Graph) -> None:
    """Save the random numbers of a joint graph under every memory budget, in few bytes.

    Inductor computes random numbers from seeds, so only the seeds are saved. If random numbers are
    only compared with others, only the results of the comparisons are saved.
    """
    if not _below_one(graph):
        return
    for node in graph.nodes:
        if node.meta.get("recompute") is None and _draws(node):
            masks = [u for u in node.users if all(v.dtype == torch.bool for v in values_of(u))]
            for kept in masks if len(masks) == len(node.users) else [node]:
                kept.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _draws(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _below_one(graph: fx.Graph) -> bool:
    """Return True if the graph has a budget below 1. Change a budget of 0 to a tiny one."""
    import torch._functorch.config as config
    from torch.fx import traceback

    region = getattr(traceback, "MEMORY_BUDGET_ANNOTATION_KEY", None)  # not in every torch
    budgets = [config.activation_memory_budget]
    if budgets == [0]:
        next(iter(graph.nodes)).meta.setdefault("memory_budget", _LEAST)
    owner = graph.owning_module
    modules = [] if owner is None else list(owner.modules())
    for node in (n for m in modules if isinstance(m, fx.GraphModule) for n in m.graph.nodes):
        custom = node.meta.get("custom") or {}
        for meta, key in ((node.meta, "memory_budget"), (custom, region)):
            if isinstance(meta.get(key), float):
                meta[key] = max(meta[key], _LEAST)
                budgets.append(meta[key])
    return min(budgets) < 1
