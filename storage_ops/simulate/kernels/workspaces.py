"""Workspaces of cuBLAS: memory of torch's allocator that each thread keeps which has multiplied.

A step has two such threads, that of the caller and that of autograd. torch takes for each 32 MiB on
a Hopper or Blackwell, 2 x 4 MiB + 8 x 16 KiB on others (aten/src/ATen/cuda/CublasHandlePool.cpp),
unless CUBLAS_WORKSPACE_CONFIG says otherwise. Those of the first step are there in all later ones.
"""

from __future__ import annotations

import torch
from torch import nn

from storage_ops.foundation.ledger import Block, Ledger
from storage_ops.loss.devices import GPUS

_aten = torch.ops.aten
PRODUCTS = frozenset(
    (_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.mv, _aten.addmv, _aten.dot)
)
_HOPPER = 32 << 20
_OTHER = 2 * (4 << 20) + 8 * (16 << 10)
_HOPPERS = ("h100", "h200", "gh200", "b200", "gb200", "b300", "gb300", "rtx5090")
_OF_NAMES = {name: _HOPPER if name in _HOPPERS else _OTHER for name in GPUS}
THREADS = 2


def workspace_bytes(device: str | torch.device | None, model: nn.Module) -> int:
    """Of one thread, on a device that a step is simulated for; 0 where it is not known which GPU.

    Args:
        device: "cpu" or a GPU. None: where the parameters of the model are.
        model: the model.
    """
    name = str(device).lower()
    if name in _OF_NAMES:
        return _OF_NAMES[name]
    if device is None:
        kinds = {p.device for p in model.parameters() if p.device.type == "cuda"}
        device = next(iter(kinds), None)
    if device is None or torch.device(device).type != "cuda" or not torch.cuda.is_available():
        return 0
    return _HOPPER if torch.cuda.get_device_capability(device)[0] in (9, 10, 12) else _OTHER


def keep_workspaces(ledger: Ledger, nbytes: int) -> list[Block]:
    """Book the workspaces of a step that multiplies as there from the beginning."""
    made = [
        Block(nbytes, (nbytes,), torch.uint8, "cuBLAS", asked=nbytes)
        for _ in range(THREADS)
        if nbytes
    ]
    ledger.inputs += made
    return made
