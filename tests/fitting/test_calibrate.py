"""Times that `calibrate` measures: the file that keeps them, and the predictions that use them."""

import copy
import dataclasses
import itertools
import json
import math
import statistics
import time

import pytest
import torch
from torch import nn

import storage_ops
from storage_ops import cli
from storage_ops.fitting import calibration as calibrations
from storage_ops.fitting.calibration import Calibration, device_name, load, path_of
from storage_ops.fitting.roofline import Roofline
from storage_ops.fitting.search import Search
from storage_ops.fitting.step import OpTimes
from storage_ops.loss.planning.devices import GPUS, named
from storage_ops.loss.planning.op_times import HostTimes, MeasuredTimes, interpolated, reduced

from .models import Decoder, GptBlock

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(calibrations, "folder", lambda: tmp_path / "calibrations")
    return tmp_path / "calibrations"


@pytest.fixture(scope="module")
def calibration(tmp_path_factory):
    """Return a short calibration of this CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrations, "folder", lambda: tmp_path_factory.mktemp("calibrations"))
        return storage_ops.calibrate("cpu", seconds=0.1)


def kept(op_times=None, host=None, device=None):
    """Keep a calibration of this CPU, or of another device, and return it."""
    name = device or device_name(CPU)
    times = MeasuredTimes(op_times or {"aten::mm": {"float32": ((1e5, 1.0), (1e6, 4.0))}})
    made = Calibration(name, times, host or HostTimes(), path_of(name))
    made.save()
    return made


def mlp():
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))


def seconds_of(run, rates):
    times = OpTimes(rates)
    with times:
        run()
    return times.seconds


def test_points_are_joined_by_lines_on_logarithmic_scales():
    points = ((10.0, 1.0), (1000.0, 4.0), (1e5, 400.0))
    assert [interpolated(points, work) for work, _ in points] == pytest.approx([1.0, 4.0, 400.0])
    assert interpolated(points, 100.0) == pytest.approx(2.0)
    assert interpolated(points, 1e7) == pytest.approx(40000.0)  # at the rate of the last point
    assert interpolated(points, 0.1) == pytest.approx(0.25)  # on the first line
    assert interpolated(points, 0) == 0
    assert interpolated(((10.0, 1.0), (20.0, 4.0)), 1.0) == pytest.approx(0.1)  # no higher rate


def test_pairs_are_summarised_by_points_that_never_fall():
    pairs = [(2.0**k, 1e-6 * 2.0**k * (0.5 if k == 15 else 1.0)) for k in range(30)]
    points = reduced(pairs, most=8)
    assert len(points) <= 9 and points == tuple(sorted(points))
    assert all(a[1] <= b[1] for a, b in itertools.pairwise(points))
    assert interpolated(points, 2.0**20) == pytest.approx(1e-6 * 2**20, rel=0.05)
    assert reduced([(5.0, 1.0), (5.0, 4.0)]) == ((pytest.approx(5.0), pytest.approx(2.0)),)


@pytest.mark.in_turn
def test_every_kind_of_op_is_measured(calibration):
    measured = {op: set(by_dtype) for op, by_dtype in calibration.op_times.points.items()}
    for op in (
        "aten::mm", "aten::addmm", "aten::bmm", "attention", "grouped_mm", "aten::convolution",
        "aten::convolution_backward", "aten::native_layer_norm", "aten::native_group_norm",
        "aten::_softmax", "aten::_safe_softmax", "aten::_log_softmax", "aten::gelu", "aten::silu",
        "aten::tanh", "aten::embedding", "aten::copy_", "aten::mul.Tensor",
    ):  # fmt: skip
        assert measured[op] >= {"float32"}, op
    assert "bfloat16" in measured["aten::mm"]
    host = calibration.host
    assert 1e-6 < host.op < 1e-3 and host.discard < 0.1 and host.region < 0.1
    shown = repr(calibration)
    assert "aten::convolution" in shown and device_name(CPU).split()[0] in shown


@pytest.mark.in_turn
def test_measured_products_take_the_time_of_products(calibration):
    """A fourth of the time to four times of it is a wide margin, because other processes run."""
    a = torch.randn(128, 64)
    b = torch.randn(64, 192)
    taken = []
    for _ in range(50):
        began = time.perf_counter()
        a.mm(b)
        taken.append(time.perf_counter() - began)
    predicted = calibration.op_times.seconds("aten::mm", "float32", 2 * 128 * 64 * 192)
    assert min(taken) / 4 < predicted + calibration.host.op < 4 * statistics.median(taken) + 1e-4


def test_fit_uses_the_measured_times_of_the_device(folder):
    x = torch.randn(4, 8)
    table = storage_ops.fit(mlp(), x, "1GiB", device="cpu")
    assert not table.is_calibrated and "(device table)" in repr(table.table(""))
    host = HostTimes(op=1.0)
    kept({"aten::addmm": {"float32": ((2048.0, 5.0), (20480.0, 50.0))}}, host)
    plan = storage_ops.fit(mlp(), x, "1GiB", device="cpu")
    assert plan.is_calibrated and "(calibrated)" in " ".join(str(plan.table("")).split())
    # Two products of 2 * 4 * 8 * 32 operations, on the line through the points.
    assert plan.step_seconds > 10 and table.step_seconds < 0.01
    assert not storage_ops.fit(mlp(), x, "1GiB", device="h100").is_calibrated


def test_the_time_of_an_op_is_its_points_and_the_host(folder):
    times = {
        "aten::mm": {"float32": ((1000.0, 2.0), (10000.0, 20.0))},
        "aten::exp": {"float32": ((1000.0, 3.0), (10000.0, 30.0))},
        "aten::copy_": {"float32": ((1000.0, 0.5), (10000.0, 5.0))},
    }
    rates = kept(times, HostTimes(op=0.25)).used_in(named("cpu"))
    a, b = torch.ones(10, 10), torch.ones(10, 20)
    assert seconds_of(lambda: a.mm(b), rates) == pytest.approx(8.0 + 0.25)  # 4000 operations
    assert seconds_of(lambda: a.exp(), rates) == pytest.approx(2.4 + 0.25)  # 800 bytes
    assert seconds_of(lambda: a.add(a), rates) == pytest.approx(0.4 + 0.25)  # as a copy
    # A product that was not measured takes the time of mm.
    assert seconds_of(lambda: a.addmm(a, a), rates) == pytest.approx(4.0 + 0.25)
    # Of thin matrices, moving the memory takes longer than the products.
    thin = torch.ones(1000, 1)
    assert seconds_of(lambda: thin.t().mm(thin), rates) == pytest.approx(4.002 + 0.25, rel=1e-3)


def test_a_loss_takes_the_measured_time_of_its_products():
    rates = kept({"aten::mm": {"float32": ((1e6, 1.0), (1e8, 100.0))}}).used_in(named("cpu"))
    roofline, flops = Roofline(rates), 10**7
    assert roofline.relative_time(flops, torch.float32) == pytest.approx(10 * rates.flops32 / flops)
    share = 2 / torch.get_num_threads()
    assert (
        roofline.relative_time(flops, torch.bfloat16)
        == Roofline(named("cpu")).relative_time(flops, torch.bfloat16)
        == share
    )


def test_compiled_code_has_no_host_times(folder):
    calibration = kept(host=HostTimes(1.0, 1.0, 1.0, 1.0))
    compiled = dataclasses.replace(named("cpu"), fuses=True, host=HostTimes())
    assert calibration.used_in(compiled).host == HostTimes()
    assert calibration.used_in(GPUS["h100"]).host == HostTimes()
    assert calibration.used_in(named("cpu")).host == calibration.host


def test_a_calibration_is_read_as_it_was_written(folder):
    written = kept(host=HostTimes(1e-6, 2e-6, 3e-6, 4e-6))
    read = load(written.path)
    assert read == written and json.loads(written.path.read_text())["torch"] == torch.__version__
    assert [path.name for path in folder.iterdir()] == [written.path.name]


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "{}",
        lambda text: "[" * 100_000,
        lambda text: text.replace(torch.__version__, "1.0"),
        lambda text: text.replace('"format": 1', '"format": 0'),
        lambda text: text.replace("threads", "fibres"),
        lambda text: text.replace("4.0", "-4.0"),
        lambda text: text.replace("4.0", "NaN"),
        lambda text: text.replace('"op": 0.0', '"unknown": 0.0'),
        lambda text: text.replace("[[", "[[1.0, "),
        lambda text: text.encode() + b"\xff",
    ],
)
def test_a_broken_file_or_one_of_another_version_is_ignored(folder, change):
    path = kept().path
    text = path.read_text()
    changed = change(text)
    assert changed != text
    path.write_bytes(changed if isinstance(changed, bytes) else changed.encode())
    plan = storage_ops.fit(mlp(), torch.randn(4, 8), "1GiB", device="cpu")
    assert not plan.is_calibrated
    kept()  # calibrating again replaces it
    assert storage_ops.fit(mlp(), torch.randn(4, 8), "1GiB", device="cpu").is_calibrated


def test_a_calibration_is_for_its_number_of_threads(folder):
    kept()
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert not storage_ops.fit(mlp(), torch.randn(4, 8), "1GiB", device="cpu").is_calibrated
    finally:
        torch.set_num_threads(before)


def test_a_file_from_another_machine_is_used_for_a_named_gpu(folder):
    x = torch.randn(4, 8)
    before = storage_ops.fit(mlp(), x, "1GiB", device="h100").step_seconds
    kept(device="NVIDIA H100 80GB HBM3")
    plan = storage_ops.fit(mlp(), x, "1GiB", device="h100")
    assert plan.is_calibrated and plan.step_seconds > before
    assert not storage_ops.fit(mlp(), x, "1GiB", device="h200").is_calibrated
    assert not storage_ops.fit(mlp(), x, "1GiB", device="gh200").is_calibrated


def test_the_measured_times_of_the_table_agree_with_its_rates():
    rates = GPUS["h200"]
    flops, nbytes = 2 * 8192 * 4096 * 32000, 1e9
    measured = rates.op_times.seconds("aten::mm", "bfloat16", flops)
    assert measured == pytest.approx(flops / rates.flops16, rel=0.05)
    assert rates.op_times.traffic("bfloat16", nbytes) == pytest.approx(
        nbytes / rates.bandwidth, rel=0.05
    )


@pytest.mark.in_turn
def test_measuring_the_host_ends_on_a_busy_machine(monkeypatch):
    monkeypatch.setattr("storage_ops.fitting.calibrate._ROUNDS", 10**9)
    monkeypatch.setattr("storage_ops.fitting.calibrate._MOST_SECONDS", 0.1)
    assert storage_ops.calibrate("cpu", seconds=0.1).host.op > 0


@pytest.mark.parametrize("where", ["samples", "file"])
def test_an_interrupt_leaves_no_file(folder, monkeypatch, where):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    name = "storage_ops.fitting.calibrate._measured" if where == "samples" else "json.dump"
    with monkeypatch.context() as patch:
        patch.setattr(name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            kept() if where == "file" else storage_ops.calibrate("cpu", seconds=1)
    assert not folder.exists() or not list(folder.iterdir())


@pytest.mark.parametrize("seconds", [0, -1.0, math.nan, math.inf, "10", None, True])
def test_wrong_seconds(seconds):
    with pytest.raises(ValueError, match=r"`seconds` is .*\. Expected a positive number"):
        storage_ops.calibrate("cpu", seconds=seconds)


@pytest.mark.parametrize("device", ["mps", "meta", "gpu", "cuda", "cuda:99", 1.5])
def test_wrong_devices(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=r"`device` is .*Expected a device of this machine: 'cpu'"):
        storage_ops.calibrate(device, seconds=1)


@pytest.mark.in_turn
def test_the_command(folder, capsys):
    assert cli.main(["calibrate", "--device", "cpu", "--seconds", "0.1", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["device"] == device_name(CPU) and facts["op_times"]["aten::mm"]["float32"]
    assert load(path_of(facts["device"])) is not None and facts["host"]["op"] > 0
    assert cli.main(["calibrate", "--device", "tpu", "--seconds", "1"]) == 2
    assert "--device is 'tpu'" in capsys.readouterr().err


def step(model, batch):
    model.zero_grad()
    model(*batch).backward()


class Experts(nn.Module):
    """Four experts, each for a part of the tokens."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, 4)
        make = (nn.Linear(width, 3 * width), nn.SiLU(), nn.Linear(3 * width, width))
        self.experts = nn.ModuleList(nn.Sequential(*make) for _ in range(4))

    def forward(self, x):
        flat = self.norm(x).flatten(0, 1)
        order = self.router(flat).softmax(-1)[:, 0].argsort()
        parts = [
            expert(flat[rows]) for expert, rows in zip(self.experts, order.chunk(4), strict=True)
        ]
        return x + torch.zeros_like(flat).index_add(0, order, torch.cat(parts)).view_as(x)


