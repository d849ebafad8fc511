"""One rank of many: DTensors, collectives that are not carried out, FSDP2 and DDP.

A wrapper of tensors (a DTensor, an AsyncCollectiveTensor) is taken apart by its own class; the ops
that it calls on what is inside come back to the simulation. A collective is booked and never
carried out, so the other ranks need not exist: a process group of torch's backend "fake" will do.
FSDP2 runs as it is. The reducer of DDP is native code, so what it does to memory is done here.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors
from torch.utils._pytree import tree_leaves, tree_map_only

from storage_ops.checkpoint import fsdp

if TYPE_CHECKING:
    from storage_ops.memory.estimate_modes import Simulation

_WRAPPERS = (
    ("torch.distributed.tensor", "DTensor"),
    ("torch.distributed._functional_collectives", "AsyncCollectiveTensor"),
)
# What a ring sends from each of R ranks, of n bytes in all: so many times n (R - 1) / R.
_ROUNDS = {
    "all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1, "reduce": 1,
    "all_to_all": 1, "gather": 1, "scatter": 1,
}  # fmt: skip
_NAMES = (
    ("allreduce", "all_reduce"), ("all_reduce", "all_reduce"), ("allgather", "all_gather"),
    ("all_gather", "all_gather"), ("reduce_scatter", "reduce_scatter"), ("alltoall", "all_to_all"),
    ("all_to_all", "all_to_all"), ("broadcast", "broadcast"), ("reduce_", "reduce"),
    ("gather", "gather"), ("scatter", "scatter"),
)  # fmt: skip
_ENDS = ("send", "recv")  # between two ranks
_BARRIERS = ("barrier", "monitored_barrier")


def wrapper_types() -> tuple[type, ...]:
    """Classes of tensors that are taken apart; those whose module nobody imported are left out."""
    found = (getattr(sys.modules.get(module), name, None) for module, name in _WRAPPERS)
    return tuple(kind for kind in found if kind is not None)


def is_wrapper(t: Any) -> bool:
    """Whether a tensor is taken apart by its own class."""
    return isinstance(t, wrapper_types())


def inside(t: Any) -> list[Tensor]:
    """The plain tensors in a wrapper; of a plain one, itself."""
    if not is_wrapper(t):
        return [t]
    names, _ = t.__tensor_flatten__()  # in some versions of torch the mesh is one
    parts = [getattr(t, name) for name in names]
    return [one for part in parts if isinstance(part, Tensor) for one in inside(part)]


def rewrapped(t: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A wrapper like this one around other tensors; of a plain one, the other."""
    if not is_wrapper(t):
        return change(t)
    names, context = t.__tensor_flatten__()
    parts = {name: getattr(t, name) for name in names}
    for name, part in parts.items():
        if isinstance(part, Tensor):
            parts[name] = rewrapped(part, change)
    return type(t).__tensor_unflatten__(parts, context, t.shape, t.stride())


def is_distributed(model: nn.Module) -> bool:
    """Whether a model is a part of one that lies on several ranks."""
    modules = list(model.modules())
    wrapped = any(map(is_wrapper, model.parameters()))
    return wrapped or bool(_ddp_in(modules)) or bool(_states_in(modules))


def is_collective(func: Any) -> bool:
    """Whether an op is a collective that works on tensors in place and returns its handle."""
    return str(func.namespace) == "c10d"


def count_sent(sent: Counter[str], func: Any, args: Any) -> None:
    """Add the bytes that a collective sends from this rank, if the op is one."""
    if func.namespace not in ("c10d", "_c10d_functional", "_dtensor"):
        return
    op = func._schema.name.split("::")[1].lstrip("_")
    given = [t for t in tree_leaves(args[:2]) if isinstance(t, Tensor)]
    if op == "send":
        sent["send"] += sum(t.nbytes for t in given)
    name = next((name for start, name in _NAMES if op.startswith(start)), None)
    ranks = _ranks(func, args)
    if name is None or ranks < 2:
        return
    if func.namespace == "c10d" and name in ("all_gather", "reduce_scatter", "all_to_all"):
        given = [t for t in tree_leaves(args[1]) if isinstance(t, Tensor)]
    whole = sum(t.nbytes for t in given) * (ranks if name == "all_gather" else 1)
    sent[name] += whole * _ROUNDS[name] * (ranks - 1) // ranks


def _ranks(func: Any, args: Any) -> int:
    from torch.distributed import distributed_c10d as c10d

    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name == "group_name":
            group = c10d._resolve_process_group(value) if isinstance(value, str) else value
            return int(group.size())
        if argument.name == "process_group":
            return int(c10d.ProcessGroup.unbox(value).size())
    return 1


def pretended(simulation: Simulation, func: Any, args: Any) -> Any:
    """What a collective in place returns, without carrying it out."""
    from torch._C._distributed_c10d import FakeWork

    op = func._schema.name.split("::")[1]
    if simulation.on_gpu and op in ("allgather_", "reduce_scatter_"):
        # NCCL works on one tensor; a list of them is copied into one.
        many = tree_leaves(args[0] if op == "allgather_" else args[1])
        if len({t.shape for t in many}) == 1:
            flat = simulation.unseen(many[0].new_empty, (len(many), *many[0].shape))
            simulation.ledger.temporary(flat, str(func))
    handle = FakeWork().boxed()
    returned = func._schema.returns
    if len(returned) == 2:
        return args[0], handle
    return handle if returned else None


