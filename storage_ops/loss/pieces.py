"""Calls of several ranks in the pieces that they consist of, for those who look for collectives.

By default a call is one op, whose collectives are inside of it: what caches or recomputes ops shall
not see tiles that are overwritten. In a trace of make_fx or trace_step and under CommDebugMode the
same code runs without the op around it: its products, the row kernel and functional collectives are
what is recorded, each collective begun before the work that hides it. In graphs of torch.compile a
call stays one op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from storage_ops.foundation import regions
from storage_ops.loss.call import Call, tensors_of

_MODES = torch._C._TorchDispatchModeKey
_LOOKING = {"ProxyTorchDispatchMode", "CommDebugMode"}
_HARMLESS = {"FakeTensorMode", "Lift"}


def traced() -> bool:
    """Whether ops are recorded as those of a graph, so that nothing may depend on values."""
    return torch._C._get_dispatch_mode(_MODES.PROXY) is not None


def in_pieces(call: Call) -> bool:
    """Whether a call is run as the ops that it consists of, not as one."""
    if not call.group or call.accumulate_into is not None or _in_region():
        return False
    modes = {type(mode).__name__ for mode in _get_current_dispatch_mode_stack()}
    sizes = (n for t in tensors_of(call) if t is not None for n in t.shape)
    fixed = all(type(n) is int for n in sizes)
    return bool(modes & _LOOKING) and modes <= _LOOKING | _HARMLESS and fixed


def _in_region() -> bool:
    """Whether a traced step is in a region, of which nothing may be overwritten."""
    return traced() and regions.inside()


def run(op: Callable[..., Any], kernel: Callable[..., Any], call: Call, *args: Any) -> Any:
    """What an op returns, by it or by its kernel."""
    return kernel(*args) if in_pieces(call) else op(*args)
