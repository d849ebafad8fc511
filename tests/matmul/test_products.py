"""The package's matrix products with every dtype, stride and remainder, against float64."""

import os
import subprocess
import sys

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given

from storage_ops import matmul
from storage_ops.matmul import aten, packed, scratch

OP = torch.ops.storage_ops._product
NAN = float("nan")
pytestmark = pytest.mark.skipif(
    not packed.exists(torch.bfloat16, "cpu"), reason="this build or processor has no such products"
)


def operand(rows, columns, dtype, transposed, gap):
    """Return a random matrix of whole rows or whole columns, between NaN elements."""
    outer, inner = (columns, rows) if transposed else (rows, columns)
    wide = torch.full((outer, inner + gap), NAN, dtype=dtype)
    wide[:, :inner] = torch.randn(outer, inner)
    return wide[:, :inner].t() if transposed else wide[:, :inner]


def check(
    m, n, k, dtype, add, transposed=(False, False), gap=0, slots=None, threads=2, narrow=False,
    spent=False, direct=False,
):  # fmt: skip
    left = operand(m, k, dtype, transposed[0], gap)
    right = operand(k, n, dtype, transposed[1], gap)
    whole = torch.full((m + 2, n + gap), 7.0, dtype=dtype if narrow else torch.float32)
    out = whole[1:-1, :n]
    out.copy_(torch.randn(m, n) if add else torch.full((m, n), NAN))
    rows, least = scratch.piece(m, n, k, threads, narrow, direct)
    least += (m - rows) * n  # all rows and their sums are computed at once
    least = least if slots is None else slots
    memory = torch.full((least + 64,), NAN)  # the elements after the needed ones stay unchanged
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    want = left.double() @ right.double()
    size = left.double().abs() @ right.double().abs() + 1
    if add:
        want, size = want + out.double(), size + out.double().abs()
    try:
        if spent:
            torch.ops.storage_ops._transposed_product(out, left.t(), right, memory[:least], add)
        else:
            OP(out, left, right, memory[:least], add)
    finally:
        torch.set_num_threads(before)
    if narrow:  # the same sum, rounded once, by at most half of the last of 8 bits
        size = want.abs() * 2**-8 / 2e-6 + size
    assert ((out.double() - want).abs() <= 2e-6 * size).all()
    assert memory[least:].isnan().all()
    rest = whole.clone()
    rest[1:-1, :n] = 7
    assert torch.equal(rest, torch.full_like(rest, 7))


sizes = st.one_of(st.integers(1, 20), st.sampled_from([31, 32, 47, 48, 49, 96, 127, 128, 129, 300]))


@given(
    sizes, sizes, st.one_of(sizes, st.integers(500, 2100)),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.booleans(),
    st.tuples(st.booleans(), st.booleans()), st.integers(0, 3), st.integers(1, 5), st.booleans(),
)  # fmt: skip
@example(130, 5000, 2100, torch.bfloat16, True, (False, True), 1, 2, False)
@example(5000, 100, 300, torch.float32, False, (True, False), 1, 3, False)
def test_a_product_against_float64(m, n, k, dtype, add, transposed, gap, threads, direct):
    check(m, n, k, dtype, add, transposed, gap, threads=threads, direct=direct)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_column_with_a_stride(dtype, add):
    """The last slice of a vocabulary may have one class. Torch 2.10 wrote one element of it."""
    left, right = torch.randn(57, 72).to(dtype), torch.randn(72, 1).to(dtype)
    memory = torch.full((57, 64), 0.5 if add else torch.nan, dtype=dtype)
    aten.multiply(left, right, memory[:, :1], add)
    want = left.double() @ right.double() + 0.5 * add
    atol = 0.1 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(memory[:, :1].double(), want, rtol=atol / 10, atol=atol)
    assert not add or (memory[:, 1:] == 0.5).all()


needs_rounding = pytest.mark.skipif(
    not packed.rounds(torch.bfloat16), reason="this processor has no AVX-512 BF16"
)


@needs_rounding
@given(
    sizes, sizes, st.one_of(sizes, st.sampled_from([512, 513, 2100, 4096, 4097, 5000])),
    st.booleans(), st.tuples(st.booleans(), st.booleans()), st.integers(0, 3), st.integers(1, 5),
)  # fmt: skip
@example(130, 5000, 4100, True, (False, True), 1, 2)
@example(5000, 100, 512, True, (True, False), 1, 3)
def test_a_product_is_rounded_to_16_bits_once(m, n, k, add, transposed, gap, threads):
    check(m, n, k, torch.bfloat16, add, transposed, gap, threads=threads, narrow=True)


