"""Numbers that make one value of others, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from storage_ops.autochunk.lattice import Conflict


def fit(got: Tensor, terms: Sequence[Tensor]) -> list[float]:
    """The numbers c with got = sum_i c_i terms_i; raises Conflict if there are none."""
    basis = torch.stack(list(terms), 1)
    size = basis.norm(dim=0).clamp(min=1e-300)
    found = torch.linalg.lstsq(basis / size, got[:, None]).solution[:, 0] / size
    error = (basis @ found - got).norm()
    if not error <= 1e-9 * (got.norm() + 1e-30):
        raise Conflict("has other values")
    return [float(c) if abs(c) > 1e-9 else 0.0 for c in found]


def in_double(graph: fx.Graph) -> fx.GraphModule:
    """A graph with all its floating-point numbers in float64, on the CPU."""
    narrow = (torch.float32, torch.bfloat16, torch.float16)
    copy = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        new = env[node] = copy.node_copy(node, env.__getitem__)
        new.args = tuple(torch.float64 if a in narrow else a for a in new.args) if any(
            isinstance(a, torch.dtype) for a in new.args
        ) else new.args  # fmt: skip
        if new.kwargs.get("dtype") in narrow:
            new.kwargs = {**new.kwargs, "dtype": torch.float64}
        if "device" in new.kwargs:
            new.kwargs = {**new.kwargs, "device": torch.device("cpu")}
    return fx.GraphModule(torch.nn.Module(), copy)
