import argparse
import dataclasses
import inspect
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import storage_ops
from storage_ops import cli, matmul
from storage_ops.loss.planning.devices import DEFAULT_GPU, named
from storage_ops.simulate.rates import rates_for


def test_info_as_json(capsys):
    assert cli.main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(storage_ops.info()))


def test_info_as_a_table(capsys):
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    assert "storage_path" in printed and storage_ops.info()["torch"] in printed


@pytest.mark.parametrize(
    "options, complaint",
    [
        (["--preset", "huge"], "--preset is huge. Expected one of tiny"),
        (["--text", "/no/such/file"], "--text is /no/such/file. Expected the path of a file"),
        (["--steps", "1"], "--steps is 1. Expected at least 2"),
        (["--device", "gpu"], "--device is gpu. Expected cpu or cuda"),
        (["--seed", str(2**64)], f"--seed is {2**64}. Expected a number of 64 bits"),
    ],
)
def test_demo_complains(options, complaint, capsys):
    assert cli.main(["demo", *options]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.in_turn
def test_demo_end_to_end(tmp_path):
    """On a small text, the losses are equal, memory is saved and the picture is drawn."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i} of {i * i} words, {i % 7} " for i in range(4000)))
    picture = tmp_path / "demo.png"
    command = [sys.executable, "-m", "storage_ops", "demo", "--text", str(text), "--steps", "3"]
    result = subprocess.run(
        [*command, "--plot", str(picture), "--json"], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert "USDT" not in result.stderr
    facts = {run["label"]: run for run in json.loads(result.stdout)}
    rows = {line.split("│")[1].strip(): line.split("│")[2:-1] for line in result.stderr.splitlines()
            if line.startswith("│")}  # fmt: skip
    plain, ours = (int(cell.split()[0]) for cell in rows["peak memory of a step"][:2])
    assert ours < plain
    assert [round(run["peak_bytes"] / 2**20) for run in facts.values()] == [plain, ours]
    assert float(rows["final loss"][2].split()[0]) < 1e-3
    assert picture.read_bytes().startswith(b"\x89PNG")


PLAN = ["plan", "--tokens", "8192", "--hidden", "4096", "--vocab", "128256", "--device", "h200"]


def test_plan_as_a_table(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")  # narrower tables omit the tiles
    assert cli.main([*PLAN, "--dtype", "bf16", "--budget", "400MiB"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("token-chunked 3.35-GEMM: 1 x 10 tiles of 8192 x 20416")
    rows = [line.split() for line in printed.splitlines() if " of 8192x" in line]
    assert 8 <= len(rows) <= 11
    assert [row[0] for row in rows].count(">") == 1 and ["400", "MiB"] in [r[1:3] for r in rows]
    assert all("token-chunked" in row for row in rows[1:])  # of 64 classes, fewer launches win
    factors = [float(row[-1]) for row in rows]
    assert factors == sorted(factors, reverse=True) and factors[-1] < 1.1


@pytest.mark.parametrize(
    "options", [[], ["--grads"], ["--grads", "input"], ["--reduction", "none"]]
)
def test_plan_as_json(options, capsys):
    assert cli.main([*PLAN, "--json", *options]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["device"] == "h200" and facts["plan"]["peak_bytes"] <= facts["budget_bytes"]
    budgets = [point["budget_bytes"] for point in facts["curve"]]
    assert budgets == sorted(budgets) and budgets[0] == facts["smallest_budget_bytes"]
    assert facts["budget_bytes"] in budgets
    times = [point["seconds"] for point in facts["curve"]]
    assert times == sorted(times, reverse=True) and times[-1] >= facts["floor_seconds"]
    assert facts["fast_budget_bytes"] is None
    assert cli.main([*PLAN, "--json", "--budget", "40MiB", *options]) == 0
    tight = json.loads(capsys.readouterr().out)
    is_slow = tight["plan"]["seconds"] > 1.35 * tight["floor_seconds"]
    assert (tight["fast_budget_bytes"] is not None) == is_slow


@pytest.mark.parametrize(
    "options, complaint",
    [
        (["--budget", "1MiB"], "--budget is 1048576 bytes. Expected at least 18219520 (17.4 MiB)"),
        (["--budget", "much"], "--budget is 'much'. Expected a number of bytes"),
        (["--dtype", "int8"], "--dtype is 'int8'. Expected one of float64"),
        (["--device", "tpu"], "--device is 'tpu'. Expected one of cpu, h200"),
        (
            ["--grads", "output"],
            "--grads is output. Expected a sequence of some of input, weight, bias",
        ),
    ],
)
def test_plan_complains(options, complaint, capsys):
    assert cli.main([*PLAN, *options]) == 2
    captured = capsys.readouterr()
    assert complaint in captured.err and captured.out == ""


@pytest.mark.in_turn
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("options", "stream"),
    [([*PLAN, "--json"], 1), (PLAN, 1), (["info"], 1), (["info", "--json"], 1),
     ([*PLAN, "--device", "tpu"], 2)],
)  # fmt: skip
def test_a_closed_pipe_is_no_error(options, stream, unbuffered):
    """With `... | head`, there is no message, and the status is that of a broken pipe."""
    read, write = os.pipe()
    os.close(read)
    try:
        result = subprocess.run(
            [sys.executable, "-m", "storage_ops", *options],
            stdout=write if stream == 1 else subprocess.PIPE,
            stderr=write if stream == 2 else subprocess.PIPE,
            cwd=Path(storage_ops.__file__).parents[1], timeout=60,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
    finally:
        os.close(write)
    assert result.returncode == 141
    assert not result.stdout and not result.stderr


def test_the_script_ends_without_a_reader():
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as pipe:
        result = script(*PLAN[1:], stdout=pipe)
    assert result.returncode == 141 and result.stderr == ""


def test_commands_that_cannot_draw_fail_before_the_work(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    fit = ["fit", "--hf-config", str(tmp_path / "config.json"), "--seq", "8"]
    for command in (fit, ["will-it-fit", *fit[1:]]):
        assert cli.main([*command, "--plot", str(tmp_path / "plan.png")]) == 2
        captured = capsys.readouterr()
        assert captured.err.endswith("which is not installed. Run: pip install matplotlib\n")
        assert captured.err.startswith(f"drawing {tmp_path / 'plan.png'} needs")
        assert captured.out == ""  # it computed nothing
    for ending in (".html", ".pickle"):  # `fit` draws only images
        assert cli.main([*fit, "--plot", str(tmp_path / f"plan{ending}")]) == 2
        assert "needs matplotlib, which is not" in capsys.readouterr().err


def test_files_that_cannot_be_written_are_errors_before_the_work(tmp_path, capsys):
    fit = ["fit", "--hf-config", str(tmp_path / "config.json"), "--seq", "8"]
    will_it_fit = ["will-it-fit", *fit[1:]]
    for command, option in ((fit, "--save"), (fit, "--plot"), (will_it_fit, "--html"),
                            (will_it_fit, "--plot"), (["demo"], "--plot")):  # fmt: skip
        for path in (tmp_path, tmp_path / "no" / "plan.png"):
            assert cli.main([*command, option, str(path)]) == 2
            expected = f"{option} is {path}. Expected a file in a folder that exists.\n"
            assert capsys.readouterr().err == expected
    for command in (fit, will_it_fit, ["demo"]):
        assert cli.main([*command, "--plot", str(tmp_path / "plan.foo")]) == 2
        assert "plan.foo has an unknown format. Expected one of" in capsys.readouterr().err


@pytest.mark.parametrize("device", [[], ["--device", "cuda"]])
def test_plan_without_a_device_is_for_the_default_gpu(device, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main([*PLAN[:-2], *device]) == 0
    assert "rates              H100 SXM" in capsys.readouterr().out


def test_plan_for_cuda_is_for_the_gpu_that_torch_reports(capsys, monkeypatch):
    monkeypatch.setattr("storage_ops.loss.planning.plan.default_device", lambda: "a100")
    assert cli.main([*PLAN[:-2], "--device", "cuda"]) == 0
    assert "rates              A100" in capsys.readouterr().out


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_groups_explained_options_and_ends_with_an_example(capsys, name):
    with pytest.raises(SystemExit) as left:
        cli.main([name, "--help"])
    text = capsys.readouterr().out
    example = f"example:\n  python -m storage_ops {name} {cli.COMMANDS[name].EXAMPLE}\n"
    assert left.value.code == 0 and text.endswith(example)
    parser = argparse.ArgumentParser()
    cli.COMMANDS[name].add_arguments(parser)
    parser.parse_args(shlex.split(cli.COMMANDS[name].EXAMPLE))
    ungrouped = parser._optionals._group_actions + parser._positionals._group_actions
    assert [action.dest for action in ungrouped] == ["help"]
    assert all(action.help for action in parser._actions)


def test_commands_and_functions_have_the_same_default_gpu():
    """They use it without a device, and for models on the meta device."""
    parser = argparse.ArgumentParser()
    for number, name in enumerate(("plan", "will-it-fit", "fit")):
        if not number:
            parsers = parser.add_subparsers()
        cli.COMMANDS[name].add_arguments(parsers.add_parser(name))
    sizes = ["--tokens", "1", "--hidden", "1", "--vocab", "1"]
    step = ["--hf-config", "x", "--seq", "1"]
    options_of = {"plan": sizes, "will-it-fit": step, "fit": step}
    devices = {parser.parse_args([name, *options]).device for name, options in options_of.items()}
    judge = inspect.signature(storage_ops.memory.will_it_fit)
    assert devices == {judge.parameters["device"].default} == {DEFAULT_GPU}
    meta = torch.nn.Linear(2, 2, device="meta")
    assert rates_for(None, meta) is named(DEFAULT_GPU)


def test_plan_needs_no_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise OSError('libtorch is broken')")
    paths = [str(tmp_path), str(Path(storage_ops.__file__).parents[1])]
    result = subprocess.run(
        [sys.executable, "-m", "storage_ops", *PLAN], capture_output=True, text=True, timeout=60,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "rates              H200" in result.stdout


def script(*arguments, stdout=subprocess.PIPE):
    """Run `storage-ops-plan`. Also return whether it imported torch."""
    code = (
        "import sys, storage_ops_plan as s; code = s.main(); "
        "sys.exit(code if sys.modules['torch'] is None else 'torch was imported')"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], stdout=stdout, stderr=subprocess.PIPE,
        text=True, timeout=60, cwd=Path(storage_ops.__file__).parents[1],
    )  # fmt: skip


def test_the_script_plans_without_importing_torch(capsys):
    result = script(*PLAN[1:-2], "--json")
    assert result.returncode == 0, result.stderr
    assert cli.main([*PLAN[:-2], "--json"]) == 0
    assert json.loads(result.stdout) == json.loads(capsys.readouterr().out)


def test_the_script_does_not_plan_for_the_cpu():
    result = script(*PLAN[1:], "--device", "cpu")
    assert result.returncode == 2 and result.stdout == ""
    assert "--device is cpu, and a plan for it depends on the threads of torch" in result.stderr
    assert "Run `python -m storage_ops plan` where torch" in result.stderr


@pytest.mark.in_turn
def test_plan_for_the_cpu_is_that_of_the_loss():
    sizes = ["plan", "--tokens", "512", "--hidden", "64", "--vocab", "9000", "--dtype", "bf16"]
    threads = str(torch.get_num_threads())
    result = subprocess.run(
        [sys.executable, "-m", "storage_ops", *sizes, "--device=cpu", "--budget=1MiB", "--json"],
        capture_output=True, text=True, timeout=60,
        env=os.environ | {"OMP_NUM_THREADS": threads},
        cwd=Path(storage_ops.__file__).parents[1],
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    facts = json.loads(result.stdout)
    products = matmul.of(torch.bfloat16, "cpu", torch.get_num_threads())
    assert facts["problem"]["matmul"] == dataclasses.asdict(products)
    plan = storage_ops.plan(512, 64, 9000, "bf16", memory_budget="1MiB", device="cpu")
    assert facts["plan"] == dataclasses.asdict(plan) | {"mode": plan.mode}
