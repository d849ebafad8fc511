"""`will-it-fit --eval-batch` adds an evaluation step to the training step."""

import pytest

from storage_ops.cli import main
from tests import hf_config
from tests.commands import answer

pytest.importorskip("transformers")
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 4096,
    "max_position_embeddings": 64,
}  # fmt: skip
LOGITS = 64 * 4096 * 2  # of one sequence, in bf16


@pytest.fixture
def command(tmp_path):
    return ["will-it-fit", "--hf-config", hf_config.write(tmp_path, **SIZES), "--seq", "64"]


@pytest.mark.in_turn
def test_the_larger_peak_is_the_answer(command, capsys):
    plain = answer(command, capsys)
    small = answer([*command, "--eval-batch", "1"], capsys)
    assert small["evaluation_peak_bytes"] < plain["peak_bytes"] == small["peak_bytes"]
    large = answer([*command, "--eval-batch", "64"], capsys)
    assert large["training_peak_bytes"] == plain["peak_bytes"]
    assert large["evaluation_peak_bytes"] == large["peak_bytes"] > plain["peak_bytes"]
    assert large["by_owner"]["optimizer state"] == plain["by_owner"]["optimizer state"]
    assert not large["by_owner"].get("gradients")
    assert sum(large["by_owner"].values()) == large["peak_bytes"]


@pytest.mark.in_turn
def test_stored_logits(command, capsys):
    """Before the last of K batches, the logits of K - 1 are stored, with K >= 3 one more batch."""
    command = [*command, "--eval-batch", "64"]
    peaks = {
        kept: answer([*command, "--eval-logits", str(kept)], capsys)["evaluation_peak_bytes"]
        for kept in (0, 1, 2, 3, 4)
    }
    assert peaks[0] == peaks[1]
    assert peaks[2] - peaks[1] == 64 * LOGITS
    assert peaks[3] - peaks[2] == 2 * 64 * LOGITS
    assert peaks[4] - peaks[3] == 64 * LOGITS


@pytest.mark.in_turn
def test_the_step_with_the_larger_peak_is_named(command, tmp_path, capsys):
    page = tmp_path / "page.html"
    options = ["--eval-batch", "64", "--budget", "100MiB", "--html", str(page)]
    assert main([*command, *options]) == 1
    printed = capsys.readouterr().out
    assert "peak of a training step" in printed
    assert "The evaluation step has the larger peak" in printed
    assert "Evaluation step of LlamaForCausalLM" in page.read_text()


@pytest.mark.in_turn
def test_each_rank_gathers_logits(command, capsys):
    options = ["--gpus", "4", "--eval-batch", "16", "--eval-logits", "2"]
    owners = answer([*command, *options], capsys)["by_owner"]
    assert owners.get("logits of evaluated batches", 0) >= 2 * 4 * 16 * LOGITS


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--eval-batch", "0"], "--eval-batch is 0. Pass 1 or more."),
        (["--eval-logits", "-1"], "--eval-logits is -1. Pass 0 or more."),
        (["--eval-logits", "2"], "--eval-logits is 2, but there is no evaluation"),
        (["--eval-batch", "1", "--serve"], "--eval-batch is 1, but --serve trains nothing"),
        (
            ["--eval-batch", "1", "--eval-logits", "1", "--reference", "dpo"],
            "--eval-logits is 1, but the loss of --reference has no logits",
        ),
    ],
)
def test_options_that_need_an_evaluation(options, said, command, capsys):
    assert main([*command, *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(said) and err.count("\n") == 1


FUNCTIONS = """
import torch
from torch import nn
def sized(batch=2):
    return nn.Linear(64, 64), torch.empty(batch, 64)
def fixed():
    return nn.Linear(64, 64), torch.empty(2, 64)
def several(batch=2):
    return nn.Linear(64, 64), [torch.empty(batch, 64)]
"""


def test_evaluation_of_a_function(tmp_path, capsys):
    (tmp_path / "model.py").write_text(FUNCTIONS)
    model = f"{tmp_path}/model.py"
    options = ["--optimizer", "sgd", "--eval-batch"]
    facts = answer(["will-it-fit", "--model", f"{model}:sized", *options, "4096"], capsys)
    assert facts["evaluation_peak_bytes"] > facts["training_peak_bytes"]
    for name, said in (("fixed", "has no argument batch"), ("several", "a list of batches")):
        assert main(["will-it-fit", "--model", f"{model}:{name}", *options, "4"]) == 2
        assert said in capsys.readouterr().err
