"""Sums of tiles and gathered gradients agree with plain torch in float64."""

import pytest
import torch

OPS = torch.ops.storage_ops
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
OPTIONS = {
    "numbers": {},
    "absolute": {"absolute": True},
    "probabilities": {"lse": True},
    "scaled": {"lse": True, "logit_scale": 0.7},
    "bias": {"lse": True, "bias": True},
    "capped": {"lse": True, "bias": True, "softcap": 5.0, "logit_scale": 1.3},
    "slopes": {"lse": True, "bias": True, "softcap": 5.0, "logit_scale": 1.3, "slope": True},
    "slopes of nothing": {"lse": True, "slope": True},
}
SHAPES = [(1, 1), (3, 7), (5, 1024), (33, 2500), (2, 5000)]


def wide_of(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def inputs(
    shape, dtype, lse=False, bias=False, softcap=0.0, logit_scale=1.0, absolute=False, slope=False
):
    """Return a tile inside of a larger matrix, and all other arguments except the buckets."""
    rows, columns = shape
    tile = (torch.randn(rows, columns + 13) * 2).to(dtype)[:, :columns]
    offset = torch.randn(columns, dtype=wide_of(dtype)) if bias else None
    values = tile.double() if offset is None else tile.double() + offset.double()
    values = values * logit_scale
    values = softcap * (values / softcap).tanh() if softcap else values
    slopes = 1 - (values / softcap).square() if slope and softcap else 1
    total = None
    if lse:
        total = values.logsumexp(1)
        total[0] = torch.inf  # an ignored token
        values = (values - total.unsqueeze(1)).exp() * slopes
        total = total.to(wide_of(dtype))
    values = values.abs() if absolute else values
    return tile, total, offset, (softcap, logit_scale, absolute, slope), values


def close(got, expected, dtype):
    rtol = 1e-12 if dtype == torch.float64 else 2e-5
    torch.testing.assert_close(got.double(), expected, rtol=rtol, atol=rtol * 10)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weighted", [False, True])
def test_sums(shape, name, dtype, weighted):
    tile, lse, bias, options, values = inputs(shape, dtype, **OPTIONS[name])
    out = torch.full(shape[1:], torch.nan, dtype=wide_of(dtype))
    weight = torch.randn(shape[:1], dtype=wide_of(dtype)) if weighted else None
    OPS._tile_sums(out, tile, lse, weight, bias, None, *options)
    values = values if weight is None else values * weight.double().unsqueeze(1)
    close(out, values.sum(0), dtype)
    bucket = torch.randint(7, shape[1:]).to(torch.uint8)
    out = torch.full((shape[0], 7), torch.nan, dtype=wide_of(dtype))
    OPS._tile_sums(out, tile, lse, weight, bias, bucket, *options)
    expected = torch.zeros(shape[0], 7, dtype=torch.float64)
    close(out, expected.index_add_(1, bucket.long(), values), dtype)


def places(height, width, apart):
    """Return a permutation of the tokens, start and count of each class, and the output size."""
    tokens = torch.randperm(height)
    count = torch.randint(height + 1, (width,))
    start = torch.randperm(width) * (height + apart)
    start[torch.rand(width) < 0.3] = -1
    return tokens, start, count, width * (height + apart)


def gathered(values, tokens, start, count, size):
    """Return the op's expected output, with nan elsewhere, and the sums of the classes."""
    out, sums = torch.full((size,), torch.nan).double(), torch.zeros(len(start)).double()
    for c, (begin, n) in enumerate(zip(start.tolist(), count.tolist(), strict=True)):
        if begin >= 0:
            out[begin : begin + n] = values[tokens[:n], c]
            sums[c] = values[tokens[:n], c].abs().sum()
    return out, sums


def narrower(dtype):
    return [dtype, torch.bfloat16, torch.float16] if dtype == torch.float32 else [dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (40, 290), (300, 67), (700, 3)])
