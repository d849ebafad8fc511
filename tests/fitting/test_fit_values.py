"""Plans of layers whose sizes depend on the values of integer arguments."""

import pytest
import torch
from torch import nn

import storage_ops as so


class Padding(nn.Module):
    """Creates as many rows as the longest sequence has tokens."""

    def __init__(self):
        super().__init__()
        self.linear, self.act = nn.Linear(64, 64), nn.ReLU()

    def forward(self, x, lengths):
        padded = x.new_zeros(len(lengths), int(lengths.max()), x.shape[1])
        return x + self.act(self.linear(padded)).sum((0, 1)) * 1e-3


class Halving(Padding):
    """Returns other lengths, which the next layer reads."""

    def forward(self, x, lengths):
        return super().forward(x, lengths), lengths // 2


class Net(nn.Module):
    def __init__(self, kind, scales=(1, 1, 1, 1)):
        super().__init__()
        self.layers, self.scales = nn.ModuleList(kind() for _ in scales), scales

    def forward(self, x, lengths):
        for layer, scale in zip(self.layers, self.scales, strict=True):
            out = layer(x, lengths * scale)
            x, lengths = out if isinstance(out, tuple) else (out, lengths)
        return x


@pytest.mark.parametrize(
    "make",
    [
        lambda: Net(Padding),
        lambda: Net(Padding, (1, 3, 1, 2)),
        lambda: Net(Halving),
    ],
    ids=["the same", "other lengths in each layer", "lengths that layers return"],
)
def test_plans_know_the_values_that_layers_read(make):
    model, x, lengths = make(), torch.randn(10, 64), torch.tensor([300, 500, 200])
    plain = so.memory.simulate_step(model, (x, lengths)).peak_bytes
    rubbish = [torch.full((3,), 7 << 40) for _ in range(100)]
    del rubbish
    plan = so.fit(model, (x, lengths), int(0.9 * plain))
    with plan_applied(plan):
        model(x, lengths).sum().backward()
        model.zero_grad()
        with so.memory.measure("cpu") as m:
            model(x, lengths).sum().backward()
        inputs_bytes = sum(p.nbytes for p in model.parameters()) + x.nbytes + lengths.nbytes
    assert abs(plan.peak_bytes - m.peak_bytes - inputs_bytes) <= 0.01 * plan.peak_bytes
    # The sum over layers agrees with a simulation of the whole step.
    assert abs(plan.totals["none"][0] - plain) <= 1e-3 * plain


class Counting(Padding):
    """Creates as many rows as a tensor with one number says."""

    def forward(self, x, number):
        return super().forward(x, number.round().long().view(1))


@pytest.mark.parametrize(
    ("kind", "lengths"),
    [
        (Padding, torch.tensor([30, 50, 20])),
        (Counting, torch.tensor(50.0)),
        (Counting, torch.tensor([50.0])),
        (Padding, torch.tensor([30.0, 50.0, 20.0])),
    ],
    ids=["integers", "a float", "one float", "floats"],
)
def test_layers_are_equal_only_if_they_read_equal_values(kind, lengths):
    # Lengths are freed after their layer, so lengths of later layers can be at the same address.
    model, x = Net(kind, (1, 3, 2, *range(4, 16))), torch.randn(10, 64)
    peak = so.memory.simulate_step(model, (x, lengths)).peak_bytes
    model(x, lengths).sum().backward()
    model.zero_grad()
    with so.memory.measure("cpu") as m:
        model(x, lengths).sum().backward()
    inputs_bytes = sum(p.nbytes for p in model.parameters()) + x.nbytes + lengths.nbytes
    assert abs(peak - m.peak_bytes - inputs_bytes) <= 1e-3 * peak


class OwnLength(Padding):
    """Creates as many rows as a tensor of the layer says."""

    def __init__(self, where, length):
        super().__init__()
        if where == "buffer":
            self.register_buffer("length", torch.tensor(length))
        elif where == "mask":
            self.register_buffer("length", torch.arange(2000) < length)
        elif where == "parameter":
            self.length = nn.Parameter(torch.tensor(float(length)), requires_grad=False)
        else:
            self.length = torch.tensor(length)

    def forward(self, x):
        return super().forward(x, self.length.sum().long().view(1))


