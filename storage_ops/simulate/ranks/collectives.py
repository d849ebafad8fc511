"""One rank of several: DTensors, and collectives that are recorded without running.

A DTensor is a wrapper (`values/wrappers.py`). Collectives do not run, so the other ranks need not
exist: a process group of torch's backend "fake" is enough. `fsdp.py` and `ddp.py` have the parts
for FSDP2 and DDP.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from storage_ops._op_arguments import tensors_in
from storage_ops.foundation.op_names import Overload
from storage_ops.foundation.ops import Args
from storage_ops.simulate.ranks.ddp import ddp_in
from storage_ops.simulate.ranks.fsdp import sharded_parameters, states_in
from storage_ops.simulate.values.wrappers import is_wrapper

if TYPE_CHECKING:
    from storage_ops.simulate.mode import Simulation

_ELEMENTWISE = {
    torch.optim.ASGD, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam,
    torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
}  # fmt: skip
# The factor of n (R - 1) / R in the bytes that each of R ranks sends in a ring, of n bytes in all.
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


def is_spread(t: object) -> bool:
    """Return True if a tensor is this rank's part of a tensor on several ranks."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def is_distributed(model: nn.Module) -> bool:
    """Return True if parts of a model are on other ranks."""
    modules = list(model.modules())
    spread = any(map(is_spread, model.parameters()))
    return spread or bool(ddp_in(modules)) or bool(states_in(modules))


def is_sharded_alone(model: nn.Module) -> bool:
    """Return True if only FSDP2 distributes parameters, so that ops are those of one rank."""
    known = sharded_parameters(model)
    others = any(is_spread(p) and id(p) not in known for p in model.parameters())
    return not others and not ddp_in(list(model.modules()))


@contextlib.contextmanager
def updated_locally(optimizer: Optimizer) -> Iterator[None]:
    """Let an optimizer update this rank's parts of DTensors if the result is the same.

    It is the same if each number is updated separately, and gradients have the placements of their
    parameters. DTensor checks placements for every list of parameters, which takes a third of the
    time of a large model's estimate.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    owned = [p for params in groups for p in params]
    alike = all(p.grad is None or _lie_alike(p, p.grad) for p in owned)
    if type(optimizer) not in _ELEMENTWISE or optimizer.state or not any(map(is_spread, owned)):
        alike = False
    if not alike:
        yield
        return
    try:
        for group, params in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [_part(p) for p in params]
        yield
    finally:
        for group, params in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = params


def _lie_alike(p: Any, gradient: Any) -> bool:
    if not is_spread(p) or not is_spread(gradient):
        return not is_wrapper(p) and not is_wrapper(gradient)
    return bool(p.placements == gradient.placements)


def _part(p: Any) -> Any:
    if not is_spread(p):
        return p
    part = nn.Parameter(p.detach().to_local(), requires_grad=p.requires_grad)
    part.grad = None if p.grad is None else p.grad.to_local()
    return part


def count_sent(sent: Counter[str], func: Overload, args: Args) -> None:
    """Add the bytes that a collective sends from this rank."""
    op = func._schema.name.split("::")[1].lstrip("_")
    tensors = tensors_in(args[:2])
    if op == "send":
        sent["send"] += sum(t.nbytes for t in tensors)
    name = next((name for start, name in _NAMES if op.startswith(start)), None)
    ranks = _ranks(func, args)
    if name is None or ranks < 2:
        return
    if func.namespace == "c10d" and name in ("all_gather", "reduce_scatter", "all_to_all"):
        tensors = tensors_in(args[1])
    whole = sum(t.nbytes for t in tensors) * (ranks if name == "all_gather" else 1)
    sent[name] += whole * _ROUNDS[name] * (ranks - 1) // ranks


def _ranks(func: Overload, args: Args) -> int:
    from torch.distributed import distributed_c10d as c10d

    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name == "group_name":
            find: Any = vars(c10d)["_resolve_process_group"]
            group = find(value) if isinstance(value, str) else value
            return int(group.size())
        if argument.name == "process_group":
            return int(c10d.ProcessGroup.unbox(value).size())
    return 1


def pretended(simulation: Simulation, func: Overload, args: Args) -> Any:
    """Return the result of an in-place collective without running it."""
    from torch._C._distributed_c10d import FakeWork

    op = func._schema.name.split("::")[1]
    if simulation.on_gpu and op in ("allgather_", "reduce_scatter_"):
        # NCCL needs one tensor, so a list is copied into one.
        many = tensors_in(args[0] if op == "allgather_" else args[1])
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
    """Let DTensor run ops to find the shapes of whole tensors, without recording them."""
    module = sys.modules.get("torch.distributed.tensor._sharding_prop")
    if module is None:
        yield
        return
    kind = module.ShardingPropagator
    name = "_propagate_tensor_meta_non_cached"
    plain = getattr(kind, name)

    def unseen(*args: object, **kwargs: object) -> Any:
        return simulation.unseen(plain, *args, **kwargs)

    setattr(kind, name, unseen)
    try:
        yield
    finally:
        setattr(kind, name, plain)