def test_numbers_that_are_gathered(shape, dtype):
    tile = torch.randn(shape[0], shape[1] + 13).to(dtype)[:, : shape[1]]
    for result_dtype in narrower(dtype):
        *where, size = places(*shape, apart=2)
        out = torch.full((size,), torch.nan, dtype=result_dtype)
        sums = torch.full(shape[1:], torch.nan, dtype=wide_of(dtype))
        OPS._gather_gradient(out, sums, tile, *where, *(None,) * 5, 0.0, 1.0)
        expected, total = gathered(tile.double(), *where, size)
        torch.testing.assert_close(out, expected.to(result_dtype), rtol=0, atol=0, equal_nan=True)
        close(sums, total, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("bias", [None, "wide", "own"])
def test_gradients_that_are_gathered(bias, softcap, dtype):
    wide, height, width, scale = wide_of(dtype), 300, 101, 1.3
    tile = (torch.randn(height, width + 13) * 2).to(dtype)[:, :width]
    tile[5, 3], tile[6, 4] = torch.nan, -torch.inf
    offset = None
    if bias is not None:
        offset = torch.randn(width).to(wide if bias == "wide" else dtype)
    z = (tile.double() + (0 if offset is None else offset.double())) * scale
    z = softcap * (z / softcap).tanh() if softcap else z
    lse, factor, hit = z.logsumexp(1), torch.randn(height).double(), torch.rand(height).double()
    lse[[5, 7]] = torch.inf  # ignored tokens, one of them with a nan
    target = torch.randint(-3, width + 3, (height,))  # some targets are in other tiles
    slope = (1 - (z / softcap).square()) if softcap else 1
    values = (z - lse.unsqueeze(1)).exp() * factor.unsqueeze(1) * slope
    hits = torch.where(torch.arange(width) == target.unsqueeze(1), hit.unsqueeze(1), 0) * slope
    values[[5, 7]] = 0
    hits[[5, 7]] = 0
    numbers = (lse.to(wide), factor.to(wide), target, hit.to(wide), offset, softcap, scale)
    for result_dtype in narrower(dtype):
        *where, size = places(height, width, apart=3)
        out = torch.full((size,), torch.nan, dtype=result_dtype)
        sums = torch.full((width,), torch.nan, dtype=wide)
        OPS._gather_gradient(out, sums, tile, *where, *numbers)
        expected = gathered(values - hits, *where, size)[0]
        rtol = {torch.float64: 1e-12, torch.float32: 2e-5}.get(
            result_dtype, torch.finfo(result_dtype).eps
        )
        torch.testing.assert_close(
            out.double(), expected, rtol=rtol, atol=rtol * 0.1, equal_nan=True
        )
        close(sums, gathered(values, *where, size)[1], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("width", [1, 8, 1030])
def test_put_rows(width, add, dtype):
    for part_dtype in {dtype, wide_of(dtype)}:
        out = torch.randn(20, width + 3).to(dtype)[:, 1 : width + 1]
        part = torch.randn(7, width).to(part_dtype)
        rows = torch.randperm(20)[:7]
        expected = out.double()
        expected[rows] = part.double() + (expected[rows] if add else 0)
        OPS._put_rows(out, rows, part, add)
        assert out.equal(expected.to(wide_of(dtype)).to(dtype))


def test_nan_stays_in_its_row_and_column():
    tile = torch.randn(4, 50)
    tile[2, 7] = torch.nan
    bucket = (torch.arange(50) // 10).to(torch.uint8)
    columns, buckets = torch.empty(50), torch.empty(4, 5)
    OPS._tile_sums(columns, tile, None, None, None, None, 0.0, 1.0)
    OPS._tile_sums(buckets, tile, None, None, None, bucket, 0.0, 1.0)
    assert columns.isnan().nonzero().tolist() == [[7]]
    assert buckets.isnan().nonzero().tolist() == [[2, 0]]


def test_out_of_range_is_refused():
    tile, out = torch.randn(3, 4), torch.full((3, 2), 7.0)
    with pytest.raises(RuntimeError, match="`bucket` must be from 0 to 1"):
        OPS._tile_sums(
            out, tile, None, None, None, torch.tensor([0, 1, 2, 0], dtype=torch.uint8), 0.0, 1.0
        )
    flat = torch.full((8,), 7.0)
    for tokens, start, count, text in [
        ([0, 3], [0, 2, 4, 6], [2] * 4, "`tokens` must be from 0 to 2"),
        (
            [0, 1],
            [0, 2, 4, 7],
            [2] * 4,
            "`start` 7 and `count` 2 of class 3 must be within 8",
        ),
        ([0, 1], [0, 2, 4, 5], [2, 2, 3, 2], "`count` 3 of class 2 must be within .* 2 tokens"),
    ]:
        with pytest.raises(RuntimeError, match=text):
            places = map(torch.tensor, (tokens, start, count))
            OPS._gather_gradient(flat, None, tile, *places, *(None,) * 5, 0.0, 1.0)
    assert flat.eq(7).all()
    with pytest.raises(RuntimeError, match="`rows` must be from 0 to 2"):
        OPS._put_rows(out, torch.tensor([3]), torch.zeros(1, 2), True)
    assert out.eq(7).all()
