"""Traces FSDP2: ops of the graph gather its parameters and scatter its gradients.

Outside a trace, hooks do that with their own buffers and streams. In a trace, every parameter is
gathered before the forward of its module, in a region that is recomputed. So backward gathers it
again. With tensor parallelism, a rank's part of a parameter is a DTensor, and FSDP shards this
part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy

from storage_ops.foundation import fsdp, regions

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.tensor import DTensor

# The dictionary with the parameter, its name there, and the parameter.
Parameters = list[tuple[dict[str, Any], str, Any]]


def is_sharded(module: nn.Module) -> bool:
    """Return True if FSDP2 was applied to the module itself."""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


@contextlib.contextmanager
def recorded(name: str, module: Any) -> Iterator[None]:
    """Replace the hooks of one module in a with block.

    Raises:
        ValueError: FSDP does more than gather and scatter for the module.
    """
    module.reshard()
    _check(name, module)
    state = module._get_fsdp_state()
    parameters, parts = list(_parameters(module)), _parts(state)
    saved = [(hooks, dict(hooks)) for hooks in (module._forward_pre_hooks, module._forward_hooks)]
    for hooks, _ in saved:
        for key in [k for k, hook in hooks.items() if _belongs_to_fsdp(hook)]:
            del hooks[key]
    handles = (
        module.register_forward_pre_hook(
            partial(_gather, parameters, parts, state._mp_policy), prepend=True, with_kwargs=True
        ),
        module.register_forward_hook(
            partial(_put_back, parameters, state._mp_policy), always_call=True
        ),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for hooks, before in saved:
            hooks.clear()
            hooks.update(before)


def _check(name: str, module: Any) -> None:
    for group in fsdp.groups(module._get_fsdp_state()):
        unusual = {
            "gradients that it does not reduce": not group.reduce_grads
            or not group.all_reduce_grads,
            "a divisor of its own": group.gradient_divide_factor is not None,
            "parameters on the CPU": any(p.offload_to_cpu for p in group.fsdp_params),
            "dp_mesh_dims": any(
                getattr(p.mesh_info, "is_spmd_mesh", False) for p in group.fsdp_params
            ),
            "a hook for its all-reduce": getattr(group, "_all_reduce_hook", None) is not None,
        }
        for feature, has in unusual.items():
            if has:
                raise ValueError(
                    f"trace_step: {name} is an FSDPModule with {feature}. Expected one that "
                    "averages the gradients of its parameters."
                )


def _belongs_to_fsdp(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp")


def _parameters(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield the parameters that this module's hooks gather, without those of sharded submodules."""
    for key, value in module._parameters.items():
        if value is not None:
            yield module._parameters, key, value
    for child in module.children():
        if not is_sharded(child):
            yield from _parameters(child)


def _parts(state: object) -> dict[int, Any]:
    """Return FSDP's record of each parameter that is a DTensor, by the parameter's id."""
    parameters = [p for group in fsdp.groups(state) for p in group.fsdp_params]
    return {id(p.sharded_param): p for p in parameters if p.is_dtensor}


def _gather(
    parameters: Parameters, parts: dict[int, Any], precision: MixedPrecisionPolicy,
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    whole: dict[int, Tensor] = {}  # a parameter may be in several places
    # An activation checkpoint around the module gathers again, once for its recompute and backward.
    with regions.region(_recompute, discards=not regions.inside()):
        for _, _, parameter in parameters:
            if id(parameter) not in whole:
                whole[id(parameter)] = _gathered(parameter, parts, precision)
    for attributes, key, parameter in parameters:
        attributes[key] = whole[id(parameter)]
    if precision.cast_forward_inputs and precision.param_dtype is not None:
        args, kwargs = _cast((args, kwargs), precision.param_dtype)
    return args, kwargs


def _recompute(*args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


def _put_back(
    parameters: Parameters,
    precision: MixedPrecisionPolicy,
    module: nn.Module,
    args: object,
    output: object,
) -> Any:
    for attributes, key, parameter in parameters:
        attributes[key] = parameter
    return output if precision.output_dtype is None else _cast(output, precision.output_dtype)


def _gathered(parameter: DTensor, parts: dict[int, Any], precision: MixedPrecisionPolicy) -> Tensor:
    """Return a parameter in the form that the module's forward reads."""
    part = parts.get(id(parameter))
    if part is None:
        return _whole(parameter, precision)
    from torch.distributed.tensor import DTensor, Replicate

    mesh, shape, stride = part.mesh_info.mesh, part._orig_size, part._contiguous_orig_stride
    placements = [*[Replicate()] * (mesh.ndim - 1), part.fsdp_placement]
    mine = DTensor.from_local(
        parameter.to_local(), mesh, placements, run_check=False, shape=shape, stride=stride
    )
    # Before torch 2.12, the name was `_tp_spec`.
    spec = getattr(part, "_unsharded_dtensor_spec", None) or part._tp_spec
    return DTensor.from_local(
        _whole(mine, precision), spec.mesh, spec.placements, run_check=False, shape=spec.shape,
        stride=spec.stride,
    )  # fmt: skip


def _whole(parameter: Any, precision: MixedPrecisionPolicy) -> Tensor:
    """Return a full parameter. Its gradient is the mean over the ranks, in shards."""
    from torch.distributed.tensor import Partial, Replicate

    if precision.param_dtype is not None:
        parameter = parameter.to(precision.param_dtype)
    everywhere = [Replicate()] * parameter.device_mesh.ndim
    options = {} if precision.reduce_dtype is None else {"backward_dtype": precision.reduce_dtype}
    gathered = parameter.redistribute(placements=everywhere, **options)
    whole: Tensor = gathered.to_local(grad_placements=[Partial()] * len(everywhere))
    ranks = parameter.device_mesh.size()
    if whole.requires_grad:
        whole.register_hook(lambda grad: grad / ranks)
    return whole


def _cast(tree: object, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)
