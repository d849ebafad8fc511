"""Models of published vision runs: the transformers TimeSformer and DINO.

Attention computes its scores, as both do.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._vision_models import kept

OUTPUTS = 65536  # of DINO


class DropPath(nn.Module):
    """Drop the residual branch of a sample with probability `p`."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Return the branch with some samples set to zero."""
        if not self.p:
            return x
        shape = (len(x), *(1 for _ in x.shape[1:]))
        kept_samples = (torch.rand(shape, dtype=x.dtype, device=x.device) + 1 - self.p).floor()
        return x.div(1 - self.p) * kept_samples


class Attention(nn.Module):
    """Self-attention whose scores are a tensor."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        """Map a batch of sequences to the same shape."""
        qkv = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind()
        scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
        weights = kept(scores).softmax(-1)
        result: Tensor = self.out((weights @ v).transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):
    """Attention and a perceptron, each on a norm and with a residual."""

    def __init__(self, width: int, heads: int, p: float) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width, eps=1e-6), Attention(width, heads)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width, eps=1e-6),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )
        self.drop = DropPath(p)

    def attend(self, x: Tensor) -> Tensor:
        """Return the sum of the input and the attention's branch."""
        return x + self.drop(self.attention(self.norm(x)))

    def forward(self, x: Tensor) -> Tensor:
        """Map a batch of sequences to the same shape."""
        x = self.attend(x)
        return x + self.drop(self.mlp(x))


class DividedBlock(Block):
    """A block of TimeSformer with attention over frames, and then over the places of each frame."""

    frames = 8

    def __init__(self, width: int, heads: int, p: float) -> None:
        super().__init__(width, heads, p)
        self.norm_in_time, self.in_time = nn.LayerNorm(width, eps=1e-6), Attention(width, heads)
        self.out_in_time = nn.Linear(width, width)

    def attend(self, x: Tensor) -> Tensor:
        """Return the sum of the input and the branches of both attentions."""
        first, rest = x[:, :1], x[:, 1:]
        clips = rest.reshape(-1, self.frames, x.shape[2])
        y = self.out_in_time(self.drop(self.in_time(self.norm_in_time(clips))))
        x = torch.cat((first, rest + y.reshape(rest.shape)), 1)

        places = x[:, 1:].unflatten(1, (-1, self.frames)).transpose(1, 2).flatten(0, 1)
        first = x[:, :1].repeat(1, self.frames, 1).reshape(len(places), 1, -1)
        y = self.drop(self.attention(self.norm(torch.cat((first, places), 1))))
        first = y[:, 0].unflatten(0, (len(x), -1)).mean(1, keepdim=True)
        y = y[:, 1:].unflatten(0, (len(x), -1)).transpose(1, 2).flatten(1, 2)
        return x + torch.cat((first, y), 1)


class Patches(nn.Module):
    """Patches of 16x16 pixels with their positions, after a class token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, width, 16, 16)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 1 + 14 * 14, width))

    def forward(self, images: Tensor) -> Tensor:
        """Map images to sequences."""
        x = self.convolution(images)
        positions, side = self.positions, x.shape[-1]
        if side < 14:
            grid = positions[:, 1:].transpose(1, 2).unflatten(2, (14, 14))
            grid = F.interpolate(grid, (side, side), mode="bicubic")
            positions = torch.cat((positions[:, :1], grid.flatten(2).transpose(1, 2)), 1)
        x = x.flatten(2).transpose(1, 2)
        return torch.cat((self.first.expand(len(x), -1, -1), x), 1) + positions


class TimeSformer(nn.Module):
    """TimeSformer of MMAction2 on 8 frames.

    Args:
        is_divided: whether attention is over frames and over places in turn, or else over the
            places of each frame only.
    """

    def __init__(self, is_divided: bool) -> None:
        super().__init__()
        kind = DividedBlock if is_divided else Block
        self.patches, self.is_divided = Patches(768), is_divided
        self.times = nn.Parameter(torch.zeros(1, 8, 768)) if is_divided else None
        self.blocks = nn.Sequential(*(kind(768, 12, 0.1 * index / 11) for index in range(12)))
        self.norm, self.out = nn.LayerNorm(768, eps=1e-6), nn.Linear(768, 400)

    def forward(self, clips: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of clips, whose channels are before their frames."""
        images = clips.flatten(0, 1).transpose(1, 2)
        x = self.patches(images.flatten(0, 1))
        if self.times is not None:
            first, places = x[: len(images), :1], x[:, 1:].unflatten(0, (len(images), -1))
            places = places.transpose(1, 2).flatten(0, 1) + self.times
            x = torch.cat((first, places.reshape(len(images), -1, x.shape[2])), 1)
        x = self.blocks(x)
        if not self.is_divided:
            x = x.unflatten(0, (len(images), -1)).mean(1)
        return F.cross_entropy(self.out(self.norm(x)[:, 0]), labels)


class Network(nn.Module):
    """DINO's ViT-S/16 with its head."""

    def __init__(self, p: float) -> None:
        super().__init__()
        blocks = (Block(384, 6, p * index / 11) for index in range(12))
        self.vit = nn.Sequential(Patches(384), *blocks, nn.LayerNorm(384, eps=1e-6))
        widths = (384, 2048, 2048, 256)
        layers = [nn.Linear(*pair) for pair in itertools.pairwise(widths)]
        self.head = nn.Sequential(layers[0], nn.GELU(), layers[1], nn.GELU(), layers[2])
        self.out = nn.Parameter(torch.zeros(OUTPUTS, 256))
        self.norms = nn.Parameter(torch.ones(OUTPUTS, 1), requires_grad=False)

    def forward(self, *crops: Tensor) -> Tensor:
        """Map crops to outputs, together for each size of crops."""
        features = []
        for side in sorted({len(crop[0, 0]) for crop in crops}, reverse=True):
            alike = torch.cat([crop for crop in crops if crop.shape[-1] == side])
            features.append(self.vit(alike)[:, 0])
        x = F.normalize(self.head(torch.cat(features)), dim=-1)
        return F.linear(x, torch._weight_norm(self.out, self.norms, 0))


class DINO(nn.Module):
    """A student of all crops, and a teacher of the two large ones, with mixed precision."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Network(0.1), Network(0.0).requires_grad_(False)
        self.register_buffer("center", torch.zeros(1, OUTPUTS))
        self.outputs: Sequence[Tensor] = ()

    def forward(self, *crops: Tensor) -> Tensor:
        """Return the mean cross-entropy of all pairs of different crops."""
        with torch.autocast("cpu", torch.bfloat16):  # whose sizes are those of float16
            taught, learnt = self.teacher(*crops[:2]), self.student(*crops)
            self.outputs = taught, learnt  # variables of the training loop
            targets = ((taught - self.center) / 0.04).softmax(-1).chunk(2)
            rows = (learnt / 0.1).chunk(len(crops))
            losses = [
                torch.sum(-target * kept(row).log_softmax(-1), -1).mean()
                for index, target in enumerate(targets)
                for other, row in enumerate(rows)
                if other != index
            ]
        return sum(losses, torch.zeros((), device=taught.device)) / len(losses)
