"""A small GPT that trains in plain PyTorch or with storage_ops, with equal parameters."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from storage_ops.checkpoint.discard.output_discard import output_discard
from storage_ops.loss.api import linear_cross_entropy


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of one batch."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    vocab: int = 32768
    learning_rate: float = 1e-3


PRESETS = {
    "tiny": Config(layers=4, width=256, heads=4, context=256, batch=8),
    "mini": Config(layers=6, width=384, heads=6, context=512, batch=8),
    "gpt2-small": Config(layers=12, width=768, heads=12, context=1024, batch=8, learning_rate=6e-4),
}


class TransformerBlock(nn.Module):
    """Attention and an MLP, each after a layer norm and with a residual connection."""

    def __init__(self, config: Config, save_memory: bool) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.save_memory = save_memory

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, tokens, width) for an input of the same shape."""
        batch, tokens, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, tokens, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, tokens, width))
        normed = self.mlp_norm(x)
        if self.save_memory:
            # The wide intermediate, four times the width, exists only while it is used.
            mlp = output_discard(self._expand, self.down)(normed)
        else:
            mlp = self.down(self._expand(normed))
        y: Tensor = x + mlp
        return y

    def _expand(self, x: Tensor) -> Tensor:
        return F.gelu(self.up(x))


class GPT(nn.Module):
    """A decoder with learned positions and a head tied to the token embedding."""

    def __init__(self, config: Config, save_memory: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(
            TransformerBlock(config, save_memory) for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.width)
        self.save_memory = save_memory
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = (2 * config.layers) ** -0.5 if "projection" in name or "down" in name else 1
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss for `targets` (batch, tokens), from `tokens` (batch, tokens)."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if self.save_memory:
            loss: Tensor = linear_cross_entropy(x, self.tokens.weight, targets)
            return loss
        logits = F.linear(x, self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
