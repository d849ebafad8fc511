"""Small models and helpers for the tests of selective checkpointing."""

import threading
from collections import Counter

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode


class Attention(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.dropout = dropout

    def forward(self, x, *, mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        if mask is not None:
            scores = scores * mask
        y = F.dropout(scores, self.dropout, self.training) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(self.down(self.act(self.up(x))))


class Block(nn.Module):
    def __init__(self, width=16, dropout=0.2):
        super().__init__()
        self.attention = Attention(width, dropout)
        self.mlp = MLP(width, dropout)
        self.note = "a block"

    def forward(self, x, scale=1.0, *, extra=None, flag="on"):
        assert flag == "on"
        mask = None if extra is None else extra["mask"]
        x = x + self.attention(x, mask=mask) * scale
        return x + self.mlp(x)


class Model(nn.Module):
    """Transformer blocks. Each has six matrix products without a bias, two of them batched."""

    def __init__(self, layers=4, width=16, dropout=0.2):
        super().__init__()
        self.layers = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.head = nn.Linear(width, 4)

    def forward(self, x, **kwargs):
        for layer in self.layers:
            x = layer(x, **kwargs)
        return self.head(x)


class Calls(nn.Module):
    """A module that calls a function."""

    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, *args):
        return self.fn(*args)


def in_threads(work, count):
    """Run a function in some threads, which begin together, and wait for their ends."""
    start = threading.Barrier(count)

    def begin():
        start.wait()
        work()

    threads = [threading.Thread(target=begin) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Ops(TorchDispatchMode):
    """Counts ops by name, without the overload."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count[op.name().partition(".")[0].partition("::")[2]] += 1
        return op(*args, **(kwargs or {}))


def make_input(width=16, dtype=torch.float64):
    return torch.randn(2, 6, width, dtype=dtype, requires_grad=True)


def step(model, x, seed=7, **kwargs):
    """Run forward and backward. Return output, gradients by name, random state and backward ops."""
    for t in (x, *model.parameters()):
        t.grad = None
    torch.manual_seed(seed)
    out = model(x, **kwargs)
    loss = out.square().sum()
    with Ops() as ops:
        loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    grads["x"] = x.grad.clone()
    return out.detach(), grads, torch.get_rng_state(), ops.count


def assert_same(got, right):
    assert torch.equal(got[0], right[0]) and torch.equal(got[2], right[2])
    assert got[1].keys() == right[1].keys()
    for name, grad in right[1].items():
        assert torch.equal(got[1][name], grad), name
