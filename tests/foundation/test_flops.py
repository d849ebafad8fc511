"""Floating-point operations of ops, from shapes."""

import functools

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from storage_ops import policies
from storage_ops.foundation.op_names import name_of
from storage_ops.foundation.ops import flops_of

aten = torch.ops.aten
B, H, Q, K, D, V = 2, 6, 5, 7, 8, 16
FORWARD = 2 * B * H * Q * K * (D + V)
BACKWARD = 2 * B * H * Q * K * (3 * D + 2 * V)


def tensors(heads, *, heads_last=False):
    """Return queries, keys, values and the gradient, with heads before or after the sequence."""
    shapes = [(B, H, Q, D), (B, heads, K, D), (B, heads, K, V), (B, H, Q, V)]
    shaped = [torch.empty(shape, device="meta") for shape in shapes]
    return [t.transpose(1, 2) for t in shaped] if heads_last else shaped


class Recorded(TorchDispatchMode):
    """Records the operations of every op by name."""

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
def test_heads_after_the_sequence(kernel, heads):
    q, k, v, grad = tensors(heads, heads_last=True)
    forward = getattr(aten, f"_{kernel}_attention_forward").default
    backward = getattr(aten, f"_{kernel}_attention_backward").default
    assert flops_of(forward, (q, k, v), {}, None) == FORWARD
    assert flops_of(backward, (grad, q, k, v), {}, None) == BACKWARD


def test_sequences_packed_in_one_dimension():
    q, k, v = (t.flatten(0, 1) for t in tensors(H, heads_last=True)[:3])
    offsets = torch.empty(B + 1, dtype=torch.int32, device="meta")
    forward = aten._flash_attention_forward.default
    assert flops_of(forward, (q, k, v, offsets, offsets, Q, K), {}, None) == FORWARD
    assert flops_of(forward, (q, k, v, None, None, B * Q, B * K), {}, None) == B * FORWARD


@pytest.mark.parametrize("heads", [4, 2])
def test_attention_on_a_cpu_counts_as_on_a_gpu(heads):
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


GROUPS, ROWS, INNER, COLUMNS = 3, 8, 4, 6  # rows of all groups


def products_of_groups():
    """Return both factors, offsets and the operations for each layout of groups."""
    offsets, whole = torch.tensor([2, 2, ROWS], dtype=torch.int32), 2 * ROWS * INNER * COLUMNS
    new = functools.partial(torch.randn, dtype=torch.bfloat16)
    yield new(ROWS, INNER), new(GROUPS, INNER, COLUMNS), offsets, whole
    yield new(GROUPS, INNER, COLUMNS), new(COLUMNS, ROWS), offsets, whole
    yield new(COLUMNS, ROWS), new(ROWS, INNER), offsets, whole
    yield new(GROUPS, ROWS, INNER), new(GROUPS, INNER, COLUMNS), None, GROUPS * whole


@pytest.mark.parametrize("way", range(4), ids=["rows", "columns", "both", "matrices"])
def test_products_of_groups(way):
    left, right, offsets, expected = list(products_of_groups())[way]
    op = aten._grouped_mm.default
    assert flops_of(op, (left, right), {"offs": offsets}, None) == expected
    ends = [0] * GROUPS if offsets is None else offsets.tolist()
    parts = [slice(*part) for part in zip([0, *ends], ends, strict=False)]
    factors = [
        lambda g: (left[parts[g]], right[g]),
        lambda g: (left[g], right[:, parts[g]]),
        lambda g: (left[:, parts[g]], right[parts[g]]),
        lambda g: (left[g], right[g]),
    ][way]
    with Recorded() as one_by_one:
        for g in range(GROUPS):
            torch.mm(*factors(g))
    assert sum(one_by_one.flops.values()) == expected


def test_products_that_the_counter_of_torch_lacks():
    x, w, v = torch.randn(5, 3), torch.randn(3, 4), torch.randn(3)
    assert flops_of(aten.mv.default, (x, v), {}, None) == 2 * 5 * 3
    assert flops_of(aten.addmv.default, (torch.randn(5), x, v), {}, None) == 2 * 5 * 3
    assert flops_of(aten.dot.default, (v, v), {}, None) == 2 * 3
    assert flops_of(aten.linear.default, (x, w.t()), {}, None) == 2 * 5 * 3 * 4
    assert flops_of(aten._addmm_activation.default, (torch.randn(4), x, w), {}, None) == 120
    batch = (torch.randn(5, 4), x.expand(2, 5, 3), w.expand(2, 3, 4))
    assert flops_of(aten.addbmm.default, batch, {}, None) == 2 * 120


def test_grouped_products_of_transformers():
    pytest.importorskip("transformers.integrations.moe")
    x, w = torch.randn(ROWS, INNER), torch.randn(GROUPS, INNER, COLUMNS)
    offsets, ops = torch.tensor([2, 2, ROWS]), torch.ops.transformers
    one = 2 * ROWS * INNER * COLUMNS
    with Recorded() as recorded:
        out = ops.grouped_mm_fallback(x.requires_grad_(), w.requires_grad_(), offsets)
        assert sum(recorded.flops.values()) >= one
        recorded.flops.clear()
        out.sum().backward()
    products = sum(recorded.flops.values())  # in some versions, the backward is no op
    assert recorded.flops.get("transformers::grouped_mm_fallback_backward", products) == 2 * one
    assert policies.matmuls(None, ops.grouped_mm_fallback.default) == CheckpointPolicy.MUST_SAVE
