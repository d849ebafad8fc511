"""Calls a loss where torch.compile cannot trace it. Apart, since `disable` imports Dynamo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _run(apply: Callable[..., Any], call: Any) -> Any:
    return apply(call)


run = torch.compiler.disable(
    _run,
    reason="linear_cross_entropy or linear_kl_div is inside torch.func.grad, which torch.compile "
    "runs without a graph; expected fullgraph=False, or torch.autograd.grad of the compiled loss",
)
