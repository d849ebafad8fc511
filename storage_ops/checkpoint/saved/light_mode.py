"""A dispatch mode of Python that costs little for each op that it sees."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from storage_ops.foundation.op_names import Op
from storage_ops.foundation.ops import Args, Kwargs

# Returns the frame callback of Dynamo in this thread; None: Dynamo is off.
_dynamo: Any = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: True)


class LightMode(TorchDispatchMode):
    """Base of the modes that are active while a user's model runs; they define `dispatch`.

    Dynamo must not compile the code of a mode. torch therefore switches Dynamo off around each op.
    That takes a microsecond, a tenth of the host time of selective checkpoints. This class does so
    only if Dynamo is on, as after a graph break of compiled code.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dispatch_apart = _without_dynamo()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Code that is compiled already runs as it is."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch need not skip Dynamo around each op."""
        return False

    def dispatch(self, op: Op, args: Args, kwargs: Kwargs) -> Any:
        """Run an op, or what takes its place."""
        raise NotImplementedError

    def __torch_dispatch__(
        self, op: Op, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        if _dynamo() is None:
            return self.dispatch(op, args, kwargs or {})
        return self._dispatch_apart(self, op, args, kwargs or {})


@functools.cache
def _without_dynamo() -> Callable[..., Any]:
    """Return a function that calls `dispatch` of a mode without Dynamo."""
    from torch._dynamo.decorators import skip  # imports Dynamo, for a second

    skip(LightMode.__torch_dispatch__)  # this frame alone, and without a wrapper
    apart: Callable[..., Any]
    apart = torch.compiler.disable(lambda mode, *given: mode.dispatch(*given))
    return apart
