"""The row kernel of the loss on a GPU agrees with the CPU kernel."""

import itertools
from typing import Any, NamedTuple

import pytest
import torch

import storage_ops as so
from storage_ops.loss.planning.schedule import EXPONENTIALS, GRADIENT, SLOPE, UPDATE

pytestmark = pytest.mark.cuda


def test_the_cuda_library_is_loaded():
    assert any("libstorage_ops_cu" in name for name in so.info()["loaded"]), so.info()
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has("storage_ops::_cross_entropy_rows", "CUDA")


class Place(NamedTuple):
    """A device, and the ops to call on it."""

    device: str
    ops: Any


INF, NAN = float("inf"), float("nan")
CPU, GPU = Place("cpu", torch.ops.storage_ops), Place("cuda", torch.ops.storage_ops)
STREAMED = 32  # a bit of the phases that asks for the streamed form of the kernel
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
    "streamed": {"phases": STREAMED},
    "streamed_lse": {"phases": STREAMED, "logit_scale": 0.7, "upstream": [1.0, 0.0, -0.5]},
    "all": {
        "bias": True, "weight": True, "probabilities": True, "label_smoothing": 0.2,
        "softcap": 12.0, "logit_scale": 0.9, "upstream": None, "phases": SLOPE,
    },
}  # fmt: skip


class Fenced:
    """A copy of a matrix on a device, with a margin of sevens to detect writes outside."""

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
    def __init__(self, dtype, columns, *, rows=33, bias=False, weight=False, probabilities=False,
                 upstream=(1.0,), phases=0, softcap=0.0, logit_scale=1.0, label_smoothing=0.0):
        # fmt: on
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

    def run(self, place, *calls):
        """Return state, argmax and logits after calls (begin, end, phases) on slices."""
        device = place.device
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
            place.ops._cross_entropy_rows(
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

    def compare(self, place, *calls):
        """Check a kernel against the CPU kernel."""
        (state, argmax, logits), right = self.run(place, *calls), self.run(CPU, *calls)
        tolerance = 1e-11 if self.arithmetic == torch.float64 else 1e-4
        kept = [0, 1, 5]  # the other rows are defined only if the call asks for them
        kept += [2] if self.phases & SLOPE else []
        kept += [3, 4] if self.spread else []
        torch.testing.assert_close(state[kept], right[0][kept], rtol=tolerance, atol=tolerance)
        if self.scalars[0] == 0:  # a soft-cap creates ties, which the two kernels round differently
            assert torch.equal(argmax, right[1])
        rounding = {torch.bfloat16: 1e-2, torch.float16: 2e-3}.get(logits.dtype, tolerance)
        # If the soft-cap saturates, its slope is the difference of two numbers near 1.
        atol = min(tolerance, 1e-5 if self.scalars[0] else 1e-6)
        torch.testing.assert_close(logits.double(), right[2].double(), rtol=rounding, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 7, 1000, 50257])
@pytest.mark.parametrize("options", OPTIONS)
def test_row_kernel_against_the_cpu(dtype, columns, options):
    Rows(dtype, columns, **OPTIONS[options]).compare(GPU, (0, columns, UPDATE | GRADIENT))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_row_kernel_on_slices_of_the_vocabulary(dtype, options):
    ends = [0, 1, 1001, 1001, 2048, 4096, 5003]
    slices = list(itertools.pairwise(ends))
    calls = [(begin, end, phase) for phase in (UPDATE, GRADIENT) for begin, end in slices]
    Rows(dtype, 5003, **OPTIONS[options]).compare(GPU, *calls)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_row_kernel_writes_exponentials(dtype, options):
    Rows(dtype, 3001, **OPTIONS[options]).compare(GPU, (0, 3001, UPDATE | EXPONENTIALS))


