"""Raises errors, before the step begins, for features that a traced step cannot contain."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from storage_ops.graph.tracing.slots import Closure

_SEEDS = ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "fork_rng")
_PARTS = tuple(
    getattr(Tensor, name)
    for name in ("coalesce", "is_coalesced", "indices", "_indices", "values", "_values", "_nnz")
)
_RING = "torch.distributed.tensor.experimental._context_parallel._attention"
# Each function begins a ring of context parallelism. The first one runs before buffers change.
_BEGINNINGS = ("_context_parallel_buffers", "_enable_cp_dtensor_dispatcher")


@contextlib.contextmanager
def refused(closure: Closure) -> Iterator[None]:
    """Raise an error in a with block if fn uses a feature that a graph cannot contain.

    Raises:
        ValueError: a ring of torch's context parallelism is running, or async tensor parallelism is
            on.
    """
    _refuse_async(closure)
    with contextlib.ExitStack() as stack:
        for module in (torch, torch.random, torch.cuda):
            for name in _SEEDS:
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, _unseeded(module, name)))
        stack.enter_context(_without_rings())
        stack.enter_context(_WithoutParts())
        yield


class _WithoutParts(TorchFunctionMode):
    """Refuses to take sparse tensors apart. In a trace they have no elements."""

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _PARTS and args[0].is_sparse:
            raise RuntimeError(
                f"trace_step: `fn` calls {func.__name__}() of a sparse tensor. Its number of "
                "elements depends on values, and a graph has the sizes of the trace. Use a dense "
                "gradient (sparse=False), or an optimizer that adds a sparse one as it is, such as "
                "SGD."
            )
        return func(*args, **(kwargs or {}))


def _unseeded(module: ModuleType, name: str) -> Any:
    plain, thread = getattr(module, name), threading.get_ident()

    @functools.wraps(plain)
    def refuse(*args: object, **kwargs: object) -> Any:
        if threading.get_ident() != thread:
            return plain(*args, **kwargs)
        raise RuntimeError(
            f"trace_step: `fn` calls {module.__name__}.{name}, and a graph cannot set the state of "
            "a generator. Call it outside of `fn`, or pass a torch.Generator from there."
        )

    return refuse


@contextlib.contextmanager
def _without_rings() -> Iterator[None]:
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


def _raise_ring(*_: object, **__: object) -> Any:
    raise ValueError(
        "trace_step: `fn` uses torch's context_parallel, whose ring of attention works on buffers "
        "and streams that a graph cannot hold. Gather keys and values by "
        "all_gather_tensor_autograd of torch.distributed._functional_collectives, or run the step "
        "without trace_step."
    )


def _refuse_async(closure: Closure) -> None:
    config: Any = sys.modules.get("torch._inductor.config")
    if config is None or not config._micro_pipeline_tp:
        return
    for t in closure.tensors:
        if hasattr(t, "device_mesh"):
            raise ValueError(
                f"trace_step: {closure.slots[id(t)].name} is a DTensor, and "
                "torch._inductor.config._micro_pipeline_tp (async tensor parallelism) is True. "
                "Expected False: it is a pass of Inductor, which a traced step does not run. Use "
                "torch.compile instead of trace_step for it."
            )
