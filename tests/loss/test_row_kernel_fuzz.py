"""The C++ row kernel on random shapes, options, vocabulary slices and values, against float64.

It calls only the op. `make sanitize` runs it too: every buffer ends where its allocation ends, so
that the address sanitizer detects accesses beyond it.
"""

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import storage_ops as so

pytestmark = pytest.mark.skipif(
    "libstorage_ops_cpu.so" not in so.info()["loaded"], reason="the native library is not loaded"
)

OPS = torch.ops.storage_ops
UPDATE, GRADIENT, EXPONENTIALS, SLOPE = 1, 2, 4, 8
SHIFT, SUM, SLOPE_SUM, DOT, MASS, TARGET_LOGIT = range(6)
IGNORED = -100
INF, NAN = math.inf, math.nan
# The number of roundings that an error may have in addition to those that `Expected` counts.
MARGIN = 8
FUZZ = settings(max_examples=200)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Use one thread, because small calls would spend most of their time on waiting threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Case:
    """A case that hypothesis draws. Values come from `seed`, so a failure prints in one line."""

    seed: int
    dtype: torch.dtype
    rows: int
    columns: int
    padding: int  # between rows
    offset: int  # of the first row
    size: float  # of the logits
    probabilities: bool
    bias: bool
    weight: bool
    smoothing: float
    softcap: float
    scale: float
    upstream: int  # rows
    broadcast: bool
    argmax: bool
    slope: bool
    cuts: tuple[float, ...]
    fused: bool  # update and gradient in one call
    extreme: bool = False

    @property
    def arithmetic(self):
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def spread(self):
        return self.probabilities or self.smoothing != 0

    @property
    def exact_logits(self):
        """Return True if the kernel uses the logits in memory without rounding."""
        return not self.bias and self.softcap == 0 and self.scale == 1


def cases(**fixed):
    drawn = {
        "seed": st.integers(0, 2**32),
        "dtype": st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
        "rows": st.sampled_from([0, 1, 2, 5]),
        "columns": st.sampled_from([0, 1, 2, 7, 64, 101, 1023, 1024, 1025, 2500]),
        "padding": st.sampled_from([0, 1, 5, 32]),
        "offset": st.sampled_from([0, 1, 3, 8]),
        "size": st.sampled_from([1.0, 8.0, 1e4]),
        "probabilities": st.booleans(),
        "bias": st.booleans(),
        "weight": st.booleans(),
        "smoothing": st.sampled_from([0.0, 0.1, 1.0]),
        "softcap": st.sampled_from([0.0, 0.5, 5.0, 30.0]),
        "scale": st.sampled_from([1.0, 0.25, -1.5]),
        "upstream": st.integers(1, 5),
        "broadcast": st.booleans(),
        "argmax": st.booleans(),
        "slope": st.booleans(),
        "cuts": st.lists(st.floats(0, 1), max_size=4).map(tuple),
        "fused": st.booleans(),
    }
    return st.builds(Case, **(drawn | {name: st.just(value) for name, value in fixed.items()}))


# Logits without options, for which the kernel has special loops on some processors.
BARE = {
    "probabilities": False, "bias": False, "smoothing": 0.0, "softcap": 0.0, "scale": 1.0,
    "upstream": 1, "argmax": False, "slope": False,
}  # fmt: skip
ALL_CASES = st.one_of(cases(), cases(extreme=True), cases(**BARE), cases(**BARE, extreme=True))


def bits(t):
    return t.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def plant_extremes(x, dtype, generator):
    """Overwrite parts of most rows with values for which careless arithmetic fails."""

    def choice(count):
        return int(torch.randint(count, (), generator=generator))

    huge = {torch.float16: 6e4, torch.float64: 1e150}.get(dtype, 1e37)
    values = [INF, -INF, NAN, 1e4, -1e4, 1e7, -1e7, huge, -huge]
    for row in x:
        for _ in range(choice(4)):
            places = slice(choice(len(row)), 1 + choice(len(row)), 1 + choice(3))
            row[places] = values[choice(len(values))]
    if dtype == torch.float16:
        x.copy_(torch.where(x.isfinite(), x.clamp(-6e4, 6e4), x))


