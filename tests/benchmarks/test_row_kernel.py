"""The benchmark of the row kernel, and the model of its streamed form."""

from types import SimpleNamespace

import pytest

from benchmarks import _row_model, row_kernel
from benchmarks._row_model import ASSUMPTIONS, CLUSTERS, Assumption, blocks_of, predicted


@pytest.mark.parametrize(
    "row_bytes, blocks",
    [(2, 1), (64_000, 1), (81_920, 1), (81_922, 2), (256_512, 4), (512_000, 8), (655_360, 8),
     (655_362, 0)],
)  # fmt: skip
def test_a_row_has_the_blocks_of_the_kernel(row_bytes, blocks):
    assert blocks_of(row_bytes) == blocks


@pytest.mark.parametrize("columns", [32000, 128256])
def test_without_waits_memory_is_the_limit(monkeypatch, columns):
    monkeypatch.setattr(_row_model, "CLOCK", 1e12)
    rows = CLUSTERS[blocks_of(2 * columns)] * 16
    time = predicted(rows, columns, 2, Assumption(1.0, 0.0, 0.0))
    assert time == pytest.approx(1, abs=0.03)


def test_a_slow_clock_is_the_limit(monkeypatch):
    monkeypatch.setattr(_row_model, "CLOCK", 1e8)
    rows, columns, issue = 264 * 4, 32000, 0.5
    instructions = sum(_row_model.INSTRUCTIONS[2]) * columns * 2 / _row_model.PIECE
    seconds = 2 * 4 * instructions * _row_model.WARPS / 4 / 1e8 / issue
    copy = 4 * columns * rows / _row_model.COPY_RATE / _row_model.MULTIPROCESSORS
    time = predicted(rows, columns, 2, Assumption(issue, 0.0, 0.0))
    assert time == pytest.approx(seconds / copy, rel=0.03)


def test_longer_waits_take_longer():
    for columns in (32000, 128256, 256000):
        times = [predicted(1024, columns, 2, assumption) for assumption in ASSUMPTIONS.values()]
        assert times == sorted(times) and times[0] < times[-1]


def test_the_faster_form_of_a_shape_is_kept():
    shape = "4096 x 32000 bfloat16"
    rows = [
        {"shape": shape, "case": "copy", "time / copy": 1.0},
        {"shape": shape, "case": "direct form", "time / copy": 1.4},
        {"shape": shape, "case": "streamed form", "time / copy": 1.1},
    ]
    row_kernel.judged(rows, SimpleNamespace(shape=(4096, 32000), itemsize=2))
    expected = round(predicted(4096, 32000, 2, ASSUMPTIONS["expected"]), 2)
    assert rows[1].items() >= {"goal": 1.25}.items() and "keep" not in rows[1]
    assert rows[2].items() >= {"goal": 1.25, "predicted": expected, "keep": "yes"}.items()
    assert "keep" not in rows[0]
