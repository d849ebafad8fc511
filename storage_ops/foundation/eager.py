"""Keep Dynamo from functions and from blocks of code.

After a graph break, Dynamo is on until the compiled call ends, and compiles each Python function
that begins in this time. Autograd may then save tensors, or run a backward pass. So it calls hooks
of this package, which recompute code of the user. Compiled code saves other tensors than the
forward did, and the hooks themselves cannot be compiled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])
_eval_frame: Any = torch._C._dynamo.eval_frame  # does not import Dynamo
_SKIP = _eval_frame._FrameAction.SKIP
_WITH_CALLEES = _eval_frame._FrameExecStrategy(_SKIP, _SKIP)
# Returns None or False where Dynamo is off. Early versions of torch lack it.
_callback: Callable[[], Any] = getattr(_eval_frame, "get_eval_frame_callback", lambda: None)


def eager(fn: _Function) -> _Function:
    """Return a function after excluding it from Dynamo.

    Dynamo then compiles neither the function, nor functions defined in it, nor their callees. If a
    compiled function calls it, Dynamo still traces it.
    """
    _exclude(fn.__code__)
    return fn


def _exclude(code: CodeType) -> None:
    _eval_frame.set_code_exec_strategy(code, _WITH_CALLEES)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _exclude(constant)


@contextlib.contextmanager
def force_eager() -> Iterator[None]:
    """Run compiled functions uncompiled inside a with block that activates a dispatch mode.

    Dynamo skips a function that is first called under a mode, and never compiles that function
    again. `torch.cond` and other ops that compile themselves would fail after the block. Inside a
    compiled function the block changes nothing, because torch allows no other stance there.
    """
    if _callback() not in (None, False):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
