"""`--shard zero3` of `will-it-fit` and `fit`."""

import json

import pytest
import torch.distributed as dist

from storage_ops.cli import main, zero3
from storage_ops.simulate import step

from . import hf_config

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.in_turn,
    pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed"),
]

SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 1024}
RANKS = 4
PARTITIONED = 4 * (512 * 512 * 2 + 512 * 256 * 2 + 512 * 1024 * 3) + 2 * 1024 * 512
WHOLE = 9 * 512  # of norms
NAMES = "reduce_bucket_size", "stage3_param_persistence_threshold", "stage3_max_reuse_distance"


@pytest.fixture
def options(tmp_path):
    path = hf_config.write(tmp_path, **SIZES)
    return ["--hf-config", path, "--gpus", str(RANKS), "--shard", "zero3", "--json"]


def facts_of(command, capsys, code=0):
    assert main(command) == code, capsys.readouterr().err
    assert not dist.is_initialized()
    return json.loads(capsys.readouterr().out)


def answer(options, capsys, *more):
    return facts_of(["will-it-fit", *options, "--batch", "2", "--seq", "128", *more], capsys)


@pytest.mark.parametrize(("dtype", "itemsize", "state"), [("bf16", 2, 12), ("fp32", 4, 8)])
def test_bytes_equal_sums_by_hand(options, dtype, itemsize, state, capsys):
    """16-bit parameters have float32 copies, and float32 parameters have none."""
    bytes_of = answer(options, capsys, "--dtype", dtype)["by_owner"]
    partition = (PARTITIONED + WHOLE) // RANKS
    parameters = (PARTITIONED / RANKS + WHOLE) * itemsize
    assert bytes_of["parameters"] == bytes_of["gradients"] == parameters
    assert bytes_of["optimizer state"] == pytest.approx(partition * state, abs=1024)
    added = zero3.BUCKET * itemsize + WHOLE // RANKS * itemsize
    assert 0 <= bytes_of["buffers"] - added < 2 << 20
    assert bytes_of["gathered parameters"] > 0


def test_moments_have_8_bits_and_copies_32(options, capsys):
    bytes_of = answer(options, capsys, "--optimizer", "adamw8bit")["by_owner"]
    partition = (PARTITIONED + WHOLE) // RANKS
    blocks = partition / 256
    assert bytes_of["optimizer state"] == pytest.approx(partition * 6 + blocks * 8, abs=8192)


def test_adapters_have_the_dtype_of_the_model(options, capsys):
    pytest.importorskip("peft")
    bytes_of = answer(options, capsys, "--lora", "8:q_proj")["by_owner"]
    adapters = 4 * 8 * (512 + 512)
    assert bytes_of["parameters"] == (PARTITIONED / RANKS + WHOLE + adapters) * 2
    assert bytes_of["optimizer state"] == pytest.approx(adapters / RANKS * 12, abs=2048)


def test_quantized_weights_keep_the_dtypes_of_their_statistics(options, capsys):
    pytest.importorskip("peft")
    more = "--lora", "8:all-linear", "--quantize", "nf4-double"
    assert answer(options, capsys, *more)["fits"]


def test_last_layers_stay_gathered(options, capsys, monkeypatch):
    """The result is equal with and without reused simulations of equal layers."""
    layer = (PARTITIONED - 2 * 1024 * 512) // 4
    all_layers = answer(options, capsys)["by_owner"]["gathered parameters"]
    assert all_layers > 4 * layer * 2
    monkeypatch.setattr(zero3, "REUSED", 3 * layer)
    last_layers = answer(options, capsys)
    assert last_layers["by_owner"]["gathered parameters"] < all_layers - layer * 2
    monkeypatch.setattr(step, "_quickly", lambda model, how: None)
    assert answer(options, capsys)["by_owner"] == last_layers["by_owner"]


def test_only_one_sub_group_has_float32_gradients_at_a_time(options, capsys, monkeypatch):
    monkeypatch.setattr(zero3, "REUSED", 0)
    short = [*options, "--seq", "8", "--gpus", "2"]
    whole = facts_of(["will-it-fit", *short], capsys)["peak_bytes"]
    monkeypatch.setattr(zero3, "SUB_GROUP", PARTITIONED // 2 // 4)
    assert facts_of(["will-it-fit", *short], capsys)["peak_bytes"] < whole - PARTITIONED // 2


def test_answers_name_their_assumptions(options, capsys):
    sizes = ["--seq", "128", "--batch", "4"]
    find = ["--seq", "128", "--budget", "1115MiB", "--find", "batch", "--actions"]
    answers = [
        facts_of(["will-it-fit", *options, *sizes], capsys),
        facts_of(["fit", *options, *sizes, "--actions"], capsys),
        facts_of(["fit", *options, *find], capsys),
    ]
    for facts in answers:
        said = " ".join(facts["assumptions"])
        assert all(f"{name} is " in said for name in NAMES)
        assert "not simulated" in said and "float32 copies" in said
    assert answers[-1]["found"] > 1
    assert main(["will-it-fit", *options[:-1], *sizes]) == 0
    assert "reduce_bucket_size is 500,000,000" in capsys.readouterr().out
    assert main(["fit", *options, *sizes, "--budget", "900MiB", "--actions"]) == 1
    assert "reduce_bucket_size is 500,000,000" in capsys.readouterr().err


def test_fit_plans_for_one_rank(options, capsys):
    command = ["fit", *options, "--batch", "8", "--seq", "512", "--actions", "full"]
    none = facts_of([*command, "--budget", "8GiB"], capsys)["peak_bytes"]
    plan = facts_of([*command, "--budget", str(none - 1000)], capsys)
    assert plan["peak_bytes"] < none and plan["actions"]


def test_largest_batch_on_one_rank_of_fsdp2(options, capsys):
    options = [*options, "--shard", "fsdp2", "--seq", "128", "--budget", "116MiB"]
    find = "--find", "batch", "--actions"
    assert facts_of(["fit", *options, *find], capsys)["found"] > 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--gpus", "1"], "--shard is zero3 and --gpus is 1. Pass --gpus of 2 or more"),
        (["--tensor-parallel", "2"], "--tensor-parallel is 2. Pass --shard fsdp2"),
        (["--autocast", "bf16"], "--autocast is bf16. Pass --dtype bf16"),
        (["--optimizer", "muon"], "--optimizer is muon, but --shard zero3"),
    ],
)
def test_complaints(options, wrong, said, capsys):
    assert main(["will-it-fit", *options, "--seq", "128", *wrong]) == 2
    assert said in capsys.readouterr().err
    assert not dist.is_initialized()