class Problem:
    """The tensors of a case. Its methods call the kernel on them."""

    def __init__(self, case, values=None):
        self.case = case
        self.generator = torch.Generator().manual_seed(case.seed)
        rows, columns = case.rows, case.columns
        self.strides = (columns + case.padding, 1)
        size = case.offset + max(0, (rows - 1) * self.strides[0] + columns)
        # The row kernel may neither read nor write the padding between rows. A nan reveals most
        # reads. A number also reveals writes of values computed from the padding.
        poison = NAN if case.seed % 2 else 0.5
        self.buffer = torch.full((size,), poison, dtype=case.dtype)
        self.logits = self.rows_of(self.buffer)
        if values is None:
            values = self.normal(rows, columns) * case.size
            if case.extreme and columns:
                plant_extremes(values, case.dtype, self.generator)
        self.logits.copy_(values)
        self.before = self.buffer.clone()

        self.bias = self.normal(columns).to(case.dtype) if case.bias else None
        self.weight = self.uniform(columns).to(case.arithmetic) if case.weight else None
        kept = self.uniform(rows) < 0.8
        self.target = torch.randint(max(columns, 1), (rows,), generator=self.generator)
        self.target[~kept | (columns == 0)] = IGNORED
        self.kept = torch.ones(rows, dtype=torch.bool)
        if case.probabilities:
            self.target = self.normal(rows, columns).softmax(1).to(case.arithmetic)
        else:
            self.kept = self.target != IGNORED
        self.upstream = self.normal(1 if case.broadcast else rows, case.upstream)
        self.upstream = self.upstream.to(case.arithmetic).t()  # its strides are arbitrary
        self.state = torch.zeros(6, rows, dtype=case.arithmetic)
        self.argmax = torch.zeros(rows, dtype=torch.int64)

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, *shape):
        return torch.rand(*shape, generator=self.generator, dtype=torch.float64)

    def rows_of(self, buffer):
        shape = (self.case.rows, self.case.columns)
        return buffer.as_strided(shape, self.strides, self.case.offset)

    def call(self, begin, end, phases):
        case = self.case
        OPS._cross_entropy_rows(
            self.logits[:, begin:end],
            self.target[:, begin:end] if case.probabilities else self.target,
            None if self.bias is None else self.bias[begin:end],
            None if self.weight is None else self.weight[begin:end],
            self.upstream if phases & GRADIENT else None,
            self.state,
            self.argmax if case.argmax else None,
            begin,
            case.columns,
            IGNORED,
            case.softcap,
            case.scale,
            case.smoothing,
            phases,
        )

    def run(self, output):
        """Update the state slice by slice, then overwrite the logits slice by slice."""
        case = self.case
        # The fourth row of upstream belongs to the entropy, which needs the slope.
        update = UPDATE | (SLOPE if case.slope or case.upstream > 3 else 0)
        cuts = sorted(round(cut * case.columns) for cut in case.cuts)
        edges = [0, *cuts, case.columns]
        slices = list(itertools.pairwise(edges))
        if len(slices) == 1 and case.fused:
            self.call(0, case.columns, update | output)
        else:
            for begin, end in slices:
                self.call(begin, end, update)
            assert torch.equal(bits(self.buffer), bits(self.before))
            state = self.state.clone()
            for begin, end in slices:
                self.call(begin, end, output)
            assert torch.equal(bits(self.state), bits(state))
        # The padding must not change.
        padded = self.buffer.clone()
        self.rows_of(padded).copy_(self.rows_of(self.before))
        assert torch.equal(bits(padded), bits(self.before))
        return bool(update & SLOPE)


