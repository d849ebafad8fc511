"""Buffers that a forward writes: the recompute starts from the contents that the forward found."""

import copy

import pytest
import torch
from torch import nn

import storage_ops as so
from storage_ops.checkpoint.region import plain_region

from .paths import both_paths, know_at_once, regions_in_python

path, in_python = both_paths(plain_region), regions_in_python()


@pytest.fixture(autouse=True)
def known(monkeypatch):
    know_at_once(monkeypatch)


class Reads(nn.Module):
    """Only reads its buffers, of some dtypes and layouts."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.rand(4, dtype=torch.bfloat16))
        self.register_buffer("index", torch.tensor([3, 0, 1, 2]))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("turned", torch.randn(4, 3).t())
        self.register_buffer("missing", None)

    def forward(self, x):
        return (x[:, self.index] * self.scale + self.turned[0]).sin()


class Mean(nn.Module):
    """Reads its buffers and then writes them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("unused", torch.zeros(0))
        self.register_buffer("table", torch.randn(4, 3).t())  # read only, with other strides

    def forward(self, x):
        y = x.sin() * self.mean.clone() + self.count + self.table[0]
        with torch.no_grad():
            self.mean.mul_(0.5).add_(x.mean(0))
            self.count += 1
        return y


class Writes(nn.Module):
    """Writes a buffer in some calls only, in one of several ways."""

    def __init__(self, write):
        super().__init__()
        self.register_buffer("state", torch.ones(4))
        self.write, self.calls = write, 0

    def forward(self, x):
        y = x.sin() * self.state[:4].clone()
        if self.calls % 2:
            self.write(self, x.detach())
        return y


def in_place(module, x):
    module.state.mul_(2).add_(x[0])


def of_an_alias(module, x):
    module.state.view(4)[:2] *= 3


def with_another_size(module, x):
    size = len(module.state) + 1
    module.state.resize_(size).copy_(torch.arange(size))


def replaced(module, x):
    module.state = module.state + x[0]


WRITERS = {
    "batch norm": lambda: nn.BatchNorm1d(4),
    "batch norm without statistics": lambda: nn.BatchNorm1d(4, track_running_stats=False),
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4)), nn.InstanceNorm1d(1, track_running_stats=True), nn.Flatten()
    ),
    "only read": Reads,
    "mean": Mean,
    **{write.__name__: lambda w=write: Writes(w) for write in (in_place, of_an_alias)},
    **{write.__name__: lambda w=write: Writes(w) for write in (with_another_size, replaced)},
}


def seeded(create):
    torch.manual_seed(0)
    return create()


class Block(nn.Module):
    def __init__(self, writer):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.writer, self.last = nn.Linear(4, 4), WRITERS[writer](), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.writer(self.first(x)).sin())


def pair(writer, **options):
    """Return the same block with and without a checkpoint."""
    return Block(writer), so.CheckpointWrapper(Block(writer), **options)


def state_of(block):
    versions = [t._version for t in block.buffers()]
    return [*(t.clone() for t in block.buffers()), torch.tensor(versions)]


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


def steps(block, inputs, order=(), retain=0):
    """Return the gradients of forwards, whose backwards come after them in an order."""
    grads, parameters = {}, tuple(block.parameters())
    losses = []
    for x in inputs:
        if hasattr(block.writer, "calls"):
            block.writer.calls += 1
        losses.append(block(x).square().sum())
    for at in order or range(len(losses)):
        for again in reversed(range(retain + 1)):
            grads[at] = torch.autograd.grad(losses[at], parameters, retain_graph=again > 0)
    return [g for at in sorted(grads) for g in grads[at]]


def batches(number):
    return [torch.randn(5, 4, requires_grad=True) for _ in range(number)]


