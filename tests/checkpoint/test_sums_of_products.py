"""Products to which torch itself adds a bias or a mask in place are saved in C++, too."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import storage_ops as so
from storage_ops.checkpoint.selective import native

from .paths import both_paths

path = both_paths(native)
CALLS = 4


class Transposed(nn.Module):
    """A linear layer adds its bias in place if its input has three dimensions in another order."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.b(self.a(x.transpose(0, 1)).sin().transpose(0, 1)).cos()


class Masked(nn.Module):
    """Attention as separate ops adds its mask in place."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mask = torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype).fill_diagonal_(-1.0)
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).sin()


class Attention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)[0].sin()


KINDS = {
    "linear": Transposed,
    "mask": Masked,
    "attention": partial(Attention, 8, 2, batch_first=True),
    "encoder": partial(nn.TransformerEncoderLayer, 8, 2, 16, dropout=0.0, batch_first=True),
}
POLICIES = {"matmuls": "matmuls", "offloaded": so.policies.offload(so.policies.matmuls)}


def gradients(layer, x, again=False):
    layer.zero_grad()
    loss = layer(x).square().sum()
    passes = [torch.autograd.grad(loss, (x, *layer.parameters()), retain_graph=again)]
    if again:
        passes.append(torch.autograd.grad(loss, (x, *layer.parameters())))
    return passes


@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_saved(kind, policy, again, path):
    plain, layer = KINDS[kind]().double(), KINDS[kind]().double()
    layer.load_state_dict(plain.state_dict())
    so.CheckpointWrapper(layer, policy=POLICIES[policy])
    for _ in range(CALLS):
        x = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a warning tells that a product is recomputed
            got = gradients(layer, x, again)
        for ours, theirs in zip(got, gradients(plain, x, again), strict=True):
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
