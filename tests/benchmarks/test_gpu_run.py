"""The script for a machine with a GPU: arguments, limits, files, what it says without one."""

import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from benchmarks import _gpu_run
from benchmarks._gpu_run import STAGES, Run, Stage
from benchmarks._gpu_steps import PYTEST, STEPS

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_run.sh"
WITHOUT_GPU = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}


def call(*options, **more):
    return subprocess.run(
        [SCRIPT, *map(str, options)], capture_output=True, text=True, env=WITHOUT_GPU, **more
    )


@pytest.mark.parametrize(
    "options, complaint",
    [
        ([], "one of the arguments --call --stages is required"),
        (["--call", "5"], "invalid choice: 5 (choose from 1, 2, 3, 4)"),
        (["--call", "1", "--minutes", "soon"], "--minutes is soon; expected a whole number"),
        (["--call", "1", "--minutes", "0"], "--minutes is 0; expected a whole number of at least"),
        (["--call", "1", "--wheels", "/no/folder"], "--wheels is /no/folder; expected a folder"),
        (["--stages", "facts R99"], "--stages has R99; expected some of facts packages build"),
        (["--unknown"], "usage: gpu_run.sh"),
    ],
)
def test_wrong_arguments(options, complaint):
    done = call(*options)
    assert done.returncode == 2 and complaint in done.stderr


def test_every_call_prepares_itself_and_ends_in_time():
    for number in _gpu_run.CALLS:
        stages = [stage for stage in STAGES if number in stage.calls]
        assert [stage.name for stage in stages[:3]] == ["facts", "packages", "build"]
        assert 400 < sum(stage.seconds for stage in stages) <= 60 * _gpu_run.MINUTES - 10
    for stage in STAGES:
        assert stage.is_benchmark or stage.part in STEPS


@pytest.mark.in_turn
def test_without_a_gpu_nothing_passes(tmp_path):
    out = tmp_path / "out"
    done = call("--stages", "row_kernel memcheck R2 tests-core", "--out", out, "--minutes", 12)
    summary = json.loads((out / "summary.json").read_text())
    assert {row["outcome"] for row in summary["stages"]} == {"not run: no GPU"}
    assert done.returncode == 4 and "warning: --minutes is 12" in done.stdout
    log = (out / "log.txt").read_text()
    assert log.count("not run: no GPU") == 8 and "not run: memcheck: no GPU" in log
    assert json.loads((out / "results.json").read_text()) == []


@pytest.mark.slow
def test_a_rehearsal_says_that_it_is_one(tmp_path):
    done = call("--stages", "storage racecheck", "--dry-run", "--out", tmp_path)
    rows = json.loads((tmp_path / "summary.json").read_text())["stages"]
    assert {row["stage"]: row["outcome"] for row in rows} == {
        "racecheck": "not run: no GPU",
        "storage": "rehearsed, no GPU",
    }
    (result,) = json.loads((tmp_path / "results.json").read_text())
    assert done.returncode == 0 and result["stem"] == "storage" and result["quick"]


@pytest.mark.in_turn
def test_an_interrupt_leaves_all_that_there_is(tmp_path):
    command = [SCRIPT, "--stages", "facts demo", "--dry-run", "--out", tmp_path]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=WITHOUT_GPU)
    log, until = tmp_path / "log.txt", time.monotonic() + 90
    while time.monotonic() < until and not (log.exists() and "== demo" in log.read_text()):
        time.sleep(0.1)
    running.send_signal(signal.SIGTERM)
    printed, _ = running.communicate(timeout=60)
    rows = json.loads((tmp_path / "summary.json").read_text())["stages"]
    assert running.returncode == 130 and "stage: demo interrupted" in printed
    assert [row["outcome"] for row in rows] == ["ok", "interrupted"]


@pytest.fixture
def run_of(tmp_path, monkeypatch):
    """Runs stages that do what they are told to, as they were on a GPU."""

    def run(seconds, limits, commands):
        monkeypatch.setattr(Run, "_finds_gpu", lambda self: True)
        monkeypatch.setattr(Run, "command", lambda self, stage, limit: commands[stage.name])
        this = Run(tmp_path / "out", seconds, "", False)
        scale = 60 * _gpu_run.MINUTES / seconds
        this.stages([Stage(name, (), limit * scale, "tests") for name, limit in limits.items()])
        outcomes = [row["outcome"] for row in this.rows]
        return outcomes, this.close(), (tmp_path / "out" / "log.txt").read_text()

    return run