class Expected:
    """The results by autograd in float64, and bounds of the kernel's rounding errors."""

    def __init__(self, problem):
        case, self.case, self.problem = problem.case, problem.case, problem
        self.x = problem.rows_of(problem.before).double().requires_grad_()
        u = self.x if problem.bias is None else self.x + problem.bias.double()
        u = u * case.scale
        self.z = case.softcap * (u / case.softcap).tanh() if case.softcap else u
        # Subtract the maximum, because float64 would lose small differences of large logits.
        z = torch.where(self.z.isfinite(), self.z, -INF).detach()
        shift = z.amax(1).nan_to_num(neginf=0) if case.columns else z.sum(1)
        distance = self.z - shift.unsqueeze(1)
        self.logp = distance.log_softmax(1)
        self.p = self.logp.exp()
        self.lse = distance.logsumexp(1) + shift
        self.entropy = -(self.p * torch.where(self.logp == -INF, 0, self.logp)).sum(1)
        self.share = torch.zeros(case.rows, case.columns, dtype=torch.float64)
        if case.probabilities:
            self.share += problem.target.double() * (1 - case.smoothing)
        if case.columns:
            self.share += case.smoothing / case.columns
        if problem.weight is not None:
            self.share *= problem.weight.double()
        self.mass = self.share.sum(1)
        self.cross = -(self.share * self.logp).sum(1) if case.spread else torch.zeros(case.rows)
        self.hit = torch.zeros(case.rows, case.columns, dtype=torch.bool)
        self.nll = self.lse
        if not case.probabilities and case.columns:
            safe = problem.target.clamp_min(0).unsqueeze(1)
            self.hit.scatter_(1, safe, problem.kept.unsqueeze(1))
            self.nll = -self.logp.gather(1, safe).squeeze(1)
        # Rows for which torch's log_softmax is nan.
        self.broken = self.logp.isnan().any(1)

        self.eps = torch.finfo(case.arithmetic).eps
        finite = torch.where(self.z.isfinite(), self.z, 0).detach().abs()
        self.size = finite.amax(1) if case.columns else torch.zeros(case.rows)
        # The magnitude to which rounding errors of logits are relative, and the errors of sums.
        self.blur = torch.zeros(case.rows) if case.exact_logits else self.size
        self.terms = 1 + min(case.columns, 1024) / (2 * MARGIN)

    def value_error(self):
        return MARGIN * self.eps * (self.terms + self.size) * (1 + self.mass)

    def exp_error(self, exponent):
        """Return the error of exp(exponent), from the error of an exponent of at most 0."""
        size = torch.where(exponent == -INF, 0, exponent).abs()
        error = MARGIN * self.eps * (self.terms + size + self.blur.unsqueeze(1))
        # Results near the smallest normal number may be flushed to 0.
        tiny = 2 * torch.finfo(self.case.arithmetic).tiny
        return (exponent + error).clamp_max(0).exp() * error.clamp_max(1) + tiny

    def gradient(self):
        """Return the expected gradient by the matrix product, and its error."""
        case, problem = self.case, self.problem
        up = torch.zeros(5, case.rows, dtype=torch.float64)
        up[: case.upstream] = problem.upstream
        loss = up[0] * self.nll + up[1] * self.cross + up[2] * self.lse + up[3] * self.entropy
        loss = (loss + up[4] * self.lse.square() / 2)[problem.kept].sum()
        (gradient,) = torch.autograd.grad(loss, self.x)
        up, logp, p = up.abs().unsqueeze(2), self.logp.detach(), self.p.detach()
        row = up[0] + up[1] * self.mass.unsqueeze(1) + up[2]
        row = row + (up[4, :, 0] * self.lse.abs().nan_to_num(0, 0, 0)).unsqueeze(1)
        row = row + up[3] * (1 + self.entropy.unsqueeze(1) + torch.where(p == 0, 0, -logp))
        row = row + up[3] * self.blur.unsqueeze(1) * self.eps
        error = row * self.exp_error(logp)
        error = error + MARGIN * self.eps * (up[1] * self.share + up[0] * self.hit)
        return gradient, abs(case.scale) * error.detach()


def assert_close(got, want, error):
    """Check that values agree up to the error, with nan and inf at the same places."""
    got, want = got.double(), want.detach()
    assert torch.equal(got.isnan(), want.isnan())
    near = (got - want).abs() <= error
    assert bool((near | (got == want) | want.isnan()).all())


def check_state(problem, expected, slope):
    kept, state = problem.kept, problem.state.double()
    assert torch.equal(state[SHIFT].isnan(), expected.z.isnan().any(1) & kept)
    assert torch.equal(
        problem.state[:, ~kept].t(),
        torch.tensor([0, 1, 0, 0, 0, 0]).to(state.dtype).expand(int((~kept).sum()), 6),
    )
    error = expected.value_error()
    log_sum = state[SUM].log()
    # With an infinite logit, torch's logsumexp is infinite, and the kernel's sum is nan.
    lse = torch.where(state[SHIFT] == INF, INF, state[SHIFT] + log_sum)
    assert_close(lse[kept], expected.lse[kept], error[kept])
    if problem.case.spread and problem.case.columns:
        cross = state[MASS] * log_sum - state[DOT]
        cross_error = error * expected.terms  # the terms of the sum are as large as the logits
        assert_close(cross[kept], expected.cross[kept], cross_error[kept])
        assert_close(state[MASS][kept], expected.mass[kept], error[kept])
    if not problem.case.probabilities and problem.case.columns:
        nll = log_sum - (state[TARGET_LOGIT] - state[SHIFT])
        assert_close(nll[kept], expected.nll[kept], error[kept])
    if slope and problem.case.columns:
        entropy = log_sum - state[SLOPE_SUM] / state[SUM]
        entropy_error = error * (1 + expected.blur)
        assert_close(entropy[kept], expected.entropy[kept], entropy_error[kept])


def check_argmax(problem, expected):
    if problem.case.columns == 0 or not problem.case.argmax:
        return
    z = expected.z.detach()
    best = z.argmax(1)  # the first of equal logits, or the first nan
    values = z.gather(1, problem.argmax.clamp_min(0).unsqueeze(1)).squeeze(1)
    right = problem.argmax == best
    top = z.gather(1, best.unsqueeze(1)).squeeze(1)
    if not problem.case.exact_logits:  # with rounding, other logits may be equal or larger
        right |= top.isfinite() & (values >= top - expected.value_error())
    assert bool(torch.where(problem.kept, right, problem.argmax == -1).all())


