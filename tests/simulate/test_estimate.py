"""Memory that `estimate` counts, for inputs of every kind, and its absence of side effects."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import storage_ops as so
from storage_ops.foundation.ledger import rounded
from storage_ops.matmul import aten
from storage_ops.memory import estimate, simulate_step

from .cpu_peaks import simulated_peak

MIB = 1 << 20


def mlp(device=None):
    return nn.Sequential(
        nn.Linear(256, 1024, device=device), nn.GELU(), nn.Linear(1024, 256, device=device)
    )


def train(model, x):
    model(x).square().mean().backward()


@pytest.mark.parametrize(
    ("nbytes", "block"),
    [
        (0, 0),
        (1, 512),
        (513, 1024),
        (MIB + 1, MIB + 512),
        (33 * MIB, 34 * MIB),  # a segment of 34 MiB, whose last MiB is not split off
        (33 * MIB - 512, 33 * MIB - 512),
        (32 * MIB, 32 * MIB),
    ],
)
def test_rounding_of_the_caching_allocator(nbytes, block):
    assert rounded(nbytes) == block


def test_peak_kept_inputs_and_timeline():
    x = torch.randn(MIB)

    def fn(x):
        kept = x + 1
        temporary = kept * 2
        del temporary
        return kept, torch.empty(MIB // 2)

    e = estimate(fn, x)
    assert (e.input_bytes, e.peak_bytes, e.kept_bytes) == (4 * MIB, 12 * MIB, 10 * MIB)
    assert [s.nbytes // MIB for s in e.timeline] == [4, 8, 12, 8, 10]
    assert [s.seconds for s in e.timeline] == sorted(s.seconds for s in e.timeline)
    assert sorted(b.made_by for b in e.at_peak) == ["aten.add.Tensor", "aten.mul.Tensor", "input"]
    assert "4.0 MiB     1 x (1048576,) float32, aten.mul.Tensor" in str(e)
    assert str(e).startswith("peak 12.0 MiB, kept 10.0 MiB, inputs 4.0 MiB")


def test_views_and_storages_that_are_resized():
    def fn(x):
        y = x + 0
        half = y.view(2, -1)[1]
        y.untyped_storage().resize_(0)
        z = x * 2
        return half, z

    e = estimate(fn, torch.empty(MIB))
    assert (e.peak_bytes, e.kept_bytes) == (8 * MIB, 8 * MIB)


def test_estimates_agree_with_measured_peaks():
    """The peak of a model with many kinds of layers is measured, up to the rounding of blocks.

    There are so few tokens that a GPU also sums the gradients of biases without partial sums.
    """
    width = int(torch.randint(64, 256, ()))
    model = nn.Sequential(
        nn.Embedding(64, width),
        nn.LayerNorm(width),
        nn.Linear(width, 3 * width),
        nn.SiLU(),
        nn.Linear(3 * width, width, bias=False),
        nn.Tanh(),
        nn.Linear(width, 64),
    )
    ids = torch.randint(0, 64, (int(torch.randint(8, 24, ())), 32))

    def step():
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()

    e = estimate(step)
    with so.memory.measure() as m:
        step()
    slack = 1024 * len(e.at_peak)
    assert abs(e.peak_bytes - e.input_bytes - m.peak_bytes) < slack
    assert abs(e.kept_bytes - e.input_bytes - m.kept_bytes) < slack


@pytest.mark.parametrize(
    "kind", ["real", "meta", "meta model, real input", "fake", "in a fake mode"]
)
def test_tensors_of_every_kind(kind):
    mode = FakeTensorMode()
    real = estimate(train, mlp(), torch.randn(512, 256, requires_grad=True))
    if "fake" in kind:
        with mode:
            model, x = mlp(), torch.randn(512, 256, requires_grad=True)
    else:
        device = "meta" if "meta" in kind else "cpu"
        model = mlp(device)
        x = torch.randn(512, 256, device="cpu" if "real" in kind else device, requires_grad=True)
    if kind == "in a fake mode":
        with mode:
            e = estimate(train, model, x)
    else:
        e = estimate(train, model, x)
    assert (e.peak_bytes, e.kept_bytes, e.input_bytes) == (
        real.peak_bytes, real.kept_bytes, real.input_bytes,
    )  # fmt: skip
    assert all(p.grad is None for p in model.parameters()) and x.grad is None


def test_tensors_that_a_function_references_are_inputs():
    model, x = mlp(), torch.randn(512, 256)
    other = torch.randn(MIB)  # in memory all the time, although it is used after the peak

    def step():
        train(model, x)
        return other + 1

    e = estimate(step)
    size = sum(p.nbytes for p in model.parameters()) + x.nbytes + other.nbytes
    assert e.input_bytes == size
    assert estimate(model, x).input_bytes == size - other.nbytes  # includes layers called later


def test_nothing_is_left_behind():
    model, x = mlp(), torch.randn(512, 256)
    norm = nn.BatchNorm1d(256)
    train(model, x)
    values = [p.detach().clone() for p in model.parameters()]
    gradients = [p.grad for p in model.parameters()]
    copies = [g.clone() for g in gradients]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    state = torch.get_rng_state()
    seen = []

    def step():
        optimizer.zero_grad()
        loss = model(norm(F.dropout(x))).sum()
        loss.backward()
        optimizer.step()
        seen.append(weakref.ref(loss))

    estimate(step)
    gc.collect()
    assert seen[0]() is None
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert all(torch.equal(g, c) for g, c in zip(gradients, copies, strict=True))
    assert all(torch.equal(p, v) for p, v in zip(model.parameters(), values, strict=True))
    assert not optimizer.state and optimizer.param_groups[0]["foreach"] is None
    assert norm.num_batches_tracked == 0 and torch.equal(state, torch.get_rng_state())
    # torch's own kernels are restored.
    right = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    torch.testing.assert_close(F.rms_norm(x, (256,), eps=1e-6), right)


def test_dropped_gradients_and_accumulated_gradients():
    model, x = mlp(), torch.randn(512, 256)
    parameters = sum(p.nbytes for p in model.parameters())
    train(model, x)

    def fresh():
        model.zero_grad()
        train(model, x)

    first, added = estimate(fresh), estimate(train, model, x)
    assert first.input_bytes == added.input_bytes == 2 * parameters + x.nbytes
    assert first.kept_bytes == added.kept_bytes == first.input_bytes
    assert added.peak_bytes > first.peak_bytes


@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"fused": True}])
@pytest.mark.parametrize("warm", [False, True])
def test_a_step_with_an_optimizer(options, warm):
    model, x = mlp(), torch.randn(8, 256)
    parameters = sum(p.nbytes for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), **options)

    def step():
        optimizer.zero_grad()
        train(model, x)
        optimizer.step()

    if warm:
        step()
    count = len(optimizer.state)
    e = estimate(step)
    assert len(optimizer.state) == count
    # Parameters, gradients and two moments. A foreach step has one more temporary per parameter.
    assert 4 * parameters < e.kept_bytes < 4.1 * parameters
    extra = (e.peak_bytes - e.kept_bytes) / parameters
    assert extra > 0.95 if not options else extra < 1.1


@pytest.mark.in_turn
def test_adafactor_handles_one_parameter_at_a_time():
    """Its documentation says so, and an H200 confirmed it for a GPU."""

    def peak(foreach, kind=torch.optim.Adafactor):
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
        optimizer = kind(model.parameters(), foreach=foreach)
        return simulate_step(model, torch.empty(2, 256), optimizer=optimizer, device="h200")

    class Mine(torch.optim.AdamW):
        pass

    assert peak(None).peak_bytes == peak(False).peak_bytes < peak(True).peak_bytes
    assert peak(None, Mine).peak_bytes == peak(True, Mine).peak_bytes > peak(False, Mine).peak_bytes


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_kernels_of_a_gpu(device):
    x = torch.randn(2, 8, 2048, 64, device=device, requires_grad=True)
    size = x.nbytes
    causal = {"is_causal": True}
    attention = estimate(lambda x: F.scaled_dot_product_attention(x, x, x, **causal), x)
    assert 3 * size > attention.kept_bytes >= 2 * size  # no 2048 x 2048 scores
    kept = estimate(lambda x: F.dropout(x, 0.1), x).kept_bytes
    assert kept == 2 * size + size // 4  # the mask has one byte per element
    assert estimate(lambda x: F.dropout(x, 0.1, training=False), x).kept_bytes == size
    norm = estimate(lambda x: F.rms_norm(x, (64,)), x)
    assert norm.kept_bytes == 2 * size + size // 64  # and a number per row
    softmax = estimate(lambda x: x.softmax(-1).backward(x.detach()), x)
    assert softmax.peak_bytes == 4 * size  # input, output, product, gradient


def test_linear_cross_entropy_is_simulated_op_by_op():
    x = torch.randn(2048, 64, requires_grad=True)
    weight = torch.randn(16384, 64, requires_grad=True)
    target = torch.randint(0, 16384, (2048,))
    logits = 2048 * 16384 * 4

    def loss(budget):
        so.linear_cross_entropy(x, weight, target, memory_budget=budget).backward()

    small, large = estimate(loss, 4 * MIB), estimate(loss, 400 * MIB)
    grads = x.nbytes + weight.nbytes
    assert small.peak_bytes - small.input_bytes - grads < 5 * MIB < logits
    assert large.peak_bytes - large.input_bytes - grads > logits // 4
    assert small.kept_bytes == small.input_bytes + grads
    on_meta = estimate(
        lambda x, w: so.linear_cross_entropy(x, w, target.to("meta"), memory_budget=4 * MIB),
        x.to("meta").detach(), weight.to("meta").detach(),
    )  # fmt: skip
    assert on_meta.peak_bytes < small.peak_bytes + logits // 4


def test_discard_and_share(path, zero_copy):
    h, src = torch.empty(MIB), torch.empty(MIB)

    def fn(h, src):
        view = h[1:]
        so.discard_storage(h)
        assert so.is_discarded(h) and so.is_discarded(view) and not so.is_discarded(src)
        so.discard_storage(h)
        shared = src + 1
        so.share_storage(h, shared)
        assert not so.is_discarded(view)
        so.share_storage(h, h)
        return shared

    e = estimate(fn, h, src)
    assert [s.nbytes // MIB for s in e.timeline] == [8, 4, 8] + ([] if zero_copy else [12])
    assert not so.is_discarded(h)


def test_reading_an_unknown_value_is_an_error():
    x = nn.Parameter(torch.randn(64, 64))
    for fn in (
        lambda: x.sum().item(),
        lambda: x[x > 0],
        lambda: x.nonzero(),
        lambda: bool(x.max()),
    ):
        with pytest.raises(RuntimeError, match="simulated code needs the values of a tensor"):
            estimate(fn)
    scale = torch.tensor(3.0)  # a real tensor has a value
    assert estimate(lambda: x * scale.item()).peak_bytes == 2 * x.nbytes + 512


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_a_device_that_does_not_exist():
    with pytest.raises(RuntimeError, match="asks for device cuda, which this machine does not"):
        estimate(lambda: torch.empty(3, device="cuda"))

    def autocast():
        with torch.autocast("cuda", torch.bfloat16):
            return mlp()(torch.randn(8, 256))

    with pytest.raises(RuntimeError, match=r"Use torch\.autocast\(x\.device\.type\)"):
        estimate(autocast)


def test_autocast():
    def fn(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    layer, x = nn.Linear(256, 1024, bias=False), torch.randn(512, 256)
    e = estimate(fn, layer, x)
    assert e.kept_bytes - e.input_bytes == 512 * 1024 * 2 + x.nbytes // 2
    with pytest.raises(RuntimeError, match="which does nothing to tensors on the meta device"):
        estimate(fn, layer.to("meta"), x)


def test_tensors_that_cannot_be_simulated():
    with pytest.raises(TypeError, match=r"layout torch\.sparse_csr. Expected plain strided"):
        estimate(torch.relu, torch.eye(3).to_sparse_csr())
    sparse = torch.sparse_coo_tensor(size=(3, 3), device="meta")
    with pytest.raises(
        TypeError, match=r"a sparse tensor is a Tensor on meta\. Expected a real one"
    ):
        estimate(torch.relu, sparse)


def test_an_exception_is_raised_and_leaves_no_trace():
    model, x = mlp(), torch.randn(8, 256)

    def fn():
        train(model, x)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        estimate(fn)
    assert all(p.grad is None for p in model.parameters()) and gc.isenabled()


def test_a_traced_step():
    """After the trace, its optimizer has state but has not made a step."""
    model = nn.Linear(8, 4)
    opt = torch.optim.AdamW(model.parameters())

    def step(x):
        opt.zero_grad()
        loss = model(x).sum()
        loss.backward()
        opt.step()
        return loss.detach()

    x = torch.randn(2, 8)
    so.graph.trace_step(step, x)
    assert so.memory.estimate(step, x).peak_bytes > 0
    assert not any(state["step"] for state in opt.state.values())


@pytest.mark.parametrize("bias", [True, False])
def test_a_product_on_arm_has_a_copy_of_its_weight(bias, monkeypatch):
    """The copy is for x @ w.T in float32, padded to 8 classes, as measured on aarch64."""
    layer, x = nn.Linear(64, 1001, bias=bias), torch.randn(4, 32, 64)
    peaks = {}
    for arm in (False, True):
        monkeypatch.setattr(aten, "has_arm_library", lambda arm=arm: arm)
        peaks[arm] = [simulated_peak(lambda x=x: layer.to(x)(x)) for x in (x, x.double())]
    assert peaks[True][0] - peaks[False][0] == 4 * 64 * 1008
    assert peaks[True][1] == peaks[False][1]
