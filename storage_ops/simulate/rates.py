"""The speed and the memory of the simulated device."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from storage_ops.checkpoint.layers.config_policy import is_compiled
from storage_ops.checkpoint.selective.copies import active
from storage_ops.foundation.ledger import Ledger
from storage_ops.loss.planning.devices import (
    DEFAULT_GPU,
    DEVICES,
    Rates,
    key_of,
    named,
    rates_of,
)
from storage_ops.loss.planning.op_times import HostTimes
from storage_ops.quantities import parse_bytes
from storage_ops.simulate.kernels.cuda import workspace_bytes


class SimulatedDevice(NamedTuple):
    """The device of a simulated step.

    Attributes:
        is_gpu: whether sizes are rounded and kernels are chosen as on a GPU.
        rates: its speed.
        workspace: bytes of cuBLAS's workspace in each thread.
    """

    is_gpu: bool
    rates: Rates
    workspace: int = 0

    @staticmethod
    def of(
        device: str | torch.device | None, model: nn.Module, batches: list[Any]
    ) -> SimulatedDevice:
        """Return a device by its name, or by default the device of the parameters.

        Without parameters, the tensors of the batches decide whether it is a GPU.

        Raises:
            ValueError: the device is not known.
        """
        if device is None:
            batch_tensors = [t for t in tree_leaves(batches) if isinstance(t, Tensor)]
            kinds = {t.device.type for t in list(model.parameters()) or batch_tensors}
            is_gpu = "cpu" not in kinds
        else:
            is_gpu = kind_of(device) == "cuda"
        return SimulatedDevice(is_gpu, rates_for(device, model), workspace_bytes(device, model))

    def ledger(self) -> Ledger:
        """Return an empty ledger that rounds sizes as the allocator of the device does."""
        return Ledger() if self.is_gpu else Ledger(round_up=int)


def kind_of(device: str | torch.device) -> str:
    """Return "cuda" for a GPU by its name, else "cpu".

    Raises:
        ValueError: the device is not known.
    """
    name = key_of(device)
    if name in DEVICES:
        return "cpu" if name == "cpu" else "cuda"
    try:
        kind = torch.device(name).type
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise ValueError(
            f"`device` is {device!r}. Expected one of {', '.join(DEVICES)}, cuda, or None. For "
            "another GPU, pass the most similar one, and the memory of yours as the budget."
        )
    return kind


def rates_for(device: str | torch.device | None, model: nn.Module) -> Rates:
    """Return the rates of a device by its name. None: the parameters' device.

    The meta device, and "cuda" without a GPU, mean `DEFAULT_GPU`. A compiled module has the rates
    of compiled code.
    """
    if device is None:
        kinds = {p.device for p in model.parameters() if p.device.type != "cpu"}
        device = next(iter(kinds), torch.device("cpu"))
    if key_of(device) in DEVICES:
        rates = named(key_of(device))
    else:
        torch_device = torch.device(key_of(device))
        if torch_device.type == "cuda" and torch.cuda.is_available():
            return rates_of(torch_device)
        rates = named("cpu" if torch_device.type == "cpu" else DEFAULT_GPU)
    copies = active()
    if copies is not None and not rates.link:
        rates = replace(rates, link=copies.bytes_per_second)
    if any(map(is_compiled, model.modules())):
        rates = replace(rates, host=HostTimes(), fuses=True)
    return rates


def budget_of(
    budget: int | float | str | None, device: str | torch.device | None, model: nn.Module
) -> int:
    """Return a budget in bytes.

    None: the memory of a GPU without the CUDA context, or the memory of this machine for a CPU.

    Raises:
        TypeError, ValueError: the budget is wrong, or the system does not tell its memory.
    """
    if budget is not None:
        return parse_bytes(budget, "`budget`")
    if device is not None:
        kind_of(device)  # refuses an unknown name
    usable = rates_for(device, model).usable or _bytes_of_this_machine()
    if not usable:
        raise ValueError(
            "`budget` is not given, and this system does not tell how much memory it has. Pass the "
            "memory that the step may use, such as 16GiB."
        )
    return usable


def _bytes_of_this_machine() -> int:
    """Return the memory of this machine, or 0 if the system does not tell, as on Windows."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0