@given(
    sizes, st.one_of(sizes, st.just(1500)), st.one_of(sizes, st.sampled_from([512, 2100, 5000])),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.booleans(), st.booleans(),
    st.integers(0, 3), st.integers(1, 5), st.booleans(),
)  # fmt: skip
@example(64, 1500, 2100, torch.bfloat16, True, False, 0, 2, True)
@example(320, 1500, 1024, torch.bfloat16, False, True, 1, 2, True)
def test_a_left_operand_that_may_be_overwritten(m, n, k, dtype, add, whole, gap, threads, narrow):
    narrow = narrow and packed.rounds(dtype)
    check(m, n, k, dtype, add, (whole, False), gap, threads=threads, narrow=narrow, spent=True)


@needs_rounding
@pytest.mark.skipif(scratch.kind() == "amx_bf16", reason="registers of AMX take rows as they are")
def test_an_operand_that_is_read_often_is_interleaved_in_place():
    left, right = torch.randn(512, 64).bfloat16(), torch.randn(512, 1500).bfloat16()
    out, before = torch.empty(64, 1500, dtype=torch.bfloat16), left.clone()
    memory = torch.empty(2 * (8 + 48) * 256)
    torch.ops.storage_ops._transposed_product(out, left, right, memory, False)
    assert torch.equal(left.view(-1, 64, 2), before.view(-1, 2, 64).transpose(1, 2))


@needs_rounding
@pytest.mark.parametrize("columns", [40, 1300])
@pytest.mark.parametrize("rows", [30, 700])
def test_16_bit_gradients_are_computed_in_pieces(rows, columns):
    """Whole gradients and sums of two, from tiles with padded rows."""
    wide = torch.randn(rows, columns + 24).bfloat16()
    dz = wide[:, :columns]
    x, w = torch.randn(rows, 72).bfloat16(), torch.randn(columns, 72).bfloat16()
    ours = matmul.of(torch.bfloat16, "cpu", torch.get_num_threads())
    for gradient, left, right in [
        (ours.input_gradient, dz, w), (ours.weight_gradient, dz.t(), x)
    ]:  # fmt: skip
        out = torch.full((len(left), 72), NAN, dtype=torch.bfloat16)
        once = left.double() @ right.double()
        gradient(wide.clone()[:, :columns], right, out, False)
        assert ((out - once).abs() <= once.abs() * 2**-8 + 1e-4).all()
        before = out.clone()
        gradient(wide.clone()[:, :columns], right, out, True)
        twice = before + once
        assert ((out - twice).abs() <= twice.abs() * 2**-8 + 1e-4).all()


def test_the_least_scratch_that_is_accepted():
    """With one panel of one group of depth, every loop runs many times."""
    check(300, 200, 700, torch.float32, True, slots=2 * (8 + 48) * 128)
    check(300, 200, 700, torch.bfloat16, True, slots=2 * (8 + 48) * 256)


@needs_rounding
def test_the_least_scratch_for_rounded_products():
    """The scratch is for eight rows and one panel of the whole depth."""
    for transposed in (False, True):
        check(300, 200, 700, torch.bfloat16, True, (transposed, False), 1,
              slots=2 * (8 + 48) * 350, narrow=True)  # fmt: skip


def test_a_matrix_with_other_strides():
    left = torch.randn(20, 60).bfloat16()[:, ::3]
    right = torch.randn(40, 60).bfloat16()[::2, ::2]
    assert left.stride() == (60, 3) and right.stride() == (120, 2)
    out = torch.full((20, 30), NAN)
    OP(out, left, right, torch.empty(1 << 14), False)
    torch.testing.assert_close(out, left.float() @ right.float())


@pytest.mark.parametrize(
    "m, n, k", [(0, 3, 2), (3, 0, 2), (3, 2, 0), (0, 0, 0)], ids=["m", "n", "k", "all"]
)
def test_nothing_to_multiply(m, n, k):
    for add in (False, True):
        out, memory = torch.full((m, n), 5.0), torch.empty(scratch.packed_slots(m, n, k, 2))
        OP(out, torch.ones(m, k), torch.ones(k, n), memory, add)
        assert torch.equal(out, torch.full((m, n), 5.0 if add else 0.0))


