"""`python -m storage_ops fit`."""

import json
from functools import partial

import pytest
import torch

import storage_ops
from storage_ops import cli

from .. import hf_config

pytestmark = pytest.mark.in_turn

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3, "vocab_size": 256}


@pytest.fixture
def command(tmp_path):
    path = hf_config.write(tmp_path, **SIZES)
    return ["fit", "--hf-config", path, "--batch", "2", "--seq", "128", "--dtype", "fp32"]


def test_a_table_a_picture_and_a_plan_for_the_real_model(command, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture, saved = tmp_path / "fit.png", tmp_path / "fit.json"
    options = ["--budget", "71MiB", "--plot", str(picture), "--save", str(saved)]
    assert cli.main([*command, *options]) == 0
    shown = capsys.readouterr().out
    assert "of 71 MiB allowed" in " ".join(shown.split()) and "full checkpoint: peak" in shown
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 5000
    drawing = tmp_path / "fit.svg"
    assert cli.main([*command, *options[:2], "--plot", str(drawing)]) == 0
    words = drawing.read_text()
    assert "Fit of LlamaForCausalLM on H100 SXM: peak" in words and "budget 71 MiB" in words
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    config.use_cache = False
    model = transformers.LlamaForCausalLM(config).train()
    plan = storage_ops.load_fit(saved, model)
    assert plan.peak_bytes <= 71 << 20 and plan.seconds > 0
    plan.apply()
    ids = torch.randint(0, 256, (2, 128))
    model(input_ids=ids, labels=ids).loss.backward()
    step = storage_ops.memory.simulate_step(
        model, {"input_ids": ids, "labels": ids}, optimizer=torch.optim.AdamW, device="h100"
    )
    assert step.peak_bytes == plan.peak_bytes


@pytest.mark.parametrize(
    ("kind", "options"), [("llama", {}), ("gpt2", {"use_cache": False, "pad_token_id": 0})], ids=str
)
def test_a_plan_is_for_the_model_that_is_loaded(tmp_path, kind, options):
    """from_pretrained loads bfloat16 weights, float32 buffers, and a config with a cache."""
    configs = {
        "llama": partial(transformers.LlamaConfig, **SIZES, num_attention_heads=4),
        "gpt2": partial(  # transformers 4 has a mask of all positions in each layer
            transformers.GPT2Config, n_embd=64, n_layer=3, n_head=4, vocab_size=256, n_positions=128
        ),
    }
    config = configs[kind](bos_token_id=1, eos_token_id=2)
    auto = transformers.AutoModelForCausalLM
    auto.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path)
    saved, budget = tmp_path / "fit.json", 67 << 20
    command = ["fit", "--hf-config", str(tmp_path / "config.json"), "--batch", "2", "--seq", "128"]
    assert cli.main([*command, "--budget", f"{budget}B", "--save", str(saved)]) == 0
    assert torch.get_default_dtype() == torch.float32
    model = auto.from_pretrained(tmp_path, dtype=torch.bfloat16, **options)
    with pytest.raises(ValueError, match=r"differs in: train or eval\. Pass a model like"):
        storage_ops.load_fit(saved, model)
    model.train()
    ids = torch.randint(0, 256, (2, 128))
    batch = {"input_ids": ids, "labels": ids}
    model(**batch).loss.backward()  # attributes that a first forward sets do not matter
    model.zero_grad()
    plan = storage_ops.load_fit(saved, model)
    assert plan._actions
    plan.apply()
    adamw = torch.optim.AdamW
    step = storage_ops.memory.simulate_step(model, batch, optimizer=adamw, device="h100")
    assert step.peak_bytes <= budget
    model(**batch).loss.backward()


def test_json(command, capsys):
    seconds = []
    for budget in ("70.5MiB", "71MiB", "1GiB"):
        assert cli.main([*command, "--budget", budget, "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert facts["peak_bytes"] <= facts["budget"] and facts["device"] == "H100 SXM"
        seconds.append(facts["seconds"])
    assert seconds[0] > seconds[1] > seconds[2] == 0 and not facts["actions"]
    assert cli.main([*command, "--budget", "71MiB", "--json", "--actions", "full"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {action["mode"] for action in facts["actions"]} == {"full"}


def test_exit_code_and_message_if_no_plan_fits(command, tmp_path, capsys):
    saved = tmp_path / "fit.json"
    for more in ([], ["--json", "--save", str(saved)]):
        assert cli.main([*command, "--budget", "1MiB", *more]) == 1
        told = capsys.readouterr()
        assert "--budget is 1 MiB" in told.err and "needs at least" in told.err and not told.out
        hint = "Pass --actions output_discard selective full linear_cross_entropy to do without the"
        assert hint in told.err
    assert not saved.exists()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--actions", "tiles"], "--actions has 'tiles'"),
        (["--budget", "all"], "--budget is 'all'"),
        (["--device", "h1"], "--device is 'h1'"),
        (["--optimizer", "best"], "--optimizer is best"),
        (["--hf-config", "no.json"], "--hf-config is no.json"),
        (["--save", "no/such/fit.json"], "no/such/fit.json"),
        (["--plot", "fit.what"], "what"),
    ],
)
def test_complaints(command, options, complaint, capsys):
    assert cli.main([*command, *options]) == 2
    assert complaint in capsys.readouterr().err


def test_a_folder_with_a_config(command, tmp_path, capsys):
    command[command.index("--hf-config") + 1] = str(tmp_path)
    assert cli.main([*command, "--budget", "1GiB"]) == 0
    (tmp_path / "config.json").write_text('{"model_type": "llamma"}')
    assert cli.main(command) == 2
    complaint = " ".join(capsys.readouterr().err.split())
    assert "identifier: llamma (did you mean llama?). Expected the config.json of a" in complaint
