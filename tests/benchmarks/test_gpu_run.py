"""The queue of calls for a machine with a GPU: arguments, limits, results, stale results."""

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import _gpu_queue, _gpu_run, _gpu_tests, _runner
from benchmarks._gpu_queue import FILE, QUEUE, Call, Stage
from benchmarks._gpu_run import Run

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_run.sh"
WITHOUT_GPU = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}


def call(*options, **more):
    return subprocess.run(
        [SCRIPT, *map(str, options)], capture_output=True, text=True, env=WITHOUT_GPU, **more
    )


@pytest.mark.parametrize(
    "options, complaint",
    [
        ([], "one of the arguments --call --list is required"),
        (["--call", "5"], "invalid choice: '5'"),
        (["--call", "rows", "--minutes", "soon"], "argument --minutes: invalid float value"),
        (["--call", "rows", "--minutes", "0"], "--minutes is 0. Expected more than 0"),
        (["--call", "rows", "--wheels", "/no/folder"], "--wheels is /no/folder. Expected a folder"),
        (["--call", "rows", "--real-logits", "/no.npz"], "/no.npz. Expected a file"),
    ],
)
def test_wrong_arguments(options, complaint, capsys):
    with pytest.raises(SystemExit) as ended:
        _gpu_run.main(options)
    assert ended.value.code == 2 and complaint in capsys.readouterr().err


def test_every_call_fits_into_nine_minutes_and_names_code_that_exists():
    assert len({call.name for call in QUEUE}) == len(QUEUE)
    for call in QUEUE:
        assert (
            sum(stage.seconds for stage in call.stages) <= 60 * _gpu_run.MINUTES - _gpu_run.AROUND
        )
        assert all((ROOT / path).exists() for path in call.code)
        assert len({stage.name for stage in call.stages}) == len(call.stages)
        for stage in call.stages:
            assert stage.part in (*_runner.parts(), "_gpu_tests")
    for paths in _gpu_queue.CODE.values():
        assert all((ROOT / path).exists() for path in paths)


def test_the_next_call_is_the_first_line(tmp_path, monkeypatch):
    calls = tuple(Call(name, "much", (name,), ()) for name in ("new", "old", "fresh", "lost"))
    since = {"old": 3, "fresh": 0, "lost": None, ".": 0}
    (tmp_path / "nvidia-x").mkdir()
    measured = {"calls": {"old": "abc", "fresh": "abc", "lost": "no-dirty"}}
    (tmp_path / "nvidia-x" / "loss.json").write_text(json.dumps(measured))
    monkeypatch.setattr(_gpu_queue, "QUEUE", calls)
    monkeypatch.setattr(_gpu_queue, "RESULTS", tmp_path)
    monkeypatch.setattr(_gpu_queue, "commits_since", lambda commit, paths: since[paths[0]])
    assert list(_gpu_queue.listed()) == [
        "new           no results; decides much",
        "old           results at abc, stale: its code changed in 3 commits since",
        "lost          results at no-dirty, stale: its code changed by unknown commits since",
        "fresh         results at abc",
    ]


def test_results_are_stale_if_their_code_has_changed(monkeypatch):
    assert _gpu_queue.commits_since("no such commit", ["."]) is None
    asked = []
    monkeypatch.setattr(_gpu_queue, "commits_since", lambda *args: asked.append(args) or 0)
    assert not _gpu_queue.is_stale({"stem": "storage", "commit": "one, two"})
    assert asked == [("one", ["storage_ops/storage", "csrc/storage"])]
    monkeypatch.setattr(_gpu_queue, "commits_since", lambda *args: None)
    assert _gpu_queue.is_stale({"stem": "demo", "commit": "lost"})


@pytest.mark.in_turn
def test_without_a_gpu_the_command_fails(tmp_path):
    done = call("--call", "rows", "--out", tmp_path)
    assert done.returncode == 1 and "not run: " in done.stdout
    assert "rows decides whether the row kernel reaches its goal" in done.stdout


@pytest.mark.slow
def test_a_rehearsal_writes_results_for_make_results(tmp_path):
    done = call("--call", "rows", "--dry-run", "--out", tmp_path)
    assert done.returncode == 0, done.stdout
    results = json.loads((tmp_path / "results.json").read_text())
    stems = [result["stem"] for result in results]
    assert stems == ["tests_cuda", "row_kernel", "op_peaks", "tests_racecheck"]
    assert all(result["quick"] and result["call"] == "rows" for result in results)
    assert "row_kernel           ok" in done.stdout


@pytest.fixture
def run_of(tmp_path, monkeypatch):
    """Return a function that runs stages of commands and returns outcomes, status and log."""

    def run(minutes, stages, commands, file=""):
        monkeypatch.setattr(_gpu_run, "command", lambda part, path, *options: commands[part])
        this = Run(
            Call("some", "much", (), tuple(stages)), tmp_path, tmp_path, minutes, False, file
        )
        this.stages()
        status = this.close()
        return list(this.outcomes.values()), status, (tmp_path / "log.txt").read_text()

    return run


def wheel(folder, name, files):
    """Write a wheel with these files, by their paths, and return its path."""
    info = f"{name}-1.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    path = folder / f"{name}-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return str(path)