def with_equal_maxima(dtype, columns):
    """Return rows, some with several maxima, infinities or nan, and the first maximum of each."""
    p = Rows(dtype, columns)
    p.target.clamp_(0)
    p.logits.clamp_(max=1)
    p.logits[:, torch.randint(columns, (16,))] = 1
    p.logits[4, columns // 2 :] = NAN
    p.logits[5] = -INF
    p.logits[6, columns // 3 :] = INF
    p.logits[7, columns - 1] = INF
    right = p.logits.double().argmax(1)
    right[5] = -7  # no logit is above -inf
    return p, right


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [5, 1000, 50257])
def test_row_kernel_finds_the_first_maximum(dtype, columns):
    (p, right), middle = with_equal_maxima(dtype, columns), columns // 3
    for slices in ([(0, columns)], [(0, middle), (middle, columns)]):
        state, argmax, _ = p.run(GPU, *((begin, end, UPDATE) for begin, end in slices))
        assert torch.equal(argmax, right)
        assert state[1, 4].isnan() and state[1, 5] == 0 and state[0, 6] == float("inf")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [9, 700, 4099])
def test_row_kernel_distinguishes_nan_from_infinite_logits(dtype, columns):
    p = Rows(dtype, columns)
    p.target.clamp_(0)
    for row, values in enumerate(itertools.product([INF, NAN, -INF, 0.5], repeat=2)):
        p.logits[row, torch.randperm(columns)[:2]] = torch.tensor(values, dtype=dtype)
    z = p.logits.double()
    lse, argmax = z.logsumexp(1), z.argmax(1)
    assert lse[:16].isnan().any() and (lse == INF).any()
    ends = [0, *sorted(torch.randint(columns + 1, (3,)).tolist()), columns]
    for slices in ([(0, columns)], list(itertools.pairwise(ends))):
        state, largest, _ = p.run(GPU, *((begin, end, UPDATE) for begin, end in slices))
        shift, total = state[:2].double()
        ours = torch.where(shift == INF, INF, shift + total.log())
        torch.testing.assert_close(ours, lse, rtol=1e-5, atol=1e-5, equal_nan=True)
        assert torch.equal(largest, argmax)


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_kernel_gives_the_same_bits_twice(dtype):
    p = Rows(dtype, 4099, **OPTIONS["all"])
    once, again = (p.run(GPU, (0, 4099, UPDATE | GRADIENT)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


@pytest.mark.parametrize("wrong", [-1, -(2**62), 50, 2**40])
@pytest.mark.parametrize("options", ["plain", "class_weight"])
@pytest.mark.parametrize("last", [GRADIENT, EXPONENTIALS])
def test_targets_out_of_range_give_nan_and_write_nothing(wrong, options, last):
    p = Rows(torch.float32, 50, **OPTIONS[options])
    bad = [0, 5, 32]
    others = [i for i in range(33) if i not in bad]
    p.target[bad] = wrong
    state, argmax, logits = p.run(GPU, (0, 30, UPDATE), (30, 50, UPDATE), (0, 50, last))
    p.target[bad] = -100
    right = p.run(CPU, (0, 30, UPDATE), (30, 50, UPDATE), (0, 50, last))
    assert state[1, bad].isnan().all() and logits[bad].isnan().all()
    torch.testing.assert_close(state[:2, others], right[0][:2, others])
    torch.testing.assert_close(logits[others], right[2][others], rtol=1e-4, atol=1e-6)
    assert torch.equal(argmax, right[1])


def test_rows_on_a_side_stream_run_on_that_stream():
    p, side = Rows(torch.float32, 4099), torch.cuda.Stream()
    right = p.run(CPU, (0, 4099, UPDATE | GRADIENT))
    with torch.cuda.stream(side):
        torch.cuda._sleep(2_000_000)  # a launch on the default stream would run before the copies
        state, argmax, logits = p.run(GPU, (0, 4099, UPDATE | GRADIENT))
    torch.testing.assert_close(state[:2], right[0][:2], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits, right[2], rtol=1e-4, atol=1e-6)
    assert torch.equal(argmax, right[1])
