"""DDP on one rank of several. This module imitates the memory behaviour of its native reducer.

Gradients exist twice, the second time in buckets. With `gradient_as_bucket_view`, only there.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from storage_ops.simulate.mode import Simulation


def ddp_in(modules: Iterable[nn.Module]) -> list[Any]:
    """Return the DDP modules among `modules`."""
    return [m for m in modules if isinstance(m, nn.parallel.DistributedDataParallel)]


@contextlib.contextmanager
def ddp_simulated(modules: list[nn.Module], simulation: Simulation) -> Iterator[None]:
    """Imitate the memory behaviour of DDP's reducer without communication."""
    wrappers = ddp_in(modules)
    if not wrappers:
        yield
        return
    kind = nn.parallel.DistributedDataParallel
    plain = kind.forward
    with contextlib.ExitStack() as stack:
        for ddp in wrappers:
            stack.enter_context(_buckets(ddp, simulation))
        kind.forward = _ddp_forward  # type: ignore[method-assign]
        stack.callback(setattr, kind, "forward", plain)
        yield


@contextlib.contextmanager
def reducers_renewed(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Replace reducers that have counted gradients of the simulation in a with block.

    In the first backward of a static graph, a reducer counts the gradients of each parameter. In
    later steps it waits for as many, and would wait for those of the simulation too.
    """
    try:
        yield
    finally:
        for ddp in ddp_in(modules):
            is_counting = ddp.static_graph and not ddp._static_graph_delay_allreduce_enqueued
            if is_counting and not ddp._comm_hooks:  # a simulation refuses communication hooks
                _renew_reducer(ddp)


def _renew_reducer(ddp: Any) -> None:
    parameters, are_sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp.reducer = ddp.logger = None  # a parameter can have one reducer at a time
    ddp._ddp_init_helper(parameters, are_sparse, names, True)
    ddp.reducer._set_static_graph()
    ddp.logger._set_static_graph()


def _ddp_forward(self: nn.parallel.DistributedDataParallel, *args: object, **kwargs: object) -> Any:
    if self.will_sync_module_buffers() and torch.is_grad_enabled():
        for alike in _by_dtype(self.modules_buffers):
            # Buffers are sent as one tensor; a single buffer needs no copy.
            _flatten_dense_tensors([b.detach() for b in alike])
    output = self.module(*args, **kwargs)
    if self.find_unused_parameters and not self.static_graph and torch.is_grad_enabled():
        output = tree_map_only(Tensor, torch.clone, output)
    return output


def _by_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for t in tensors:
        by_dtype.setdefault(t.dtype, []).append(t)
    return list(by_dtype.values())


@contextlib.contextmanager
def _buckets(ddp: nn.parallel.DistributedDataParallel, simulation: Simulation) -> Iterator[None]:
    """Create the buckets of a DDP module, and the hooks that copy gradients into them."""
    dist: Any = importlib.import_module("torch.distributed")

    feature = "a communication hook" if ddp._comm_hooks else None
    feature = "mixed_precision" if ddp.mixed_precision is not None else feature
    if feature is not None:
        raise RuntimeError(
            f"estimate: a DistributedDataParallel has {feature}, which is not simulated. Expected "
            "one without it."
        )
    parameters = [p for p in ddp._module_parameters if p.requires_grad]
    ranks = ddp.process_group.size()
    first = min(dist._DEFAULT_FIRST_BUCKET_BYTES, ddp.bucket_bytes_cap)
    backwards = parameters[::-1]
    places, _ = dist._compute_bucket_assignment_by_size(backwards, [first, ddp.bucket_bytes_cap])
    with contextlib.ExitStack() as stack:
        for place in places:
            members = [backwards[i] for i in place]
            bucket = simulation.unseen(
                torch.empty, sum(p.numel() for p in members), dtype=members[0].dtype,
                device=members[0].device,
            )  # fmt: skip
            simulation.ledger.see(bucket, "bucket of DistributedDataParallel", is_input=True)
            simulation.buckets.append(bucket)
            offset = 0
            for p in members:
                hook = _into_bucket(ddp, simulation, bucket, offset, ranks)
                stack.callback(p.register_post_accumulate_grad_hook(hook).remove)
                offset += p.numel()
        yield


def _into_bucket(
    ddp: nn.parallel.DistributedDataParallel,
    simulation: Simulation,
    bucket: Tensor,
    offset: int,
    ranks: int,
) -> Callable[[Tensor], None]:
    def hook(p: Tensor) -> None:
        if not ddp.require_backward_grad_sync:
            return
        simulation.sent["all_reduce"] += 2 * p.nbytes * (ranks - 1) // ranks
        if ddp.gradient_as_bucket_view:
            p.grad = simulation.viewed(bucket, p.shape, p.stride(), offset, p.dtype)

    return hook
