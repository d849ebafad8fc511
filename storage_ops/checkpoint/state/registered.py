"""The parameters and buffers that modules have registered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.modules.batchnorm import _NormBase

from storage_ops.foundation.values import is_module_of_torch

NamedTensors = tuple[dict[str, Any], dict[str, Any]]


def named_tensors(module: nn.Module) -> NamedTensors:
    """Return the parameters and the buffers of a module, without those of its submodules.

    For a TorchScript module, the dictionaries are copies. Its tensors are never replaced.
    """
    parameters, buffers = module._parameters, module._buffers
    if isinstance(parameters, dict):
        return parameters, buffers
    return dict(parameters.items()), dict(buffers.items())


def buffers_of(modules: Iterable[nn.Module]) -> Iterator[tuple[Tensor, bool]]:
    """Yield the buffers that modules may write.

    Yields:
        A buffer, and whether every write increments its version. Kernels of batch norm write
        without that, and so may code that is not torch's.
    """
    for module in modules:
        buffers = named_tensors(module)[1]
        if buffers:
            cls = type(module)
            own = not is_module_of_torch(cls) or issubclass(cls, (_NormBase, ScriptModule))
            for t in buffers.values():
                if t is not None and not t.requires_grad:
                    yield t, not own
