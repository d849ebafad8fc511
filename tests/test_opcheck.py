"""torch.library.opcheck of every op, on inputs of several kinds."""

import pytest
import torch
from torch.library import opcheck

from storage_ops.autochunk.runtime.program import Factor, Output, Program, Slice, encode

from .conftest import PATHS

OPS = torch.ops.storage_ops
TEXT = ("test_schema", "test_autograd_registration", "test_faketensor")  # no graph returns it
VALUES_GONE = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def rows(dtype=torch.float32, bias=True, count=5, dense=False, phases=3, smoothing=0.1):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    target = torch.tensor([0, 6, -100, 3, 2])[:count]
    target = torch.softmax(torch.randn(count, 7), 1).to(wide) if dense else target
    offset, weight = (torch.randn(7).to(dtype), torch.rand(7).to(wide)) if bias else (None, None)
    upstream, state = torch.rand(5, count).to(wide), torch.zeros(6, count, dtype=wide)
    if not phases & 1:
        state[1] = 2
    argmax = torch.zeros(count, dtype=torch.int64) if phases & 1 else None
    logits = torch.randn(count, 7).to(dtype)
    return (logits, target, offset, weight, upstream, state, argmax, 0, 7, -100, 5.0, 2.0,
            smoothing, phases)  # fmt: skip


def loss(
    reduction, needs=(True, True, True), bias=True, dtype=torch.float32, early=True, dense=False,
    wants=(False, False, False, False), token_weight=False, shift=False, into=None, rest=(),
):  # fmt: skip
    x, w = torch.randn(3, 4, 6).to(dtype), torch.randn(7, 6).to(dtype)
    b = torch.randn(7).to(dtype) if bias else None
    for t, need in zip((x, w, b), needs, strict=True):
        if t is not None:
            t.requires_grad_(need)
    target = torch.randint(7, (3, 4))
    target[0, 1] = -100
    target = torch.softmax(torch.randn(3, 4, 7), -1) if dense else target
    weights = (torch.rand(7), torch.rand(3, 4)) if token_weight else (None, None)
    return (x, w, target, b, *weights, into, reduction, -100, 0.1, 0.01, 3.0, 0.5, shift, None,
            None, None, "", "", early, list(needs), list(wants), *rest)  # fmt: skip


def picks(shift, ids=True, top_k=2, divisor=None, logits_dtype=None):
    """Return the arguments from valid_classes on."""
    ids = torch.randint(7, (3, 4 - shift, 5)) if ids else None
    return None, "replicate", False, divisor, logits_dtype, ids, top_k


def divergence(
    name, reduction="mean", early=True, needs=(True, True, True), dtype=torch.float32, topk=False,
    shift=False, backward=False, softcap=0.0, target=False,
):  # fmt: skip
    x, w, b = torch.randn(3, 4, 6).to(dtype), torch.randn(7, 6).to(dtype), torch.randn(7).to(dtype)
    for t, need in zip((x, w, b), needs, strict=True):
        t.requires_grad_(need and not backward)
    teacher, weight = (torch.randn(3, 4, 5).to(dtype), torch.randn(7, 5).to(dtype)), None
    values, ids = (None, None)
    if topk:
        teacher = (None, None)
        values, ids = torch.randn(3, 4, 7).log_softmax(-1).topk(2)
    if shift:
        weight = torch.rand(3, 4)
    call = (x, w, *teacher, b, None, weight, values, ids, name, 0.3, 2.0, softcap, 0.0, True,
            reduction, shift, None, None, None, "", early, list(needs))  # fmt: skip
    call += (torch.randint(7, (3, 4)), 0.7) if target else ()
    if not backward:
        return call
    grad = torch.randn(3, 4 - shift) if reduction == "none" else torch.randn(())
    return (grad, torch.rand(9 if target else 3, 12), *call)


def head_rows(name, phases=3, dtype=torch.float32, bias=True, count=5, over=False):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    offsets = (torch.randn(7, dtype=wide), torch.randn(7, dtype=wide)) if bias else (None, None)
    tiles = torch.randn(count, 7).to(dtype), torch.randn(count, 7).to(dtype)
    upstream = torch.rand(count, dtype=wide)
    return (*tiles, *offsets, torch.rand(3, count, dtype=wide), torch.zeros(count, dtype=wide),
            upstream, name, 0.3, 0.5, phases, over)  # fmt: skip


