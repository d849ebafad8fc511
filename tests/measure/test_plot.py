"""Owners of memory in measurements and estimates, and pictures of them."""

import pickle

import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.text import Text
from torch import nn
from torch.cuda import _memory_viz

import storage_ops as so
from storage_ops.measure import plot

MIB = 1 << 20


def model():
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), nn.GELU()) for _ in range(1)])


def at_peak(m):
    peak = max(range(len(m.timeline)), key=lambda i: m.timeline[i].nbytes)
    owners = {}
    for life in m.lives:
        if life.start <= peak and (life.end is None or life.end > peak):
            owners[life.owner] = owners.get(life.owner, 0) + life.nbytes
    return owners


def test_owners_of_a_measured_step():
    net, x, outputs = model(), torch.randn(128, 64), []
    optimizer = torch.optim.Adam(net.parameters())

    def step():
        outputs.append(net(x))
        outputs.pop().sum().backward()
        optimizer.step()

    weight, activation = net[0][0].weight.nbytes, 128 * 256 * 4
    with so.memory.measure(model=net) as m:
        step()
    kept = {}
    for life in m.lives:
        if life.end is None:
            kept[life.owner] = kept.get(life.owner, 0) + life.nbytes
    parameters = sum(p.nbytes for p in net.parameters())
    state = sum(t.nbytes for s in optimizer.state.values() for t in s.values())
    assert kept == {"gradients": parameters, "optimizer state": state}
    largest = {life.nbytes for life in m.lives if life.owner == "activations of 0.0"}
    assert activation in largest and "activations of 0.1" in {life.owner for life in m.lives}
    assert weight < parameters and not net[0][0].weight._post_accumulate_grad_hooks


def test_gradients_that_are_dropped_have_owners():
    net = model()
    with so.memory.measure(model=net) as m:
        net(torch.randn(8, 64)).sum().backward()
        net.zero_grad()
    assert {life.nbytes for life in m.lives if life.owner == "gradients"} == {
        p.nbytes for p in net.parameters()
    }
    assert m.kept_bytes == 0


def test_lives_add_up_to_the_timeline():
    net, x = model(), torch.randn(128, 64)
    with so.memory.measure(model=net) as m:
        net(x).sum().backward()
    estimated = so.memory.estimate(lambda: net(x).sum().backward())
    step = so.memory.simulate_step(net, x, optimizer=torch.optim.SGD)
    for result in (m, estimated, step):
        for at, sample in enumerate(result.timeline):
            alive = (b for b in result.lives if b.start <= at and (b.end is None or b.end > at))
            assert sum(life.nbytes for life in alive) == sample.nbytes
    assert at_peak(estimated) == estimated.by_owner
    assert at_peak(step) == step.by_owner


def test_owners_of_an_estimate():
    net = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).to("meta")
    optimizer = torch.optim.AdamW(net.parameters())
    x = torch.empty(16384, 1024, device="meta")

    def step(x):
        net(x).sum().backward()
        optimizer.step()

    e = so.memory.estimate(step, x)
    parameters = sum(p.nbytes for p in net.parameters())
    assert e.by_owner["activations of 0"] == e.by_owner["activations of 1"] == 256 * MIB
    assert parameters <= e.by_owner["parameters"] < 1.01 * parameters
    assert x.nbytes <= e.by_owner["inputs"] < 1.01 * x.nbytes
    assert sum(e.by_owner.values()) == e.peak_bytes


def test_wrong_types_and_compiled_models_are_refused():
    with pytest.raises(TypeError, match=r"`model` is 3, a int\. Expected"):
        so.memory.measure(model=3)
    net = nn.Sequential(torch.compile(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=r"`model` has a compiled module, 0\. Expected none"):
        so.memory.measure(model=net)
    net = nn.Linear(2, 2)
    net.compile()
    with pytest.raises(ValueError, match="`model` has a compiled module, itself"):
        so.memory.measure(model=net)


def test_an_error_leaves_the_model_unchanged():
    net = model()
    call = nn.Linear.__call__
    with pytest.raises(RuntimeError, match="shapes cannot"), so.memory.measure(model=net):
        net(torch.randn(3, 5))
    assert nn.Linear.__call__ is call
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())


