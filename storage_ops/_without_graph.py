"""Calls that torch.compile cannot trace: losses, recomputed checkpoints and traced steps.

They are in a file of their own because `disable` imports Dynamo.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _run(apply: Callable[..., Any], call: object) -> Any:
    return apply(call)


run = torch.compiler.disable(
    _run,
    reason="linear_cross_entropy or linear_kl_div is inside torch.func.grad, which torch.compile "
    "runs without a graph. Pass fullgraph=False, or use torch.autograd.grad of the compiled loss.",
)


def _run_backward(fn: Callable[..., Any], *args: object) -> Any:
    return fn(*args)


run_backward = torch.compiler.disable(
    _run_backward,
    reason="A checkpoint of storage_ops is recomputed in a backward pass that compiled autograd "
    "runs without a graph. Use torch.compile(backend=..., fullgraph=False).",
)


def _run_step(step: Callable[..., Any], *args: object, **kwargs: object) -> Any:
    return step(*args, **kwargs)


run_step = torch.compiler.disable(
    _run_step,
    reason="A traced step is a graph already. Compile it alone: step.gm = torch.compile(step.gm). "
    "Or pass fullgraph=False.",
)
