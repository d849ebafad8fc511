"""Rewrites recomputed random ops so that a CUDA graph can capture them."""

from __future__ import annotations

import torch
from torch import fx
from torch._prims.rng_prims import graphsafe_run_with_rng_state, run_and_save_rng_state

from storage_ops.graph.nodes import check_graph, copy_of, item_of
from storage_ops.graph.recompute import rng
from storage_ops.graph.recompute.remat import BEFORE

_DEVICES = ("cuda",)


def capturable(gm: fx.GraphModule) -> tuple[fx.GraphModule, list[torch.Generator]]:
    """Let a CUDA graph capture the random ops that a step recomputes.

    A traced step reads the state of a GPU's generator before each random op that it runs again.
    This is not allowed during a capture. In the returned graph such an op has its own generator,
    and so does each of its copies. These generators have the same seed and advance together. So the
    copies draw the same numbers as the op at each replay. The numbers differ from eager mode.
    Random ops that do not run again use the default generator as before.

    The seeds are drawn from torch's default CPU generator.

    Args:
        gm: a graph of `trace_step` or `remat`. It is not modified.

    Returns:
        The new graph, and its generators. Register them by
        `torch.cuda.CUDAGraph.register_generator_state` before the capture.

    Example:
        >>> step = storage_ops.graph.trace_step(lambda x: (x + 1).sum(), torch.ones(256))
        >>> step.gm, generators = storage_ops.graph.capturable(step.gm)
        >>> cuda_graph = torch.cuda.CUDAGraph() if torch.cuda.is_available() else None
        >>> for generator in generators:
        ...     cuda_graph.register_generator_state(generator)
    """
    check_graph("capturable", gm)
    gm = copy_of(gm)
    generators: list[torch.Generator] = []
    for node in list(gm.graph.nodes):
        device = rng.device_of(node)
        if node.target is run_and_save_rng_state and device.type in _DEVICES:
            generators += _rewrite(gm, node, device)
    gm.graph.lint()
    gm.recompile()
    if generators:
        gm.meta.pop(BEFORE, None)  # the new graph draws other numbers, so verifying would fail
    return gm, generators


def check_capture(graph: fx.Graph) -> None:
    """Raise an error if a graph cannot run during a capture."""
    saving = next((node for node in graph.nodes if node.target is run_and_save_rng_state), None)
    if saving is not None:
        raise RuntimeError(
            f"traced step: {saving.name} reads the state of a generator, which a CUDA graph cannot "
            "capture. Run `step.gm, generators = storage_ops.graph.capturable(step.gm)` first."
        )


def _rewrite(gm: fx.GraphModule, node: fx.Node, device: torch.device) -> list[torch.Generator]:
    """Give a random op and its copies generators, instead of a saved generator state."""
    items = {user.args[1]: user for user in node.users if item_of(user) is node}
    state, result = items[0], items[1]
    copies = list(state.users)
    seed = int(torch.randint(torch.iinfo(torch.int64).max, ()))
    generators = [_generator(device).manual_seed(seed) for _ in (node, *copies)]
    for run, generator in zip((node, *copies), generators, strict=True):
        name = f"generator_of_{run.name}"
        setattr(gm, name, generator)
        with gm.graph.inserting_before(run):
            attribute = gm.graph.create_node("get_attr", name)
        if run is not node:
            run.args = run.args[1:]
        run.kwargs = {**run.kwargs, "rng_state": attribute}
        run.target = graphsafe_run_with_rng_state
    node.meta = result.meta
    result.replace_all_uses_with(node, propagate_meta=False)
    gm.graph.erase_node(result)
    gm.graph.erase_node(state)
    return generators


def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device)
