"""Run two graphs from one seed and compare all that they do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves


def verify_equal(first: fx.GraphModule, second: fx.GraphModule) -> None:
    """Raise unless two graphs give the same bits on the same random inputs.

    Floating-point inputs are normal numbers, all others are zeros, which are valid as indices.

    Raises:
        RuntimeError: naming what differs.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = [
        _random(node.meta.get("val"), generator)
        for node in first.graph.nodes
        if node.op == "placeholder"
    ]
    with torch.random.fork_rng():
        ours, theirs = _run(first, inputs), _run(second, inputs)
    states = len(_random_states())
    names = [f"output {i}" for i in range(len(ours) - len(inputs) - states)]
    names += [f"input {i} after the run" for i in range(len(inputs))]
    names += ["the state of the random-number generator"] * states
    for name, one, other in zip(names, ours, theirs, strict=True):
        if isinstance(one, Tensor) and not torch.equal(one.nan_to_num(), other.nan_to_num()):
            difference = (one.double() - other.double()).abs().max().item()
            raise RuntimeError(
                f"remat: {name} differs by {difference:.3g} from that of the graph without "
                "recomputation; expected the same bits"
            )


def _run(gm: fx.GraphModule, inputs: list[Any]) -> list[Any]:
    given = [t.clone() if isinstance(t, Tensor) else t for t in inputs]
    torch.manual_seed(0)
    with torch.no_grad():
        # Not by calling the graph, which may take its inputs in containers.
        outputs = tree_leaves(fx.Interpreter(gm).run(*given, enable_io_processing=False))
    return [*outputs, *given, *_random_states()]


def _random_states() -> list[Tensor]:
    """The state of the CPU's generator, and of those of the GPUs in use."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *gpus]


def _random(value: Any, generator: torch.Generator) -> Any:
    if isinstance(value, Tensor):
        shape = [_size(n) for n in value.shape]
        made = torch.zeros(shape, dtype=value.dtype, device=value.device)
        if value.is_floating_point():
            made.copy_(torch.randn(shape, generator=generator, dtype=torch.float64))
        return made.as_strided(shape, made.stride()) if made.is_contiguous() else made
    return _size(value)


def _size(value: Any) -> Any:
    return value.node.hint if isinstance(value, (torch.SymInt, torch.SymFloat)) else value
