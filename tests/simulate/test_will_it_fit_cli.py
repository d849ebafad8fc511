"""`python -m storage_ops will-it-fit`."""

import json

import pytest

from storage_ops import cli

from .. import hf_config

pytest.importorskip("transformers")

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 1024}


@pytest.fixture
def command(tmp_path):
    path = hf_config.write(tmp_path, **SIZES)
    return ["will-it-fit", "--hf-config", path, "--batch", "2", "--seq", "128"]


@pytest.mark.in_turn
def test_a_table(command, capsys):
    assert cli.main([*command, "--budget", "1GiB"]) == 0
    assert "fits, " in (shown := capsys.readouterr().out)
    assert "optimizer state" in shown and "model.layers.*.mlp" in shown
    assert cli.main([*command, "--budget", "10MiB"]) == 1
    assert "does not fit, " in capsys.readouterr().out


@pytest.mark.in_turn
def test_advice_for_a_step_that_does_not_fit(command, capsys):
    """The advice is a `fit` command for the same step, unless recomputing cannot help."""
    options = ["--optimizer", "sgd", "--accumulate", "--device", "a100", "--budget", "30MiB"]
    assert cli.main([*command, *options]) == 1
    *_, words = capsys.readouterr().out.splitlines()
    program, arguments = words.split()[:3], words.split()[3:]
    assert program == ["python", "-m", "storage_ops"] and arguments[0] == "fit"
    assert sorted(arguments[1:]) == sorted([*command[1:], *options])
    assert cli.main(arguments) in (0, 1)
    capsys.readouterr()
    assert cli.main([*command, "--budget", "10MiB"]) == 1
    shown = capsys.readouterr().out
    assert "optimizer state and workspaces alone take" in shown and " fit --hf" not in shown


@pytest.mark.in_turn
def test_json(command, capsys):
    facts = {}
    for optimizer in ("adamw", "sgd", "none"):
        cli.main([*command, "--optimizer", optimizer, "--json", "--dtype", "fp32"])
        facts[optimizer] = json.loads(capsys.readouterr().out)
    assert facts["adamw"]["fits"] and facts["adamw"]["budget_bytes"] == (79 << 30) - (512 << 20)
    assert "optimizer state" not in facts["none"]["by_owner"]
    peaks = [facts[name]["peak_bytes"] for name in ("adamw", "sgd")]
    assert peaks[0] - peaks[1] >= 2 * facts["none"]["by_owner"]["parameters"]
    assert sum(facts["sgd"]["by_owner"].values()) == peaks[1]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--optimizer", "best"], "--optimizer is best. Expected none or one of"),
        (["--batch", "0"], "--batch is 0. Expected 1 or more"),
        (["--dtype", "int3"], "int3"),
        (["--budget", "all"], "--budget is 'all'"),
        (["--device", "h1"], "--device is 'h1'. Expected one of cpu, h200"),
        (["--hf-config", "no.json"], "--hf-config is no.json, which transformers cannot read"),
        (["--hf-config", "org/model-8B"], "run `hf download org/model-8B config.json`."),
    ],
)
def test_complaints(command, options, complaint, capsys):
    assert cli.main([*command, *options]) == 2
    assert complaint in capsys.readouterr().err


def test_a_picture_of_the_memory_is_written(command, tmp_path, capsys):
    assert cli.main([*command, "--plot", str(tmp_path / "memory.svg")]) == 0
    words = (tmp_path / "memory.svg").read_text()
    assert "optimizer state" in words and "budget 78.5 GiB" in words
    assert "Step of LlamaForCausalLM on h100: peak" in words
    assert cli.main([*command, "--plot", str(tmp_path / "none" / "memory.svg")]) == 2
    assert "Expected a file in a folder that exists" in capsys.readouterr().err