def test_what_fails_does_not_stop_the_next(run_of):
    codes = {"good": 0, "bad": 7, "absent": 75, "last": 0}
    commands = {name: ["sh", "-c", f"echo it was {name}; exit {codes[name]}"] for name in codes}
    outcomes, code, log = run_of(60, dict.fromkeys(commands, 9), commands)
    assert outcomes == ["ok", "FAILED, exit status 7", "not run: what it needs is not here", "ok"]
    assert code == 2 and all(f"it was {name}" in log for name in commands)
    assert log.index("Look at first") < log.index("stage: bad FAILED, exit status 7")


TESTS = """
import signal, time
def test_right(): pass
def test_wrong(): assert 1 + 1 == 3, "arithmetic"
def test_hangs():
    if {deaf}: signal.signal(signal.SIGINT, signal.SIG_IGN)
    time.sleep(99)
"""


@pytest.mark.slow
@pytest.mark.parametrize("deaf", [False, True], ids=["can be interrupted", "has to be killed"])
def test_what_hangs_is_stopped_and_its_failures_are_told(deaf, tmp_path, run_of):
    (tmp_path / "test_it.py").write_text(TESTS.format(deaf=deaf))
    command = [*PYTEST, "-p", "no:xdist", f"--rootdir={tmp_path}", tmp_path / "test_it.py"]
    junit = tmp_path / "junit.xml"
    commands = {"hangs": [*map(str, command), f"--junit-xml={junit}"], "next": ["echo", "done"]}
    begin = time.monotonic()
    outcomes, code, log = run_of(14.5, {"hangs": 9, "next": 5}, commands)
    assert outcomes == ["stopped after 9 s", "ok"] and code == 1
    assert 6 <= time.monotonic() - begin < 30
    assert log.count("FAILED test_it.py::test_wrong - AssertionError: arithmetic") == 1
    first = log.partition("Look at first:\n")[2].splitlines()
    assert first[0].endswith("failed test: test_it.py::test_wrong - AssertionError: arithmetic")
    assert first[1].endswith("stage: hangs stopped after 9 s")
    assert "torch seed" not in log and junit.exists() is not deaf
    assert deaf or 'failures="1"' in junit.read_text()


@pytest.mark.in_turn
def test_a_stage_takes_what_others_left_but_not_what_is_kept_for_them(run_of):
    commands = {"short": ["true"], "long": ["sleep", "9"], "last": ["echo", "done"]}
    outcomes, code, _ = run_of(6.9, {"short": 2, "long": 2, "last": 2}, commands)
    assert outcomes == ["ok", "stopped after 4 s", "ok"] and code == 1


def test_a_stage_does_not_begin_where_no_time_is_left(run_of):
    outcomes, code, log = run_of(1, {"late": 5}, {"late": ["echo", "late"]})
    assert outcomes == ["not begun, no time left"] and code == 1
    assert "stage: late not begun, no time left" in log


def test_the_log_stays_small_and_the_archive_has_all(run_of, tmp_path, monkeypatch):
    monkeypatch.setattr(_gpu_run, "MOST_OF_A_STAGE", 1000)
    commands = {"loud": ["sh", "-c", "echo first; seq 9999; echo last"]}
    _, _, log = run_of(60, {"loud": 9}, commands)
    assert "bytes are left out here" in log and len(log) < 2000
    assert "first\n1\n" in log and "9999\nlast\n" in log
    with tarfile.open(tmp_path / "out" / "more.tar.gz") as archive:
        whole = archive.extractfile("logs/loud.txt").read().decode()
    assert whole == "\n".join(["first", *map(str, range(1, 10000)), "last", ""])
    assert len(list((tmp_path / "out").iterdir())) == 4


def test_the_archive_leaves_out_the_largest(tmp_path, capsys):
    for name, size in (("a", 10), ("b", 50_000), ("c", 5_000), ("d", 100_000)):
        (tmp_path / name).write_bytes(random.randbytes(size))
    _gpu_run.pack(tmp_path / "x.tar.gz", [tmp_path / name for name in "abcd"], 20_000)
    with tarfile.open(tmp_path / "x.tar.gz") as archive:
        assert [Path(name).name for name in archive.getnames()] == ["a", "c"]
    assert "d is left out" in capsys.readouterr().out
    assert (tmp_path / "x.tar.gz").stat().st_size <= 20_000
