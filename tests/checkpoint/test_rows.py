"""A row of layers with mode "output_discard" takes little more memory than full checkpoints."""

import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

import storage_ops as so
from storage_ops.checkpoint.region.rows import SavedBytes
from storage_ops.checkpoint.saved.guard import storage_key


class Heavy(nn.Module):
    """Saves many times the bytes of its output."""

    def __init__(self, width=32):
        super().__init__()
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(8 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)).sin())


class Half(nn.Module):
    """Saves a mask of half the size of its output."""

    def forward(self, x):
        return torch.where(x > 0, x, x * 0.5)


class Pair(nn.Module):
    """A layer with two inputs."""

    def __init__(self):
        super().__init__()
        self.heavy = Heavy()

    def forward(self, x, y):
        return self.heavy(x * y), x + y


class Row(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.storages = []

    def forward(self, x):
        self.storages.clear()
        for layer in self.layers:
            x = layer(*x) if isinstance(layer, Pair) else layer(x)
            for t in x if isinstance(x, tuple) else (x,):
                self.storages.append(weakref.ref(t.untyped_storage()))
        x = sum(x) if isinstance(x, tuple) else x
        return x.square().mean()

    def freed(self):
        return [storage().nbytes() == 0 for storage in self.storages if storage() is not None]


def step(row, x, mode):
    """Return gradients, peak bytes, and for each output whether it was freed."""
    kinds = sorted({type(layer) for layer in row.layers}, key=str)
    if mode:
        so.apply_activation_checkpoint(row, {"layer_classes": kinds, "mode": mode})
    wanted = [x, *row.parameters()]
    with so.memory.measure() as measurement:
        loss = row(x)
        freed = row.freed()
        gradients = torch.autograd.grad(loss, wanted)
    so.remove_activation_checkpoint(row)
    return gradients, measurement.peak_bytes, freed


def test_large_layers_keep_their_outputs():
    row, x = Row(Heavy() for _ in range(8)), torch.randn(512, 32, requires_grad=True)
    right, plain, _ = step(row, x, None)
    _, full, _ = step(row, x, "full")
    got, peak, freed = step(row, x, "output_discard")
    assert all(map(torch.equal, got, right))
    assert peak <= 1.05 * full < 0.5 * plain
    assert freed == [False] * 7 + [True]


def test_outputs_of_small_layers_are_freed():
    row = Row([nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), nn.Tanh()] * 3)
    x = torch.randn(64, 32, requires_grad=True)
    right, *_ = step(row, x, None)
    got, _, freed = step(row, x, "output_discard")
    assert all(map(torch.equal, got, right)) and all(freed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_ends_before_it_takes_too_much_memory(dtype):
    row, x = Row(Half() for _ in range(16)), torch.randn(4096, dtype=dtype, requires_grad=True)
    right, *_ = step(row, x, None)
    _, full, _ = step(row, x, "full")
    got, peak, freed = step(row, x, "output_discard")
    assert all(map(torch.equal, got, right)) and peak <= 1.3 * full
    assert any(freed) and all(freed) == (dtype == torch.float32)  # a mask of a quarter


def test_layers_with_several_inputs():
    row = Row(Pair() for _ in range(6))
    x = torch.randn(64, 32, requires_grad=True)
    forward = row.forward
    row.__class__ = type("Paired", (Row,), {"forward": lambda self, x: forward((x, x.sin()))})
    right, *_ = step(row, x, None)
    _, full, _ = step(row, x, "full")
    got, peak, _ = step(row, x, "output_discard")
    assert all(map(torch.equal, got, right)) and peak <= 1.3 * full


def test_saved_bytes_of_inputs_parameters_and_outputs_do_not_count():
    layer = nn.Linear(16, 32)
    region = so.checkpoint.region.region.Region(
        lambda x: (h := layer(x)).exp() * h.sum(),
        (x := torch.randn(8, 16, requires_grad=True),),
        {},
        so.checkpoint.region.region.Options(counts_saved=True),
    )
    region.forward((x,), {})
    # The region saves x, the weight, exp and its sum. The first two do not count.
    assert region.allocated.total == 4 * (8 * 32 + 1)


def test_the_bytes_of_wrapper_subclasses_are_those_inside():
    """A wrapper has a storage of its own, so the tensor inside it must keep its address."""
    saved, sizes = SavedBytes(), range(1, 20)
    for size in sizes:
        t = torch.randn(size)
        wrapper = TwoTensor(t, t)
        saved.add(wrapper, storage_key(wrapper))
        del t, wrapper  # the next tensor may take the address
    saved.finish([], [])
    assert saved.total == 4 * sum(sizes)
