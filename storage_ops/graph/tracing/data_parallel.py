"""Data-parallel modules in a trace: their communication becomes part of the graph.

DistributedDataParallel communicates in hooks that copy gradients to its own buffers. In a trace,
functional collectives average gradients instead, one per parameter. Each begins when its gradient
is complete. The end of the backward pass waits for all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from storage_ops.graph.tracing import fully_sharded
from storage_ops.graph.tracing.lift import is_traced
from storage_ops.graph.tracing.slots import Closure

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

_REFUSED = ("FullyShardedDataParallel", "DataParallel")


@contextlib.contextmanager
def traced(closure: Closure, fake_mode: FakeTensorMode) -> Iterator[None]:
    """Record the communication of data-parallel modules of a traced function in a with block.

    Raises:
        ValueError: the communication of a module cannot be recorded.
    """
    with contextlib.ExitStack() as stack:
        for name, module in closure.modules:
            kinds = {kind.__name__ for kind in type(module).__mro__}
            for kind in kinds.intersection(_REFUSED):
                raise ValueError(
                    f"trace_step: {name} is a {kind}, which communicates in hooks that a graph "
                    "cannot hold. Use DistributedDataParallel or fully_shard."
                )
            if fully_sharded.is_sharded(module):
                stack.enter_context(fully_sharded.recorded(name, module))
            if "DistributedDataParallel" in kinds:
                parallel = cast("DistributedDataParallel", module)
                _check(name, parallel)
                stack.enter_context(_Replicas(parallel, fake_mode).recorded())
        yield


def _check(name: str, module: DistributedDataParallel) -> None:
    """Raise an error if a module communicates other values than its averaged gradients."""
    unusual = {
        "a communication hook": bool(module._comm_hooks),
        "mixed precision": module.mixed_precision is not None,
        "delayed all-reduces": bool(module._delay_all_reduce_params),
        "a hook for its buffers": hasattr(module, "buffer_hook"),
    }
    for feature, has in unusual.items():
        if has:
            raise ValueError(
                f"trace_step: {name} is a DistributedDataParallel with {feature}. Expected one "
                "that averages its gradients."
            )


class _Replicas:
    """One data-parallel module in a trace."""

    def __init__(self, module: DistributedDataParallel, fake_mode: FakeTensorMode) -> None:
        self._module = module
        self._fake_mode = fake_mode
        self._group: str = module.process_group.group_name
        self._world: int = module.process_group.size()
        self._averages = False
        self._begun: list[tuple[Tensor, Tensor]] = []

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Replace the module's forward, and the hooks of its parameters, in a with block."""
        handles = [
            p.register_post_accumulate_grad_hook(self._begin)
            for p in self._module._module_parameters
            if p.requires_grad
        ]
        self._module.forward = self._forward  # type: ignore[method-assign]
        synced = self._module.require_forward_param_sync
        try:
            yield
        finally:
            self._module.require_forward_param_sync = synced
            del self._module.forward
            for handle in handles:
                handle.remove()

    def _forward(self, *args: object, **kwargs: object) -> Any:
        module = self._module
        if module.will_sync_module_buffers():
            with torch.no_grad():
                for buffer in module.module.buffers():
                    root = torch.ops._c10d_functional.broadcast(buffer, 0, self._group)
                    buffer.copy_(torch.ops._c10d_functional.wait_tensor(root))
        # As in eager mode, module.no_sync() around the forward decides.
        self._averages = torch.is_grad_enabled() and module.require_backward_grad_sync
        module.require_forward_param_sync = self._averages
        if module.device_ids:
            to_device = partial(Tensor.to, device=module.device, non_blocking=True)
            args, kwargs = tree_map_only(Tensor, to_device, (args, kwargs))
        return module.module(*args, **kwargs)

    def _begin(self, parameter: Tensor) -> None:
        """Begin to average a complete gradient."""
        if not self._averages:
            return
        if not self._begun:
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._finish)
        with torch._C.DisableTorchFunction():  # fn does not read the gradient here
            grad = parameter.grad
            assert grad is not None
            share = grad * (1 / self._world)
            total = torch.ops._c10d_functional.all_reduce(share, "sum", self._group)
        self._begun.append((parameter, total))

    def _finish(self) -> None:
        for parameter, total in self._begun:
            mean = torch.ops._c10d_functional.wait_tensor(total)
            with torch._C.DisableTorchFunction():
                if is_traced(parameter.grad, self._fake_mode):
                    parameter.grad = mean
                else:
                    assert parameter.grad is not None
                    parameter.grad.copy_(mean)
        self._begun.clear()
        self._averages = False
