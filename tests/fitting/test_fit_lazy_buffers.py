"""Plans of models that register buffers in their forward."""

import torch
from torch import nn

import storage_ops as so


class Masked(nn.Module):
    """Keeps a mask in a buffer, as long as the longest sequence so far."""

    def __init__(self):
        super().__init__()
        self.linear, self.act = nn.Linear(16, 16), nn.GELU()
        self.register_buffer("mask", None, persistent=False)

    def forward(self, x):
        n = x.shape[1]
        if self.mask is None or len(self.mask) < n:
            self.register_buffer("mask", torch.ones(n, n).tril(), persistent=False)
        return x + self.mask[:n, :n] @ self.act(self.linear(x))


def test_a_plan_is_applied_after_an_evaluation():
    model, x = nn.Sequential(Masked(), Masked()), torch.randn(4, 12, 16)
    plan = so.fit(model, x, "1GiB")
    with torch.no_grad():
        model(x[:, :6]), model(x)
    plan.apply()
    model(x).sum().backward()
    plan.undo()