@pytest.mark.parametrize(
    "options", [{}, {"ops_to_save": ["aten.addmm"]}], ids=["full", "selective"]
)
@pytest.mark.parametrize("writer", WRITERS)
def test_they_are_written_once_and_read_as_in_the_forward(path, writer, options, in_python):
    plain, model = pair(writer, **options)
    for retain in (0, 0, 0, 1):
        inputs = batches(2)
        right = steps(plain, inputs[:1])
        assert same(steps(model, inputs[:1], retain=retain), right)
        assert same(state_of(model), state_of(plain))
    if path == "C++" and writer in ("batch norm", "instance norm", "only read"):
        in_python.clear()
        steps(model, batches(1))
        assert in_python == []


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("writer", ["batch norm", "mean", "in_place"])
def test_backwards_of_several_forwards(path, writer, order):
    plain, model = pair(writer)
    for _ in range(3):
        inputs = batches(3)
        assert same(steps(model, inputs, order), steps(plain, inputs, order))
        assert same(state_of(model), state_of(plain))


def evaluates(block):
    block.eval()


def replaces(block):
    block.writer._buffers.update({n: torch.ones_like(b) for n, b in block.writer.named_buffers()})


def needs_no_gradient(block):
    block.first.weight.requires_grad_(False)


@pytest.mark.parametrize("change", [evaluates, replaces, needs_no_gradient])
@pytest.mark.parametrize("writer", ["batch norm", "mean"])
def test_python_takes_over_with_the_copies(path, writer, change):
    _, model = pair(writer)
    (x,) = batches(1)
    for _ in range(2):
        before = copy.deepcopy(model.state_dict())
        inputs = (x, model.first.bias)
        right = torch.autograd.grad(model(x).square().sum(), inputs)
        after = copy.deepcopy(model.state_dict())
        model.load_state_dict(before)
        y = model(x).square().sum()
        assert same([*model.state_dict().values()], [*after.values()])
        change(model)
        now = state_of(model)
        assert same(torch.autograd.grad(y, inputs), right)
        assert same(state_of(model), now)
        model.train().requires_grad_()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_in_the_recompute_puts_them_back(path, error):
    class Fails(Mean):
        fails = False

        def forward(self, x):
            y = super().forward(x)
            if type(self).fails:
                raise error
            return y.exp()

    layer = so.CheckpointWrapper(Fails())
    (x,) = batches(1)
    for fails in (False, False, True, False):
        y = layer(x).sum()
        after = state_of(layer)
        Fails.fails = fails
        if fails:
            with pytest.raises(error):
                y.backward()
        else:
            y.backward()
        Fails.fails = False
        assert same(state_of(layer), after)


def test_a_backward_inside_the_forward_reads_those_from_before_it(path):
    class Inner(Mean):
        def forward(self, x):
            y = super().forward(x)
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return y * slope

    plain, layer = seeded(Inner), so.CheckpointWrapper(seeded(Inner))
    for _ in range(4):
        (x,) = batches(1)
        right, got = (torch.autograd.grad(each(x).sum(), x) for each in (plain, layer))
        assert same(got, right) and same(state_of(layer), state_of(plain))


@pytest.mark.parametrize("writer", ["batch norm", "mean", "with_another_size"])
def test_the_output_is_discarded(path, writer):
    plain, model = Block(writer), Block(writer)
    producer = lambda x: model.writer(model.first(x))  # noqa: E731
    consumer = lambda h: model.last(h.sin())  # noqa: E731
    for _ in range(4):
        (x,) = batches(1)
        for block in (plain, model):
            if hasattr(block.writer, "calls"):
                block.writer.calls += 1
        right = torch.autograd.grad(plain(x).square().sum(), (x, *plain.parameters()))
        y = so.output_discard(producer, consumer)(x)
        got = torch.autograd.grad(y.square().sum(), (x, *model.parameters()))
        assert same(got, right) and same(state_of(model), state_of(plain))


def test_a_buffer_of_two_modules_is_restored_once(path):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = Mean(), Mean()
            self.two.mean = self.one.mean

        def forward(self, x):
            return self.two(self.one(x))

    plain, model = seeded(Two), so.CheckpointWrapper(seeded(Two))
    for _ in range(4):
        (x,) = batches(1)
        right, got = (torch.autograd.grad(each(x).sum(), x) for each in (plain, model))
        assert same(got, right) and same(state_of(model), state_of(plain))
