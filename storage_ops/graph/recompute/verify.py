"""Runs two graphs from one seed and compares results, modified inputs and generator states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from storage_ops.checkpoint.state.execution import gpus_in_use

# A key in the meta of random ops that were recorded again. The value is the name of the op whose
# random numbers the op repeats in eager mode, or None if that is unknown.
REPEATS = "storage_ops_repeats"


def verify_equal(first: fx.GraphModule, second: fx.GraphModule) -> None:
    """Raise an error unless two graphs give the same bits on the same random inputs.

    If the first graph has notes on repeated ops, it runs as eager mode would. Floating-point inputs
    are normal numbers. All others are zeros, which are valid as indices.

    Raises:
        RuntimeError: the graphs differ, or the first graph lacks information. The error has the
            details.
    """
    unclear = [n.name for n in first.graph.nodes if n.meta.get(REPEATS, n.name) is None]
    if unclear:
        raise RuntimeError(
            "remat: cannot verify a graph that does not say whose random numbers "
            f"{', '.join(unclear)} repeat. Expected a graph of storage_ops.graph.trace_step."
        )
    # A compiler's backend runs under modes that compute no values.
    with _disable_current_modes(), torch.random.fork_rng():
        _compare(first, second)


def _compare(first: fx.GraphModule, second: fx.GraphModule) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [
        _random(node.meta.get("val"), generator)
        for node in first.graph.nodes
        if node.op == "placeholder"
    ]
    ours, theirs = _run(first, inputs), _run(second, inputs)
    states = len(_random_states())
    names = [f"output {i}" for i in range(len(ours) - len(inputs) - states)]
    names += [f"input {i} after the run" for i in range(len(inputs))]
    names += ["the state of the random-number generator"] * states
    for name, one, other in zip(names, ours, theirs, strict=True):
        if isinstance(one, Tensor) and not _same(one, other):
            difference = (one.double() - other.double()).abs().max().item()
            raise RuntimeError(
                f"remat: {name} differs by {difference:.3g} from that of the graph without "
                "recomputation. Expected the same bits."
            )


def _same(one: Tensor, other: Tensor) -> bool:
    numbers = torch.equal(one.nan_to_num(), other.nan_to_num())
    return numbers and torch.equal(one.isnan(), other.isnan())


def _run(gm: fx.GraphModule, inputs: list[Any]) -> list[Any]:
    arguments = [t.clone() if isinstance(t, Tensor) else t for t in inputs]
    torch.manual_seed(0)
    with torch.no_grad():
        # Do not call the graph, because it may take its inputs in containers.
        outputs = tree_leaves(_Eager(gm).run(*arguments, enable_io_processing=False))
    return [*outputs, *arguments, *_random_states()]


class _Eager(fx.Interpreter):
    """Runs a graph. An op that repeats another returns its result and draws no numbers."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self._repeated = {node.meta.get(REPEATS) for node in gm.graph.nodes}
        self._results: dict[str, Any] = {}

    def run_node(self, node: fx.Node) -> Any:
        first = node.meta.get(REPEATS)
        if first is not None:
            return _copied(self._results[first])
        value = super().run_node(node)
        if node.name in self._repeated:
            self._results[node.name] = _copied(value)  # a reader may modify the value
        return value


def _copied(value: object) -> Any:
    return tree_map_only(Tensor, torch.clone, value)


def _random_states() -> list[Tensor]:
    """Return the state of the CPU's generator, and of the generators of GPUs in use."""
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, gpus_in_use())]


def _random(value: object, generator: torch.Generator) -> Any:
    if isinstance(value, Tensor):
        shape = [_size(n) for n in value.shape]
        values = torch.zeros(shape, dtype=value.dtype, device=value.device)
        if value.is_floating_point():
            values.copy_(torch.randn(shape, generator=generator, dtype=torch.float64))
        return values.as_strided(shape, values.stride()) if values.is_contiguous() else values
    return _size(value)


def _size(value: object) -> Any:
    return value.node.hint if isinstance(value, (torch.SymInt, torch.SymFloat)) else value
