"""Decoders like GPT-2 and Llama, in plain PyTorch or with parts of storage_ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.nn import functional as F

import storage_ops
from benchmarks.fit.ways import checkpointed

Features = frozenset[str]


@dataclass(frozen=True)
class Config:
    """Sizes of a model and of one batch.

    Args:
        kv_heads: heads of keys and values, each for several heads of queries. With None, the model
            is like GPT-2: layer norms with biases, learned positions, GELU, as many of these heads
            as of queries, and an embedding tied to the head. With a number, it is like Llama: RMS
            norms, rotary positions, SwiGLU, and a separate head.
    """

    layers: int
    width: int
    heads: int
    hidden: int
    context: int
    batch: int
    vocab: int
    kv_heads: int | None = None
    dropout: float = 0.0
    learning_rate: float = 1e-3


SIZES = {
    "gpt2-tiny": Config(2, 128, 4, 512, 128, 4, 8192),
    "llama-tiny": Config(2, 128, 4, 344, 128, 4, 8192, kv_heads=2),
    "gpt2-mini": Config(4, 256, 8, 1024, 128, 8, 8192),
    "llama-mini": Config(4, 256, 8, 688, 128, 8, 8192, kv_heads=2),
    "gpt2-6": Config(6, 768, 12, 3072, 512, 8, 50257, learning_rate=6e-4),
    "llama-6": Config(6, 768, 12, 2048, 512, 8, 32000, kv_heads=4, learning_rate=6e-4),
    "gpt2-small": Config(12, 768, 12, 3072, 1024, 16, 50257, learning_rate=6e-4),
    "llama-1b": Config(16, 2048, 32, 8192, 2048, 8, 128256, kv_heads=8, learning_rate=3e-4),
}

# Features and their effect on the step.
FEATURES = {
    "linear_cross_entropy": "the loss without logits",
    "output_discard": "cheap intermediate results are freed and recomputed in the backward",
    "selective_checkpoint": "layers save their QKV products and attention, and recompute the rest",
    "traced": "the step as one graph of storage_ops.graph.trace_step",
    "autochunk": "torch.compile with the backend storage_ops",
    "compile": "torch.compile (Inductor)",
    "auto_chunker": "torch.compile with Inductor's auto_chunker",
    "full_checkpoint": "full checkpoints of this package around every block",
    "checkpoint": "torch.utils.checkpoint around every block",
    "torch_selective": "torch's selective checkpoint of every block, by the rules of torchtitan",
    "liger": "Liger-Kernel's loss, norms and SwiGLU",
}
EVERYTHING = ("linear_cross_entropy", "output_discard", "selective_checkpoint")
COMPILERS = ("traced", "autochunk", "compile", "auto_chunker")
CHECKPOINTS = ("selective_checkpoint", "full_checkpoint", "checkpoint", "torch_selective")
# Features that exclude each other.
_EXCLUSIVE = (COMPILERS, ("linear_cross_entropy", "liger"), CHECKPOINTS)


def features_of(case: str) -> Features:
    """Return the features that a case such as "compile+linear_cross_entropy" names.

    Raises:
        ValueError: a feature is unknown, or two exclude each other.
    """
    names = [] if case == "plain" else case.split("+")
    features = frozenset(n for name in names for n in (EVERYTHING if name == "all" else (name,)))
    unknown = sorted(features - set(FEATURES))
    if unknown:
        known = ", ".join(("plain", "all", *FEATURES))
        raise ValueError(f"--features names {unknown[0]!r}. Expected {known}, joined by +.")
    for group in _EXCLUSIVE:
        both = [name for name in group if name in features]
        if len(both) > 1:
            raise ValueError(f"--features has {'+'.join(both)}. Expected at most one of these.")
    return features


def missing(features: Features, device: torch.device) -> str | None:
    """Return why these features cannot run here, or None."""
    if "auto_chunker" in features and not hasattr(inductor_config, "auto_chunker"):
        return f"torch {torch.__version__} has no auto_chunker"
    if "liger" in features:
        if device.type != "cuda":
            return "Liger-Kernel needs a GPU"
        try:
            import liger_kernel  # noqa: F401
        except ImportError as error:
            return f"Liger-Kernel is not installed ({error})"
    return None


class Norm(nn.Module):
    """A layer norm, or an RMS norm (Zhang and Sennrich 2019)."""

    def __init__(self, width: int, rms: bool, liger: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = None if rms else nn.Parameter(torch.zeros(width))
        self.liger = liger

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x (..., width)."""
        if self.liger:
            from liger_kernel.transformers import functional as liger

            if self.bias is None:
                return liger.liger_rms_norm(x, self.weight, 1e-5)  # type: ignore[no-any-return]
            return liger.liger_layer_norm(x, self.weight, self.bias, 1e-5)  # type: ignore[no-any-return]
        if self.bias is None:
            return F.rms_norm(x, self.weight.shape, self.weight, 1e-5)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class Part(nn.Module):
    """A producer and a consumer. The tensor between them is freed or saved."""

    discard: bool

    def join(
        self, producer: Callable[..., Tensor], consumer: Callable[..., Tensor], *args: Tensor
    ) -> Tensor:
        """Return consumer(producer(*args))."""
        if self.discard:
            result: Tensor = storage_ops.output_discard(producer, consumer)(*args)
            return result
        return consumer(producer(*args))


