"""FSDP2 on one rank of several. FSDP2's own code runs, and is restored afterwards."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from storage_ops.checkpoint.state.unchanged import unchanged
from storage_ops.foundation import fsdp

if TYPE_CHECKING:
    from storage_ops.simulate.mode import Simulation

_CODE = "torch.distributed.fsdp._fully_shard."
_MODULES = ("_fsdp_param_group", "_fsdp_collectives")
# Asks a stream for its number, which those of the CPU lack. From torch 2.15 on.
_RECORD = "record_grad_output_stream"
# The results of parts of FSDP.
GATHERED, REDUCED = "gathered parameters", "gradients to reduce"
_PARTS = {
    "foreach_all_gather": GATHERED,
    "foreach_all_gather_copy_out": GATHERED,
    "foreach_reduce": REDUCED,
}


@contextlib.contextmanager
def fsdp_simulated(modules: list[nn.Module], simulation: Simulation) -> Iterator[None]:
    """Let FSDP2 train parameters on the meta device. Undo the changes afterwards.

    FSDP2 asks the device of its mesh for memory and streams. In a simulation, memory is on the
    device of the parameters, and streams are those of the mesh.
    """
    if any(isinstance(m, _fsdp1()) for m in modules):
        raise RuntimeError(
            "estimate: a module is a FullyShardedDataParallel (FSDP1), which is not simulated. Use "
            "fully_shard (FSDP2)."
        )
    states = states_in(modules)
    if not states:
        yield
        return
    groups = [group for state in states for group in fsdp.groups(state)]
    objects = [s for state in states for s in (state, state._state_ctx, state._comm_ctx)]
    objects += [p for group in groups for p in (group, *group.fsdp_params)]
    with contextlib.ExitStack() as stack:
        for group in groups:
            _refuse_fsdp(group)
        stack.enter_context(unchanged(*map(vars, dict.fromkeys(objects))))
        for p in (p for group in groups for p in group.fsdp_params):
            # FSDP would resize the storage of the earlier full parameter. It creates a new one.
            vars(p).pop("_unsharded_param", None)
            p.all_gather_outputs = []
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
    """Raise an error for features that move memory off the device, or allocate it differently."""
    makers = (getattr(group, name, None) for name in ("_all_gather_comm", "_reduce_scatter_comm"))
    own = [type(m).__name__ for m in makers if m is not None]
    own = [name for name in own if not name.startswith("Default")]
    feature = "CPUOffloadPolicy" if any(p.offload_to_cpu for p in group.fsdp_params) else None
    feature = f"the collective {own[0]}" if own else feature
    if feature is not None:
        raise RuntimeError(
            f"estimate: a module of fully_shard has {feature}, which is not simulated. Expected "
            "parameters on the device and torch's own collectives."
        )


@contextlib.contextmanager
def _named(simulation: Simulation) -> Iterator[None]:
    """Assign blocks that FSDP allocates to their own owners."""
    module = importlib.import_module(_CODE + _MODULES[0])

    def under(plain: Callable[..., Any], name: str) -> Any:
        def call(*args: object, **kwargs: object) -> Any:
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
    """Return FSDP2's states of these modules."""
    mine = set(modules)
    return [state for state in fsdp.states() if mine.intersection(state._modules)]


def reshard(modules: list[nn.Module]) -> bool:
    """Free full parameters, which a simulation would free for good. Return True if there are any.

    FSDP keeps the parameters of a root after a forward without a backward.
    """
    groups = [group for state in states_in(modules) for group in fsdp.groups(state)]
    whole = [group for group in groups if group.is_unsharded]
    for group in whole:
        group.reshard()
    return bool(whole)


def sharded_modules(model: nn.Module) -> dict[int, set[int]]:
    """Return the numbers of FSDP's hooks on each FSDP2 module's forward, by the module's id."""
    sharded: dict[int, set[int]] = {}
    for state in states_in(list(model.modules())):
        handles = (state._pre_forward_hook_handle, state._post_forward_hook_handle)
        # Handles for several modules have no id.
        numbers = {h.id for h in handles if hasattr(h, "id")}
        sharded |= {id(module): numbers for module in state._modules}
    return sharded


def sharded_parameters(model: nn.Module) -> dict[int, Hashable]:
    """Return the memory properties of FSDP2 parameters that are plain when gathered, by id.

    A parameter of tensor parallelism is not included, because it is a DTensor when gathered.
    """
    groups = (g for state in states_in(list(model.modules())) for g in fsdp.groups(state))
    return {
        id(p.sharded_param): (
            p._orig_size, p.sharded_param.dtype, p.mp_policy, p.mesh_info.mesh, p.fsdp_placement,
            p.sharded_param.requires_grad,
        )
        for group in groups for p in group.fsdp_params if not p.is_dtensor
    }  # fmt: skip


