"""Classes of other packages that discard an output, with the calls of our OutputDiscardCheckpoint.

OLMo-core's works on a CPU too: `pip install ai2-olmo-core dill`. Megatron-LM's needs a GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks._harness import skip

DISCARDING = {
    "OLMo-core": ("olmo_core.nn.output_discard_checkpoint", "OutputDiscardCheckpoint"),
    "Megatron-LM": ("megatron.core.tensor_parallel.random", "CheckpointWithoutOutput"),
}
Make = Callable[[], Any]


def by_hook(make: Make, producer: Any, consumer: Any, x: Tensor) -> Tensor:
    """Return consumer(producer(x)). A class of `make` discards the output in between."""
    ckpt = make()
    y: Tensor = consumer(ckpt.checkpoint(producer, x))
    ckpt.discard_output_and_register_recompute(y)
    return y


def peers(device: str) -> dict[str, Make]:
    """Return the installed classes that work on this device.

    Note the others as skipped.
    """
    return dict(_tried(device))


def _tried(device: str) -> Iterator[tuple[str, Make]]:
    for name, (module, attribute) in DISCARDING.items():
        try:
            make = getattr(importlib.import_module(module), attribute)
            x = torch.ones(2, 2, device=device, requires_grad=True)
            by_hook(make, torch.sin, lambda h: h @ h, x).sum().backward()  # type: ignore[no-untyped-call]
        except Exception as error:  # a package without its dependencies can fail in any way
            skip(f"{name} {attribute}", f"not usable here ({type(error).__name__}: {error})")
        else:
            yield name, make