class Attention(Part):
    """Causal attention after a norm, with rotary positions (Su et al. 2021) in a Llama."""

    def __init__(self, config: Config, features: Features) -> None:
        super().__init__()
        self.config, self.discard = config, "output_discard" in features
        llama = config.kv_heads is not None
        self.size = config.width // config.heads
        self.sections = [
            n * self.size for n in (config.heads, *2 * [config.kv_heads or config.heads])
        ]
        self.norm = Norm(config.width, llama, "liger" in features)
        self.qkv = nn.Linear(config.width, sum(self.sections), bias=not llama)
        self.projection = nn.Linear(config.width, config.width, bias=not llama)
        self.turns: Tensor | None
        rates = 10000.0 ** -torch.linspace(0, 1, self.size // 2 + 1)[:-1]
        angles = torch.outer(torch.arange(config.context), rates)
        turns = torch.stack((angles.cos(), angles.sin())) if llama else None
        self.register_buffer("turns", turns, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        qkv = self.join(self.norm, self.qkv, x)
        # Between the attention and its projection is a copy in another order.
        return self.join(lambda y: y.transpose(1, 2).flatten(2), self.projection, self.mix(qkv))

    def mix(self, qkv: Tensor) -> Tensor:
        """Return the attention of all heads, (batch, heads, tokens, size)."""
        parts = (
            t.unflatten(2, (-1, self.size)).transpose(1, 2) for t in qkv.split(self.sections, 2)
        )
        q, k, v = parts
        if self.turns is not None:
            q, k = self.turn(q), self.turn(k)
        grouped = k.shape[1] != q.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    def turn(self, x: Tensor) -> Tensor:
        """Rotate pairs of features by angles that grow with the position."""
        assert self.turns is not None
        cos, sin = self.turns[:, : x.shape[2]].to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class MLP(Part):
    """The wide part after a norm: GELU, or SwiGLU (Shazeer 2020) in a Llama."""

    def __init__(self, config: Config, features: Features) -> None:
        super().__init__()
        self.discard, self.liger = "output_discard" in features, "liger" in features
        llama = config.kv_heads is not None
        self.norm = Norm(config.width, llama, self.liger)
        self.gate = nn.Linear(config.width, config.hidden, bias=False) if llama else None
        self.up = nn.Linear(config.width, config.hidden, bias=not llama)
        self.down = nn.Linear(config.hidden, config.width, bias=not llama)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        return self.join(self.expand, self.down, x)

    def expand(self, x: Tensor) -> Tensor:
        """Return the wide activation, (batch, tokens, hidden)."""
        x = self.norm(x)
        if self.gate is None:
            return F.gelu(self.up(x), approximate="tanh")
        if self.liger:
            from liger_kernel.transformers import functional as liger

            return liger.liger_swiglu(self.gate(x), self.up(x))  # type: ignore[no-any-return]
        return F.silu(self.gate(x)) * self.up(x)


class Block(nn.Module):
    """Attention and MLP, each with a residual connection."""

    def __init__(self, config: Config, features: Features) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(config, features), MLP(config, features)
        self.dropout = config.dropout

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        x = x + F.dropout(self.attention(x), self.dropout, self.training)
        return x + F.dropout(self.mlp(x), self.dropout, self.training)


class Decoder(nn.Module):
    """A language model that returns its loss.

    Attributes:
        linear_loss: the loss of hidden states, weight of the head and targets, if the feature
            linear_cross_entropy is on.
    """

    def __init__(self, config: Config, features: Features) -> None:
        super().__init__()
        self.config, self.features = config, features
        self.linear_loss: Callable[..., Tensor] = storage_ops.linear_cross_entropy
        llama = config.kv_heads is not None
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.places = None if llama else nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config, features) for _ in range(config.layers))
        self.norm = Norm(config.width, llama, "liger" in features)
        self.head = nn.Linear(config.width, config.vocab, bias=False) if llama else self.tokens
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                inner = name.endswith(("projection.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 * ((2 * config.layers) ** -0.5 if inner else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        self._checkpoint()

    def _checkpoint(self) -> None:
        if not self.features.isdisjoint(("checkpoint", "torch_selective")):
            checkpointed(list(self.blocks), selective="torch_selective" in self.features)
            return
        if "full_checkpoint" in self.features:
            cfg = {"layer_classes": ["Block"]}
        elif "selective_checkpoint" not in self.features:
            return
        else:
            # A region inside a checkpoint is a plain call, so each has one part of the block.
            layer = "Attention" if "output_discard" in self.features else "Block"
            cfg = {
                "layer_classes": [layer], "policy": "attention", "mm_shapes_to_save": ["*.qkv"],
            }  # type: ignore[dict-item]  # fmt: skip
        storage_ops.apply_activation_checkpoint(self, cfg)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of predicting `targets` from `tokens`, each (batch, tokens)."""
        x = self.tokens(tokens)
        if self.places is not None:
            x = x + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        x, weight = self.norm(x), self.head.weight
        if "linear_cross_entropy" in self.features:
            loss: Tensor = self.linear_loss(x, weight, targets)
            return loss
        if "liger" in self.features:
            from liger_kernel.transformers import functional as liger

            return liger.liger_fused_linear_cross_entropy(  # type: ignore[no-any-return]
                x.flatten(0, 1), weight, targets.flatten()
            )
        logits = F.linear(x, weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
