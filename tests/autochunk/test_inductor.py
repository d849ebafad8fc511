"""Compare chunks with float64 in cases that Inductor itself computes wrongly on a CPU."""

import pytest
import torch
from torch.nn import functional as F

from storage_ops.autochunk.runtime import chunk_op as chunks
from storage_ops.autochunk.runtime import inductor

from .losses import arguments
from .tails import HEADS, LARGE, LAST, SMALL
from .test_fuzz import error, weighted


def compare(loss, arguments, options=None):
    """Return the errors of compiled results and gradients against float64."""
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="storage_ops", options=options or {}, dynamic=False)
    got = weighted(compiled, *arguments)
    exact = weighted(loss, *(a.double() if a.is_floating_point() else a for a in arguments))
    return [error(ours, want) for ours, want in zip(got, exact, strict=True)]


@pytest.mark.slow
def test_chunks_of_several_rows_at_a_time(monkeypatch):
    """Inductor processes several rows at once, because the bias is not contiguous."""
    first = chunks._first_that_compiles

    def without_overwriting(program, *rest):  # torch 2.11 does this first
        over = [(i, value) for i, value in enumerate(program.over) if value is not None]
        if not over:
            return first(program, *rest)
        body = torch.compile(chunks._without_copy(program), dynamic=False)
        return chunks._overwriting(body, over)

    monkeypatch.setattr(chunks, "_first_that_compiles", without_overwriting)

    def loss(x, w, t):
        return LAST["masked"](SMALL["binary"](LARGE["glu"](HEADS["bias"](x, w))))

    assert max(compare(loss, arguments(), {"num_chunks": 2})) < 1e-5


@pytest.mark.slow
def test_chunks_with_the_index_of_the_largest():
    def loss(x, w, t):
        return LAST["mean"](SMALL["gather"](HEADS["bias"](x, w)))

    assert max(compare(loss, arguments(), {"num_chunks": 2})) < 1e-5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:storage_ops.autochunk. the graph is not")
def test_graphs_that_are_not_chunked():
    def loss(x, w, t):
        logits = x + w[:, 0]
        return (F.log_softmax(logits, -1).exp() * logits).sum(-1)

    assert max(compare(loss, (torch.randn(16, 320), torch.randn(320, 16), torch.zeros(1)))) < 1e-5


def test_argmax_runs_op_by_op_if_inductor_computes_it_wrongly(monkeypatch):
    def graph(f):
        return torch.fx.experimental.proxy_tensor.make_fx(f)(torch.randn(4, 8))

    largest, sums = graph(lambda z: z.max(-1)[1]), graph(lambda z: z.amax(-1))
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.12.1"))
    assert inductor.miscompiled(largest, "cpu") and not inductor.miscompiled(sums, "cpu")
    assert not inductor.miscompiled(largest, "cuda")
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.13.0"))
    assert not inductor.miscompiled(largest, "cpu")
