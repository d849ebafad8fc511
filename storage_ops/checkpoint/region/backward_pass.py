"""The backward pass that runs in this thread."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from storage_ops.foundation.eager import eager

# Returns the group of passes that share one recompute; None in torch versions without groups.
current_group: Callable[[], Any] | None = getattr(torch._C, "_get_graph_exec_group", None)


def current_pass() -> Any:
    """Return an identity of the running backward pass or of its group; None outside of a backward.

    `torch.utils.checkpoint.GraphExecGroup` makes several passes share one recompute.
    """
    current = None if current_group is None else current_group()
    if current is not None:
        return current
    task = torch._C._current_graph_task_id()
    return None if task == -1 else task


# Returns True if the running backward pass keeps the graph and its saved tensors.
is_retained: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph


@eager
def end_backward(region: weakref.ref[Any], retained: bool) -> None:
    """Tell a region that a backward pass has ended, unless the region was freed."""
    alive = region()
    if alive is not None:
        alive.end_backward(retained)
