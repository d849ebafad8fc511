"""`find_largest` and `fit --find` find the largest number that fits."""

import json
from functools import partial

import pytest
import torch
from torch import nn

import storage_ops
from storage_ops import cli
from storage_ops.fitting.largest import _bisected
from storage_ops.loss.planning.devices import BY_PRICE, GPUS

from .. import hf_config
from ..refused import refused


@pytest.mark.parametrize(
    "peak",
    [
        lambda n: 100 + 7 * n,
        lambda n: 100 + n * n,
        lambda n: 512 * -(-n // 64),
        lambda n: 3 if n < 777 else 10**6,
    ],
    ids=["linear", "quadratic", "in steps", "a jump"],
)
@pytest.mark.parametrize("limit", [101, 1000, 99_999])
@pytest.mark.parametrize("last", [1, 50, 1 << 28])
def test_bisection_finds_what_a_scan_finds(peak, limit, last):
    tried = []

    def counted(number):
        tried.append(number)
        return peak(number)

    largest, first = _bisected(counted, limit, last)
    scanned = next((n for n in range(1, 20_000) if peak(n) > limit), 20_000) - 1
    assert first == peak(1) and largest == min(scanned, last)
    assert len(tried) < 80 and all(1 <= n <= last for n in tried)


class Layer(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(size), nn.Linear(size, 192), nn.Linear(192, 48)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def layers():
    return nn.Sequential(*(Layer(48) for _ in range(4)))


def make_batch(number):
    return torch.empty(number, 32, 48, device="meta")


@pytest.mark.slow
def test_the_next_number_does_not_fit():
    model = layers().to("meta")
    find = partial(storage_ops.find_largest, model, make_batch, "6MiB", None, torch.optim.AdamW)
    largest = find(device="h100", accumulate=True)
    step = partial(
        storage_ops.memory.simulate_step, model, optimizer=torch.optim.AdamW, device="h100",
        accumulate=True,
    )  # fmt: skip
    with pytest.raises(ValueError, match="`device` is 'h1'"):
        find(device="h1")
    assert largest.found is None and largest.kept is None  # cuBLAS workspaces exceed the budget
    assert largest.least_bytes > 64 << 20 and "Nothing fits into 6 MiB" in str(largest)
    find = partial(storage_ops.find_largest, model, make_batch, "74MiB", None, torch.optim.AdamW)
    largest = find(device="h100", accumulate=True, actions=["full"])
    kept, planned = largest.kept, largest.planned
    assert step(batch=make_batch(kept.size)).peak_bytes == kept.plan.peak_bytes <= 74 << 20
    assert step(batch=make_batch(kept.size + 1)).peak_bytes > 74 << 20
    assert planned.size == largest.found > kept.size and planned.items == planned.size
    fit = partial(
        storage_ops.fit, model, budget="74MiB", optimizer=torch.optim.AdamW, device="h100",
        accumulate=True, actions=["full"],
    )  # fmt: skip
    with pytest.raises(ValueError, match="needs at least"):
        fit(batch=make_batch(largest.found + 1))
    planned.plan.apply()
    assert step(batch=make_batch(planned.size)).peak_bytes == planned.plan.peak_bytes <= 74 << 20


@pytest.mark.in_turn
def test_a_measured_step_of_the_largest_batch_is_within_the_budget():
    model = layers()
    state = sum(p.nbytes for p in model.parameters())

    def real_batch(number):
        return torch.ones(number, 32, 48)

    def loss(output):
        return output.square().mean()

    largest = storage_ops.find_largest(model, real_batch, "4MiB", loss, actions=["full"])
    largest.planned.plan.apply()
    for number, fits in ((largest.found, True), (largest.found + 2, False)):
        with storage_ops.memory.measure() as m:
            loss(model(real_batch(number))).backward()
        assert (state + m.peak_bytes <= 4 << 20) is fits
        model.zero_grad(set_to_none=True)


@pytest.mark.in_turn
def test_most_limits_the_search():
    model = layers().to("meta")
    largest = storage_ops.find_largest(model, make_batch, "1GiB", device="cpu", most=3)
    assert largest.found == largest.kept.size == 3 and "among sizes up to 3" in str(largest)


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("make", "options", "error", "said"),
    [
        refused(TypeError, "`make_batch` is a Tensor. Expected a function", make_batch(1)),
        refused(ValueError, "`most` is 0", make_batch, most=0),
        refused(ValueError, "`most` is True", make_batch, most=True),
        refused(ValueError, "takes no more memory", lambda _: make_batch(1), actions=[]),
        refused(ValueError, "`actions` has 'what'", make_batch, actions=["what"]),
        refused(TypeError, "`actions` is 3. Expected a list", make_batch, actions=3),
    ],
)
def test_wrong_arguments(make, options, error, said):
    with pytest.raises(error, match=said):
        storage_ops.find_largest(layers().to("meta"), make, "1GiB", device="cpu", **options)


def test_every_gpu_has_a_price_and_a_size():
    assert set(BY_PRICE) == set(GPUS) and all(gpu.memory >> 30 >= 23 for gpu in GPUS.values())


@pytest.fixture
def command(tmp_path):
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 256}
    return ["fit", "--dtype", "fp32", "--hf-config", hf_config.write(tmp_path, **sizes)]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["batch", "seq"])
def test_on_the_command_line(command, what, tmp_path, capsys):
    other = {"batch": "seq", "seq": "batch"}[what]
    find = [*command, f"--{other}", "2", "--budget", "70MiB", "--actions", "full"]
    saved = tmp_path / "fit.json"
    assert cli.main([*find, "--find", what, "--json", "--save", str(saved)]) == 0
    facts = json.loads(capsys.readouterr().out)
    size, planned = facts["found"], facts["planned"]
    assert size == planned["size"] >= facts["kept"]["size"] > 1
    assert planned["tokens"] == 2 * size and planned["seconds"] > 0
    assert json.loads(saved.read_text()) == planned["plan"]
    assert cli.main([*find, f"--{what}", str(size)]) == 0
    assert cli.main([*find, f"--{what}", str(size + 1)]) == 1


@pytest.mark.in_turn
def test_the_cheapest_gpu(command, capsys):
    assert cli.main([*command, "--seq", "64", "--find", "device", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["found"] == facts["kept"]["size"] == "rtx4090"
    assert facts["kept"]["peak_bytes"] < 23 << 30


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--find", "seq", "--seq", "8"], "--seq is 8, but --find seq finds it"),
        (["--find", "device", "--device", "a100"], "--device is a100, but --find"),
        (["--find", "batch"], "--seq is missing"),
        (["--find", "batch", "--plot", "fit.png"], "--plot is fit.png, but --find"),
    ],
)
def test_complaints(command, options, said, capsys):
    assert cli.main([*command, *options]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.in_turn
def test_nothing_fits(command, capsys):
    assert cli.main([*command, "--seq", "8", "--find", "batch", "--budget", "1MiB"]) == 1
    assert "Nothing fits into 1 MiB; the smallest step takes" in capsys.readouterr().out
