"""Estimates of packed sequences and of CTC. C++ code reads their lengths without an op."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import storage_ops as so
from storage_ops.fitting.step import StepLedger
from storage_ops.simulate.values.assume import Assumption

from .cpu_peaks import CPU


def agree(step):
    """Check that the simulated peak of a step on a CPU equals the measured one up to 1 KiB."""
    step_ledger = StepLedger(CPU, Assumption(None))
    with step_ledger.open(step, (), {}):
        step_ledger.run(step)
    levels = step_ledger.levels()
    with so.memory.measure("cpu") as m:
        step()
    assert abs(max(levels) - levels[0] - m.peak_bytes) < 1 << 10


class Packed(nn.Module):
    def __init__(self, kind, **kwargs):
        super().__init__()
        self.embed, self.rnn = nn.Linear(32, 32), kind(32, 48, **kwargs)

    def forward(self, x, lengths):
        first = self.rnn.batch_first
        packed = pack_padded_sequence(self.embed(x), lengths, first, enforce_sorted=False)
        return pad_packed_sequence(self.rnn(packed)[0], first, total_length=14)


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("kind", "kwargs"),
    [
        (nn.LSTM, {"batch_first": True, "bidirectional": True}),
        (nn.GRU, {}),
        (nn.RNN, {"batch_first": True}),
    ],
    ids=["LSTM", "GRU", "RNN"],
)
def test_packed_sequences(kind, kwargs):
    model, lengths = Packed(kind, **kwargs), torch.randint(1, 13, (8,))
    lengths[3] = 12
    x = torch.randn((8, 12, 32) if kwargs else (12, 8, 32))

    def step():
        model.zero_grad()
        y, unpacked = model(x, lengths)
        assert torch.equal(unpacked, lengths) and y.shape[1 if kwargs else 0] == 14
        y.sum().backward()

    agree(step)


def test_a_plan_for_packed_sequences():
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
    packed = Packed(nn.GRU, batch_first=True)
    packed.embed = model
    batch = torch.randn(8, 12, 32), torch.tensor([12, 12, 9, 7, 6, 3, 2, 1])
    e = so.memory.will_it_fit(packed, batch, device="cpu", loss=lambda out: out[0].sum())
    plan = so.fit(packed, batch, e.peak_bytes, loss=lambda out: out[0].sum())
    assert plan.peak_bytes <= e.peak_bytes


@pytest.mark.parametrize("kind", [torch.tensor, tuple, list])
def test_ctc_loss(kind):
    scores = torch.randn(50, 16, 20, requires_grad=True)
    targets = torch.randint(1, 20, (16, 30))
    lengths = kind([50] * 16), kind(torch.randint(10, 30, (16,)).tolist())

    def step():
        scores.grad = None
        F.ctc_loss(scores.log_softmax(2), targets, *lengths).backward()

    agree(step)
