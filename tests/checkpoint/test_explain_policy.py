"""explain_policy lists every op with its count, bytes, decision and FLOPs."""

from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import storage_ops as so
from storage_ops import policies

from .blocks import Model, Ops, make_input, step


def test_a_small_function_by_hand():
    x, w = torch.randn(4, 16), torch.randn(16, 64, requires_grad=True)

    def fn(x, *, scale):
        h = (x @ w).sin()
        return (h.t().reshape(4, 64) @ w.t() * scale).add_(1) @ w

    table = so.explain_policy(fn, x, scale=2.0, policy="every_other_mm")
    rows = {(r.op, r.saved): r for r in table.rows}
    product = 2 * 4 * 16 * 64
    assert rows["aten.mm", True].count == 2 and rows["aten.mm", False].count == 1
    assert rows["aten.mm", True].nbytes == 2 * 4 * 64 * 4
    assert rows["aten.mm", False].nbytes == 4 * 16 * 4
    assert rows["aten.sin", False].nbytes == 4 * 64 * 4 and rows["aten.sin", False].flops == 0
    assert rows["aten.t", False].nbytes == rows["aten.add_.Tensor", False].nbytes == 0
    assert table.flops == 3 * product and table.recompute_flops == product
    assert table.saved_bytes == 2 * 4 * 64 * 4
    assert rows["aten.mm", False].recompute_share == 1.0
    assert sum(r.recompute_share for r in table.rows) == pytest.approx(1)


def test_all_forms_of_a_policy():
    x, layer = torch.randn(4, 16), nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 16))
    config = so.ActivationCheckpointConfig(mm_shapes_to_save=["1"])
    for policy, saved in (
        ("matmuls", 2),
        (policies.save("aten.addmm"), 2),
        (["matmuls", "attention"], 2),
        (lambda ctx, op, *args, **kwargs: ctx.op_output.shape == (4, 16), 1),
        (so.ActivationCheckpointConfig(ops_to_save=["aten.addmm"]), 2),
        ({"ops_to_save": ["aten.addmm"]}, 2),
        (so.ActivationCheckpointConfig(["Linear"]), 0),
        (config, 1),
        ("communication", 0),
    ):
        table = so.explain_policy(layer, x, policy=policy)
        assert sum(r.count for r in table.rows if r.saved and r.op == "aten.addmm") == saved
    with pytest.raises(ValueError, match=r"`policy` is 'matmull'. .*Did you mean 'matmuls'"):
        so.explain_policy(layer, x, policy="matmull")
    with pytest.raises(TypeError, match="`policy` is 3"):
        so.explain_policy(layer, x, policy=3)


def test_recomputed_counts_are_those_of_the_backward():
    model, x = Model(layers=1).double(), make_input()
    table = so.explain_policy(model.layers[0], x, policy="matmuls")
    plain = step(model, x)[3]
    so.CheckpointWrapper(model.layers[0], policy="matmuls")
    difference = step(model, x)[3] - plain
    recomputed = Counter()
    for row in table.rows:
        recomputed[row.op.split(".")[1]] += 0 if row.saved else row.count
    for op in ("gelu", "_softmax", "bernoulli_", "mm", "bmm", "empty_like"):
        assert difference[op] == recomputed[op], op


def test_a_report_prints_as_a_table():
    table = so.explain_policy(nn.Linear(16, 64), torch.randn(4, 16), policy="matmuls")
    text = str(table)
    assert "aten.addmm" in text and "saved" in text and "1 KiB" in text
    assert "8.192 kFLOP" in text and all(len(line) <= 120 for line in text.splitlines())
    assert "recomputed" in str(so.explain_policy(torch.sin, torch.ones(2), policy="matmuls"))


def test_the_function_runs_once_and_without_a_checkpoint():
    calls = []

    def fn(x):
        calls.append(torch.is_grad_enabled())
        return x.sin()

    so.explain_policy(fn, torch.ones(2), policy="matmuls")
    with torch.no_grad():
        so.explain_policy(fn, torch.ones(2), policy="matmuls")
    assert calls == [True, False]


def test_flops_of_attention_and_convolution():
    q = torch.randn(2, 3, 8, 16)
    attend = torch.nn.functional.scaled_dot_product_attention
    table = so.explain_policy(attend, q, q, q, policy="attention")
    assert table.flops == 2 * (2 * 2 * 3 * 8 * 8 * 16) and table.recompute_flops == 0
    convolution = nn.Conv2d(3, 8, 3, bias=False)
    table = so.explain_policy(convolution, torch.randn(2, 3, 6, 6), policy="attention")
    assert table.flops == table.recompute_flops == 2 * (2 * 4 * 4 * 8) * (3 * 3 * 3)


def test_saved_results_that_are_modified_count_as_recomputed():
    def fn(x, w):
        h = x @ w
        with torch.no_grad():
            h[0].mul_(2)
        return (h.sin() @ w).cos()

    w = torch.randn(8, 8, requires_grad=True)
    call = fn, torch.randn(4, 8), w
    (first, second) = (
        r for r in so.explain_policy(*call, policy="matmuls").rows if r.op == "aten.mm"
    )
    assert {first.saved, second.saved} == {True, False} and first.count == second.count == 1
    context_fn = partial(so.policies.contexts, so.policies.matmuls)
    with pytest.warns(UserWarning, match=r"modifies in place results of aten\.mm"):
        y = checkpoint(*call, use_reentrant=False, context_fn=context_fn)
    with Ops() as ops:
        torch.autograd.grad(y.sum(), w)
    assert ops.count["mm"] == 1 + 3  # one runs again, three are gradients
    with torch.inference_mode():
        so.explain_policy(*call, policy="matmuls")
    gru = so.explain_policy(nn.GRU(4, 8), torch.randn(3, 2, 4), policy="matmuls")
    assert any(not row.saved and row.flops for row in gru.rows)
