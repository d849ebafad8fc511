"""`will-it-fit --gradient-checkpointing`."""

import json

import pytest
import torch

from storage_ops.cli import gradient_checkpointing, main
from storage_ops.memory import measure, simulate_step

from . import hf_config

pytestmark = pytest.mark.in_turn

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "vocab_size": 256}


@pytest.fixture
def command(tmp_path):
    path = hf_config.write(tmp_path, **SIZES)
    return ["will-it-fit", "--hf-config", path, "--batch", "4", "--seq", "128", "--dtype", "fp32"]


def test_three_peaks(command, capsys):
    for budget, code in (("1GiB", 0), ("1MiB", 1)):
        options = ["--gradient-checkpointing", "--budget", budget]
        assert main([*command, *options, "--json"]) == code
        facts = json.loads(capsys.readouterr().out)
        kept, checkpointed, ours = (row["peak_bytes"] for row in facts["compared"])
        assert kept > checkpointed == facts["peak_bytes"] >= ours or budget == "1GiB"
        assert main([*command, "--budget", budget, "--json"]) == code
        assert json.loads(capsys.readouterr().out)["peak_bytes"] == kept
    seconds = [row["seconds"] for row in facts["compared"]]
    assert seconds == [0.0, None, None]  # nothing fits
    assert main([*command, *options]) == 1
    shown = capsys.readouterr().out
    assert "gradient checkpointing of transformers" in shown and "the smallest plan of fit" in shown


def test_a_plan_that_fits_has_seconds(command, capsys):
    assert main([*command, "--budget", "73MiB", "--gradient-checkpointing", "--json"]) in (0, 1)
    kept, checkpointed, ours = json.loads(capsys.readouterr().out)["compared"]
    assert kept["peak_bytes"] > 73 << 20 >= ours["peak_bytes"]
    assert 0 < ours["seconds"] <= checkpointed["seconds"]


def test_the_peak_equals_that_of_a_run():
    config = transformers.LlamaConfig(**SIZES, num_attention_heads=4, use_cache=False)
    model = transformers.LlamaForCausalLM(config).train()
    ids = torch.randint(0, 256, (4, 128))
    batch = {"input_ids": ids, "labels": ids}
    kept = simulate_step(model, batch, device="cpu").peak_bytes
    with gradient_checkpointing.enabled(model):
        simulated = simulate_step(model, batch, device="cpu").peak_bytes
        model(**batch).loss.backward()
        model.zero_grad()
        before = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), ids))
        with measure() as m:
            model(**batch).loss.backward()
    assert simulated == pytest.approx(m.peak_bytes + before, rel=1e-3)
    assert simulated < kept == simulate_step(model, batch, device="cpu").peak_bytes


def test_models_without_gradient_checkpointing(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "import torch\ndef f():\n return torch.nn.Linear(8, 8), torch.empty(4, 8)\n"
    )
    command = ["will-it-fit", "--model", f"{tmp_path}/mine.py:f", "--gradient-checkpointing"]
    assert main(command) == 2
    assert "Linear has no gradient_checkpointing_enable()" in capsys.readouterr().err
