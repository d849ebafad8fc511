"""All cases of the benchmark compute the same loss and gradients."""

import pytest
import torch

from benchmarks import _discarding
from benchmarks.selective_checkpoint import PLAIN, cases_of

SIZES = {"layers": 1, "width": 32, "heads": 2, "batch": 2, "tokens": 16}


@pytest.mark.in_turn
@pytest.mark.parametrize("mode", ["eager", "traced"])
def test_every_case_gives_the_same_loss_and_gradients(mode):
    cases, models = cases_of(mode, SIZES, "cpu", torch.float32)
    base = PLAIN if mode == "eager" else f"{PLAIN}, eager"
    losses = {name: run() for name, run in cases.items()}
    expected = [p.grad for p in models[base].parameters()]
    assert len(losses) >= 6 and any(name.startswith("storage_ops") for name in losses)
    for name, loss in losses.items():
        torch.testing.assert_close(loss, losses[base])
        for p, right in zip(models[name].parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, right)


def test_classes_of_other_packages_are_tried_first(monkeypatch, capsys):
    for name, place in {
        "ours": ("storage_ops", "OutputDiscardCheckpoint"),
        "none": ("no_such", "Class"),
        "old": ("builtins", "object"),
    }.items():
        monkeypatch.setitem(_discarding.DISCARDING, name, place)
    usable = _discarding.peers("cpu")
    assert "ours" in usable and "none" not in usable and "old" not in usable
    said = capsys.readouterr().out
    assert "skipped: none Class: not usable here (ModuleNotFoundError" in said
    assert "skipped: old object: not usable here (AttributeError" in said
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    loss = _discarding.by_hook(usable["ours"], torch.sin, lambda h: h @ w, x).sum()
    gradient, *_ = torch.autograd.grad(loss, x)
    right, *_ = torch.autograd.grad((torch.sin(x) @ w).sum(), x)
    assert torch.equal(gradient, right)
