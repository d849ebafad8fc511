"""torch.compile(fullgraph=True) of the ops and their wrappers."""

import pytest
import torch
from torch.nn import functional as F

import storage_ops as so

BACKENDS = ["inductor", "aot_eager"]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def head(x, w, target, b, reduction="mean"):
    return so.linear_cross_entropy(x * 1.5, w, target, linear_bias=b, reduction=reduction)


def plain_head(x, w, target, b, reduction="mean"):
    logits = F.linear(x * 1.5, w, b).flatten(0, 1)
    return F.cross_entropy(logits, target.flatten(), reduction=reduction)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_linear_cross_entropy(backend, dynamic, reduction):
    compiled = torch.compile(head, fullgraph=True, backend=backend, dynamic=dynamic)
    w, b = torch.randn(31, 8, requires_grad=True), torch.randn(31, requires_grad=True)
    for length in (5, 9, 12) if dynamic else (5, 9):  # static shapes recompile for each
        x = torch.randn(2, length, 8, requires_grad=True)
        target = torch.randint(31, (2, length))
        ours = compiled(x, w, target, b, reduction).sum()
        right = plain_head(x, w, target, b, reduction).sum()
        torch.testing.assert_close(ours, right)
        for got, expected in zip(
            torch.autograd.grad(ours, (x, w, b)), torch.autograd.grad(right, (x, w, b)), strict=True
        ):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.in_turn
@pytest.mark.parametrize("call", [so.discard_storage, torch.ops.storage_ops.discard_storage])
@pytest.mark.parametrize("backend", BACKENDS)
def test_storage_ops_leave_no_mutation_in_the_graph(backend, call):
    def step(x):
        h = x * 2
        y = h.sin()
        call(h)
        src = x * 2
        so.share_storage(h, src)
        return (y * h).sum()

    x = torch.randn(8, requires_grad=True)
    right = torch.autograd.grad((x * 2).sin().mul(x * 2).sum(), x)[0]
    graphs = []

    def inspect(graph, inputs):
        graphs.append(graph)
        return graph.forward

    ours = torch.autograd.grad(torch.compile(step, fullgraph=True, backend=backend)(x), x)[0]
    torch.testing.assert_close(ours, right)

    from torch._dynamo.backends.common import aot_autograd

    torch.compile(step, fullgraph=True, backend=aot_autograd(fw_compiler=inspect))(x)
    names = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert graphs and not any("storage" in name for name in names), names


def test_share_of_symbolic_sizes():
    def step(x):
        h = x[x > 0]
        src = h * 3
        so.discard_storage(h)
        so.share_storage(h, src)
        return h.sin()

    x = torch.randn(9)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        y = torch.compile(step, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(y, (x[x > 0] * 3).sin())


def test_a_share_of_another_dtype_is_refused_in_a_graph():
    def step(x):
        h = x + 1
        so.share_storage(h, torch.ones(4, dtype=torch.int32))
        return h

    with pytest.raises(Exception, match=r"`src` is torch\.int32. Expected torch\.float32"):
        torch.compile(step, fullgraph=True, backend="aot_eager")(torch.ones(4))
