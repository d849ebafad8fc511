"""Functions that a GPU computes otherwise: their shapes, and calls of attention with scores."""

import itertools
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

from storage_ops.memory import estimate

TOKENS, HEADS = 32, 16


@dataclass
class Call:
    """The arguments of a call of attention."""

    dtype: torch.dtype = torch.bfloat16
    size: int = 32
    size_of_values: int = 32
    heads_of_keys: int = HEADS
    keys: int = TOKENS
    mask: str | None = None
    causal: bool = False
    tokens: int = TOKENS
    dropout: float = 0.0

    def tensors(self, device="cpu"):
        def tensor(heads, tokens, size):
            t = torch.randn(2, heads, tokens, size, dtype=self.dtype, device=device)
            return t.requires_grad_()

        q = tensor(HEADS, self.tokens, self.size)
        k = tensor(self.heads_of_keys, self.keys, self.size)
        v = tensor(self.heads_of_keys, self.keys, self.size_of_values)
        if self.mask is None:
            return q, k, v, None
        bias = torch.zeros(2, 1, self.tokens, self.keys, dtype=self.dtype, device=device)
        mask = bias == 0 if self.mask == "bool" else bias
        return q, k, v, mask.requires_grad_(self.mask == "learned")

    def run(self, tensors):
        q, k, v, mask = tensors
        shared = self.heads_of_keys != HEADS
        y = F.scaled_dot_product_attention(
            q, k, v, mask, self.dropout, self.causal, enable_gqa=shared
        )
        needed = [t for t in tensors if t is not None and t.requires_grad]
        return y, torch.autograd.grad(y, needed, torch.ones_like(y))


def shapes(result):
    y, gradients = result
    return [(t.shape, t.dtype) for t in (y, *gradients)]


SIZES = [(32, 32), (48, 32), (20, 20), (320, 320)]
MASKS = [(None, False), (None, True), ("bool", False), ("learned", False)]


@pytest.mark.in_turn
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("size", "size_of_values"), SIZES)
def test_shapes_are_those_of_the_cpu(dtype, size, size_of_values):
    options = itertools.product(MASKS, (HEADS, 2), (TOKENS, 50), (0.0, 0.1))
    for (mask, causal), heads, keys, dropout in options:
        call = Call(dtype, size, size_of_values, heads, keys, mask, causal, dropout=dropout)
        seen = []
        estimate(lambda call=call, seen=seen: seen.extend(shapes(call.run(call.tensors("meta")))))
        assert seen == shapes(call.run(call.tensors())), call


def norms(x, weight):
    for w in (weight, None):
        y = F.rms_norm(x, (32,), w)
        yield y, torch.autograd.grad(y, [x] if w is None else [x, w], torch.ones_like(y))
    y = F.rms_norm(x, (8, 32))
    yield y, torch.autograd.grad(y, [x], torch.ones_like(y))


def dropouts(x, weight):
    for p, training in itertools.product((0.0, 0.3, 1.0), (False, True)):
        y = F.dropout(x * weight, p, training)
        yield y, torch.autograd.grad(y, [x, weight], torch.ones_like(y))


def flexible(x, weight):
    for heads, size in ((8, 32), (2, 32), (8, 16)):
        keys = x.new_zeros(4, heads, 50, 32)
        values = x.new_zeros(4, heads, 50, size)
        # On a CPU, torch has no gradients for flex_attention.
        yield flex_attention(x.detach(), keys, values, enable_gqa=heads == 2), ()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("function", [norms, dropouts, flexible])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_other_replaced_functions_have_the_shapes_of_the_cpu(function, dtype):
    def run(device):
        x = torch.randn(4, 8, 8, 32, dtype=dtype, device=device, requires_grad=True)
        weight = torch.randn(32, dtype=dtype, device=device, requires_grad=True)
        return [shapes(result) for result in function(x, weight)]

    seen = []
    estimate(lambda: seen.extend(run("meta")))
    assert seen == run("cpu")


FUSED = [
    Call(),
    Call(heads_of_keys=2),
    Call(heads_of_keys=2, mask="bool"),
    Call(mask="bool", keys=TOKENS + 2),
    Call(size=48),  # as in latent attention, values have another head size
    Call(size=48, dtype=torch.float32),
    Call(size=320, size_of_values=320),
    Call(size=20, size_of_values=20),
    Call(causal=True, keys=TOKENS + 2),
    Call(dtype=torch.float32, mask="float"),
]
SCORES = [
    Call(dtype=torch.float64),
    Call(dtype=torch.float32, heads_of_keys=2),
    Call(mask="learned"),  # the kernel is fused, but the mask has a gradient for each head
    Call(heads_of_keys=2, mask="learned"),
    Call(size=48, heads_of_keys=2),
    Call(size=20, size_of_values=20, mask="bool"),
]


def growth(call):
    """Return the growth of memory, without masks, for four times as many tokens and keys."""
    taken, odd = [], call.keys % 8
    for tokens in (1024, 4096):
        call.tokens, call.keys = tokens, tokens + odd
        tensors = call.tensors("meta")
        e = estimate(lambda tensors=tensors: call.run(tensors))
        masks = 0 if tensors[3] is None else 3 * call.tokens * call.keys * 2 * call.dtype.itemsize
        taken.append(e.peak_bytes - e.input_bytes - masks)
    return taken[1] / taken[0]


@pytest.mark.parametrize("call", FUSED, ids=str)
def test_fused_kernels_allocate_no_scores(call):
    assert growth(call) < 5


@pytest.mark.parametrize("call", SCORES, ids=str)
def test_calls_without_a_fused_kernel_allocate_scores(call):
    assert growth(call) > 12