def test_infinities_and_nan_stay_in_their_row_and_column():
    left, right = torch.ones(9, 5), torch.ones(5, 50)
    left[2, 3], right[1, 7] = float("inf"), NAN
    out = torch.zeros(9, 50)
    OP(out, left, right, torch.empty(1 << 13), False)
    torch.testing.assert_close(out, left @ right, equal_nan=True)


def test_errors_name_wrong_arguments():
    out, left, right, memory = (
        torch.zeros(4, 6), torch.zeros(4, 5), torch.zeros(5, 6), torch.zeros(1 << 14),
    )  # fmt: skip
    for bad, message in [
        ((out, left.T, right, memory), "left"),
        ((out, left, right.bfloat16(), memory), "of one dtype"),
        ((out.double(), left, right, memory), "out"),
        ((out.half(), left.half(), right.half(), memory), "of 16 bits needs bfloat16"),
        ((out.half(), left.bfloat16(), right.bfloat16(), memory), "float32 or that dtype"),
        ((out, left.double(), right.double(), memory), "float32, bfloat16 or float16"),
        ((out, left, right, memory[:9]), "`scratch` has .* elements beside the sums"),
        ((out, left, right, memory.double()), "scratch"),
        ((out.T.contiguous().T, left, right, memory), "contiguous rows"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            OP(*bad, False)


deep = st.integers(0, 200_000)


@given(deep, deep, deep, st.integers(1, 64), st.booleans(), st.booleans())
@example(0, 1, 16385, 1, True, False)
@example(1025, 0, 4097, 1, True, False)
@example(3, 1, 16385, 1, True, False)
@example(0, 553, 5, 38, True, False)
def test_python_and_native_code_compute_the_same_scratch(m, n, k, threads, narrow, direct):
    """Scratch is for whole rows unless their sums exceed a limit per thread or for all."""
    rows, slots = scratch.piece(m, n, k, threads, narrow, direct)
    in_pieces = narrow and k > scratch.one_pass()
    sums = rows * n if in_pieces else 0
    assert rows <= m
    assert (rows == min(m, 16) or 8 * sums <= m * k) if in_pieces else rows == m
    at_least = threads * 96 * k if narrow and not sums else threads * 96 * 256
    assert 0 <= slots - sums <= max(threads * (320 << 10), at_least)
    assert slots - sums <= max(m * k // 2 + threads, 1 << 16, at_least)


def test_errors_name_wrong_sizes():
    with pytest.raises(RuntimeError, match="threads are 1, 2, 3 and 0"):
        scratch.piece(1, 2, 3, 0, False, False)


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
def test_other_instruction_sets(capability):
    """Run the loops of other instruction sets, chosen once for a process."""
    if capability == "avx512" and torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2"):
        pytest.skip("the processor has no AVX-512")
    code = f"""
import sys, torch
from storage_ops.matmul import packed, scratch
if {capability!r} == "default":
    sys.exit(scratch.kind() != "" or packed.exists(torch.bfloat16, "cpu"))
assert scratch.kind() == {capability!r}
from tests.matmul.test_products import check
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for add in (False, True):
        for m, n, k in ((1, 1, 1), (37, 97, 300), (200, 50, 131), (9, 500, 1500)):
            for transposed in ((False, False), (True, False), (False, True), (True, True)):
                check(m, n, k, dtype, add, transposed, 1)
assert not packed.exists(torch.float64, "cpu")
"""
    env = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)


@pytest.mark.in_turn
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no way to hold to a CPU")
def test_threads_on_one_processor_do_not_wait_for_each_other():
    """This is as on a busy machine. A barrier after every block took 200 times as long."""
    code = """
import os, time, torch
from storage_ops import matmul
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before there are threads to inherit it
left, right = torch.randn(64, 30000).bfloat16(), torch.randn(30000, 512).bfloat16()
out = torch.empty(64, 512)
def seconds(threads):
    torch.set_num_threads(threads)
    begin = time.process_time()
    matmul.of(left.dtype, "cpu", threads).multiply(left, right, out, False)
    return time.process_time() - begin
for _ in range(5):
    times = [min(seconds(n) for _ in range(3)) for n in (1, 2)]
    if times[1] < 2.5 * times[0]:
        break
else:
    raise AssertionError(times)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