def product(add, dtype=torch.float32, transposed=False):
    left, right = torch.randn(20, 9).to(dtype), torch.randn(9, 50).to(dtype)
    left = left.t().contiguous() if transposed else left
    return torch.randn(20, 50), left, right, torch.zeros(1 << 13), add


def backward(reduction, into=None, dense=False, picked=False):
    x, w, target, b, *rest = loss(reduction, (False, False, False), shift=1, dense=dense)
    rest[-2], rest[2] = [True, True, b is not None], into
    rest[-3] = False
    rest += picks(1, top_k=0) if picked else ()
    state = torch.rand(6, 12) + 1
    per_token = torch.randn(3, 3)
    grad = torch.randn(()) if reduction == "mean" else per_token
    totals = (
        (x, w, target, b, *rest) if into is not None else (x, w, target, b, *rest[:2], *rest[3:])
    )
    of_picks = torch.randn(3, 3, 5) if picked else None
    return (grad, None, per_token, per_token * 2, of_picks, state, *totals)


def kept(reduction, into=None):
    """Return arguments with an empty tile, because nothing may read it after the op frees it."""
    parked = () if into is not None else (None,)
    return (torch.empty(0, 7), *parked, *backward(reduction, into))


def span(dtype=torch.float32):
    """Return products of x (8, 3) by chunks: exp(x) @ w (3, 5) and the sum of exp(x).T @ x."""
    nodes = [["input"], ["input"], ["aten.exp.default", [{"node": 0}], {"dict": {}}],
             ["output", [[{"node": 2}]]]]  # fmt: skip
    name = str(dtype).removeprefix("torch.")
    value = Factor("value", 0, False)
    outputs = (
        Output(Slice(0, 1, 1), 2, name, None, (value, Factor("input", 1, False))),
        Output(None, 2, name, None, (Factor("value", 0, True), Factor("input", 0, False)), 1),
    )
    program = Program((Slice(0, 1, 1), None), outputs, 3, 0, 0, 0, False, nodes)
    tensors = [torch.randn(8, 3).to(dtype), torch.randn(3, 5).to(dtype)]
    return tensors, [], [8, 5, 3, 3], [8], encode([program])


