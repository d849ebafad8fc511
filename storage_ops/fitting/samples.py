"""Small models with the ops of large ones, whose steps `calibrate` measures."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Size(NamedTuple):
    """Sizes of a sample.

    Attributes:
        batch: sequences, or images.
        tokens: tokens of a sequence.
        width: width of layers.
        channels: channels of images.
        image: height and width of images.
    """

    batch: int
    tokens: int
    width: int
    channels: int
    image: int


# The largest ones are for a GPU, where smaller kernels take as long as their launch.
SIZES = (
    Size(2, 8, 16, 8, 8),
    Size(4, 32, 64, 16, 28),
    Size(4, 128, 192, 32, 56),
    Size(8, 128, 384, 64, 56),
    Size(8, 256, 768, 64, 112),
    Size(8, 1024, 1024, 64, 256),
    Size(8, 2048, 2048, 64, 512),
    Size(4, 4096, 4096, 128, 512),
)
SIZES_OF_CPU = 5
_HEADS = 8
_PARTS, _NUMBERS_OF_PART = 16, 1 << 19  # together more than the caches of most processors
_VOCAB = 8  # classes of the head, as a multiple of the width


class Decoder(nn.Module):
    """A decoder layer like that of a Llama, between an embedding and a loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.embed = nn.Embedding(_VOCAB * width, width)
        self.norms = nn.ParameterList(torch.ones(width) for _ in range(2))
        self.rms = nn.RMSNorm(width)
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, width // 2, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)
        self.head = nn.Linear(width, _VOCAB * width, bias=False)

    def _norm(self, x: Tensor, number: int) -> Tensor:
        exact = x.float()
        exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-6)
        weight: Tensor = self.norms[number]
        return weight * exact.to(x.dtype)

    def _attention(self, x: Tensor) -> Tensor:
        def heads(t: Tensor, count: int) -> Tensor:
            parts: Tensor = t.unflatten(-1, (count, -1))
            return parts.transpose(1, 2)

        q, k = heads(self.q(x), _HEADS), heads(self.k(x), _HEADS // 2)
        v = heads(self.v(x), _HEADS // 2)
        angles = torch.arange(q.shape[2], device=x.device)[:, None] / (1.0 + q.shape[3])
        cos, sin = (f(angles.expand(-1, q.shape[3])).to(x.dtype) for f in (torch.cos, torch.sin))

        def rotated(t: Tensor) -> Tensor:
            first, second = t.chunk(2, -1)
            return t * cos + torch.cat((-second, first), -1) * sin

        q, k = rotated(q), rotated(k)
        k, v = (
            t[:, :, None].expand(-1, -1, 2, -1, -1).reshape(t.shape[0], _HEADS, *t.shape[2:])
            for t in (k, v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).reshape(x.shape))  # type: ignore[no-any-return]

    def forward(self, ids: Tensor) -> Tensor:
        """Return the mean loss of the next tokens."""
        x = self.embed(ids)
        x = x + self._attention(self._norm(x, 0))
        h = self._norm(x, 1)
        x = self.rms(x + self.down(F.silu(self.gate(h)) * self.up(h)))
        logits = self.head(x).float().flatten(0, 1)
        return F.cross_entropy(logits, ids.flatten())


class Encoder(nn.Module):
    """An encoder layer like that of BERT, with attention in single ops, biases and dropout."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.other, self.back = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens to tokens."""
        q, k, v = (
            self.qkv(self.norm1(x)).unflatten(-1, (3 * _HEADS, -1)).transpose(1, 2).chunk(3, 1)
        )
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -1e4)
        mixed = F.dropout(scores.softmax(-1), 0.1) @ v
        mixed = mixed + F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        x = x + F.dropout(self.o(mixed.transpose(1, 2).reshape(x.shape)), 0.1)
        h = self.up(self.norm2(x))
        x = x + self.down(F.gelu(h) + F.gelu(h, approximate="tanh"))
        h = self.other(x)
        h = 0.5 * h * (1.0 + torch.tanh(0.8 * (h + 0.04 * h.pow(3.0))))
        return x + self.back(F.relu(h) * torch.sigmoid(h))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """A layer whose router selects two of four experts for each token."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.router = nn.Linear(width, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(4, 2 * width, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens to tokens."""
        flat = x.flatten(0, 1)
        share, chosen = self.router(flat).float().softmax(-1).topk(2)
        share = (share / share.sum(-1, keepdim=True)).to(x.dtype)
        _, order = chosen.flatten().sort()
        rows = flat[order // 2]
        # Equal parts, so that the shapes do not depend on the router.
        parts = [
            F.silu(part @ up) @ down
            for part, up, down in zip(rows.chunk(4), self.up, self.down, strict=True)
        ]
        weighted = torch.cat(parts) * share.flatten()[order][:, None]
        return torch.zeros_like(flat).index_add(0, order // 2, weighted).view_as(x)


class GroupedExperts(nn.Module):
    """The products of four experts in one op, for equal parts of the tokens."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.up = nn.Parameter(torch.randn(4, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(4, 2 * width, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens to tokens."""
        flat = x.flatten(0, 1)
        ends = torch.arange(1, 5, device=x.device, dtype=torch.int32) * (len(flat) // 4)
        product = torch.ops.aten._grouped_mm
        h = F.silu(product(flat, self.up, ends))
        out: Tensor = product(h, self.down, ends) * 1.0  # so that the gradient is contiguous
        return out


class Pictures(nn.Module):
    """Convolutions of several kinds, with norms of groups and of batches."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.channels
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.norms = nn.ModuleList((nn.GroupNorm(8, width), nn.BatchNorm2d(width)))
        self.same = nn.Conv2d(width, width, 3, padding=1)
        self.single = nn.Conv2d(width, width, 1)
        self.shrink = nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.inner = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.grow = nn.ConvTranspose2d(2 * width, width, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Map images to images of as many channels as the layers have."""
        y: Tensor = self.same(F.silu(self.norms[0](self.enter(x))))
        y = y + self.single(F.relu(self.norms[1](y)))
        inner = F.max_pool2d(self.inner(self.shrink(y)), 2)
        y = y + self.grow(F.interpolate(inner, scale_factor=2.0))
        return y + F.interpolate(self.patches(x), size=y.shape[-2:])


class Moves(nn.Module):
    """Copies, casts and sums."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size.width))

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens to tokens."""
        y = torch.empty_like(x)
        y.copy_(x)
        y = y * self.scale + x
        other = torch.float32 if x.dtype != torch.float32 else torch.bfloat16
        y = y + y.to(other).to(x.dtype) - torch.exp(-y.square()) / (y.abs() + 1.0).sqrt()
        y = torch.where(y > 0, y, 0.1 * y)
        swapped = y.transpose(0, 1).contiguous().transpose(0, 1)
        return swapped + y.sum((0, 1)) + y[:, :1] + y.sum(-1, keepdim=True).clamp(-1.0, 1.0)


class Block(nn.Module):
    """A layer whose step is mostly the work of the host.

    The kernels of large layers replace the content of the processor's caches, so that the host's
    code runs slower. Here sums over `other_data` do the same, before each module.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.gelu = nn.Linear(width, 4 * width), nn.GELU()
        self.down = nn.Linear(4 * width, width)
        self.other_data = itertools.cycle(torch.zeros(_PARTS, _NUMBERS_OF_PART))

    def _replace_caches(self) -> None:
        next(self.other_data).sum()

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens to tokens."""

        def run(module: nn.Module, t: Tensor) -> Tensor:
            self._replace_caches()
            return module(t)  # type: ignore[no-any-return]

        h = run(self.norm1, x)
        q, k, v = (
            run(f, h).unflatten(-1, (_HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v)
        x = x + run(self.o, mixed.transpose(1, 2).flatten(2))
        return x + run(self.down, run(self.gelu, run(self.up, run(self.norm2, x))))


Step = Callable[[], None]


def steps(size: Size, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Step]]:
    """Yield the name of each sample, and a function that runs forward and backward once."""
    ids = torch.randint(0, _VOCAB * size.width, (size.batch, size.tokens), device=device)
    x = torch.randn(size.batch, size.tokens, size.width, device=device, dtype=dtype)
    images = torch.randn(size.batch, 3, size.image, size.image, device=device, dtype=dtype)
    for kind, value in (
        (Moves, x), (Decoder, ids), (Encoder, x), (Experts, x), (GroupedExperts, x),
        (Pictures, images),
    ):  # fmt: skip
        with device:
            model = kind(size).to(dtype)
        if value.is_floating_point():
            value.requires_grad_()
        yield kind.__name__, functools.partial(step, model, value)


def step(model: nn.Module, value: Tensor) -> None:
    """Run forward and backward, and drop the gradients."""
    model(value).sum().backward()
    model.zero_grad()
    value.grad = None