@pytest.mark.parametrize("where", ["buffer", "mask", "parameter", "attribute"])
def test_layers_are_equal_only_if_their_tensors_have_equal_values(where):
    model = nn.Sequential(*(OwnLength(where, length) for length in (300, 900, 600, 300, 900)))
    x = torch.randn(10, 64)
    peak = so.memory.simulate_step(model, x).peak_bytes
    model(x).sum().backward()
    model.zero_grad()
    with so.memory.measure("cpu") as m:
        model(x).sum().backward()
    own = sum(t.nbytes for t in (*model.parameters(), *model.buffers())) + x.nbytes
    assert abs(peak - m.peak_bytes - own) <= 1e-3 * peak
    plan = so.fit(model, x, int(0.7 * peak), actions=["full"])
    with plan_applied(plan):
        assert so.memory.simulate_step(model, x).peak_bytes == plan.peak_bytes


def test_values_that_no_code_reads_do_not_make_layers_different():
    class Counted(nn.Sequential):
        runs = 0

        def forward(self, x):
            Counted.runs += 1
            return super().forward(x) * self[1].scale

    def layer(scale):
        made = Counted(nn.Linear(64, 64), nn.ReLU())
        made[1].register_buffer("scale", torch.tensor(scale))
        return made

    model, x = nn.Sequential(*map(layer, range(8))), torch.randn(10, 64)
    so.memory.simulate_step(model, x, loss=lambda out: out.square().mean())
    assert 0 < Counted.runs < 4


class plan_applied:
    def __init__(self, plan):
        self.plan = plan

    def __enter__(self):
        self.plan.apply()

    def __exit__(self, *_):
        self.plan.undo()


class Choosing(Padding):
    def forward(self, x, lengths):
        return super().forward(x, lengths), x[: len(lengths)].argmax(1)


def test_unknown_values_are_an_error_in_fit():
    model, batch = Net(Choosing), (torch.randn(10, 64), torch.tensor([3, 5, 2]))
    for call in (so.memory.simulate_step, lambda *args: so.fit(*args, "1GiB")):
        with pytest.raises(RuntimeError, match="needs the values of a tensor"):
            call(model, batch)


class Routed(nn.Module):
    """A layer whose router chooses the tokens of each expert."""

    def __init__(self, experts=4):
        super().__init__()
        self.router = nn.Linear(32, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(experts)
        )

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(1, -1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (chosen[:, 0] == i).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows])
        return x + out


def test_layers_with_a_router_are_planned_with_an_assumption():
    model, x = nn.Sequential(*(Routed() for _ in range(3))), torch.randn(512, 32)
    with pytest.raises(RuntimeError, match=r"Pass assume=\{'topk': "):
        so.fit(model, x, "1GiB")
    assume = {"topk": 0.25}
    none = so.memory.simulate_step(model, x, assume=assume).peak_bytes
    plan = so.fit(model, x, int(0.6 * none), actions=["full"], assume=assume)
    with pytest.raises(ValueError, match=r"`assume` is 1\.5"):
        so.fit(model, x, "1GiB", assume=1.5)
    plan.apply()
    step = so.memory.simulate_step(model, x, assume=assume)
    assert step.peak_bytes == plan.peak_bytes <= 0.6 * none


class Writing(nn.Module):
    """A layer that writes in place, so a region copies its parameters in the first forward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(256, 512))

    def forward(self, x):
        with torch.no_grad():
            out = torch.zeros_like(x)
        out.index_add_(0, torch.arange(len(x)), (x @ self.weight).exp() @ self.weight.T)
        return out


def test_copies_of_parameters_are_not_compared_in_a_simulation():
    model, x = nn.Sequential(*(Writing() for _ in range(3))), torch.randn(512, 256)
    none = so.memory.simulate_step(model, x).peak_bytes
    so.apply_activation_checkpoint(model, {"layer_classes": ["Writing"]})
    assert so.memory.simulate_step(model, x).peak_bytes < 0.8 * none
