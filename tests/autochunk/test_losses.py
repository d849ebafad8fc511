"""The chunked gradients of every loss are those of the uncompiled function."""

import pytest
import torch
from torch.nn import functional as F

from storage_ops.autochunk.backend import backend
from storage_ops.autochunk.runtime import chunk_op as chunks
from storage_ops.autochunk.runtime.program import decode_graph

from .losses import LOSSES, D, V, arguments, interpreted, run

STRICT = {"num_chunks": 4, "strict": True}


def error(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-12))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_gradients(loss, dtype):
    torch._dynamo.reset()
    inputs = arguments(dtype)
    exact = run(loss, *(a.double() if a.is_floating_point() else a for a in inputs))
    plain = run(loss, *inputs)
    check(run(interpreted(loss), *inputs), plain, exact, dtype)


def test_as_many_tokens_as_classes():
    torch._dynamo.reset()
    x, w = torch.randn(V, D), torch.randn(V, D) * 0.5

    def loss(x, w, t):
        return torch.softmax(F.linear(x, w), -1).square().sum()

    inputs = (x, w, None)
    exact = run(loss, x.double(), w.double(), None)
    check(run(interpreted(loss), *inputs), run(loss, *inputs), exact, torch.float32)


def test_the_base_of_a_view_stays_outside(monkeypatch):
    """Dynamo would trace the base too, and fail if its sizes are symbols."""
    torch._dynamo.reset()
    bases = []

    def first_that_compiles(program, *_):
        body = decode_graph(program.body)

        def run_body(*args):
            bases.extend(a._base for a in args if isinstance(a, torch.Tensor))
            return body(*args)

        return run_body

    monkeypatch.setattr(chunks, "_first_that_compiles", first_that_compiles)
    chunks.body_of.cache_clear()
    chunks.bodies_of.cache_clear()
    loss = next(f for f in LOSSES if f.__name__ == "heads")
    run(interpreted(loss), *arguments())
    chunks.body_of.cache_clear()
    chunks.bodies_of.cache_clear()
    assert bases and all(base is None for base in bases)


def check(chunked, plain, exact, dtype):
    for got, eager, want in zip(chunked, plain, exact, strict=True):
        assert got.dtype == eager.dtype and got.shape == eager.shape
        floor = 1e-5 if dtype == torch.float32 else 1e-2
        assert error(got, want) <= 1.5 * error(eager, want) + floor


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cross_entropy", "z_loss_and_entropy", "dpo", "heads"])
def test_gradients_with_inductor(name):
    torch._dynamo.reset()
    loss = next(f for f in LOSSES if f.__name__ == name)
    inputs = arguments()
    compiled = torch.compile(loss, backend=backend, options=STRICT, dynamic=False)
    for got, want in zip(run(compiled, *inputs), run(loss, *inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cross_entropy", "focal", "softcap_scaled"])
def test_dynamic_sizes_compile_once(name):
    torch._dynamo.reset()
    loss = next(f for f in LOSSES if f.__name__ == name)
    compiled = torch.compile(loss, backend=backend, options=STRICT, dynamic=True)
    x, w, t = arguments()
    run(compiled, x, w, t)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch, length in ((6, 7), (5, 11), (9, 13)):
            x, t = torch.randn(batch, length, x.shape[2]), torch.randint(9, (batch, length))
            for got, want in zip(run(compiled, x, w, t), run(loss, x, w, t), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