def check_overwritten(problem, want, error):
    """Check that logits were overwritten by `want` in their dtype, and by 0 in ignored rows."""
    dtype, kept = problem.case.dtype, problem.kept
    assert bool((problem.logits[~kept] == 0).all())
    limits = torch.finfo(dtype)
    # Rounding errs by half a unit in the last place. Values that are too large become infinite.
    want = want[kept].clamp(-limits.max, limits.max)
    error = error[kept] + want.abs() * limits.eps / 2 + limits.smallest_normal * limits.eps
    assert_close(problem.logits.double()[kept].clamp(-limits.max, limits.max), want, error)


def check_state_and_gradient(problem):
    expected = Expected(problem)
    slope = problem.run(GRADIENT)
    check_state(problem, expected, slope)
    check_argmax(problem, expected)
    want, error = expected.gradient()
    want = want.masked_fill(expected.broken.unsqueeze(1), NAN)
    check_overwritten(problem, want, error)


@FUZZ
@given(ALL_CASES)
def test_state_and_gradient(case):
    check_state_and_gradient(Problem(case))


@pytest.mark.parametrize(
    "row",
    [
        [INF] * 1100 + [NAN, 0.0, NAN],  # in torch, nan is the maximum
        [-1e37] * 1100 + [1e37],  # the distance times the sum of a block is infinite
        [-INF] * 1100 + [-1e7, 0.0, 1.0],  # the exponent does not fit into an int
        [0.0] * 1100 + [100.0, 99.0],  # exp of the distance to the earlier maximum is infinite
        [0.0] * 1100 + [INF, 1.0],
        [0.0] * 1100 + [NAN, 1.0],
        [1e30] + [-1e30] * 1100 + [1.0],
    ],
)
@pytest.mark.parametrize("cuts", [(), (0.5, 0.999)])
@pytest.mark.parametrize("bare", [False, True])
def test_rows_for_which_earlier_versions_failed(row, cuts, bare):
    options = {
        "seed": 1, "dtype": torch.float32, "rows": 1, "columns": len(row), "padding": 0,
        "offset": 0, "size": 1.0, "weight": False, "broadcast": False, "cuts": cuts, "fused": False,
    }  # fmt: skip
    case = Case(
        **(options | BARE | ({} if bare else {"upstream": 4, "argmax": True, "slope": True}))
    )
    problem = Problem(case, torch.tensor([row]))
    assert bool(problem.kept.all())
    check_state_and_gradient(problem)


@FUZZ
@given(ALL_CASES)
def test_exponentials(case):
    problem = Problem(case)
    expected = Expected(problem)
    problem.run(EXPONENTIALS)
    (slope,) = torch.autograd.grad(expected.z.sum(), expected.x)
    distance = expected.z.detach() - problem.state[SHIFT].double().unsqueeze(1)
    distance = distance.clamp_max(0)  # rounding may make it larger
    want = torch.where(distance == -INF, 0, distance.exp() * slope)
    check_overwritten(problem, want, abs(case.scale) * expected.exp_error(distance))


@FUZZ
@given(case=cases(probabilities=False), bad=st.sampled_from([None, -1, 1 << 40, -(1 << 63)]),
       phases=st.integers(0, 15), data=st.data())  # fmt: skip
def test_a_target_out_of_range_changes_nothing(case, bad, phases, data):
    if case.rows == 0:
        return
    problem = Problem(case)
    row = data.draw(st.integers(0, case.rows - 1))
    problem.target[row] = case.columns if bad is None else bad
    problem.state.fill_(3)
    problem.argmax.fill_(3)
    with pytest.raises(RuntimeError, match="is out of range"):
        problem.call(0, data.draw(st.integers(0, case.columns)), phases)
    assert torch.equal(bits(problem.buffer), bits(problem.before))
    assert bool((problem.state == 3).all()) and bool((problem.argmax == 3).all())


@pytest.mark.parametrize("with_bias", [False, True], ids=["bare", "bias"])
def test_vector_exponential_is_within_2_ulp(with_bias):
    """With a shift of 0 in the state, the phase of exponentials computes exp(x)."""
    x = torch.cat([torch.linspace(-87, 0, 1 << 22), -torch.logspace(-40, 0, 1 << 16, base=2)])
    got, target = x.clone().unsqueeze(0), torch.zeros(1, dtype=torch.int64)
    state, bias = torch.zeros(6, 1), torch.zeros_like(x) if with_bias else None
    torch.ops.storage_ops._cross_entropy_rows(
        got, target, bias, None, None, state, None, 0, len(x), IGNORED, 0.0, 1.0, 0.0, EXPONENTIALS
    )
    exact = x.double().exp()
    ulp = torch.ldexp(torch.ones_like(exact), exact.frexp().exponent - 24)
    worst = float(((got[0].double() - exact).abs() / ulp).max())
    print("largest error of the vector exp in ulp:", worst)
    assert worst <= 2
