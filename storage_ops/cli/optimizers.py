"""Optimizers by name: those of torch, and stand-ins for those of bitsandbytes.

Stand-ins have the state of the real optimizers, and update nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_SMALL = 4096  # states with at least this many elements are quantized
_BLOCK = 256  # elements of a state with a common maximum
_PAGED = 100_000  # paged states with at least this many elements can leave the GPU


class Bitsandbytes(Optimizer):
    """The state of an optimizer of bitsandbytes: `moments` tensors for each parameter.

    8-bit states have a maximum for each block of 256. Small parameters have float32 states. Large
    paged states are in host memory, from which the GPU reads them.
    """

    moments, bits, is_paged = 2, 8, False

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {})
        self._maps: list[Tensor] = []  # maps from 8 bits to numbers, with and without a sign

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Create the states, as a first step does."""
        trained = (p for group in self.param_groups for p in group["params"] if p.grad is not None)
        for p in trained:
            if not self.state[p]:
                self._make_state(p, self.state[p])

    def _make_state(self, p: Tensor, state: dict[str, Any]) -> None:
        is_quantized = self.bits == 8 and p.numel() >= _SMALL
        is_on_host = self.is_paged and p.numel() >= _PAGED
        if is_quantized and not self._maps:
            self._maps = [p.new_empty(256, dtype=torch.float32) for _ in range(2)]
        for index in range(self.moments):
            if not is_on_host:
                dtype = torch.uint8 if is_quantized else torch.float32
                state[f"state{index}"] = torch.zeros_like(p, dtype=dtype)
            if is_quantized:
                blocks = math.ceil(p.numel() / _BLOCK)
                state[f"absmax{index}"] = p.new_zeros(blocks, dtype=torch.float32)
                state[f"qmap{index}"] = self._maps[index]


class MuonAndAdamW(Optimizer):
    """Muon for the matrices of layers, and AdamW for embeddings, output layers and all others.

    Attributes:
        by_adamw: ids of matrices that AdamW trains.
    """

    by_adamw: frozenset[int] = frozenset()

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        parts: tuple[list[nn.Parameter], list[nn.Parameter]] = [], []
        for p in params:
            parts[p.dim() != 2 or id(p) in self.by_adamw].append(p)
        super().__init__([p for part in parts for p in part], {})
        kinds = torch.optim.Muon, torch.optim.AdamW
        self._parts = [kind(part) for kind, part in zip(kinds, parts, strict=True) if part]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Let each optimizer take a step."""
        for part in self._parts:
            part.step()


def _kinds() -> dict[str, type[Optimizer]]:
    """Return the optimizers by their names."""
    kinds: dict[str, type[Optimizer]] = {}
    for name, moments in (("adamw", 2), ("adam", 2), ("lion", 1)):
        for end, bits in (("", 32), ("-8bit", 8)):
            for start in ("", "paged-"):
                body = {"moments": moments, "bits": bits, "is_paged": bool(start)}
                kinds[f"{start}{name}{end}"] = type(name, (Bitsandbytes,), body)
    # LBFGS runs the model in its step, and SparseAdam does not accept gradients of layers.
    refused = Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam
    for name, cls in vars(torch.optim).items():
        if isinstance(cls, type) and issubclass(cls, Optimizer) and cls not in refused:
            kinds[name.lower()] = cls
    return kinds


def optimizer_named(name: str, model: nn.Module) -> type[Optimizer] | None:
    """Return the optimizer for parameters of `model`, or None for "none".

    Names are those of classes of torch.optim, or of bitsandbytes if torch has none, in upper or
    lower case and with any separators. They include names of transformers, such as
    "paged_adamw_8bit".

    Raises:
        ValueError: there is no such optimizer.
    """
    short = _short(name)
    if short == "none":
        return None
    kinds = _kinds()
    optimizer_class = {_short(known): cls for known, cls in kinds.items()}.get(short)
    if optimizer_class is None:
        raise ValueError(f"--optimizer is {name}. Expected none or one of {', '.join(kinds)}.")
    if optimizer_class is not torch.optim.Muon:
        return optimizer_class
    head = getattr(model, "get_output_embeddings", lambda: None)()
    ends = [m for m in model.modules() if isinstance(m, nn.Embedding) or m is head]
    by_adamw = frozenset(id(p) for m in ends for p in m.parameters())
    return type("Muon", (MuonAndAdamW,), {"by_adamw": by_adamw})


def _short(name: str) -> str:
    """Return a name without separators and redundant words."""
    parts = name.lower().replace("-", "_").split("_")
    return "".join(part for part in parts if part not in ("torch", "bnb", "32bit"))
