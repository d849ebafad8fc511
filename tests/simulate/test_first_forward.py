"""A simulation predicts a later step, and leaves the first forward of each module as it was."""

import torch
from torch import nn

import storage_ops as so

WIDTH = 512  # its weight of 1 MiB is copied only before the first forward


class Clamped(nn.Module):
    """Writes its weight in place, if the flag is set. Its code may always do so."""

    def __init__(self, writes=False):
        super().__init__()
        self.linear, self.writes = nn.Linear(WIDTH, WIDTH, bias=False), writes

    def forward(self, x):
        if self.writes:
            with torch.no_grad():
                self.linear.weight.mul_(0.5)
        return self.linear(x).sin()


def checkpointed(**options):
    torch.manual_seed(0)
    model = nn.Sequential(*(Clamped(**options) for _ in range(4)))
    so.apply_activation_checkpoint(model, {"layer_classes": ["Clamped"]})
    return model


def peak(model, x):
    return so.memory.simulate_step(model, x, loss=torch.sum, optimizer=torch.optim.SGD).peak_bytes


def test_the_first_simulation_has_the_peak_of_a_second_step():
    model, x = checkpointed(), torch.randn(8, WIDTH)
    first = peak(model, x)
    assert peak(model, x) == first
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):
        static = x.nbytes + sum(p.nbytes for p in model.parameters())
        with so.memory.measure() as m:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert abs(m.peak_bytes + static - first) <= 0.01 * first


def test_a_simulation_does_not_count_as_the_first_forward():
    """The first forward copies a weight that it writes, so that a recompute reads it again."""
    model, plain, x = checkpointed(writes=True), checkpointed(writes=True), torch.randn(8, WIDTH)
    so.remove_activation_checkpoint(plain)
    peak(model, x)
    for each in (model, plain):
        each(x).sum().backward()
    for ours, right in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, right) and torch.equal(ours.grad, right.grad)
