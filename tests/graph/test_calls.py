"""Calls of a traced step from compiled code, and after its objects have changed."""

import pytest
import torch
from torch import nn

from storage_ops import graph


def test_compiled_code_calls_a_traced_step():
    w = nn.Parameter(torch.randn(3))
    weight, x = w.detach().clone(), torch.randn(2, 3)
    traced = graph.trace_step(lambda x: (x * w).sum().backward(), x)

    def call(x):
        traced(2 * x)
        return x + 1

    compiled = torch.compile(call, backend="aot_eager")
    assert torch.equal(compiled(x), x + 1) and torch.equal(w, weight)
    torch.testing.assert_close(w.grad, (2 * x).sum(0))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="A traced step is a graph already"):
        torch.compile(lambda x: traced(x), backend="aot_eager", fullgraph=True)(x)


def test_places_that_do_not_exist_any_more_are_errors():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x):
        opt.zero_grad()
        model(x).sum().backward()
        opt.step()

    x = torch.randn(2, 3)
    step(x)
    traced = graph.trace_step(step, x)
    opt.state.clear()
    with pytest.raises(ValueError, match=r"opt\.state.*momentum_buffer.* does not exist any more"):
        traced(x)
    del model[1].bias
    with pytest.raises(ValueError, match=r"model\.1\.bias does not exist any more"):
        traced(x)
