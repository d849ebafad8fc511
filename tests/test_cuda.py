"""The ops and wrappers on a GPU. Skipped without one; STORAGE_OPS_REQUIRE_CUDA=1 forbids that."""

import itertools

import pytest
import torch
from torch.nn import functional as F

import storage_ops as so
from storage_ops.ops import reference

pytestmark = pytest.mark.cuda


def numbers(*shape, dtype=torch.float32):
    return torch.randn(*shape, device="cuda").to(dtype)


def test_the_cuda_library_is_loaded():
    assert any("libstorage_ops_cu" in name for name in so.info()["loaded"]), so.info()
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has("storage_ops::_cross_entropy_rows", "CUDA")


DEVICE, UPDATE, GRADIENT, EXPONENTIALS, SLOPE = "cuda", 1, 2, 4, 8
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
OPTIONS = {
    "plain": {},
    "logit_scale": {"logit_scale": 0.7},
    "bias": {"bias": True},
    "softcap": {"softcap": 8.0, "logit_scale": 1.5},
    "smoothing": {"label_smoothing": 0.1, "upstream": [0.9, 1.0]},
    "class_weight": {"label_smoothing": 0.1, "weight": True, "upstream": [0.9, 1.0]},
    "probabilities": {"probabilities": True, "upstream": [0.0, 1.0]},
    "entropy": {"phases": SLOPE, "upstream": [1.0, 0.0, 0.0, 0.5]},
    "z_loss": {"upstream": [1.0, 0.0, 0.0, 0.0, 1e-2]},
    "lse": {"upstream": [1.0, 0.0, -0.5]},
    "upstream_per_row": {"upstream": None, "phases": SLOPE},
    "all": {
        "bias": True, "weight": True, "probabilities": True, "label_smoothing": 0.2,
        "softcap": 12.0, "logit_scale": 0.9, "upstream": None, "phases": SLOPE,
    },
}  # fmt: skip


