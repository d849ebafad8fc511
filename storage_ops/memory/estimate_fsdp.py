"""FSDP2 on one rank of many: it runs as it is, and is afterwards what it was."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from storage_ops.checkpoint import fsdp
from storage_ops.checkpoint.unchanged import unchanged

if TYPE_CHECKING:
    from storage_ops.memory.estimate_modes import Simulation

_CODE = "torch.distributed.fsdp._fully_shard."
_MODULES = ("_fsdp_param_group", "_fsdp_collectives")
# What parts of FSDP make.
GATHERED, REDUCED = "gathered parameters", "gradients to reduce"
_PARTS = {
    "foreach_all_gather": GATHERED,
    "foreach_all_gather_copy_out": GATHERED,
    "foreach_reduce": REDUCED,
}


@contextlib.contextmanager
def fsdp_simulated(modules: list[nn.Module], simulation: Simulation) -> Iterator[None]:
    """Let FSDP2 train parameters on the meta device, and forget what it did.

    It asks the device of its mesh for memory and for streams. Here memory is where the parameters
    are, and its streams are those of the mesh.
    """
    if any(isinstance(m, _fsdp1()) for m in modules):
        raise RuntimeError(
            "estimate: a module is a FullyShardedDataParallel (FSDP1), which is not simulated; "
            "expected fully_shard (FSDP2)"
        )
    states = states_in(modules)
    if not states:
        yield
        return
    groups = [group for state in states for group in fsdp.groups(state)]
    kept = [s for state in states for s in (state, state._state_ctx, state._comm_ctx)]
    kept += [p for group in groups for p in (group, *group.fsdp_params)]
    with contextlib.ExitStack() as stack:
        for group in groups:
            _refuse_fsdp(group)
        stack.enter_context(unchanged(*map(vars, dict.fromkeys(kept))))
        stack.enter_context(_named(simulation))
        meta = [g for g in groups if any(p.sharded_param.is_meta for p in g.fsdp_params)]
        if meta:
            stack.enter_context(_on_meta(meta))
        yield


def _fsdp1() -> tuple[type, ...]:
    module = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    kind = getattr(module, "FullyShardedDataParallel", None)
    return () if kind is None else (kind,)


def _refuse_fsdp(group: Any) -> None:
    """Refuse what takes other memory than that of the device, or takes it in another way."""
    makers = (getattr(group, name, None) for name in ("_all_gather_comm", "_reduce_scatter_comm"))
    own = [type(m).__name__ for m in makers if m is not None]
    own = [name for name in own if not name.startswith("Default")]
    what = "CPUOffloadPolicy" if any(p.offload_to_cpu for p in group.fsdp_params) else None
    what = f"the collective {own[0]}" if own else what
    if what is not None:
        raise RuntimeError(
            f"estimate: a module of fully_shard has {what}, which is not simulated; expected "
            "parameters on the device and torch's own collectives"
        )


@contextlib.contextmanager
def _named(simulation: Simulation) -> Iterator[None]:
    """Let blocks that FSDP makes belong to what it does."""
    module = importlib.import_module(_CODE + _MODULES[0])

    def under(plain: Any, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with simulation.ledger.call(name):
                return plain(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for function, name in _PARTS.items():
            plain = getattr(module, function)
            setattr(module, function, under(plain, name))
            stack.callback(setattr, module, function, plain)
        yield


def states_in(modules: list[nn.Module]) -> list[Any]:
    """What FSDP2 keeps of these modules."""
    mine = set(modules)
    return [state for state in fsdp.states() if mine.intersection(state._modules)]


def sharded_modules(model: nn.Module) -> dict[int, set[int]]:
    """By the id of a module of FSDP2, the numbers of the hooks that FSDP has on its forward."""
    found: dict[int, set[int]] = {}
    for state in states_in(list(model.modules())):
        handles = (state._pre_forward_hook_handle, state._post_forward_hook_handle)
        numbers = {h.id for h in handles if hasattr(h, "id")}  # those on several modules have none
        found |= {id(module): numbers for module in state._modules}
    return found


def sharded_parameters(model: nn.Module) -> dict[int, Hashable]:
    """By the id of a parameter of FSDP2 that is plain when gathered, what decides over its memory.

    A parameter of tensor parallelism is not: gathered it is a DTensor.
    """
    every = (g for state in states_in(list(model.modules())) for g in fsdp.groups(state))
    return {
        id(p.sharded_param): (
            p._orig_size, p.sharded_param.dtype, p.mp_policy, p.mesh_info.mesh, p.fsdp_placement,
            p.sharded_param.requires_grad,
        )
        for group in every for p in group.fsdp_params if not p.is_dtensor
    }  # fmt: skip


@contextlib.contextmanager
def _on_meta(groups: list[Any]) -> Iterator[None]:
    param_group, collectives = (importlib.import_module(_CODE + part) for part in _MODULES)

    where = groups[0].device.type
    before: list[Any] = [(m, m._get_device_handle) for m in (collectives, param_group)]

    def handle_of(kind: str) -> Any:
        return before[0][1](where if kind == "meta" else kind)

    kind: Any = param_group.FSDPParamGroup
    refuse, stream = kind._validate_no_meta_params, vars(torch.cpu)["Stream"]
    kind._validate_no_meta_params = lambda _: None
    # Replicas of what is sharded expect one of any device but a CPU, whose streams record none.
    record, stream.record_event = stream.record_event, lambda _: torch.cpu.Event()
    for module, _ in before:
        module._get_device_handle = handle_of
    for group in groups:
        for holder in (group, *group.fsdp_params):
            holder.device = torch.device("meta")
    try:
        yield  # the devices are put back with everything else
    finally:
        kind._validate_no_meta_params, stream.record_event = refuse, record
        for module, plain in before:
            module._get_device_handle = plain