class _Root(nn.Module):
    """An FSDP root around a layer. FSDP frees the root's parameters only after the backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: object, **kwargs: object) -> Any:
        return self.layer(*args, **kwargs)


@contextlib.contextmanager
def layer_alone(layer: nn.Module, gathered: Mapping[str, Tensor]) -> Iterator[nn.Module]:
    """Let a layer run alone, inside the FSDP hooks that its model has around it.

    Yield the module to call. FSDP modules inside the layer gather their parameters and reduce
    gradients as in the model.

    Args:
        layer: the layer.
        gathered: a full tensor for each parameter that FSDP gathers before the layer runs, by name.
            In the block, the layer has these as parameters.
    """
    outer = [state for state in states_in([layer]) if state._modules == (layer,)]
    inner = [state for state in states_in(list(layer.modules())) if state not in outer]
    meshes = [group.mesh_info.mesh for state in inner for group in fsdp.groups(state)]
    called: nn.Module = layer
    if meshes:
        called = _Root(layer)
        shard: Any = importlib.import_module("torch.distributed.fsdp").fully_shard
        shard(called, mesh=meshes[0], ignored_params=set(called.parameters()))
        shard.state(called)._lazy_init()
    named = dict(layer.named_parameters())
    whole = {
        id(named[name]): nn.Parameter(t, requires_grad=named[name].requires_grad)
        for name, t in gathered.items()
    }
    with contextlib.ExitStack() as stack:
        for module in layer.modules():
            for name, p in list(module._parameters.items()):
                if id(p) in whole:
                    module._parameters[name] = whole[id(p)]
                    stack.callback(module._parameters.__setitem__, name, p)
        for state in outer:
            numbers = (state._pre_forward_hook_handle.id, state._post_forward_hook_handle.id)
            hooks: Any = (layer._forward_pre_hooks, layer._forward_hooks)
            for known, number in zip(hooks, numbers, strict=True):
                stack.callback(_put_back, known, dict(known))
                known.pop(number)
        yield called


def _put_back(hooks: dict[int, Any], before: dict[int, Any]) -> None:
    """Restore hooks in their former order."""
    hooks.clear()
    hooks.update(before)


def gathered_inside(layer: nn.Module) -> list[nn.Parameter]:
    """Return the full parameters that FSDP modules of a layer have gathered."""
    groups = (g for state in states_in(list(layer.modules())) for g in fsdp.groups(state))
    gathered = (getattr(p, "_unsharded_param", None) for group in groups for p in group.fsdp_params)
    return [p for p in gathered if p is not None]


@contextlib.contextmanager
def forwards_forgotten(layer: nn.Module) -> Iterator[None]:
    """Let the FSDP modules of a layer forget the forwards inside a with block.

    In backward, FSDP gathers parameters in the order of the forwards that it has recorded.
    """
    states = states_in(list(layer.modules()))
    kept = [s for state in states for s in (state, state._state_ctx, state._comm_ctx)]
    kept += [group for state in states for group in fsdp.groups(state)]
    with unchanged(*map(vars, dict.fromkeys(kept))) if kept else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _on_meta(groups: list[Any]) -> Iterator[None]:
    param_group, collectives = (importlib.import_module(_CODE + part) for part in _MODULES)

    where, handle_of_device = groups[0].device.type, collectives._get_device_handle

    def handle_of(kind: str) -> Any:
        return handle_of_device(where if kind == "meta" else kind)

    changes: list[tuple[Any, str, Callable[..., Any]]] = [
        (collectives, "_get_device_handle", handle_of),
        (param_group, "_get_device_handle", handle_of),
        (param_group.FSDPParamGroup, "_validate_no_meta_params", lambda _: None),
        # HSDP expects a device other than the CPU, whose streams record no events.
        (vars(torch.cpu)["Stream"], "record_event", lambda _: torch.cpu.Event()),
    ]
    if hasattr(collectives, _RECORD):
        changes.append((collectives, _RECORD, lambda *_: None))
    plain = [getattr(owner, name) for owner, name, _ in changes]
    for owner, name, function in changes:
        setattr(owner, name, function)
    for group in groups:
        for holder in (group, *group.fsdp_params):
            holder.device = torch.device("meta")
    try:
        yield  # the caller restores the devices with everything else
    finally:
        for (owner, name, _), function in zip(changes, plain, strict=True):
            setattr(owner, name, function)
