"""Peers in benchmarks compute the same loss as this package."""

import sys
import types

import pytest
import torch
from torch.nn import functional as F

from benchmarks._loss_peers import PEERS, Missing, Task, Unable, peers
from benchmarks.linear_cross_entropy import Bench, make, measure

SLOW = ("torch.compile", "Inductor auto_chunker, 8 chunks")  # compilation takes too long for a test


def task(**more):
    options = {"tokens": 24, "vocab": 40, "dtype": torch.float32, "device": "cpu", **more}
    return Task("small", **options)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_peers_that_run_here_agree(softcap, reduction):
    asked = task(softcap=softcap, reduction=reduction)
    x, w = torch.randn(24, 8), 2 * torch.randn(40, 8)
    target = torch.randint(40, (24,))
    target[::3] = -100
    z = x.double() @ w.double().t()
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    expected = F.cross_entropy(z, target, reduction=reduction)
    tried = []
    for name, make_loss in PEERS.items():
        try:
            loss = make_loss(asked)
        except Unable:
            continue
        if name not in SLOW:
            tried.append(name)
            torch.testing.assert_close(loss(x, w, target).double(), expected, rtol=1e-5, atol=1e-5)
    ours = Bench(x, w, target, asked).ours()
    torch.testing.assert_close(ours(x, w, target).double(), expected, rtol=1e-5, atol=1e-5)
    assert "eager" in tried


def test_absent_peers_are_named(capsys):
    installed = dict(peers(task()))
    printed = capsys.readouterr().out
    assert "eager" in installed and "Liger" not in installed
    for name in ("Liger", "CCE", "quack"):
        assert f"skipped: {name}: needs an NVIDIA GPU" in printed


def test_the_options_of_a_package_are_passed_on(monkeypatch):
    calls = []
    fake = types.ModuleType("liger_kernel.transformers.functional")
    fake.liger_fused_linear_cross_entropy = lambda x, w, t, **options: calls.append(options)
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    PEERS["Liger, fp32 sums"](task(device="cuda", softcap=30.0))(None, None, None)
    assert calls == [{"reduction": "mean", "softcap": 30.0, "accum_dtype": torch.float32}]
    with pytest.raises(Missing, match="does not import"):
        PEERS["CCE"](task(device="cuda"))


@pytest.mark.parametrize("variant", ["mean", "none", "half ignored"])
def test_rows_of_one_shape(variant, monkeypatch):
    import benchmarks.linear_cross_entropy as benchmark

    monkeypatch.setitem(benchmark.SHAPES, "tiny", (64, 16, 1000))
    monkeypatch.setattr(benchmark, "peers", lambda task: [("eager", task.plain)])
    options = types.SimpleNamespace(device="cpu", shares=[4], all_plans=False, repeats=1)
    rows = list(measure(make("tiny", torch.float32, variant, options), variant, options))
    losses = {row["case"]: row["loss"] for row in rows if row["loss"] != ""}
    assert {"eager", "storage_ops, default budget", "storage_ops, 1/4"} == {*losses}
    assert max(losses.values()) - min(losses.values()) < 1e-4 and min(losses.values()) > 1
    peaks = {row["case"]: row["peak (MiB)"] for row in rows}
    assert peaks["storage_ops, 1/4"] < peaks["eager"]
    frozen = [row["case"] for row in rows if "its own floor" in row["case"]]
    assert len(frozen) == (3 if variant == "mean" else 0)