@pytest.mark.parametrize("ending", ["png", "svg", "html"])
def test_files(ending, tmp_path):
    net = model()
    with so.memory.measure(model=net) as m:
        net(torch.randn(128, 64)).sum().backward()
    path = tmp_path / f"memory.{ending}"
    m.plot(path)
    start = {"png": b"\x89PNG", "svg": b"<?xml", "html": (b"<!doctype html>", b"<html>")}[ending]
    assert path.read_bytes().startswith(start)
    if ending == "html":
        assert "activations of *.*" in path.read_text() and "<script src" not in path.read_text()


def test_torchs_visualizer_reads_the_snapshot(tmp_path):
    net = model()
    with so.memory.measure(model=net) as m:
        net(torch.randn(128, 64)).sum().backward()
    m.plot(tmp_path / "m.pickle")
    snapshot = pickle.loads((tmp_path / "m.pickle").read_bytes())
    ends = sum(life.end is not None for life in m.lives)
    assert f"{len(m.lives) + ends} entries" in _memory_viz.trace(snapshot)
    assert "activations of 0.0" in str(snapshot)


def test_areas_add_up_and_only_large_owners_have_colours():
    lives = [so.memory.Life(f"op{chr(97 + i)}", (i + 1) * MIB, i, None) for i in range(20)]
    levels = [sum(life.nbytes for life in lives[: i + 1]) for i in range(20)]
    timeline = [so.memory.Sample(float(i), level) for i, level in enumerate(levels)]
    stack = plot.stack_of(so.memory.Measurement(levels[-1], levels[-1], timeline, lives))
    assert list(stack.areas) == [f"op{c}" for c in "tsrqpon"] + ["others"]
    totals = [sum(column) for column in zip(*stack.areas.values(), strict=True)]
    assert totals == [level / MIB for level in levels]


def test_long_timelines_keep_their_peak():
    levels = torch.randint(1000, (5000,)).tolist()
    levels[3333] = 5000
    kept = plot._moments(levels)
    assert 3333 in kept and kept[0] == 0 and kept[-1] == 4999 and len(kept) < 1600


def test_an_empty_timeline_is_refused(tmp_path):
    with so.memory.measure() as m:
        pass
    with pytest.raises(ValueError, match="nothing was allocated"):
        m.plot(tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


def text_of(figure):
    return " ".join(text.get_text() for text in figure.findobj(Text))


@pytest.fixture
def drawn(monkeypatch):
    """Return a list of the saved figures: their texts, and the heights of their lines."""
    seen = []

    def savefig(figure, *args, **kwargs):
        lines = [line for axes in figure.axes for line in axes.lines]
        seen.append((text_of(figure), lines, figure))

    monkeypatch.setattr(Figure, "savefig", savefig)
    return seen


def of_step():
    return so.memory.simulate_step(model().to("meta"), torch.empty(128, 64, device="meta"))


def of_block():
    net = model()
    with so.memory.measure(model=net) as m:
        net(torch.randn(128, 64)).sum().backward()
    return m


@pytest.mark.parametrize(
    ("make", "title"),
    [(of_step, "Step of Sequential on H100 SXM: peak "), (of_block, "Sequential on cpu: peak "),
     (lambda: so.memory.estimate(torch.relu, torch.ones(64)), "relu on a GPU: peak 1 KiB")],
)  # fmt: skip
def test_the_title_names_function_device_and_peak(make, title, drawn):
    result = make()
    result.plot("a.png")
    (text, lines, _), peak = drawn[0], so.quantities.readable(result.peak_bytes, up=True)
    assert title in text and f"peak {peak}" in text and not lines and "budget" not in text


def test_the_budget_is_drawn_as_a_line(drawn, tmp_path):
    result = of_step()
    result.plot("a.png", budget=2 * result.peak_bytes)
    result.plot("a.png", budget="80GiB")
    (near, (line,), figure), (far, _, below) = drawn
    assert line.get_ydata()[0] == 2 * result.peak_bytes / MIB < figure.axes[0].get_ylim()[1]
    assert "budget" in near and "far above" not in near and "budget 80 GiB, far above" in far
    assert below.axes[0].get_ylim()[1] < 1.1 * result.peak_bytes / MIB
    result.plot(tmp_path / "a.html", budget=result.peak_bytes)
    assert "budget" in (tmp_path / "a.html").read_text()
    with pytest.raises(ValueError, match=r"`budget` is 'much'\. Expected a number of bytes"):
        result.plot("a.png", budget="much")


def test_lives_and_plots_are_not_available_before_the_block_ends():
    with so.memory.measure() as m, pytest.raises(AttributeError, match="`device` is known only"):
        _ = m.device
    assert m.device == "cpu" and m.subject == ""
