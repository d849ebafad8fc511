"""The budget of `will_it_fit` and of the commands, if none is given, and names of devices."""

import os

import pytest
import torch
from torch import nn

from storage_ops import cli
from storage_ops.loss.planning.devices import CONTEXT_BYTES, GPUS, key_of
from storage_ops.memory import simulate_step, will_it_fit

from .. import hf_config

MODEL, X = nn.Linear(8, 8), torch.ones(4, 8)


@pytest.mark.parametrize("name", GPUS)
def test_the_budget_is_the_memory_of_the_gpu(name):
    """80 GiB for every GPU would say that a step of 40 GiB fits into an RTX 4090."""
    budget = GPUS[name].memory - CONTEXT_BYTES
    assert will_it_fit(MODEL, X, device=name).budget_bytes == budget
    assert will_it_fit(MODEL, X, device=GPUS[name].name).budget_bytes == budget
    assert will_it_fit(MODEL, X, "1GiB", device=name).budget_bytes == 1 << 30


def test_the_budget_of_a_cpu_is_the_memory_of_the_machine(monkeypatch):
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert will_it_fit(MODEL, X, device="cpu").budget_bytes == machine
    assert will_it_fit(MODEL, X, device=None).budget_bytes == machine
    monkeypatch.delattr(os, "sysconf")
    with pytest.raises(ValueError, match=r"`budget` is not given, .* Pass the memory"):
        will_it_fit(MODEL, X, device="cpu")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("RTX 4090", "rtx4090"), ("rtx-4090", "rtx4090"), ("H100 SXM", "h100"), ("H200", "h200"),
        ("A100-80GB", "a100"), ("A100 40GB", "a100 40gb"), ("CUDA:1", "cuda:1"), ("CPU", "cpu"),
    ],
)  # fmt: skip
def test_names_of_devices(name, key):
    """An A100 with 40 GB is none of the known GPUs."""
    assert key_of(name) == key


def test_a_gpu_has_the_same_step_by_each_of_its_names():
    steps = [simulate_step(MODEL, X, device=name) for name in ("rtx4090", "RTX 4090")]
    assert steps[0].by_owner == steps[1].by_owner and "workspaces of cuBLAS" in steps[0].by_owner
    upper, lower = (will_it_fit(MODEL, X, device=name) for name in ("CUDA", "cuda"))
    assert upper.by_owner == lower.by_owner and upper.budget_bytes == lower.budget_bytes


@pytest.mark.in_turn
@pytest.mark.parametrize("name", ["will-it-fit", "fit", "serve"])
def test_commands_take_the_memory_of_the_device(name, tmp_path, capsys):
    pytest.importorskip("transformers")
    path = hf_config.write(tmp_path, hidden_size=64, num_hidden_layers=2, vocab_size=128)
    words = ["will-it-fit", "--serve"] if name == "serve" else [name]
    options = ["--hf-config", path, "--seq", "16", "--device", "RTX 4090"]
    assert cli.main([*words, *options]) == 0
    assert "of 22.5 GiB" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("words", [["will-it-fit"], ["will-it-fit", "--serve"], ["fit"]])
def test_a_wrong_budget_of_a_command_is_an_error_before_a_model_exists(words, tmp_path, capsys):
    path = tmp_path / "config.json"  # reading this file would be another error
    assert cli.main([*words, "--hf-config", str(path), "--budget", "much"]) == 2
    assert "--budget is 'much'. Expected" in " ".join(capsys.readouterr().err.split())
