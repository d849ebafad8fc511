"""All ways that are compared compute the same thing."""

import pytest
import torch

from benchmarks.selective_checkpoint import PLAIN, by_hook, cases_of, discarding_peers
from storage_ops import OutputDiscardCheckpoint

SIZES = {"layers": 1, "width": 32, "heads": 2, "batch": 2, "tokens": 16}


@pytest.mark.parametrize("mode", ["eager", "traced"])
def test_every_way_gives_the_same_loss_and_gradients(mode):
    cases, models = cases_of(mode, SIZES, "cpu", torch.float32)
    base = PLAIN if mode == "eager" else f"{PLAIN}, eager"
    losses = {name: run() for name, run in cases.items() if "Megatron" not in name}
    expected = [p.grad for p in models[base].parameters()]
    assert len(losses) >= 6 and any(name.startswith("storage_ops") for name in losses)
    for name, loss in losses.items():
        torch.testing.assert_close(loss, losses[base])
        for p, right in zip(models[name].parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, right)


def test_classes_of_other_packages_are_called_by_their_hook(monkeypatch, capsys):
    monkeypatch.setitem(
        discarding_peers.__globals__["DISCARDING"],
        "ours",
        ("storage_ops", "OutputDiscardCheckpoint"),
    )
    monkeypatch.setitem(discarding_peers.__globals__["DISCARDING"], "none", ("no_such", "Class"))
    found = dict(discarding_peers())
    assert "ours" in found and "none" not in found
    assert "skipped: none Class: not usable here (ModuleNotFoundError" in capsys.readouterr().out
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    for run in (found["ours"], by_hook(OutputDiscardCheckpoint)):
        gradient, *_ = torch.autograd.grad(run(torch.sin, lambda h: h @ w, x).sum(), x)
        right, *_ = torch.autograd.grad((torch.sin(x) @ w).sum(), x)
        assert torch.equal(gradient, right)
