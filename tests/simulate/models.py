"""Small models of six families. Each has a batch and a loss."""

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, width, heads=4, dropout=0.0):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.dropout = heads, dropout

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
        )
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in "gu")
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Sends each token to two of four experts, drawn at random."""

    def __init__(self, width):
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.experts = nn.ModuleList([GatedMLP(width) for _ in range(4)])

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        return sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class Block(nn.Module):
    def __init__(self, width, mlp, norm, dropout=0.0):
        super().__init__()
        self.norm1, self.norm2 = norm(width), norm(width)
        self.attention, self.mlp = Attention(width, dropout=dropout), mlp(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Decoder(nn.Module):
    """A decoder like GPT, Llama or Mixtral. With `tied`, the head has the embedding's weight."""

    def __init__(self, mlp, norm, layers=3, width=64, vocab=256, dropout=0.0, tied=False):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList([Block(width, mlp, norm, dropout) for _ in range(layers)])
        self.norm, self.head = norm(width), nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), ids.flatten())


class Cross(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.block, self.norm = Block(width, plain_mlp, nn.LayerNorm), nn.LayerNorm(width)
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * width)

    def forward(self, x, memory):
        x = self.block(x)
        k, v = self.kv(memory).chunk(2, -1)
        return x + F.scaled_dot_product_attention(self.q(self.norm(x)), k, v)


class EncoderDecoder(nn.Module):
    """A model like T5: each decoder layer gets the encoder's output."""

    def __init__(self, width=64, layers=3):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.encoder = nn.ModuleList([Block(width, plain_mlp, nn.RMSNorm) for _ in range(layers)])
        self.decoder = nn.ModuleList([Cross(width) for _ in range(layers)])

    def forward(self, ids):
        memory = x = self.embed(ids)
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            x = layer(x, memory)
        return x


class Vision(nn.Module):
    def __init__(self, width=64, layers=3):
        super().__init__()
        self.patches = nn.Linear(3 * 64, width)
        self.layers = nn.ModuleList(
            [Block(width, plain_mlp, nn.LayerNorm, 0.1) for _ in range(layers)]
        )
        self.head = nn.Linear(width, 10)

    def forward(self, images):
        x = F.pixel_unshuffle(images, 8).flatten(2).transpose(1, 2)
        x = self.patches(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        parts = (nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
        second = (nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
        self.body = nn.Sequential(*parts, *second)

    def forward(self, x):
        return x + self.body(x)


class UNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 1)
        self.down = nn.ModuleList([nn.Sequential(*map(Residual, (width, width)))])
        self.shrink = nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.middle = nn.ModuleList([Residual(2 * width) for _ in range(3)])
        self.grow = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.up = nn.ModuleList([Residual(width) for _ in range(2)])

    def forward(self, x):
        x = skip = self.down[0](self.enter(x))
        x = self.shrink(x)
        for block in self.middle:
            x = block(x)
        x = self.grow(x) + skip
        for block in self.up:
            x = block(x)
        return self.leave(x)


def plain_mlp(width):
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def square(output):
    return output.float().square().mean()


def ids():
    return torch.randint(0, 256, (16, 96))


def images():
    return torch.randn(16, 3, 48, 48)


# Functions that create the model and a batch, and the loss.
MODELS = {
    "gpt": (lambda: Decoder(plain_mlp, nn.LayerNorm, dropout=0.1, tied=True), ids, None),
    "llama": (lambda: Decoder(GatedMLP, nn.RMSNorm), ids, None),
    "mixtral": (lambda: Decoder(Experts, nn.RMSNorm), ids, None),
    "vit": (Vision, images, square),
    "t5": (EncoderDecoder, ids, square),
    "unet": (UNet, images, square),
}


def build(name, dtype=torch.float32):
    """Return the model, a batch and the loss of one of MODELS."""
    model, batch, loss = MODELS[name]
    batch = batch()
    return model().to(dtype), batch.to(dtype) if batch.is_floating_point() else batch, loss


def run(model, batch, loss, optimizer=None):
    """Run a step as simulate_step defines it."""

    def value():
        output = model(batch)
        return output if loss is None else loss(output)

    value().backward()
    if optimizer is not None:
        optimizer.step()
