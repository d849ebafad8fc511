"""The streamed form of the row kernel agrees with the direct form, also at its edges."""

import itertools

import pytest
import torch

from storage_ops.loss.planning.schedule import EXPONENTIALS, GRADIENT, UPDATE

from .test_row_kernel import GPU, INF, NAN, STREAMED, Rows, with_equal_maxima

pytestmark = pytest.mark.cuda

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PLACE = GPU


def agree(p, *calls):
    """Check the streamed against the direct form, after the same calls (begin, end, phases)."""
    streamed = p.run(PLACE, *((begin, end, phases | STREAMED) for begin, end, phases in calls))
    state, argmax, logits = p.run(PLACE, *calls)
    kept = [0, 1, 5]  # the other rows are defined only if the call asks for them
    torch.testing.assert_close(streamed[0][kept], state[kept], rtol=1e-5, atol=1e-5, equal_nan=True)
    assert torch.equal(streamed[1], argmax)
    rounding = {torch.bfloat16: 1e-2, torch.float16: 2e-3}.get(logits.dtype, 1e-5)
    torch.testing.assert_close(
        streamed[2].double(), logits.double(), rtol=rounding, atol=1e-6, equal_nan=True
    )
    return streamed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "columns", [1, 2, 8, 9, 255, 1279, 1280, 1281, 2561, 4103, 5122, 8206, 10241, 20480]
)
def test_rows_of_any_length(dtype, columns):
    agree(Rows(dtype, columns), (0, columns, UPDATE | GRADIENT))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [32000, 128256, 256000, 300001])
def test_long_rows(dtype, columns):
    agree(Rows(dtype, columns, rows=300), (0, columns, UPDATE | GRADIENT))


@pytest.mark.parametrize("rows", [1, 2, 3, 9, 100])
@pytest.mark.parametrize("columns", [7, 1000, 5003])
def test_any_number_of_rows(rows, columns):
    for last in (GRADIENT, EXPONENTIALS):
        agree(Rows(torch.bfloat16, columns, rows=rows), (0, columns, UPDATE | last))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("first", [1, 8, 24])
def test_slices_of_the_vocabulary_aligned_or_not(dtype, first):
    ends = [0, first, 3000, 5003]
    p = Rows(dtype, 5003, logit_scale=0.5)
    agree(p, *((begin, end, UPDATE | EXPONENTIALS) for begin, end in itertools.pairwise(ends)))


@pytest.mark.parametrize("columns", [300, 5003])
@pytest.mark.parametrize("ignored", ["all", "first", "last", "most"])
def test_ignored_rows_and_targets_out_of_range(columns, ignored):
    p = Rows(torch.float32, columns)
    rows = {"all": slice(None), "first": slice(9), "last": slice(24, None), "most": slice(1, 32)}
    p.target[rows[ignored]] = -100
    p.target[[2, 17]] = torch.tensor([-5, columns])
    state, argmax, logits = agree(p, (0, columns, UPDATE | GRADIENT))
    assert state[1, [2, 17]].isnan().all() and logits[[2, 17]].isnan().all()
    assert (logits[p.target == -100] == 0).all() and (argmax[p.target == -100] == -1).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [5, 1000, 5003])
def test_the_first_maximum(dtype, columns):
    p, right = with_equal_maxima(dtype, columns)
    state, argmax, _ = agree(p, (0, columns, UPDATE | EXPONENTIALS))
    assert torch.equal(argmax, right)
    assert state[1, 4].isnan() and state[1, 5] == 0 and state[0, 6] == INF


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [9, 700, 5003])
def test_nan_and_infinite_logits(dtype, columns):
    p = Rows(dtype, columns)
    p.target.clamp_(0)
    for row, values in enumerate(itertools.product([INF, NAN, -INF, 0.5], repeat=2)):
        p.logits[row, torch.randperm(columns)[:2]] = torch.tensor(values, dtype=dtype)
    state, argmax, _ = agree(p, (0, columns, UPDATE | GRADIENT))
    assert torch.equal(argmax, p.logits.double().argmax(1))
    shift, total = state[:2].double()
    lse = torch.where(shift == INF, INF, shift + total.log())
    right = p.logits.double().logsumexp(1)
    torch.testing.assert_close(lse, right, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("columns", [1000, 5003])
def test_two_runs_give_the_same_bits(columns):
    p = Rows(torch.bfloat16, columns)
    once, again = (p.run(PLACE, (0, columns, UPDATE | GRADIENT | STREAMED)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-3, 300.0, 1e4, 1e37, 3.3e38])
def test_logits_of_any_size(dtype, size):
    """The largest logits occur as masks. There, 1 / ln 2 times a logit is infinite."""
    p = Rows(dtype, 1003, rows=8)
    p.target[:] = torch.arange(8)
    p.logits[:] = (p.logits / 4).clamp(-1, 1) * size
    p.logits[5:] = -size
    p.logits[6, 7] = size
    state, _, logits = agree(p, (0, 1003, UPDATE | GRADIENT))
    z = p.logits.double()
    lse = z.logsumexp(1)
    ours = state[0].double() + state[1].double().log()
    torch.testing.assert_close(ours, lse, rtol=1e-6, atol=1e-5)
    right = z.softmax(1)
    right[torch.arange(8), p.target] -= 1
    # A float of this size has an error of size * 2^-24, and so has the exponent.
    error = 1e-5 + (size * 2**-22 if size < 1e5 else 0)
    rounding = {torch.bfloat16: 1e-2}.get(dtype, error)
    torch.testing.assert_close(logits.double(), right, rtol=max(rounding, error), atol=error)
