"""Modules, reports, integrations and training jobs on a GPU."""

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import storage_ops as so
from benchmarks._gpt import Config
from benchmarks._training import Job, Settings

from ..checkpoint.blocks import Model
from .devices import each_device

TINY = Config(2, 64, 4, 128, context=32, batch=4, vocab=1003)
BFLOAT16_TOLERANCE = 5e-3


@each_device
def test_the_loss_as_a_module(device):
    weight = torch.rand(101, device=device)
    options = {"label_smoothing": 0.1, "softcap": 5.0}
    loss = so.LinearCrossEntropyLoss(24, 101, True, weight=weight, device=device, **options)
    x = torch.randn(3, 8, 24, device=device, requires_grad=True)
    target = torch.randint(101, (3, 8), device=device)
    logits = 5 * torch.tanh(loss.linear(x) / 5)
    right = F.cross_entropy(logits.flatten(0, 1), target.flatten(), weight, label_smoothing=0.1)
    leaves = (x, *loss.parameters())
    ours = loss(x, target)
    torch.testing.assert_close(ours, right)
    grads = zip(*(torch.autograd.grad(y, leaves) for y in (ours, right)), strict=True)
    for a, b in grads:
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@each_device
def test_output_discard_as_a_module_that_moves_and_copies(device):
    up, down = nn.Sequential(nn.Linear(16, 64), nn.GELU()), nn.Linear(64, 16)
    module = copy.deepcopy(so.OutputDiscard(up, down)).to(device)
    x = torch.randn(4, 16, device=device, requires_grad=True)
    right = torch.autograd.grad(down.to(device)(up.to(device)(x)).sum(), x)[0]
    assert torch.equal(torch.autograd.grad(module(x).sum(), x)[0], right)
    assert set(module.state_dict()) == set(so.OutputDiscard(up, down).state_dict())


@each_device
def test_a_checkpoint_wrapper_and_its_removal(device):
    plain = Model(layers=2, width=32, dropout=0.0).to(device)
    ours = copy.deepcopy(plain)
    for i, layer in enumerate(ours.layers):
        ours.layers[i] = so.CheckpointWrapper(layer)
    x = torch.randn(2, 8, 32, device=device, requires_grad=True)
    right = torch.autograd.grad(plain(x).square().sum(), x)[0]
    assert torch.equal(torch.autograd.grad(ours(x).square().sum(), x)[0], right)
    so.remove_activation_checkpoint(ours)
    assert not any(isinstance(m, so.CheckpointWrapper) for m in ours.modules())
    assert torch.equal(torch.autograd.grad(ours(x).square().sum(), x)[0], right)


@each_device
def test_reports_of_a_model_on_the_device(device):
    model, x = Model(layers=2, width=32).to(device), torch.randn(2, 8, 32, device=device)
    table = so.explain_policy(model.layers[0], x, policy="matmuls")
    assert any(row.saved and row.op.startswith("aten.mm") for row in table.rows)
    so.apply_activation_checkpoint(model, {"layer_classes": ["Block"], "policy": "matmuls"})
    assert "2 of 2" in str(so.checkpoint_report(model, x))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.cuda  # for the CPU: tests/benchmarks/test_train_gpt.py
@pytest.mark.parametrize("kv_heads", [None, 2], ids=["gpt2", "llama"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_with_all_parts_has_the_losses_of_the_plain_model(kv_heads, dtype):
    config = dataclasses.replace(TINY, kv_heads=kv_heads)
    settings, data = Settings(config, 5, accumulate=2, dtype=dtype), torch.randint(1003, (2000,))
    losses, peaks = {}, {}
    for case in ("plain", "all", "traced+all"):
        job = Job(case, settings, data, torch.device("cuda"))
        for _ in range(5):
            job.step()
        losses[case], peaks[case] = job.losses, job.memory().peak_bytes
    tolerance = 1e-4 if dtype == "float32" else BFLOAT16_TOLERANCE
    for case in ("all", "traced+all"):
        torch.testing.assert_close(losses[case], losses["plain"], rtol=tolerance, atol=0)
        assert peaks[case] < peaks["plain"]


@pytest.mark.cuda
def test_a_resumed_job_on_a_gpu_continues_exactly(tmp_path):
    device, data = torch.device("cuda"), torch.randint(1003, (2000,))
    settings = Settings(dataclasses.replace(TINY, dropout=0.1), 6, dtype="bfloat16")
    jobs = [Job("all", settings, data, device, tmp_path / name) for name in "ab"]
    for job in jobs:
        for _ in range(3):
            job.step()
    jobs[1].save()
    jobs[1] = Job("all", settings, data, device, tmp_path / "b")
    assert jobs[1].resume()
    for job in jobs:
        for _ in range(3):
            job.step()
    # A GPU sums the gradient of an embedding in any order.
    torch.testing.assert_close(jobs[0].losses, jobs[1].losses, rtol=1e-3, atol=0)
    assert jobs[0].losses[:3] == pytest.approx(jobs[1].losses[:3], rel=1e-4)


@each_device
@pytest.mark.parametrize("name", ["Llama", "GPT-2, tied", "Gemma 2, soft-cap"])
def test_patched_models_of_transformers(device, name):
    pytest.importorskip("transformers")
    from ..integrations.models import check_against_plain, make

    ids = torch.randint(3, 97, (3, 9), device=device)
    model = make(name).to(device)
    check_against_plain(model, lambda model: model(ids, labels=ids), rtol=1e-4, atol=1e-5)


@pytest.mark.cuda
def test_the_demo(tmp_path, capsys):
    from storage_ops.cli import main

    text = tmp_path / "text"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 2000)
    command = ["demo", "--device", "cuda", "--steps", "4", "--text", str(text)]
    assert main([*command, "--plot", str(tmp_path / "demo.png")]) == 0
    assert (tmp_path / "demo.png").stat().st_size > 0
    assert "saved" in capsys.readouterr().out
