"""Estimates of steps with sparse gradients, scalers, schedulers, closures and flex_attention."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import storage_ops as so
from storage_ops.memory import estimate

MIB = 1 << 20


def agree(step, parameters, slack):
    """Check that a step on parameters without gradients takes the measured bytes, up to `slack`."""
    for p in parameters:
        p.grad = None
    e = estimate(step)
    assert all(p.grad is None for p in parameters)
    with so.memory.measure() as m:
        step()
    assert abs(e.peak_bytes - e.input_bytes - m.peak_bytes) < slack
    assert abs(e.kept_bytes - e.input_bytes - m.kept_bytes) < slack
    return e


@pytest.mark.parametrize("kind", ["once", "added up", "padded", "bag"])
def test_sparse_gradients_take_the_measured_memory(kind):
    width = int(torch.randint(16, 64, ()))
    padding = 0 if kind == "padded" else None
    if kind == "bag":
        layer = nn.EmbeddingBag(8192, width, sparse=True, mode="sum")
    else:
        layer = nn.Embedding(8192, width, sparse=True, padding_idx=padding)
    ids = torch.randint(0, 512, (8, 256))

    def step():
        for _ in range(2 if kind == "added up" else 1):
            (layer(ids) * 2).square().sum().backward()

    e = agree(step, [layer.weight], 8 * ids.nbytes)
    step()  # leaves sparse gradients, which are inputs of the next step
    assert layer.weight.grad.is_sparse
    before = layer.weight.grad
    added = estimate(step)
    assert layer.weight.grad is before
    assert added.input_bytes > e.input_bytes


def test_coalesced_gradients():
    """On a GPU they take the coalesced size, and on a CPU the size from before."""
    layer, ids = nn.Embedding(8192, 64, sparse=True), torch.randint(0, 512, (8, 256))

    def step(ids):
        layer(ids).sum().backward()
        layer.weight.grad = layer.weight.grad.coalesce()

    e, rows = estimate(step, ids), len(ids.unique())
    assert e.kept_bytes - e.input_bytes == pytest.approx(rows * (64 * 4 + 8), abs=1024)
    scratch = estimate(lambda: step(torch.randint(0, 512, (8, 256), device=ids.device)))
    assert scratch.kept_bytes < scratch.input_bytes + 2048 * 64 * 4


@pytest.mark.parametrize("make", [torch.optim.SparseAdam, torch.optim.SGD, torch.optim.Adagrad])
def test_steps_with_sparse_gradients(make):
    layer, ids = nn.Embedding(16384, 64, sparse=True), torch.randint(0, 512, (8, 256))
    optimizer = make(layer.parameters(), lr=0.1)

    def step():
        (layer(ids) * 2).square().sum().backward()
        optimizer.step()

    step()
    agree(step, [layer.weight], 8 * ids.nbytes)
    dense = layer.weight.nbytes
    e = estimate(step)
    assert e.peak_bytes - e.input_bytes < dense  # no gradient as large as the weight
    optimizer.zero_grad()
    optimizer.state.clear()
    if make is torch.optim.SparseAdam:
        fresh = estimate(step)
        assert fresh.kept_bytes > 3 * dense and not optimizer.state
        on_meta = nn.Embedding(16384, 64, sparse=True, device="meta")
        optimizer, layer, ids = make(on_meta.parameters(), lr=0.1), on_meta, ids.to("meta")
        with pytest.raises(
            RuntimeError, match=r"Pass assume=\{'coalesce': the share of the largest"
        ):
            estimate(step)
        assert estimate(step, assume={"coalesce": 0.2}).kept_bytes == pytest.approx(
            fresh.kept_bytes, rel=0.01
        )


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_steps_with_a_scaler(options, device):
    if options == {"fused": True} and device == "meta":
        pytest.skip("torch has no fused step on the meta device")
    model = nn.Sequential(nn.Linear(256, 1024, device=device), nn.Linear(1024, 256, device=device))
    x = torch.randn(8, 256, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    scaler = torch.amp.GradScaler("cpu")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    plain = estimate(lambda: (model(x).sum().backward(), optimizer.step()))

    def step():
        scaler.scale(model(x).sum()).backward()
        if not options:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()

    group = dict(optimizer.param_groups[0])
    e = estimate(step)
    assert abs(e.kept_bytes - plain.kept_bytes) < 8192  # so the optimizer did step
    assert abs(e.peak_bytes - plain.peak_bytes) < 8192
    assert scaler._scale is None and scaler.get_scale() == 65536.0
    assert not scaler._per_optimizer_states and not optimizer.state
    assert dict(optimizer.param_groups[0]) == group and scheduler.last_epoch == 0


def test_steps_with_a_scaler_take_the_measured_memory():
    model, x = (
        nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 256)),
        torch.ones(64, 256),
    )
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    scaler = torch.amp.GradScaler("cpu")
    seen = []

    def step():
        scaler.scale(model(x).square().sum()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        scaler.step(optimizer)
        scaler.update()
        seen.append(scaler.get_scale())

    step()
    agree(step, list(model.parameters()), 32 * 1024)
    assert seen == [65536.0] * 3


def test_a_scheduler_that_reads_the_loss():
    p = nn.Parameter(torch.ones(4))
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([p], lr=0.1))
    with pytest.raises(RuntimeError, match=r"item at .*plateau\.step.*assume={'item'"):
        estimate(lambda: plateau.step((p * 2).detach().sum()))
    estimate(lambda: plateau.step((p * 2).detach().sum()), assume={"item": 0.5})
    assert plateau.last_epoch == 0 and plateau.best == float("inf")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_a_scaler_for_a_device_that_does_not_exist():
    with pytest.raises(RuntimeError, match=r"Use torch\.amp\.GradScaler\(x\.device\.type\)"):
        estimate(lambda: torch.amp.GradScaler("cuda"))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("compiled", [False, True])
def test_flex_attention_is_the_compiled_kernel(device, compiled):
    attention = torch.compile(flex_attention, fullgraph=True) if compiled else flex_attention
    q = torch.empty(2, 8, 4096, 64, device=device, requires_grad=True)
    k, v = (torch.empty(2, 2, 4096, 64, device=device, requires_grad=True) for _ in "kv")
    numbers = 2 * 8 * 4096 * 4  # one per query and head
    near = functools.partial(pytest.approx, abs=8192)  # a block mask without blocks

    forward = estimate(lambda q, k, v: attention(q, k, v, enable_gqa=True), q, k, v)
    inputs = q.nbytes + k.nbytes + v.nbytes
    assert forward.input_bytes == inputs
    assert forward.kept_bytes == near(inputs + q.nbytes + numbers)  # no 4096 x 4096 scores
    assert forward.peak_bytes == near(forward.kept_bytes + numbers)  # plus the maximum of each row

    def step(q, k, v):
        attention(q, k, v, enable_gqa=True).backward(q.detach())

    both = estimate(step, q, k, v)
    assert both.kept_bytes == 2 * inputs
    assert both.peak_bytes == near(2 * inputs + q.nbytes + 2 * numbers)
    with torch.no_grad():
        e = estimate(lambda q, k, v: attention(q, k, v, enable_gqa=True), q, k, v)
    assert e.kept_bytes == near(inputs + q.nbytes)


def test_flex_attention_with_a_mask_and_a_bias():
    q = torch.randn(1, 4, 512, 64, requires_grad=True)
    bias = nn.Parameter(torch.randn(4, MIB, dtype=torch.bfloat16))
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 512, 512, device="cpu")

    def score(s, b, h, i, j):
        return s + bias[h, i - j]

    e = estimate(lambda: flex_attention(q, q, q, score_mod=score, block_mask=mask).sum().backward())
    assert e.kept_bytes >= 2 * (q.nbytes + bias.nbytes)
    assert e.peak_bytes >= 2 * bias.nbytes + 2 * bias.nbytes  # its gradient is summed in float32
    assert bias.grad is None
    blocks = estimate(lambda: create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 512, 512, "cpu"))
    assert e.input_bytes - q.nbytes - bias.nbytes == blocks.kept_bytes
    # torch's own flex_attention is restored.
    out, x = flex_attention(q.detach(), q.detach(), q.detach(), block_mask=mask), q.detach()
    torch.testing.assert_close(out, F.scaled_dot_product_attention(x, x, x, is_causal=True))


def test_flex_attention_under_autocast():
    q = torch.randn(1, 4, 512, 64, requires_grad=True)

    def fn():
        with torch.autocast("cpu", torch.bfloat16):
            return flex_attention(q, q, q, return_aux=AuxRequest(lse=True))

    e = estimate(fn)
    # Queries, keys, values and the output in bfloat16, and row statistics for kernel and caller.
    assert e.kept_bytes == pytest.approx(3 * q.nbytes + 2 * 4 * 512 * 4, abs=8192)
    t = q.transpose(1, 2)
    assert estimate(lambda: flex_attention(t, t, t)).kept_bytes >= 2 * q.nbytes + 4 * 512 * 4


def test_compiled_functions_run_op_by_op():
    x = torch.randn(MIB)
    fn = torch.compile(lambda x: (x + 1).sin(), fullgraph=True)
    assert estimate(fn, x).peak_bytes == 12 * MIB


def test_a_run_after_a_simulation_in_one_autocast_block():
    """Autocast does not reuse the casts of parameters that the simulation created."""
    model, x = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), torch.randn(4, 8)

    def loss(out):
        return out.float().square().mean()

    with torch.autocast("cpu", torch.bfloat16):
        right = loss(model(x))
        peaks = [so.memory.simulate_step(model, x, loss=loss).peak_bytes for _ in "ab"]
        value = loss(model(x))
        value.backward()
    torch.testing.assert_close(value, right)
    assert peaks[0] == peaks[1]
    with torch.autocast("cpu", torch.bfloat16):
        assert so.memory.simulate_step(model, x, loss=loss).peak_bytes == peaks[0]


class Searching(torch.optim.SGD):
    """Calls the closure until the loss is smaller."""

    def step(self, closure):
        first = float(closure())
        super().step()
        while float(closure()) > first:
            pass


class Twice(torch.optim.SGD):
    """Calls the closure twice, without reading the loss."""

    def step(self, closure):
        closure()
        super().step()
        closure()


def closing(kind, **kwargs):
    model, x = nn.Linear(64, 64), torch.randn(32, 64)
    optimizer = kind(model.parameters(), lr=0.1, **kwargs)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    return model, lambda: optimizer.step(closure=closure)


def test_optimizers_that_call_their_closure_depending_on_values():
    for kind in (functools.partial(torch.optim.LBFGS, max_iter=1), torch.optim.LBFGS, Searching):
        model, step = closing(kind)
        with pytest.raises(RuntimeError, match=r"\.step decides by values how often it calls its"):
            estimate(step)
        assert model.weight.grad is None


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.NAdam, torch.optim.Adafactor, Twice])
def test_optimizers_with_a_closure(kind):
    model, step = closing(kind)
    agree(step, model.parameters(), 5 * 64 * 64)


def test_a_closure_that_reads_a_value():
    def step():
        optimizer.step(lambda: x[: int(x.exp().sum())].sum().backward())

    x = torch.randn(5000000, requires_grad=True)
    optimizer = torch.optim.SGD([x], lr=0.1)
    with pytest.raises(RuntimeError, match="needs the values of a tensor: item"):
        estimate(step)