@pytest.mark.in_turn
def test_wheels_with_parts_of_one_folder_and_paths_are_installed(tmp_path, capsys):
    first = wheel(tmp_path, "first", {"shared/one.py": "", "shared.pth": "shared/modules\n"})
    second = wheel(tmp_path, "second", {"shared/modules/two.py": ""})
    broken = tmp_path / "broken-1-py3-none-any.whl"
    broken.write_text("no archive")
    code = "import shared.one, two, importlib.metadata as m; m.version('first')"
    for wheels in ([first, second], [first, str(broken)]):
        run = Run(Call("some", "much", (), ()), tmp_path, tmp_path / Path(wheels[1]).stem, 9, True)
        run.install(wheels)
        code = code if second in wheels else "import shared.one"
        done = subprocess.run([sys.executable, "-c", code], env=run.environment, cwd=tmp_path)
        assert done.returncode == 0
    assert capsys.readouterr().out == "not installed: broken-1-py3-none-any.whl\n"


def test_a_failure_does_not_stop_the_next_stage(run_of):
    stages = [Stage(name, 60, name) for name in ("good", "bad", "last")]
    stages.append(Stage("real", 60, "good", (FILE,)))
    commands = {"good": ["echo", "good"], "bad": ["sh", "-c", "exit 7"], "last": ["echo", "end"]}
    outcomes, status, log = run_of(9, stages, commands)
    assert [text.split(",")[0] for text in outcomes] == [
        "ok", "FAILED", "ok", "not run: --real-logits is not given",
    ]  # fmt: skip
    assert status == 1 and "exit status 7" in log and log.index("end") < log.index("decides much")


@pytest.mark.in_turn
def test_a_stage_is_stopped_and_later_ones_keep_their_time(run_of):
    commands = {"long": ["sleep", "9"], "last": ["echo", "end"]}
    stages = [Stage("long", 270, "long"), Stage("last", 240, "last")]
    begin = time.monotonic()
    outcomes, status, _ = run_of(0.1, stages, commands)
    assert outcomes[0].startswith("stopped after") and outcomes[1].startswith("ok")
    assert status == 1 and time.monotonic() - begin < 8


def test_a_stage_does_not_begin_without_time(run_of):
    outcomes, status, _ = run_of(0.01, [Stage("late", 2000, "late")], {"late": ["true"]})
    assert outcomes == ["not begun, no time left"] and status == 1


@pytest.mark.in_turn
def test_an_interrupt_keeps_earlier_results(tmp_path):
    command = [SCRIPT, "--call", "rows", "--dry-run", "--out", tmp_path]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True,
                               env={**WITHOUT_GPU, "TMPDIR": str(tmp_path)})  # fmt: skip
    log, until = tmp_path / "log.txt", time.monotonic() + 90
    while time.monotonic() < until and not (
        log.exists() and "benchmarks.row_kernel" in log.read_text()
    ):
        time.sleep(0.1)
    running.send_signal(signal.SIGTERM)
    printed, _ = running.communicate(timeout=60)
    assert running.returncode == 130 and "row_kernel           interrupted" in printed
    assert not list(tmp_path.glob("gpu_run-*"))
    assert (tmp_path / "results.json").is_file()


@pytest.fixture
def counted(tmp_path, monkeypatch):
    """Return a function that counts the tests of a sanitizer, which is a script of the shell."""

    def count(script):
        fake = tmp_path / "compute-sanitizer"
        fake.write_text(f"""#!/bin/sh
for a; do case $a in --junit-xml=*) file=${{a#*=}};; esac; done
{script}
echo '<x><testsuite tests="9" failures="1" errors="0" skipped="2"/></x>' > $file
exit 99
""")
        fake.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        arguments = SimpleNamespace(device="cuda", tool="racecheck", arguments=["tests/cuda"])
        codes = []
        rows = {row["case"]: row for row in _gpu_tests.rows(arguments, codes)}
        assert codes == [99]
        counts = {case: row["tests"] for case, row in rows.items() if "tests" in row}
        assert counts == {"passed": 6, "failures": 1, "errors": 0, "skipped": 2}
        return rows

    handler = signal.getsignal(signal.SIGINT)
    yield count
    signal.signal(signal.SIGINT, handler)


def test_tests_are_counted_together_with_errors_of_the_sanitizer(counted):
    printed = (
        "========= COMPUTE-SANITIZER\\n========= Invalid write\\n========= ERROR SUMMARY: 1 error"
    )
    assert counted(f"printf '{printed}\\n'")["Invalid write"]["findings"] == 1


def test_tests_are_counted_after_an_interrupt(counted):
    counted("kill -INT $PPID; sleep 0.1; kill -INT $PPID; sleep 0.1")


def test_a_missing_sanitizer_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(_gpu_tests.shutil, "which", lambda name: None)
    arguments = SimpleNamespace(device="cuda", tool="memcheck", arguments=["tests/cuda"])
    codes = []
    assert list(_gpu_tests.rows(arguments, codes)) == [] and codes == [1]
    assert "compute-sanitizer is neither on the PATH nor beside nvcc" in capsys.readouterr().out
