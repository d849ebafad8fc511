"""The harness of the benchmarks: order of cases, clocks, ratios, results."""

import json
import time

import pytest
import torch

from benchmarks import _harness


@pytest.fixture
def arguments(tmp_path):
    return _harness.parser("").parse_args(["--json", str(tmp_path / "a.json"), "--device", "cpu"])


def test_cases_run_in_alternating_order():
    order = []
    cases = {name: lambda name=name: order.append(name) for name in "abc"}
    seconds = _harness.interleave(cases, 3)
    assert "".join(order) == "abc" + "abc" + "cba" + "abc"
    assert {name: len(runs) for name, runs in seconds.items()} == {"a": 3, "b": 3, "c": 3}


def test_process_time_is_compared_without_waiting():
    def work():
        until = time.process_time() + 0.05
        while time.process_time() < until:
            pass

    seconds = _harness.interleave({"work": work, "wait": lambda: time.sleep(0.1)}, 1)
    (work_wall, worked), (wait_wall, waited) = seconds["work"][0], seconds["wait"][0]
    # Corrections of the time of day change the wall clock, but not the process clock.
    assert work_wall >= 0.99 * worked and worked >= 0.05 and wait_wall >= 0.1 > 2 * waited


def test_on_a_gpu_launches_before_the_first_kernel_do_not_count(monkeypatch):
    order = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            order.append("record")

        def synchronize(self):
            order.append("wait")

        def elapsed_time(self, end):
            return 7.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("idle"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append(f"sleep {cycles}"))
    monkeypatch.setitem(_harness.WARM_RUNS, "cuda", 0)
    seconds = _harness.interleave({"case": lambda: order.append("run")}, 1, "cuda")
    assert seconds == {"case": [(0.007, 0.007)]}
    sleep = f"sleep {_harness.HEAD_START}"
    assert order == ["idle", "idle", sleep, "record", "run", "record", "wait"]


def test_ratio_of_medians_and_spread_of_rounds():
    seconds = {"base": [(9, 1.0), (9, 2.0), (9, 4.0)], "case": [(9, 3.0), (9, 1.0), (9, 5.0)]}
    ratios = _harness.ratios(seconds, "base")
    assert ratios == {"base": (1.0, 1.0, 1.0), "case": (1.5, 0.5, 3.0)}
    assert _harness.milliseconds(seconds["case"]) == 3000.0


def test_a_case_that_raises_is_named_and_left_out(capsys, arguments):
    def broken():
        raise RuntimeError("no kernel\nand more")

    def rows():
        cases = {"good": lambda: None, "broken": broken}
        assert list(_harness.interleave(cases, 2, label="small")) == list(cases) == ["good"]
        yield {"case": "good"}

    _harness.finish("a", rows(), arguments)
    assert json.loads(arguments.json.read_text())["skipped"] == {
        "small: broken": "RuntimeError: no kernel"
    }
    assert "skipped: small: broken" in capsys.readouterr().out


def test_the_result_file_is_complete_at_any_moment(arguments, capsys):
    def read():
        return json.loads(arguments.json.read_text())

    def rows():
        _harness.expect(2)
        assert read()["rows"] == [] and read()["done"] == 0
        _harness.interleave({"x": lambda: None}, 1)
        yield {"shape": "s", "case": "one", "curve": [[0, 1]]}
        assert read()["rows"] == [{"shape": "s", "case": "one", "curve": [[0, 1]]}]
        assert read()["done"] == 0.5 and "running" in read()
        yield {"shape": "s", "case": "two", "more": 2}

    _harness.finish("a", rows(), arguments)
    final = read()
    assert [row["case"] for row in final["rows"]] == ["one", "two"]
    assert "running" not in final and "done" not in final
    facts = ("stem", "commit", "day", "hardware", "torch", "storage_ops", "python", "packages")
    assert all(fact in final for fact in facts) and final["torch"] == torch.__version__
    assert arguments.json.read_text().count("\n  {") == 2  # one row per line
    assert "curve" not in capsys.readouterr().out


def test_after_the_time_limit_only_first_rounds_begin(arguments, capsys):
    rounds = []

    def rows():
        rounds.extend(_harness.interleave({"slow": lambda: time.sleep(0.1)}, 9)["slow"])
        yield {"case": "slow"}

    arguments.seconds = 0.15
    _harness.finish("a", rows(), arguments)
    assert len(rounds) == 1 and "1 of 9 rounds" in capsys.readouterr().out


def test_the_peak_is_relative_to_the_memory_before():
    base = torch.empty(1 << 20)
    mib = _harness.peak(lambda: (base + 1) + (base + 2))
    assert mib == 12.0


def test_hardware_names_distinguish_generations_of_a_processor(monkeypatch):
    def named(family):
        said = f"cpu family\t: {family}\nmodel\t\t: 17\nmodel name\t: AMD EPYC(tm)\n"
        monkeypatch.setattr(_harness.packed, "processor", lambda: said)
        return _harness.hardware("cpu")

    assert named(25).startswith("amd-epyc-family-25-")
    assert named(25).replace("-25-", "-26-") == named(26)


def test_quick_results_do_not_replace_kept_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = _harness.parser("").parse_args(["--quick", "--device", "cpu"])
    _harness.finish("a", [{"case": "one"}], options)
    assert (tmp_path / "bench-report" / "a.json").is_file()
