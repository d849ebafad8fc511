"""torch.library.opcheck of every op, on inputs of several kinds."""

import pytest
import torch
from torch.library import opcheck

from ..conftest import PATHS

OPS = torch.ops.storage_ops
VALUES_GONE = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def rows(dtype=torch.float32, index=torch.int64, bias=True, count=5):
    arithmetic = torch.float64 if dtype == torch.float64 else torch.float32
    target = torch.tensor([0, 6, -100, 3, 2], dtype=index)[:count]
    offset = torch.randn(7).to(dtype) if bias else None
    scale, nll = torch.rand(()).to(arithmetic), torch.zeros(count, dtype=arithmetic)
    return (torch.randn(count, 7).to(dtype), target, offset, scale, nll, -100, True)


def loss(reduction, mask=(True, True, True), bias=True, dtype=torch.float32):
    x, w = torch.randn(9, 6).to(dtype), torch.randn(7, 6).to(dtype)
    b = torch.randn(7).to(dtype) if bias else None
    for t, needs in zip((x, w, b), mask, strict=True):
        if t is not None:
            t.requires_grad_(needs)
    return (x, w, torch.randint(7, (9,)), b, reduction, -100, None, list(mask))


def backward(reduction):
    x, w, target, b, *options = loss(reduction, (False, False, False))
    options[-1] = [True, True, True]
    grad = torch.randn(9 if reduction == "none" else ())
    return (grad, x, w, target, b, *options)


# op name -> argument tuples. The house test asserts that every schema has an entry.
CASES = {
    "discard_storage": [(torch.empty(0),), (torch.empty(3, 0)[:1],)],
    "share_storage": [
        (torch.randn(4), torch.randn(4)),
        (torch.randn(6)[2:4], torch.randn(9)),
        (torch.randn(4, requires_grad=True), torch.randn(4)),
        (torch.empty(0), torch.empty(0)),
        (torch.zeros((), dtype=torch.bfloat16), torch.ones((), dtype=torch.bfloat16)),
    ],
    "_is_discarded": [(torch.randn(4),), (torch.empty(0),)],
    "_arm_guard": [(torch.randn(4), "message")],
    "_record_stream": [(torch.randn(4), 0, 0, 1)],
    "_alias_bytes": [(torch.arange(8, dtype=torch.uint8),)],
    "_cross_entropy_rows": [
        rows(),
        rows(torch.float64, torch.int32),
        rows(torch.bfloat16, bias=False),
        (torch.randn(5, 16)[:, :7], *rows()[1:]),
        rows(count=0),
    ],
    "linear_cross_entropy": [
        loss("mean"),
        loss("sum", (True, False, False), bias=False),
        loss("none"),
        loss("none", (False, True, False)),
        loss("mean", (False, False, False)),
        loss("mean", dtype=torch.bfloat16),
    ],
    "linear_cross_entropy_backward": [backward("mean"), backward("none")],
}


@pytest.mark.parametrize(
    "name, args",
    [
        (name, args)
        for name, cases in CASES.items()
        for args in cases
        if name != "_alias_bytes" or "alias" in PATHS
    ],
)
def test_opcheck(name, args):
    tolerance = {"atol": 1e-2, "rtol": 1e-2} if torch.bfloat16 in {
        a.dtype for a in args if isinstance(a, torch.Tensor)
    } else {}  # fmt: skip
    opcheck(getattr(OPS, name).default, args, **tolerance)


def test_discard_of_real_bytes():
    """All of opcheck but the comparison of values, which are gone."""
    opcheck(OPS.discard_storage.default, (torch.randn(4),), test_utils=VALUES_GONE)
