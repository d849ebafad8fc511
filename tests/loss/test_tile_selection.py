"""Sums of tiles and what is gathered of them, against float64 in plain torch."""

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
    """A tile within another matrix, and the other arguments but buckets."""
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
        total[0] = torch.inf  # a token that is ignored
        values = (values - total.unsqueeze(1)).exp() * slopes
        total = total.to(wide_of(dtype))
    values = values.abs() if absolute else values
    return tile, total, offset, (softcap, logit_scale, absolute, slope), values


def close(found, expected, dtype):
    rtol = 1e-12 if dtype == torch.float64 else 2e-5
    torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=rtol * 10)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weighted", [False, True])
def test_sums(shape, name, dtype, weighted):
    tile, lse, bias, how, values = inputs(shape, dtype, **OPTIONS[name])
    out = torch.full(shape[1:], torch.nan, dtype=wide_of(dtype))
    weight = torch.randn(shape[:1], dtype=wide_of(dtype)) if weighted else None
    OPS._tile_sums(out, tile, lse, weight, bias, None, *how)
    values = values if weight is None else values * weight.double().unsqueeze(1)
    close(out, values.sum(0), dtype)
    bucket = torch.randint(7, shape[1:]).to(torch.uint8)
    out = torch.full((shape[0], 7), torch.nan, dtype=wide_of(dtype))
    OPS._tile_sums(out, tile, lse, weight, bias, bucket, *how)
    expected = torch.zeros(shape[0], 7, dtype=torch.float64)
    close(out, expected.index_add_(1, bucket.long(), values), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_gathered(dtype):
    tile = torch.randn(40, 300).to(dtype)[:, :290]
    for height, width in [(0, 5), (1, 1), (40, 290), (13, 700)]:
        rows, columns = torch.randint(40, (height,)), torch.randint(290, (width,))
        out = torch.full((height, width), torch.nan, dtype=dtype)
        OPS._gather_tile(out, tile, rows, columns)
        assert out.equal(tile[rows][:, columns])


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
    with pytest.raises(RuntimeError, match="`columns` must be from 0 to 3"):
        OPS._gather_tile(out, tile, torch.arange(3), torch.tensor([0, 4]))
    assert out.eq(7).all()
