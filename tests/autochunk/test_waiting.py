"""With at most as many tokens as the hidden size, logit gradients are stored in the weight's."""

import pytest
import torch
from torch.nn import functional as F

import storage_ops
from storage_ops.autochunk.backend import backend
from storage_ops.autochunk.runtime import assemble

from .losses import V, biased, distillation, flat, interpreted, policy_ratio, run, squared
from .losses import z_loss_and_entropy as mixed


def focal(x, w, t):
    """Return a focal loss of capped logits, which does not become the op."""
    log_p = torch.log_softmax(flat(x, w).float().clamp(-50, 50), -1)
    nll = -log_p.gather(-1, t.flatten().clamp(min=0)[:, None])
    return (nll * (1 - (-nll).exp()) ** 2).mean()


def focal_with_bias(x, w, t):
    z = F.linear(x, w, w[:, 0]).flatten(0, -2).float()
    log_p = torch.log_softmax(z.clamp(-50, 50), -1)
    nll = -log_p.gather(-1, t.flatten().clamp(min=0)[:, None])
    return (nll * (1 - (-nll).exp()) ** 2).mean()


LOSSES = [biased, distillation, focal, focal_with_bias, mixed, policy_ratio, squared]


@pytest.fixture
def waiting(monkeypatch):
    """Return a list of the stored gradients. Fill unwritten memory with nan."""
    stored = []

    class Watched(assemble.Waiting):
        def settle(self):
            stored.append(self)
            super().settle()

    monkeypatch.setattr("storage_ops.autochunk.runtime.chunk_op.Waiting", Watched)
    torch.use_deterministic_algorithms(True)
    yield stored
    torch.use_deterministic_algorithms(False)


def wide(dtype, hidden=40):
    x = torch.randn(4, 8, hidden).to(dtype)
    t = torch.randint(V, (4, 8))
    t[0, :2] = -100
    return x, (torch.randn(V, hidden) * 0.3).to(dtype), t


def error(got, want):
    return float((got.double() - want).norm() / want.norm().clamp(min=1e-12))


@pytest.mark.slow
@pytest.mark.parametrize("num_chunks", [2, 4, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_gradients(loss, dtype, num_chunks, waiting):
    torch._dynamo.reset()
    inputs = wide(dtype)
    exact = run(loss, inputs[0].double(), inputs[1].double(), inputs[2])
    plain = run(loss, *inputs)
    ops = []
    got = run(interpreted(loss, num_chunks, ops=ops), *inputs)
    assert waiting or "storage_ops.linear_cross_entropy.default" in ops
    for ours, eager, want in zip(got, plain, exact, strict=True):
        assert ours.dtype == eager.dtype and ours.shape == eager.shape
        floor = 1e-5 if dtype == torch.float32 else 1e-2
        assert error(ours, want) <= 1.5 * error(eager, want) + floor


@pytest.mark.parametrize("loss", [focal, focal_with_bias], ids=lambda f: f.__name__)
def test_products_are_computed_for_all_tokens_at_once(loss, waiting, monkeypatch):
    """All three products have all tokens, and slices of the vocabulary."""
    torch._dynamo.reset()
    rows = []
    matmul = type(assemble._products_of(torch.empty(0)))
    for owner, name, left in (assemble, "_multiply", 0), (matmul, "input_gradient", 1):
        own = getattr(owner, name)
        watched = lambda *a, f=own, i=left: rows.append(len(a[i])) or f(*a)  # noqa: E731
        monkeypatch.setattr(owner, name, watched)
    inputs = wide(torch.float32)
    torch.testing.assert_close(run(interpreted(loss, 8), *inputs), run(loss, *inputs))
    (one,) = waiting
    slices = len(list(one.tiles()))
    assert len(one.others) == 1 and slices > 1
    assert rows == [32] * (2 * slices)  # logits and the input's gradient


@pytest.mark.in_turn
@pytest.mark.parametrize("vocabulary", [60, 64, 65, 130])
def test_slices_of_a_small_vocabulary(vocabulary, waiting):
    torch._dynamo.reset()
    inputs = torch.randn(2, 3, 7), torch.randn(vocabulary, 7), torch.randint(vocabulary, (2, 3))
    torch.testing.assert_close(run(interpreted(focal, 3), *inputs), run(focal, *inputs))
    assert [(rows.start, rows.stop) for rows, _ in waiting[0].tiles()] == [
        (begin, min(begin + 64, vocabulary)) for begin in range(0, vocabulary, 64)
    ]


def test_gradients_of_too_many_tokens_are_not_stored(waiting):
    torch._dynamo.reset()
    inputs = wide(torch.float32, hidden=31)
    torch.testing.assert_close(run(interpreted(focal), *inputs), run(focal, *inputs))
    assert not waiting


@pytest.mark.in_turn
def test_sizes_that_change(waiting):
    """One graph handles numbers of tokens that fit and numbers that do not."""
    torch._dynamo.reset()
    compiled = interpreted(focal, dynamic=True)
    for tokens, waits in ((8, True), (11, False), (9, True)):
        x, w, t = torch.randn(4, tokens, 40), torch.randn(V, 40), torch.randint(V, (4, tokens))
        torch.testing.assert_close(run(compiled, x, w, t), run(focal, x, w, t))
        assert bool(waiting) == waits
        waiting.clear()


@pytest.mark.slow
def test_no_sum_in_float32():
    torch._dynamo.reset()
    x, w = torch.randn(256, 256).bfloat16(), torch.randn(8192, 256).bfloat16()

    def loss(x, w, t):
        return torch.softmax(F.linear(x, w), -1).square().sum()

    compiled = torch.compile(loss, backend=backend, options={"num_chunks": 8, "strict": True})
    run(compiled, x, w, None)
    with storage_ops.memory.measure(device="cpu") as m:
        run(compiled, x, w, None)
    logits, gradients = 2 * 256 * 8192, 2 * (x.numel() + w.numel())
    assert m.peak_bytes < 1.1 * (gradients + logits / 8) + w.numel() * 2
