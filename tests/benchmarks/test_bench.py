"""`python -m storage_ops bench`."""

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import _runner
from storage_ops import cli
from storage_ops.cli import bench

ROOT = Path(__file__).parents[2]


def test_every_part_exists_and_has_a_docstring():
    parts = _runner.parts()
    assert {"linear_cross_entropy", "output_discard", "selective_checkpoint", "autochunk"} < {
        *parts
    }
    assert {"fit:peaks", "fit:plans", "fit:compiled"} < {*parts}
    for part in parts:
        name = part.partition(":")[0]
        places = ROOT / "benchmarks" / f"{name}.py", ROOT / "benchmarks" / name / "__main__.py"
        assert any(place.is_file() and place.read_text().startswith('"""') for place in places)
        importlib.import_module(f"benchmarks.{name}")  # fails if it uses an unknown name


def test_an_unknown_part_is_named(capsys):
    assert cli.main(["bench", "loss"]) == 2
    assert "PART is loss. Expected one of autochunk" in " ".join(capsys.readouterr().err.split())


def test_without_a_source_tree_the_error_says_where_to_get_one(capsys, monkeypatch):
    monkeypatch.setattr(bench, "source_tree", lambda: None)
    assert cli.main(["bench"]) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert "belong to the source tree" in printed and "make build" in printed


def test_the_source_tree_is_that_of_the_package_or_the_current_folder(tmp_path, monkeypatch):
    assert bench.source_tree() == ROOT
    monkeypatch.setattr(bench.storage_ops, "__file__", str(tmp_path / "site/so/x.py"))
    monkeypatch.chdir(tmp_path)
    assert bench.source_tree() is None
    monkeypatch.chdir(ROOT)
    assert bench.source_tree() == ROOT


@pytest.mark.slow
def test_a_quick_run_and_a_part_that_fails(tmp_path, capsys):
    code = _runner.run(["storage", "no_such_part"], True, tmp_path, _runner.Console(width=200))
    printed = capsys.readouterr().out
    assert code == 1 and "no_such_part failed" in printed and "No module named" in printed
    result = json.loads((tmp_path / "storage.json").read_text())
    assert result["rows"] and "running" not in result
    assert "## storage" in (tmp_path / "report.md").read_text()
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(lines) == len(result["rows"])
    assert all(line["stem"] == "storage" and line["torch"] and line["commit"] for line in lines)


@pytest.mark.in_turn
def test_an_interrupt_ends_the_part_and_reports_earlier_results(tmp_path):
    command = [sys.executable, "-m", "storage_ops", "bench", "--quick", "--out", tmp_path]
    running = subprocess.Popen(
        [*command, "storage", "demo"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    until = time.monotonic() + 90
    while not (tmp_path / "storage.json").exists() and time.monotonic() < until:
        time.sleep(0.1)
    running.terminate()
    printed, _ = running.communicate(timeout=60)
    assert running.returncode == 1 and "storage failed with exit code 130" in printed
    assert "**It did not reach its end**" in (tmp_path / "report.md").read_text()
    assert not (tmp_path / "demo.json").exists()
