"""Floating-point operations of ops, from shapes."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from storage_ops.checkpoint.flops import flops_of
from storage_ops.checkpoint.op_names import name_of

aten = torch.ops.aten
B, H, Q, K, D, V = 2, 6, 5, 7, 8, 16
FORWARD = 2 * B * H * Q * K * (D + V)
BACKWARD = 2 * B * H * Q * K * (3 * D + 2 * V)


def tensors(heads, *, behind=False):
    """Queries, keys, values and the gradient of the result; heads before or behind the sequence."""
    shapes = [(B, H, Q, D), (B, heads, K, D), (B, heads, K, V), (B, H, Q, V)]
    found = [torch.empty(shape, device="meta") for shape in shapes]
    return [t.transpose(1, 2) for t in found] if behind else found


class Recorded(TorchDispatchMode):
    """The operations of every op, by name."""

    def __init__(self):
        super().__init__()
        self.flops = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        if flops := flops_of(op, args, kwargs or {}, out):
            name = name_of(op)
            self.flops[name] = self.flops.get(name, 0) + flops
        return out


@pytest.mark.parametrize("heads", [H, 3, 1])
@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_attention_of_a_gpu(kernel, heads):
    q, k, v, grad = tensors(heads)
    forward = getattr(aten, f"_scaled_dot_product_{kernel}_attention").default
    backward = getattr(aten, f"_scaled_dot_product_{kernel}_attention_backward").default
    assert flops_of(forward, (q, k, v), {}, None) == FORWARD
    assert flops_of(forward, (q,), {"key": k, "value": v}, None) == FORWARD
    assert flops_of(backward, (grad, q, k, v), {}, None) == BACKWARD


@pytest.mark.parametrize("heads", [H, 2])
@pytest.mark.parametrize("kernel", ["flash", "efficient"])
def test_heads_behind_the_sequence(kernel, heads):
    q, k, v, grad = tensors(heads, behind=True)
    forward = getattr(aten, f"_{kernel}_attention_forward").default
    backward = getattr(aten, f"_{kernel}_attention_backward").default
    assert flops_of(forward, (q, k, v), {}, None) == FORWARD
    assert flops_of(backward, (grad, q, k, v), {}, None) == BACKWARD


def test_sequences_in_one_dimension():
    q, k, v = (t.flatten(0, 1) for t in tensors(H, behind=True)[:3])
    offsets = torch.empty(B + 1, dtype=torch.int32, device="meta")
    forward = aten._flash_attention_forward.default
    assert flops_of(forward, (q, k, v, offsets, offsets, Q, K), {}, None) == FORWARD
    assert flops_of(forward, (q, k, v, None, None, B * Q, B * K), {}, None) == B * FORWARD


@pytest.mark.parametrize("heads", [4, 2])
def test_attention_of_a_cpu_as_that_of_a_gpu(heads):
    q = torch.randn(2, 4, 16, 8, requires_grad=True)
    k, v = (torch.randn(2, heads, 16, 8, requires_grad=True) for _ in range(2))
    with Recorded() as recorded:
        F.scaled_dot_product_attention(q, k, v, enable_gqa=True).sum().backward()
    one = 2 * 2 * 4 * 16 * 16 * 8
    assert sum(recorded.flops.values()) == (2 + 5) * one


def test_flex_attention_with_fewer_heads_of_keys():
    q, k, v, _ = tensors(2)
    assert flops_of(torch.ops.higher_order.flex_attention, (q, k, v), {}, None) == FORWARD
    backward = torch.ops.higher_order.flex_attention_backward
    assert flops_of(backward, (q, k, v), {}, None) == BACKWARD


def test_ops_without_a_formula():
    x = torch.randn(3)
    assert flops_of(aten.sin.default, (x,), {}, x) == 0
    assert flops_of(aten._fused_sdp_choice.default, (x, x, x), {}, 0) == 0
