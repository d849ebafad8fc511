"""Second derivatives of a chunked graph, which must raise as those of any compiled graph do.

AOTAutograd raises for a second derivative if a tensor that the backward reads leads to the tensor
that the caller asks for. A chunked graph computes its gradients in the forward, and its backward
reads nothing else: the second derivative would be zero without an error.
"""

from __future__ import annotations

import torch
from torch import fx

from storage_ops.autochunk.edit import Calls
from storage_ops.autochunk.values import name_of, numel, returned, tangents_of

_CONNECT = torch.ops.storage_ops._connect.default


def disconnect(graph: fx.Graph) -> bool:
    """Remove the connections that ops of the graph have made for themselves, if there are any."""
    found = [n for n in graph.nodes if name_of(n) == str(_CONNECT)]
    for node in found:
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    return bool(found)


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