# op name -> argument tuples. test_house.py asserts that every schema has an entry.
CASES = {
    "discard_storage": [(torch.empty(0),), (torch.empty(3, 0)[:1], None)],
    "share_storage": [
        (torch.randn(4), torch.randn(4)),
        (torch.randn(6)[2:4], torch.randn(9)),
        (torch.randn(4, requires_grad=True), torch.randn(4)),
        (torch.empty(0), torch.empty(0)),
        (torch.zeros((), dtype=torch.bfloat16), torch.ones((), dtype=torch.bfloat16)),
    ],
    "_is_discarded": [(torch.randn(4),), (torch.empty(0),)],
    "_check_storage": [(torch.randn(4), None), (torch.randn(4), torch.randn(4))],
    "_record_stream": [(torch.randn(4), 0, 0, 1)],
    "_alias_bytes": [(torch.arange(8, dtype=torch.uint8),)],
    "_cross_entropy_rows": [
        rows(),
        rows(torch.float64, dense=True),
        rows(torch.bfloat16, bias=False, smoothing=0.0),
        rows(phases=2),
        rows(phases=5 | 8, smoothing=0.0),
        (torch.randn(5, 16)[:, :7], *rows()[1:]),
        rows(count=0),
    ],
    "_tile_sums": [
        (torch.empty(7), torch.randn(5, 7), None, None, None, None, 0.0, 1.0),
        (torch.empty(7), torch.randn(5, 7), None, None, None, None, 0.0, 1.0, True),
        (
            torch.empty(5, 3),
            torch.randn(5, 7),
            torch.rand(5) + 3,
            torch.randn(5),
            torch.randn(7),
            (torch.arange(7) % 3).to(torch.uint8),
            4.0,
            0.5,
        ),
    ],
    "_gather_gradient": [
        (
            torch.empty(8),
            torch.empty(7),
            torch.randn(5, 7),
            torch.tensor([4, 0, 1]),
            torch.tensor([0, -1, 2, -1, -1, -1, 5]),
            torch.tensor([2, 1, 3, 0, 0, 0, 3]),
            torch.rand(5) + 3,
            torch.randn(5),
            torch.tensor([6, 0, -1, 2, 9]),
            torch.rand(5),
            torch.randn(7),
            4.0,
            0.5,
        ),
    ],
    "_put_rows": [
        (torch.randn(5, 7).bfloat16(), torch.tensor([4, 0]), torch.randn(2, 7), add)
        for add in (False, True)
    ],
    "_product": [product(False), product(True), product(True, torch.bfloat16)],
    "_product_scratch": [(100, 200, 5000, 2, rounded, False) for rounded in (False, True)],
    "_product_kind": [()],
    "_check_ranks": [(torch.tensor([[5, *range(8)]] * 2), [5, 5], "", [5, 0, 1, 2], False)],
    "_connect": [(torch.randn(3), [torch.randn(2, 2), torch.randn(())])],
    "_scale": [
        (torch.randn(3, 4).to(dtype), torch.tensor(by, dtype=wide))
        for dtype, wide in [
            (torch.float64, torch.float64),
            (torch.float32, torch.float32),
            (torch.bfloat16, torch.float32),
        ]
        for by in (1.0, 0.3)
    ],
    "_transposed_product": [product(add, transposed=True) for add in (False, True)],
    "linear_cross_entropy": [
        loss("mean"),
        loss("sum", (True, False, False), bias=False, token_weight=True),
        loss("none", early=False, shift=True),
        loss("none", (False, True, False), early=False, dense=True, token_weight=True),
        loss("mean", (False, False, False), wants=(True, True, True, True)),
        loss("mean", early=False, wants=(True, True, True, True), shift=True),
        loss("mean", dtype=torch.bfloat16),
        loss("sum", dtype=torch.float16, early=False),
        loss("sum", rest=picks(0, False, 0, torch.tensor(3.0))),
        loss("mean", dtype=torch.bfloat16, rest=picks(0, False, 0, None, torch.float32)),
        loss("mean", early=False, rest=picks(0)),
        loss("none", early=False, shift=2, rest=picks(2, top_k=0)),
        loss("sum", (False, False, False), rest=picks(0, False)),
    ],
    "linear_cross_entropy_backward": [
        backward("mean"),
        backward("none"),
        backward("mean", picked=True),
    ],
    "linear_cross_entropy_backward_kept": [kept("mean"), kept("none")],
    "linear_cross_entropy_backward_target": [backward("mean", dense=True)],
    "linear_cross_entropy_backward_into": [backward("mean", torch.zeros(7, 6))],
    "linear_cross_entropy_backward_into_kept": [kept("mean", torch.zeros(7, 6))],
    "_divergence_rows": [
        head_rows("forward"),
        head_rows("reverse", 1, torch.float64),
        head_rows("jsd", 2, torch.bfloat16, bias=False),
        head_rows("tvd", count=0),
        head_rows("jsd", over=True),
    ],
    "linear_kl_div": [
        divergence("forward"),
        divergence("reverse", "sum", needs=(True, False, False), shift=True),
        divergence("jsd", "none", early=False, topk=True),
        divergence("tvd", needs=(False, False, False)),
        divergence("jsd", dtype=torch.bfloat16),
        divergence("jsd", softcap=3.0),
        divergence("forward", target=True),
    ],
    "linear_kl_div_backward": [
        divergence("jsd", early=False, backward=True),
        divergence("forward", "none", early=False, shift=True, backward=True),
        divergence("reverse", "none", early=False, topk=True, backward=True),
        divergence("jsd", "none", early=False, target=True, backward=True),
    ],
    "_chunked_span": [span(), span(torch.float64)],
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
    tolerance = {"atol": 1e-2, "rtol": 1e-2} if {torch.bfloat16, torch.float16} & {
        a.dtype for a in args if isinstance(a, torch.Tensor)
    } else {}  # fmt: skip
    utils = {"test_utils": TEXT} if name == "_product_kind" else {}
    opcheck(getattr(OPS, name).default, args, **tolerance, **utils)


def test_discard_of_real_bytes():
    """Run all of opcheck except the comparison of values, which were freed."""
    opcheck(OPS.discard_storage.default, (torch.randn(4),), test_utils=VALUES_GONE)
