"""Fake tensors of the CPU in the place of tensors on the meta device.

Autocast casts by device, and knows no meta device. A model of fake tensors has no bytes either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from storage_ops.simulate.values.wrappers import rewrapped


class FakesOfCPU:
    """Makes fake tensors of the CPU that are like others; tied ones stay tied."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode()
        self._made: dict[int, tuple[Tensor, Tensor]] = {}  # the first keeps its id its own

    def module(self, module: nn.Module) -> None:
        """Replace the parameters and buffers of a module in place."""
        for each in module.modules():
            for name, p in each._parameters.items():
                if p is not None:
                    each._parameters[name] = self._parameter(p)
            for name, buffer in each._buffers.items():
                if buffer is not None:
                    each._buffers[name] = self._tensor(buffer)

    def batch(self, batch: object) -> Any:
        """Return a batch with other tensors. Real ones stay, since a simulation reads numbers."""
        return tree_map_only(Tensor, lambda t: self._tensor(t) if t.is_meta else t, batch)

    def _parameter(self, p: nn.Parameter) -> nn.Parameter:
        if id(p) not in self._made:
            fake = nn.Parameter(self._tensor(p.detach()), requires_grad=p.requires_grad)
            self._made[id(p)] = p, fake
        return self._made[id(p)][1]  # type: ignore[return-value]

    def _tensor(self, t: Tensor) -> Tensor:
        if id(t) not in self._made:
            self._made[id(t)] = t, rewrapped(t, self._plain)
        return self._made[id(t)][1]

    def _plain(self, t: Tensor) -> Tensor:
        with self._mode:
            return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu")
