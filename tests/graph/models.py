"""A small GPT whose blocks are checkpointed in one of several ways."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import storage_ops
from storage_ops import graph

MODES = ("none", "full", "selective", "output_discard")
MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)


def save_matmuls(ctx, op, *args, **kwargs):
    if op in MATMULS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def selective(policy=save_matmuls):
    return partial(create_selective_checkpoint_contexts, policy)


class Block(nn.Module):
    def __init__(self, width, heads, dropout, mode):
        super().__init__()
        self.heads, self.dropout, self.mode = heads, dropout, mode
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def _attend(self, x):
        batch, tokens, _ = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, tokens, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        p = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        return F.dropout(
            self.projection(mixed.transpose(1, 2).reshape(x.shape)), self.dropout, self.training
        )

    def _expand(self, x):
        return F.dropout(F.gelu(self.up(x)), self.dropout, self.training)

    def _forward(self, x):
        x = x + self._attend(x)
        h = self.norms[1](x)
        if self.mode == "output_discard":
            return x + storage_ops.output_discard(self._expand, self.down)(h)
        return x + self.down(self._expand(h))

    def forward(self, x):
        if self.mode == "full":
            return checkpoint(self._forward, x, use_reentrant=False)
        if self.mode == "selective":
            return checkpoint(self._forward, x, use_reentrant=False, context_fn=selective())
        return self._forward(x)


class GPT(nn.Module):
    def __init__(self, layers=4, width=16, heads=2, vocab=23, context=8, dropout=0.1, mode="full"):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout, mode) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def gpt_step(model):
    def step(tokens, targets):
        loss = model(tokens, targets)
        loss.backward()
        return loss.detach()

    return step


def batch(vocab=23, size=2, context=8):
    return torch.randint(vocab, (size, context)), torch.randint(vocab, (size, context))


def count(gm, *ops):
    return sum(node.target in ops for node in gm.graph.nodes)


def both(fn, *args):
    """Return results and random states of `fn` and of its trace from one seed, and the trace."""
    state = torch.get_rng_state()
    eager = fn(*args), torch.get_rng_state()
    torch.set_rng_state(state)
    step = graph.trace_step(fn, *args)
    traced = step(*args), torch.get_rng_state()
    torch.testing.assert_close(traced, eager, rtol=0, atol=0)
    graph.remat(step.gm, verify=True)
    return step


def leaves(*shapes):
    return [torch.randn(shape, dtype=torch.double, requires_grad=True) for shape in shapes]
