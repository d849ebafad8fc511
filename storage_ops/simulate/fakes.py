"""The fake tensor mode of simulations, and fake CPU tensors in place of tensors on the meta device.

Autocast depends on the device, and does not know the meta device. Fake tensors have no bytes,
either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nested._internal.nested_tensor import get_tensor_symint
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map_only

from storage_ops.simulate.values.wrappers import rewrapped


class SimulatedFakes(FakeTensorMode):
    """The fake tensor mode. `reads` says whether values are known, for losses that count tokens."""

    reads: Callable[[Tensor], bool] | None = None

    def create_symbolic_nested_int(self, *, nt_tensor_id: int | None = None) -> Any:
        """Return a new ragged size of a jagged tensor, which torch cannot create without symbols.

        It is the size that eager mode assigns to new offsets.
        """
        with no_dispatch():
            return get_tensor_symint(torch.empty(0))


class FakesOfCPU:
    """Creates fake CPU tensors like other tensors. Tied ones stay tied."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode()
        # By the id of the original, which is kept too, so that its id is not reused.
        self._fakes: dict[int, tuple[Tensor, Tensor]] = {}

    def module(self, module: nn.Module) -> None:
        """Replace the parameters and buffers of a module in place."""
        for submodule in module.modules():
            for name, p in submodule._parameters.items():
                if p is not None:
                    submodule._parameters[name] = self._parameter(p)
            for name, buffer in submodule._buffers.items():
                if buffer is not None:
                    submodule._buffers[name] = self._tensor(buffer)

    def batch(self, batch: object) -> Any:
        """Return a batch with fake tensors. Real ones stay, because simulations read values."""
        return tree_map_only(Tensor, lambda t: self._tensor(t) if t.is_meta else t, batch)

    def _parameter(self, p: nn.Parameter) -> nn.Parameter:
        if id(p) not in self._fakes:
            fake = nn.Parameter(self._tensor(p.detach()), requires_grad=p.requires_grad)
            self._fakes[id(p)] = p, fake
        return self._fakes[id(p)][1]  # type: ignore[return-value]

    def _tensor(self, t: Tensor) -> Tensor:
        if id(t) not in self._fakes:
            self._fakes[id(t)] = t, rewrapped(t, self._plain)
        return self._fakes[id(t)][1]

    def _plain(self, t: Tensor) -> Tensor:
        with self._mode:
            return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu")
