"""Ways of parallel training that a traced step cannot hold: refused by name, before they begin."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from storage_ops.graph.slots import Closure

_RING = "torch.distributed.tensor.experimental._context_parallel._attention"
# Each begins a ring; the first before it changes a buffer.
_BEGINNINGS = ("_context_parallel_buffers", "_enable_cp_dtensor_dispatcher")


@contextlib.contextmanager
def refused(closure: Closure) -> Iterator[None]:
    """Raise in a with block where a ring of torch's context parallelism begins, and before.

    Raises:
        ValueError: a ring is under way already, or async tensor parallelism is asked for.
    """
    _refuse_async(closure)
    module: Any = sys.modules.get(_RING)
    if module is None:
        yield
        return
    from torch.distributed.tensor import DTensor

    dispatcher: Any = vars(DTensor)["_op_dispatcher"]
    if module.custom_ops.keys() & dispatcher._custom_op_handlers.keys():
        _raise_ring()
    plain = {name: getattr(module, name) for name in _BEGINNINGS}
    try:
        for name in plain:
            setattr(module, name, _raise_ring)
        yield
    finally:
        for name, function in plain.items():
            setattr(module, name, function)


def _raise_ring(*_: Any, **__: Any) -> Any:
    raise ValueError(
        "trace_step: fn uses torch's context_parallel, whose ring of attention works on buffers "
        "and streams that a graph cannot hold; expected keys and values gathered by "
        "all_gather_tensor_autograd of torch.distributed._functional_collectives, or the step "
        "without trace_step"
    )


def _refuse_async(closure: Closure) -> None:
    config: Any = sys.modules.get("torch._inductor.config")
    if config is None or not config._micro_pipeline_tp:
        return
    for t in closure.tensors:
        if hasattr(t, "device_mesh"):
            raise ValueError(
                f"trace_step: {closure.slots[id(t)].name} is a DTensor, and "
                "torch._inductor.config._micro_pipeline_tp, async tensor parallelism, is True; "
                "expected False: it is a pass of Inductor, which a traced step does not go "
                "through, so use torch.compile for that instead of trace_step"
            )