class Fenced:
    """A copy of a matrix on a device, amid sevens."""

    def __init__(self, values, device):
        rows, columns = values.shape
        self.all = values.new_full((rows + 2, -(-columns // 64) * 64 + 128), 7, device=device)
        self.values = self.all[1:-1, 64 : 64 + columns]
        self.values.copy_(values)

    def taken_out(self):
        values = self.values.clone().cpu()
        self.values.fill_(7)
        assert (self.all == 7).all()
        return values


class Rows:
    """Random arguments of the row kernel, and runs of it on copies of them."""

    # fmt: off
    def __init__(self, dtype, columns, *, bias=False, weight=False, probabilities=False,
                 upstream=(1.0,), phases=0, softcap=0.0, logit_scale=1.0, label_smoothing=0.0):
        # fmt: on
        rows = 33
        self.arithmetic = torch.float64 if dtype == torch.float64 else torch.float32
        self.logits = (4 * torch.randn(rows, columns)).to(dtype)
        self.target = torch.randint(columns, (rows,))
        self.target[3::5] = -100
        if probabilities:
            self.target = torch.rand(rows, columns, dtype=self.arithmetic)
        self.bias = torch.randn(columns).to(dtype) if bias else None
        self.weight = torch.rand(columns, dtype=self.arithmetic) if weight else None
        self.upstream = torch.randn(5, rows, dtype=self.arithmetic)
        if upstream:
            self.upstream = torch.tensor(upstream, dtype=self.arithmetic).unsqueeze(1)
        self.scalars, self.phases = (softcap, logit_scale, label_smoothing), phases
        self.spread = probabilities or label_smoothing != 0

    def run(self, device, *calls):
        """State, argmax and logits after calls (begin, end, phases) on slices of the columns."""
        target, bias, weight, upstream = (
            None if t is None else t.to(device)
            for t in (self.target, self.bias, self.weight, self.upstream)
        )
        rows, columns = self.logits.shape
        logits = Fenced(self.logits, device)
        state = Fenced(torch.zeros(6, rows, dtype=self.arithmetic), device)
        argmax = Fenced(torch.full((1, rows), -7), device)
        for begin, end, phases in calls:
            part = slice(begin, end)
            torch.ops.storage_ops._cross_entropy_rows(
                logits.values[:, part],
                target if target.dim() == 1 else target[:, part],
                None if bias is None else bias[part],
                None if weight is None else weight[part],
                upstream if phases & GRADIENT else None,
                state.values,
                argmax.values[0] if phases & UPDATE else None,
                begin,
                columns,
                -100,
                *self.scalars,
                phases | self.phases,
            )
        return state.taken_out(), argmax.taken_out()[0], logits.taken_out()

    def compare(self, *calls):
        """Check the CUDA kernel against the CPU kernel."""
        (state, argmax, logits), right = self.run(DEVICE, *calls), self.run("cpu", *calls)
        tolerance = 1e-11 if self.arithmetic == torch.float64 else 1e-4
        kept = [0, 1, 5]  # the rest has a meaning only where it is asked for
        kept += [2] if self.phases & SLOPE else []
        kept += [3, 4] if self.spread else []
        torch.testing.assert_close(state[kept], right[0][kept], rtol=tolerance, atol=tolerance)
        if self.scalars[0] == 0:  # the soft-cap makes ties, and the two round differently
            assert torch.equal(argmax, right[1])
        rounding = {torch.bfloat16: 1e-2, torch.float16: 2e-3}.get(logits.dtype, tolerance)
        # Where the soft-cap saturates, its slope is the difference of two numbers near 1.
        atol = min(tolerance, 1e-5 if self.scalars[0] else 1e-6)
        torch.testing.assert_close(logits.double(), right[2].double(), rtol=rounding, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 7, 1000, 50257])
@pytest.mark.parametrize("options", OPTIONS)
def test_row_kernel_against_the_cpu(dtype, columns, options):
    Rows(dtype, columns, **OPTIONS[options]).compare((0, columns, UPDATE | GRADIENT))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_row_kernel_on_slices_of_the_vocabulary(dtype, options):
    ends = [0, 1, 1001, 1001, 2048, 4096, 5003]
    slices = list(itertools.pairwise(ends))
    calls = [(begin, end, phase) for phase in (UPDATE, GRADIENT) for begin, end in slices]
    Rows(dtype, 5003, **OPTIONS[options]).compare(*calls)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_row_kernel_writes_exponentials(dtype, options):
    Rows(dtype, 3001, **OPTIONS[options]).compare((0, 3001, UPDATE | EXPONENTIALS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [5, 1000, 50257])
def test_row_kernel_finds_the_first_maximum(dtype, columns):
    p, middle = Rows(dtype, columns), columns // 3
    p.target.clamp_(0)
    p.logits.clamp_(max=1)
    p.logits[:, torch.randint(columns, (16,))] = 1
    p.logits[4, columns // 2 :] = float("nan")
    p.logits[5] = -float("inf")
    p.logits[6, middle:] = float("inf")
    p.logits[7, columns - 1] = float("inf")
    right = p.logits.double().argmax(1)
    right[5] = -7  # no logit is above -inf
    for slices in ([(0, columns)], [(0, middle), (middle, columns)]):
        state, argmax, _ = p.run(DEVICE, *((begin, end, UPDATE) for begin, end in slices))
        assert torch.equal(argmax, right)
        assert state[1, 4].isnan() and state[1, 5] == 0 and state[0, 6] == float("inf")


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_kernel_gives_the_same_bits_twice(dtype):
    p = Rows(dtype, 4099, **OPTIONS["all"])
    once, again = (p.run(DEVICE, (0, 4099, UPDATE | GRADIENT)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


@pytest.mark.parametrize("wrong", [-1, -(2**62), 50, 2**40])
@pytest.mark.parametrize("options", ["plain", "class_weight"])
@pytest.mark.parametrize("last", [GRADIENT, EXPONENTIALS])
def test_targets_out_of_range_make_nan_and_touch_nothing(wrong, options, last):
    p = Rows(torch.float32, 50, **OPTIONS[options])
    bad = [0, 5, 32]
    others = [i for i in range(33) if i not in bad]
    p.target[bad] = wrong
    state, argmax, logits = p.run(DEVICE, (0, 30, UPDATE), (30, 50, UPDATE), (0, 50, last))
    p.target[bad] = -100
    right = p.run("cpu", (0, 30, UPDATE), (30, 50, UPDATE), (0, 50, last))
    assert state[1, bad].isnan().all() and logits[bad].isnan().all()
    torch.testing.assert_close(state[:2, others], right[0][:2, others])
    torch.testing.assert_close(logits[others], right[2][others], rtol=1e-4, atol=1e-6)
    assert torch.equal(argmax, right[1])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_cross_entropy(dtype, reduction):
    x, w = numbers(512, 256, dtype=dtype), numbers(5003, 256, dtype=dtype)
    target = torch.randint(5003, (512,), device="cuda")
    grads = []
    for double in (False, True):
        leaves = [(t.double() if double else t).detach().requires_grad_() for t in (x, w)]
        loss = (reference if double else so).linear_cross_entropy(
            *leaves, target, reduction=reduction
        )
        loss.sum().backward()
        grads.append([loss.detach().double(), *(t.grad.double() for t in leaves)])
    for ours, right in zip(*grads, strict=True):
        error = (ours - right).norm() / right.norm()
        assert error < (1.5e-2 if dtype == torch.bfloat16 else 1e-4)


def test_cuda_graph_capture_of_the_loss():
    x, w = numbers(64, 32), numbers(500, 32).requires_grad_()
    target = torch.randint(500, (64,), device="cuda")

    def step():
        return torch.autograd.grad(so.linear_cross_entropy(x, w, target), w)[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        right = step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    assert torch.equal(captured, right)


def test_discard_frees_and_share_binds_without_a_copy(path):
    dst, src = numbers(1 << 20), numbers(1 << 20)
    before = torch.cuda.memory_allocated()
    so.discard_storage(dst)
    assert torch.cuda.memory_allocated() == before - (4 << 20)
    so.share_storage(dst, src)
    assert torch.equal(dst, src)
    if path != "copy":
        assert dst.data_ptr() == src.data_ptr()


def test_memory_used_on_another_stream_is_not_reused_early(path):
    side = torch.cuda.Stream()
    for _ in range(20):
        t, src = torch.zeros(1 << 22, device="cuda"), torch.ones(1 << 22, device="cuda")
        so.share_storage(t, src)
        del src
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000)
            total = t.sum()
        so.discard_storage(t, streams=[side])
        poison = torch.full((1 << 22,), 5.0, device="cuda")
        torch.cuda.synchronize()
        assert total == 1 << 22 and poison[0] == 5


def test_pinned_memory(path):
    dst, src = torch.zeros(1 << 16).pin_memory(), torch.ones(1 << 16).pin_memory()
    so.discard_storage(dst)
    so.share_storage(dst, src)
    assert torch.equal(dst.to("cuda", non_blocking=True).cpu(), src)
    assert path == "copy" or dst.is_pinned()


def test_reading_after_discard_is_an_error_not_a_poisoned_context():
    t = numbers(8)
    so.discard_storage(t, guard="gone")
    with pytest.raises(RuntimeError, match="gone"):
        t + 1
    torch.cuda.synchronize()
    assert numbers(4).sum().isfinite()


def test_output_discard_with_dropout_equals_eager(path):
    up, down = torch.nn.Linear(64, 256).cuda(), torch.nn.Linear(256, 64).cuda()
    x = numbers(32, 64).requires_grad_()
    producer = lambda x: F.dropout(F.gelu(up(x)), 0.3)  # noqa: E731
    results = []
    for way in (lambda x: down(producer(x)), so.output_discard(producer, down)):
        torch.manual_seed(1)
        results.append(torch.autograd.grad(way(x).square().sum(), (x, up.weight, down.weight)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_measure():
    with so.memory.measure("cuda") as m:
        kept = torch.empty(1 << 20, device="cuda")
        temporary = torch.empty(1 << 20, device="cuda")
        del temporary
    assert m.peak_bytes == 2 * kept.nbytes and m.kept_bytes == kept.nbytes
    assert max(s.nbytes for s in m.timeline) == m.peak_bytes