@contextlib.contextmanager
def propagation_unseen(simulation: Simulation) -> Iterator[None]:
    """Let DTensor ask for shapes of whole tensors, which it does by ops, without any being booked.
    """
    module = sys.modules.get("torch.distributed.tensor._sharding_prop")
    if module is None:
        yield
        return
    kind = module.ShardingPropagator
    name = "_propagate_tensor_meta_non_cached"
    plain = getattr(kind, name)

    def unseen(*args: Any, **kwargs: Any) -> Any:
        return simulation.unseen(plain, *args, **kwargs)

    setattr(kind, name, unseen)
    try:
        yield
    finally:
        setattr(kind, name, plain)


@contextlib.contextmanager
def fsdp_simulated(modules: list[nn.Module]) -> Iterator[None]:
    """Let FSDP2 train parameters on the meta device, and forget what it did.

    It asks the device of its mesh for memory and for streams. Here memory is where the parameters
    are, and its streams are those of the mesh.
    """
    states = _states_in(modules)
    if not states:
        yield
        return
    groups = [group for state in states for group in fsdp.groups(state)]
    kept = [s for state in states for s in (state, state._state_ctx, state._comm_ctx)]
    kept += [p for group in groups for p in (group, *group.fsdp_params)]
    with contextlib.ExitStack() as stack:
        for module in modules:
            for name in ("_parameters", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks"):
                stack.enter_context(_same_contents(vars(module)[name]))
        for value in dict.fromkeys(kept):
            stack.enter_context(_same_contents(vars(value)))
        meta = [g for g in groups if any(p.sharded_param.is_meta for p in g.fsdp_params)]
        if meta:
            stack.enter_context(_on_meta(meta))
        yield


def _states_in(modules: list[nn.Module]) -> list[Any]:
    mine = set(modules)
    return [state for state in fsdp.states() if mine.intersection(state._modules)]


@contextlib.contextmanager
def _same_contents(values: Any) -> Iterator[None]:
    """Let a dict contain afterwards what it does now; so do lists, dicts and sets in it."""
    before = dict(values)
    inner = {k: copy.copy(v) for k, v in before.items() if isinstance(v, (list, dict, set))}
    try:
        yield
    finally:
        values.clear()
        values.update(before)
        for key, contents in inner.items():
            value = values[key]
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(contents)


@contextlib.contextmanager
def _on_meta(groups: list[Any]) -> Iterator[None]:
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group

    where = groups[0].device.type
    before = [(module, module._get_device_handle) for module in (collectives, param_group)]

    def handle_of(kind: str) -> Any:
        return before[0][1](where if kind == "meta" else kind)

    plain = param_group.FSDPParamGroup._validate_no_meta_params
    param_group.FSDPParamGroup._validate_no_meta_params = lambda _: None  # type: ignore[method-assign]
    for module, _ in before:
        module._get_device_handle = handle_of
    for group in groups:
        for holder in (group, *group.fsdp_params):
            holder.device = torch.device("meta")
    try:
        yield  # the devices are put back with everything else
    finally:
        param_group.FSDPParamGroup._validate_no_meta_params = plain  # type: ignore[method-assign]
        for module, get in before:
            module._get_device_handle = get


def _ddp_in(modules: Iterable[nn.Module]) -> list[Any]:
    return [m for m in modules if isinstance(m, nn.parallel.DistributedDataParallel)]


@contextlib.contextmanager
def ddp_simulated(modules: list[nn.Module], simulation: Simulation) -> Iterator[None]:
    """Do to memory what DDP's reducer does, which would communicate."""
    found = _ddp_in(modules)
    if not found:
        yield
        return
    kind = nn.parallel.DistributedDataParallel
    plain = kind.forward
    with contextlib.ExitStack() as stack:
        for ddp in found:
            stack.enter_context(_buckets(ddp, simulation))
        kind.forward = _ddp_forward  # type: ignore[method-assign]
        stack.callback(setattr, kind, "forward", plain)
        yield


def _ddp_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    if self.will_sync_module_buffers() and torch.is_grad_enabled():
        for alike in _by_dtype(self.modules_buffers):
            # They are sent as one tensor, which a single one is already.
            _flatten_dense_tensors([b.detach() for b in alike])
    output = self.module(*args, **kwargs)
    if self.find_unused_parameters and not self.static_graph and torch.is_grad_enabled():
        output = tree_map_only(Tensor, torch.clone, output)
    return output


def _by_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    found: dict[torch.dtype, list[Tensor]] = {}
    for t in tensors:
        found.setdefault(t.dtype, []).append(t)
    return list(found.values())


@contextlib.contextmanager
def _buckets(ddp: Any, simulation: Simulation) -> Iterator[None]:
    """The buckets of a DDP module, and the hooks that put gradients into them."""
    import torch.distributed as dist

    for said, what in ((ddp._comm_hooks, "communication hook"), (ddp.mixed_precision, "mixed_precision")):
        if said:
            raise RuntimeError(
                f"estimate: a DistributedDataParallel has a {what}, which is not simulated; "
                "expected one without"
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
    ddp: Any, simulation: Simulation, bucket: Tensor, offset: int, ranks: int
) -> Callable[[Tensor], None]:
    def hook(p: Tensor) -> None:
        if not ddp.require_backward_grad_sync:
            return
        simulation.sent["all_reduce"] += 2 * p.nbytes * (ranks - 1) // ranks
        if ddp.gradient_as_bucket_view:
            p.grad = simulation.viewed(bucket, p.shape, p.stride(), offset, p.dtype)

    return hook
