"""Steps whose time is nearly all host time: ten SwiGLU blocks with tiny tensors.

Each case is the same step with another kind of checkpoint. "two forwards" is the floor, the time
of a recompute without any other cost.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import storage_ops

LAYERS, HEADS = 10, 3
# For each size: width, batch and tokens, and rounds of steps.
SIZES = {"width 48, 1 x 8": ((48, 1, 8), 41), "width 512, 8 x 128": ((512, 8, 128), 5)}
_ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"
SAVED = ("aten.mm", "aten.addmm", _ATTENTION)


class SwiGLUBlock(nn.Module):
    """A transformer block with attention and a SwiGLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.gate = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input of the next block."""
        batch, tokens, width = x.shape
        heads = HEADS if width % HEADS == 0 else 8
        shape = batch, tokens, 3, heads, width // heads
        q, k, v = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.mlp(self.norm2(x))

    def mlp(self, h: Tensor) -> Tensor:
        """Return the output of the SwiGLU."""
        return self.down(self.activation(h))  # type: ignore[no-any-return]

    def activation(self, h: Tensor) -> Tensor:
        """Return the input of the last projection."""
        return F.silu(self.gate(h)) * self.up(h)  # type: ignore[no-any-return]


class _Discarding(SwiGLUBlock):
    def mlp(self, h: Tensor) -> Tensor:
        return storage_ops.output_discard(self.activation, self.down)(h)  # type: ignore[no-any-return]


class _Around(nn.Module):
    """Calls a block with `call`."""

    def __init__(self, call: Callable[..., Any], block: nn.Module) -> None:
        super().__init__()
        self.call, self.block = call, block

    def forward(self, x: Tensor) -> Any:
        return self.call(self.block, x)


def _twice(block: nn.Module, x: Tensor) -> Any:
    block(x)
    return block(x)


def cases(width: int, batch: int, tokens: int, device: str) -> dict[str, Callable[[], object]]:
    """Return a step for each kind of checkpoint. "plain" has none."""
    torchs = partial(checkpoint, use_reentrant=False)
    ops: list[Any] = [getattr(torch.ops.aten, name.partition(".")[2]).default for name in SAVED]
    selective = partial(torchs, context_fn=partial(create_selective_checkpoint_contexts, ops))
    wrap = storage_ops.apply_activation_checkpoint
    layers = {"layer_classes": [SwiGLUBlock]}

    def blocks(cls: type[SwiGLUBlock] = SwiGLUBlock) -> nn.Sequential:
        return nn.Sequential(*(cls(width) for _ in range(LAYERS))).to(device)

    def around(call: Callable[..., Any]) -> nn.Sequential:
        return nn.Sequential(*(_Around(call, block) for block in blocks()))

    models = {
        "plain": blocks(),
        "two forwards": around(_twice),
        "torch, full": around(lambda block, x: torchs(block, x)),
        "torch, selective": around(lambda block, x: selective(block, x)),
        "full": wrap(blocks(), {**layers, "mode": "full"}),
        "selective": wrap(blocks(), {**layers, "ops_to_save": list(SAVED)}),
        "discarding": blocks(_Discarding),
    }
    x = torch.randn(batch, tokens, width, device=device)
    return {name: partial(_step, model, x) for name, model in models.items()}


def _step(model: nn.Module, x: Tensor) -> None:
    model(x).sum().backward()