class Pictures(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        layers = (nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
        self.layers = nn.ModuleList(nn.Sequential(*layers, *layers) for _ in range(3))

    def forward(self, x):
        x = self.enter(x)
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def gpt_like():
    blocks = [GptBlock(192, 0.1) for _ in range(4)]
    tokens = torch.randint(128, (4, 128))
    return Decoder(192, blocks), (tokens, tokens)


def moe_like():
    tokens = torch.randint(128, (4, 128))
    return Decoder(192, [Experts(192) for _ in range(4)]), (tokens, tokens)


def unet_like():
    return Pictures(32), (torch.randn(4, 3, 64, 64),)


# How far a predicted ratio may be from the measured one. It is wide, because other processes slow
# single steps: the errors on a busy machine were up to 0.16.
MARGIN = 0.2


@pytest.mark.slow
def test_predictions_of_full_checkpoints(folder):
    """With a calibration, each is near the measured ratio, and all together no further from it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        steps, errors = {}, {"table": [], "calibrated": []}
        for make in (gpt_like, moe_like, unet_like):
            model, batch = make()
            steps[make.__name__] = model, batch
        predicted = {"table": ratios(steps)}
        storage_ops.calibrate("cpu", seconds=15)
        predicted["calibrated"] = ratios(steps)
        for name, (model, batch) in steps.items():
            taken = measured_ratio(model, batch)
            for source, error in errors.items():
                error.append(abs(predicted[source][name] - taken))
            print(name, taken, {source: ratio[name] for source, ratio in predicted.items()})
    finally:
        torch.set_num_threads(before)
    assert max(errors["calibrated"]) < MARGIN
    assert sum(errors["calibrated"]) < sum(errors["table"]) + MARGIN


def ratios(steps):
    """Return the predicted times of steps with full checkpoints, relative to plain steps."""
    found = {}
    for name, (model, batch) in steps.items():
        search = Search(model, batch, actions=["full"])
        full = [len(options) - 1 for options in search.problem.options]
        found[name] = 1 + search.problem.seconds(full) / search._variants[0].seconds
    return found


def measured_ratio(model, batch):
    """Return the measured ratio, the median of rounds in turn."""
    full = copy.deepcopy(model)
    for layer in full.layers:
        storage_ops.CheckpointWrapper(layer)
    found = []
    for model_of_case in (model, full):
        step(model_of_case, batch)
    for _ in range(9):
        seconds = []
        for model_of_case in (model, full):
            began = time.process_time()
            step(model_of_case, batch)
            seconds.append(time.process_time() - began)
        found.append(seconds[1] / seconds[0])
    return statistics.median(found)
