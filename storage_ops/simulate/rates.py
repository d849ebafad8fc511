"""The speed of the simulated device."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from storage_ops.checkpoint.layers.config_policy import is_compiled
from storage_ops.checkpoint.selective.copies import active
from storage_ops.loss.planning.devices import DEFAULT_GPU, DEVICES, Rates, named, rates_of
from storage_ops.loss.planning.op_times import HostTimes


def rates_for(device: str | torch.device | None, model: nn.Module) -> Rates:
    """Return the rates of a device by its name. None: the parameters' device.

    The meta device, and "cuda" without a GPU, mean `DEFAULT_GPU`. A compiled module has the rates
    of compiled code.
    """
    if device is None:
        kinds = {p.device for p in model.parameters() if p.device.type != "cpu"}
        device = next(iter(kinds), torch.device("cpu"))
    if str(device).lower() in DEVICES:
        rates = named(str(device).lower())
    else:
        torch_device = torch.device(device)
        if torch_device.type == "cuda" and torch.cuda.is_available():
            return rates_of(torch_device)
        rates = named("cpu" if torch_device.type == "cpu" else DEFAULT_GPU)
    copies = active()
    if copies is not None and not rates.link:
        rates = replace(rates, link=copies.bytes_per_second)
    if any(map(is_compiled, model.modules())):
        rates = replace(rates, host=HostTimes(), fuses=True)
    return rates
