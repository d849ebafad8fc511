"""`--gpus`, `--shard` and `--tensor-parallel` of `will-it-fit` and `fit`."""

import argparse
import json

import pytest
import torch
import torch.distributed as dist

from storage_ops.cli import main, ranks, will_it_fit
from storage_ops.memory import simulate_step

from . import hf_config

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.in_turn,
    pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed"),
]

SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "vocab_size": 256}
PARAMETERS = 4 * (4 * (64 * 64 * 1.5 * 2 + 3 * 64 * 192 + 128) + 2 * 256 * 64 + 64)


@pytest.fixture
def options(tmp_path):
    path = hf_config.write(tmp_path, **SIZES)
    return ["--hf-config", path, "--batch", "2", "--seq", "128", "--dtype", "fp32", "--json"]


def facts_of(command, capsys):
    assert main(command) == 0, capsys.readouterr().err
    assert not dist.is_initialized()
    return json.loads(capsys.readouterr().out)


def owners(options, capsys, *more):
    return facts_of(["will-it-fit", *options, *more], capsys)["by_owner"]


def test_shards_of_fsdp2(options, capsys):
    bytes_of = owners(options, capsys, "--gpus", "4")
    # Shards of norms are rounded up to 512 bytes.
    assert bytes_of["parameters"] == pytest.approx(PARAMETERS / 4, rel=0.1)
    assert bytes_of["optimizer state"] == pytest.approx(PARAMETERS / 2, rel=0.1)
    assert bytes_of["gathered parameters"] > 0
    assert owners(options, capsys)["parameters"] == pytest.approx(PARAMETERS, rel=0.01)


def test_replicas_of_ddp_are_as_in_torch(tmp_path, capsys):
    """The parameters are real, because DDP requires it."""
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def f():\n    return nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)), "
        "torch.empty(8, 256)\n"
    )
    options = ["will-it-fit", "--model", f"{tmp_path}/mine.py:f", "--gpus", "4", "--json"]
    facts = facts_of([*options, "--shard", "ddp"], capsys)
    assert sum(facts["by_owner"].values()) == facts["peak_bytes"]
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        layers = [torch.nn.Linear(256, 256) for _ in range(2)]
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
        step = simulate_step(model, torch.empty(8, 256), optimizer=torch.optim.AdamW, device="h100")
    finally:
        dist.destroy_process_group()
    assert facts["by_owner"]["gradient buckets"] == step.by_owner["gradient buckets"]
    assert facts["peak_bytes"] == pytest.approx(step.peak_bytes, abs=4096)


def test_tensor_parallelism(options, capsys):
    """Embeddings and norms are whole. With FSDP2, they are sharded too."""
    spread = 4 * (4 * (64 * 64 * 1.5 * 2 + 3 * 64 * 192) + 256 * 64)
    bytes_of = owners(options, capsys, "--gpus", "2", "--tensor-parallel", "2")
    assert bytes_of["parameters"] == pytest.approx(PARAMETERS - spread / 2, rel=0.02)
    bytes_of = owners(options, capsys, "--gpus", "4", "--tensor-parallel", "2")
    assert bytes_of["parameters"] == pytest.approx(PARAMETERS / 4, rel=0.1)


@pytest.mark.parametrize("more", [[], ["--tensor-parallel", "2"]])
def test_autocast_on_one_rank_equals_that_with_real_tensors(options, more, capsys):
    sharding = ["--gpus", "4", *more, "--autocast", "bf16"]
    bytes_of = facts_of(["will-it-fit", *options, *sharding], capsys)["by_owner"]
    config = transformers.AutoConfig.from_pretrained(options[1])
    model = transformers.LlamaForCausalLM(config).train()
    ids = torch.zeros(int(options[3]), int(options[5]), dtype=torch.int64)
    parser = argparse.ArgumentParser()
    will_it_fit.add_arguments(parser)
    args = parser.parse_args([*options, *sharding])
    with ranks.one_of(args, model), torch.autocast("cpu", torch.bfloat16):
        batch = {"input_ids": ids, "labels": ids, "use_cache": False}
        step = simulate_step(model, batch, optimizer=torch.optim.AdamW, device="h100")
    assert bytes_of == step.by_owner


def test_fit_plans_for_one_rank(options, capsys):
    command = ["fit", *options, "--gpus", "4"]
    none = facts_of([*command, "--budget", "1GiB"], capsys)["peak_bytes"]
    budget = str(none - 1000)
    plan = facts_of([*command, "--budget", budget], capsys)
    assert plan["peak_bytes"] < none and plan["actions"]


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (["--gpus", "0"], "--gpus is 0. Expected 1 or more"),
        (["--gpus", "4", "--tensor-parallel", "3"], "--tensor-parallel is 3. Expected a divisor"),
        (["--gpus", "8", "--tensor-parallel", "8"], "num_attention_heads, 4"),
        (["--gpus", "2", "--shard", "ddp", "--plot", "x.svg"], "--shard is ddp, which fit"),
        (
            ["--gpus", "4", "--shard", "ddp", "--tensor-parallel", "2"],
            "--tensor-parallel do not support. Pass --shard fsdp2",
        ),
    ],
)
def test_complaints(options, ranks, said, capsys):
    assert main(["will-it-fit", *options, *ranks]) == 2
    assert said in capsys.readouterr().err
    assert not dist.is_initialized()


def test_the_advice_prints_no_command_that_fit_refuses(options, capsys):
    options = [name for name in options if name != "--json"]
    budget = ["--budget", "68MiB", "--optimizer", "none", "--gpus", "4"]
    assert main(["will-it-fit", *options, *budget, "--tensor-parallel", "2"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "only with --shard fsdp2 or zero3" in shown


def test_models_without_a_plan(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "import torch\ndef f():\n return torch.nn.Linear(8, 8), torch.empty(4, 8)\n"
    )
    model = ["--model", f"{tmp_path}/mine.py:f", "--gpus", "2"]
    assert main(["will-it-fit", *model, "--tensor-parallel", "2"]) == 2
    assert "Linear has no plan for it" in capsys.readouterr().err
    assert main(["fit", *model, "--shard", "ddp"]) == 2
    assert "--shard is ddp, which fit, --gradient-checkpointing" in capsys.readouterr().err
    assert main(["fit", *model, "--tensor-parallel", "2"]) == 2
    assert "--tensor-parallel is 2, but fit and --gradient-checkpointing" in capsys.readouterr().err
