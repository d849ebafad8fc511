"""What to look at first after a run on a GPU."""

import pytest

from benchmarks._gpu_ranking import MOST, ranked

STAGES = [
    {"stage": "build", "outcome": "ok", "seconds": 9},
    {"stage": "tests-core", "outcome": "FAILED, exit status 1", "seconds": 9},
    {"stage": "memcheck", "outcome": "FAILED, exit status 99", "seconds": 9},
    {"stage": "racecheck", "outcome": "not run: what it needs is not here", "seconds": 0},
    {"stage": "R1", "outcome": "stopped after 100 s", "seconds": 100},
]
LOGS = {
    "memcheck": """========= COMPUTE-SANITIZER
tests/cuda/test_row_kernel.py::test_row_kernel_against_the_cpu[plain] PASSED
========= Uninitialized __global__ memory read of size 4 bytes
========= Invalid __global__ write of size 4 bytes
=========     at cross_entropy_rows(float*)+0x70
=========     by thread (0,0,0) in block (1,0,0)
=========
========= Invalid __global__ write of size 4 bytes
========= ERROR SUMMARY: 3 errors
""",
    "tests-core": "..F.\nFAILED tests/a.py::test_b[x - y] - AssertionError: no\nTraceback\n",
}


def point(shape, case, time, column="time / floor", **more):
    return {"shape": shape, "case": case, column: time, "peak (MiB)": 9.0, "ms": 10 * time, **more}


def loss(*rows, **more):
    return {"stem": "linear_cross_entropy", "hardware": "nvidia-h200", "rows": rows, **more}


GOOD = [point("R1 bfloat16", "storage_ops, 1/4", 1.1), point("R1 bfloat16", "eager", 1.2)]


def kinds(lines):
    assert [int(line.split(".")[0]) for line in lines] == list(range(1, len(lines) + 1))
    return list(dict.fromkeys(line.split(". ", 1)[1].split(": ")[0] for line in lines))


def test_faults_come_before_goals_and_goals_before_what_is_slow():
    results = [
        {"stem": "output_discard", "rows": [
            point("a", "discard", 1.3, "time / plain"), point("a", "plain", 1.0, "time / plain"),
            point("b", "discard", 1.6, "time / plain"), point("b", "plain", 1.0, "time / plain"),
        ]},
        {"stem": "row_kernel", "rows": [
            {"shape": "s bfloat16", "case": "copy", "time / copy": 1.0},
            {"shape": "s bfloat16", "case": "row kernel", "time / copy": 1.25},
            {"shape": "s float32", "case": "row kernel", "time / copy": 1.1},
        ]},
        loss(*GOOD, skipped={"Liger": "does not import"}),
    ]  # fmt: skip
    lines = ranked(STAGES, LOGS, results)
    assert kinds(lines) == ["failed test", "sanitizer", "stage", "below its goal", "slow",
                            "not run", "not measured"]  # fmt: skip
    assert [line.split(". ", 1)[1] for line in lines] == [
        "failed test: tests/a.py::test_b[x - y] - AssertionError: no",
        "sanitizer: memcheck: 2 x Invalid __global__ write of size 4 bytes",
        "sanitizer: memcheck: 1 x Uninitialized __global__ memory read of size 4 bytes",
        "stage: tests-core FAILED, exit status 1",
        "stage: memcheck FAILED, exit status 99",
        "stage: R1 stopped after 100 s",
        "below its goal: s bfloat16: 80% of a copy's bandwidth, goal 85%",
        "slow: output_discard, b: discard takes 1.60 of the time of plain",
        "slow: output_discard, a: discard takes 1.30 of the time of plain",
        "not run: racecheck: what it needs is not here",
        "not measured: Liger: does not import",
    ]


def test_a_test_that_hangs_is_named():
    dump = """..
Timeout (0:01:00)!
Thread 0x1 (most recent call first):
  File "/x/lib/execnet/gateway_base.py", line 534 in read
Thread 0x2 (most recent call first):
  File "/x/tests/cuda/devices.py", line 15 in synchronize
  File "/x/tests/cuda/test_loss.py", line 60 in test_that_waits
  File "/x/lib/_pytest/python.py", line 187 in pytest_pyfunc_call
"""
    lines = ranked(STAGES, {"tests-core": dump}, [])
    assert lines[0] == "  1. stuck test: tests/cuda/test_loss.py:60, test_that_waits"


def test_a_build_that_failed_is_first():
    stages = [{"stage": "build", "outcome": "stopped after 90 s", "seconds": 90}, *STAGES[1:]]
    assert ranked(stages, LOGS, [])[0] == "  1. preparation: build stopped after 90 s"


@pytest.mark.parametrize(
    "rows, expected",
    [
        (GOOD, []),
        ([*GOOD, point("R1 bfloat16", "CCE", 1.05)], ["takes 1.05 of the time of CCE, goal 1.0"]),
        ([*GOOD, point("R1 bfloat16", "quack", 1.08)], []),
        ([*GOOD, point("R1 bfloat16", "quack", 1.0)], ["1.10 of the time of quack, goal 1.03"]),
        ([*GOOD, point("R1 bfloat16", "floor (three products)", 1.0)], []),
        ([point("R1 bfloat16", "storage_ops", 1.74)], ["takes 17.4 ms, goal 17.3 ms"]),
        ([point("R2 bfloat16", "storage_ops", 1.74)], []),
    ],
)
def test_goals_of_the_loss(rows, expected):
    lines = ranked([], {}, [loss(*rows)])
    assert len(lines) == len(expected)
    assert all(text in line for text, line in zip(expected, lines, strict=True))
    assert ranked([], {}, [loss(*rows, quick=True)]) == []


@pytest.mark.parametrize("wrong", [12.5, float("nan")])
def test_a_loss_that_is_not_that_of_the_others(wrong):
    rows = [point("R8 bfloat16", f"peer {i}", 2.0 + i, loss=11.7) for i in range(3)]
    rows += [point("R8 bfloat16", "storage_ops", 1.0, loss=wrong)]
    (line,) = ranked([], {}, [loss(*rows)])
    assert line.endswith(
        f"wrong loss: R8 bfloat16: storage_ops computed {wrong}, the median is 11.7"
    )


def test_a_kind_with_many_lines_does_not_hide_the_next():
    log = "".join(f"FAILED tests/a.py::test_{i} - no\n" for i in range(MOST + 5))
    lines = ranked(STAGES, {"tests-core": log}, [])
    assert lines[MOST].endswith("failed test: and 5 more") and kinds(lines)[1] == "stage"
