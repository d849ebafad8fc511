"""Small models of the kinds that people train, and a batch for each."""

import torch
from torch import nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    def __init__(self, size, heads, causal=True):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q, self.k, self.v, self.o = (nn.Linear(size, size, bias=False) for _ in range(4))

    def forward(self, x, memory=None):
        memory = x if memory is None else memory

        def split(t):
            return t.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        q, k, v = split(self.q(x)), split(self.k(memory)), split(self.v(memory))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.o(out.transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    def __init__(self, size, width):
        super().__init__()
        self.gate = nn.Linear(size, width, bias=False)
        self.up = nn.Linear(size, width, bias=False)
        self.down = nn.Linear(width, size, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LlamaBlock(nn.Module):
    def __init__(self, size, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx
        self.norm1, self.norm2 = RMSNorm(size), RMSNorm(size)
        self.attention = Attention(size, 4)
        self.mlp = GatedMLP(size, 3 * size)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GptBlock(nn.Module):
    def __init__(self, size, dropout):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.attention = Attention(size, 4)
        self.mlp = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Decoder(nn.Module):
    def __init__(self, size, blocks, vocab=128):
        super().__init__()
        self.embed = nn.Embedding(vocab, size)
        self.layers = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(size)
        self.head = nn.Linear(size, vocab, bias=False)

    def forward(self, tokens, labels):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class Moe(nn.Module):
    """Every token goes to one expert, by its position, because a simulation has no values."""

    def __init__(self, size, experts):
        super().__init__()
        self.router = nn.Linear(size, experts)
        self.experts = nn.ModuleList(GatedMLP(size, 2 * size) for _ in range(experts))

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        parts = x.chunk(len(self.experts), 1)
        outputs = [
            expert(part) * weight[..., i : i + 1]
            for i, (expert, part, weight) in enumerate(
                zip(self.experts, parts, weights.chunk(len(self.experts), 1), strict=True)
            )
        ]
        return torch.cat(outputs, 1)


class MixtralBlock(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(size), RMSNorm(size)
        self.attention = Attention(size, 4)
        self.moe = Moe(size, 4)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.moe(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, size=48, depth=4):
        super().__init__()
        self.patches = nn.Conv2d(3, size, 4, stride=4)
        layer = nn.TransformerEncoderLayer(size, 4, 4 * size, 0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(size, 10)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        return self.head(self.encoder(x).mean(1))


class CrossBlock(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (RMSNorm(size) for _ in range(3))
        self.attention, self.cross = Attention(size, 4), Attention(size, 4, causal=False)
        self.mlp = GatedMLP(size, 2 * size)

    def forward(self, x, memory):
        x = x + self.attention(self.norm1(x))
        x = x + self.cross(self.norm2(x), memory)
        return x + self.mlp(self.norm3(x))


class T5(nn.Module):
    def __init__(self, size=48, depth=3, vocab=128):
        super().__init__()
        self.embed = nn.Embedding(vocab, size)
        self.encoder = nn.ModuleList(LlamaBlock(size, i) for i in range(depth))
        self.decoder = nn.ModuleList(CrossBlock(size) for _ in range(depth))
        self.head = nn.Linear(size, vocab, bias=False)

    def forward(self, tokens, targets):
        memory, x = self.embed(tokens), self.embed(targets)
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            x = layer(x, memory)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())}


class ConvBlock(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, inputs), nn.GroupNorm(4, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x):
        h = self.conv1(F.silu(self.norm1(x)))
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class UNet(nn.Module):
    def __init__(self, size=16):
        super().__init__()
        self.first = nn.Conv2d(3, size, 3, padding=1)
        self.down = nn.ModuleList([ConvBlock(size, size), ConvBlock(size, 2 * size)])
        self.middle = ConvBlock(2 * size, 2 * size)
        self.up = nn.ModuleList([ConvBlock(4 * size, size), ConvBlock(2 * size, size)])
        self.last = nn.Conv2d(size, 3, 3, padding=1)

    def forward(self, x):
        x = self.first(x)
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x, kept.pop()], 1))
        return self.last(x)


def tokens(batch, length, vocab=128):
    return torch.randint(0, vocab, (batch, length))


def gpt(dropout=0.1):
    return Decoder(48, [GptBlock(48, dropout) for _ in range(4)]), (tokens(2, 96), tokens(2, 96))


def llama():
    return Decoder(64, [LlamaBlock(64, i) for i in range(5)]), (tokens(2, 96), tokens(2, 96))


def mixtral():
    return Decoder(48, [MixtralBlock(48) for _ in range(3)]), (tokens(2, 96), tokens(2, 96))


def vit():
    return ViT(), torch.randn(8, 3, 32, 32)


def t5():
    return T5(), {"tokens": tokens(2, 96), "targets": tokens(2, 64)}


def unet():
    return UNet(), torch.randn(2, 3, 32, 32)


MODELS = {"gpt": gpt, "llama": llama, "mixtral": mixtral, "vit": vit, "t5": t5, "unet": unet}
