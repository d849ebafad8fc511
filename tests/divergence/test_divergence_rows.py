"""The row kernel of divergences, native where possible, against its definition."""

import itertools

import pytest
import torch

from storage_ops.divergence import rows

DIVERGENCES = ["forward", "reverse", "jsd", "tvd"]
OPS = torch.ops.storage_ops
UPDATE, GRADIENT = 1, 2


def tiles(dtype, columns, count=7, bias=True):
    """Return the kernel's arguments up to upstream, in matrices with longer rows than needed."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    heads = [(torch.randn(count, columns + 9) * 3).to(dtype)[:, :columns] for _ in range(2)]
    offsets = [torch.randn(columns, dtype=wide) if bias else None for _ in range(2)]
    state = torch.full((3, count), torch.nan, dtype=wide)
    return *heads, *offsets, state, torch.full((count,), torch.nan, dtype=wide)


def part_ties(args, scale):
    """Change the teacher until no class is nearly as likely under both heads' scaled logits.

    Total variation has a kink there, and the sign in its gradient has a ramp.
    """
    student, teacher, *biases = args[:4]
    while True:
        logs = [(scale * (head.double() + (0 if bias is None else bias))).log_softmax(-1)
                for head, bias in zip((student, teacher), biases, strict=True)]  # fmt: skip
        tied = (logs[0] - logs[1]).abs() < 2e-4
        if not tied.any():
            return
        teacher[tied] += 1


# By the bytes of a logit: relative errors of statistics and gradients, absolute ones of statistics.
BOUNDS = {2: (2e-5, 5e-3, 2e-6), 4: (2e-5, 2e-5, 2e-6), 8: (1e-12, 1e-12, 1e-12)}


def compare_rows(kernel, args, divergence, bounds, device="cpu", by=1.0):
    """Compare a kernel on a device, with fences and poison, with plain torch in float64.

    by: factor of the upstream gradients, like that of a loss scaler.
    """
    dtype, columns, wide = args[0].dtype, args[0].shape[1], args[4].dtype
    double = [None if t is None else t.to(torch.float64, copy=True) for t in args]
    upstream = by * torch.randn(7, dtype=wide)
    options = (divergence, 0.3, 0.7)
    rows.divergence_rows(*double, upstream.double(), *options, UPDATE | GRADIENT, False)
    rtol, apart, atol = bounds[dtype.itemsize]
    offsets = [None if t is None else t.to(device) for t in args[2:4]]
    for phases, over in itertools.product(([UPDATE | GRADIENT], [UPDATE, GRADIENT]), (False, True)):
        fences = torch.full((2, 7, columns + 9), 9.0, dtype=dtype, device=device)
        fences[0, :, :columns], fences[1, :, :columns] = args[0], args[1]
        heads = list(fences[:, :, :columns])
        poisoned = [torch.full_like(t, torch.nan, device=device) for t in args[4:]]
        own = [*heads, *offsets, *poisoned]
        for phase in phases:
            kernel(*own, upstream.to(device), *options, phase, over)
        assert torch.equal(heads[not over].cpu(), args[not over])
        torch.testing.assert_close(own[4].cpu(), double[4].to(wide), rtol=rtol, atol=atol)
        torch.testing.assert_close(own[5].cpu(), double[5].to(wide), rtol=rtol, atol=atol)
        error = (own[over].cpu().double() - double[0]).norm() / double[0].norm().clamp_min(1e-30)
        if not (divergence == "tvd" and columns == 1) and double[0].norm() > 0:
            assert error < apart
        assert (fences[:, :, columns:] == 9).all()


@pytest.mark.parametrize("columns", [1, 5, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rows_against_plain_torch_in_float64(dtype, divergence, columns):
    args = tiles(dtype, columns, bias=columns % 2 > 0)
    if columns > 1:
        part_ties(args, 0.7)
    compare_rows(OPS._divergence_rows, args, divergence, BOUNDS)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_parts_of_rows_from_the_statistics_of_whole_rows(divergence):
    args = tiles(torch.float64, 3000)
    upstream = torch.randn(1, dtype=torch.float64)
    options = (divergence, 0.6, 1.0)
    parts = args[0].clone()
    OPS._divergence_rows(*args, upstream, *options, UPDATE | GRADIENT, False)
    for part in (slice(0, 1000), slice(1000, 3000)):
        heads = (parts[:, part], args[1][:, part], args[2][part], args[3][part])
        OPS._divergence_rows(*heads, *args[4:], upstream, *options, GRADIENT, False)
    torch.testing.assert_close(parts, args[0])


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_rows_of_infinities_and_nans(divergence):
    """Each element is as in plain torch, also in infinite rows. Rows without weight are 0."""
    results = []
    for kernel in (OPS._divergence_rows, rows.divergence_rows):
        torch.manual_seed(0)
        logits, teacher = torch.randn(9, 2000), torch.randn(9, 2000)
        logits[1, 7] = teacher[1, 7] = -torch.inf
        logits[2, 1500] = -torch.inf
        teacher[3, 1500] = -torch.inf
        logits[4, 3] = torch.nan
        teacher[5, 1999] = torch.nan
        logits[6, 3] = torch.inf
        logits[7] = -torch.inf
        logits[8, 0] = torch.nan  # in a row without weight
        state, loss, upstream = torch.zeros(3, 9), torch.zeros(9), torch.ones(9)
        upstream[8] = 0
        kernel(logits, teacher, None, None, state, loss, upstream, divergence, 0.5, 1.0, 3, False)
        results.append((loss, logits))
    (ours, dz), (right, wanted) = results
    torch.testing.assert_close(ours, right, equal_nan=True)
    assert ours[1].isfinite() and ours[4:8].isnan().all() and not dz[8].any()
    known = ~ours.isnan()
    torch.testing.assert_close(dz[known], wanted[known], equal_nan=True)
    assert dz[4].isnan().any() and dz[7].isnan().any()
    infinite = {"forward": 2, "reverse": 3}.get(divergence)
    assert infinite is None or ours[infinite].isinf()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_small_probability_does_not_make_an_infinite_row_finite(dtype):
    """The other head has probability 0. Large logits make large finite divergences."""
    far = torch.tensor([0.0, -69.0]), torch.tensor([0.0, -torch.inf])
    large = torch.tensor([0.0, -5e9]), torch.tensor([0.0, 0.0])
    for teacher, student in (far, large):
        for divergence, heads in (("forward", (student, teacher)), ("reverse", (teacher, student))):
            tiles = [t.to(dtype).view(1, 2).clone() for t in heads]
            q, p = (t.double().log_softmax(1) for t in (teacher.view(1, 2), student.view(1, 2)))
            loss = torch.zeros(1, dtype=dtype)
            OPS._divergence_rows(*tiles, None, None, torch.zeros(3, 1, dtype=dtype), loss, None,
                                 divergence, 0.5, 1.0, UPDATE, False)  # fmt: skip
            terms = torch.where(q.exp() == 0, 0, q.exp() * (q - p))
            torch.testing.assert_close(loss, terms.sum(1).to(dtype))


def test_the_vector_logarithm():
    """The logarithm in jsd, for probabilities of every size, in float32 against float64."""
    logits = torch.linspace(-86, 0, 4096).view(1, -1)
    teacher = logits.flip(1).contiguous()
    loss, double = torch.zeros(1), torch.zeros(1, dtype=torch.float64)
    for dtype, out in ((torch.float32, loss), (torch.float64, double)):
        heads = [t.to(dtype, copy=True) for t in (logits, teacher)]
        OPS._divergence_rows(*heads, None, None, torch.zeros(3, 1, dtype=dtype), out, None, "jsd",
                             0.37, 1.0, UPDATE, False)  # fmt: skip
    torch.testing.assert_close(loss.double(), double, rtol=2e-6, atol=0)
