"""A Python dispatch mode with little overhead for each op."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from storage_ops.foundation.op_names import Op
from storage_ops.foundation.ops import Args, Kwargs

# Returns Dynamo's frame callback in this thread, or None if Dynamo is off.
_dynamo: Any = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: True)


class LightMode(TorchDispatchMode):
    """Base class of modes that are active while a user's model runs. They define `dispatch`.

    Dynamo must not compile the code of a mode. torch therefore switches Dynamo off around each op,
    which takes 1 µs, a tenth of the host time of a selective checkpoint. This class switches Dynamo
    off only if Dynamo is on, for example after a graph break of compiled code.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dispatch_without_dynamo = _without_dynamo()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: compiled code runs unchanged under the mode."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: `__torch_dispatch__` itself switches Dynamo off if that is necessary."""
        return False

    def dispatch(self, op: Op, args: Args, kwargs: Kwargs) -> Any:
        """Return the result of an op."""
        raise NotImplementedError

    def __torch_dispatch__(
        self, op: Op, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        if _dynamo() is None:
            return self.dispatch(op, args, kwargs or {})
        return self._dispatch_without_dynamo(self, op, args, kwargs or {})


@functools.cache
def _without_dynamo() -> Callable[..., Any]:
    """Return a function that calls a mode's `dispatch` with Dynamo switched off."""
    from torch._dynamo.decorators import skip  # imports Dynamo, which takes a second

    skip(LightMode.__torch_dispatch__)  # excludes only this frame, and adds no wrapper
    function: Callable[..., Any]
    function = torch.compiler.disable(lambda mode, *args: mode.dispatch(*args))
    return function
