"""Frozen experts of transformers with quantized weights.

Kernels multiply by quantized weights without dequantizing them. The backward dequantizes some
experts at a time, at most 1 GiB of them, as transformers' `FP8Experts` does.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from storage_ops.cli.quantized.layers import frozen, scales_of
from storage_ops.cli.quantized.schemes import Scheme

_PROJECTIONS = ("gate_up_proj", "up_proj", "down_proj")
_AT_ONCE = 1 << 30  # bytes of weights that the backward dequantizes at a time
_GROUP = 32  # elements of mxfp4 with a common scale
_Saved: TypeAlias = "Tensor | tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]"


def projections_of(module: nn.Module) -> list[str]:
    """Return the names of a module's parameters that stack the weights of its experts."""
    parameters = dict(module.named_parameters(recurse=False))
    return [name for name in _PROJECTIONS if name in parameters and parameters[name].dim() == 3]


def quantize_experts(module: Any, scheme: Scheme) -> None:
    """Quantize the weights of a module of experts. It keeps the forward of its class."""
    names = projections_of(module)
    for name in names:
        weight = getattr(module, name)
        shape = weight.shape
        # Quantized weights have the layout of nn.Linear, with output features first.
        if getattr(module, "is_transposed", False):
            shape = torch.Size((shape[0], shape[2], shape[1]))
        delattr(module, name)
        if scheme.name == "fp8":
            scales = scales_of(shape, scheme)
            if name == "gate_up_proj" and scales:  # both halves have at least one scale
                scales = (scales[0], max(scales[1], 2), scales[2])
            module.register_parameter(name, frozen(tuple(shape), torch.float8_e4m3fn))
            module.register_parameter(f"{name}_scale_inv", frozen(scales, scheme.scale))
        else:
            *rows, columns = shape
            module.register_parameter(name, frozen((*rows, columns // 2), torch.uint8))
            scales = (*rows, columns // _GROUP)
            module.register_parameter(f"{name}_scales", frozen(scales, torch.uint8))
        module.__dict__.setdefault("_shapes", {})[name] = weight.shape
    for parameter in module.parameters(recurse=False):
        parameter.requires_grad_(False)
    cls = type(module)
    weights: dict[str, Any] = {name: property(_weight_of(name, weight.dtype)) for name in names}
    weights["__module__"] = cls.__module__
    module.__class__ = type(cls.__name__, (QuantizedExperts, cls), weights)


def _weight_of(name: str, dtype: torch.dtype) -> Any:
    def weight(module: Any) -> Tensor:
        """Return the weights of all experts, with the memory of one."""
        experts, *shape = module._shapes[name]
        device = module._parameters[name].device
        return torch.empty(1, *shape, dtype=dtype, device=device).expand(experts, *shape)

    return weight


class QuantizedExperts(nn.Module):
    """Experts whose class is the other base class. Saved weights are dequantized in the backward.

    The memory of the dequantized weights is allocated when the backward reads them.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the forward of the other base class."""
        with torch.autograd.graph.saved_tensors_hooks(_packed, _unpacked):
            return super().forward(*args, **kwargs)


def _packed(t: Tensor) -> _Saved:
    is_weight = t.dim() == 3 and t.stride(0) == 0 and t.shape[0] > 1
    return (t.shape, t.stride(), t.dtype, t.device) if is_weight else t


def _unpacked(saved: _Saved) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    shape, stride, dtype, device = saved
    size = shape[1] * shape[2]
    at_once = min(shape[0], max(1, _AT_ONCE // (size * dtype.itemsize)))
    weights = torch.empty(at_once, size, dtype=dtype, device=device)
    return weights.as_strided(shape, stride)
