import dataclasses
import math
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import storage_ops as so
from storage_ops.loss.planning import devices, planner, schedule
from storage_ops.loss.planning.devices import rates_of
from storage_ops.loss.planning.problem import Problem
from storage_ops.matmul.aten import Aten
from storage_ops.matmul.packed import Packed
from storage_ops.quantities import metric, parse_bytes, readable

from ..refused import refused

R2, R5, R6, R7 = (
    (8192, 4096, 128256),
    (8192, 2304, 256000),
    (16384, 2048, 32000),
    (32768, 768, 50257),
)
BOTH, INPUT, WEIGHT, NONE = ("input", "weight"), ("input",), ("weight",), ()


@pytest.mark.parametrize(
    "options, mode, chunks, slices",
    [
        pytest.param({"memory_budget": "400MiB"}, "token-chunked 3.35-GEMM", 1, 10, id="400 MiB"),
        pytest.param({"memory_budget": "3GiB"}, "token-chunked 3-GEMM", 1, 1, id="3 GiB"),
        pytest.param(
            {"memory_budget": "600MiB", "grads": INPUT},
            "frozen-weight token-chunked 2-GEMM",
            4,
            1,
            id="frozen weight",
        ),
        pytest.param(
            {"memory_budget": "3GiB", "grads": WEIGHT},
            "frozen-input token-chunked 2-GEMM",
            1,
            1,
            id="frozen input",
        ),
        pytest.param({"grads": NONE}, "no-grad 1-GEMM", 2, 1, id="no gradients"),
        pytest.param({"reduction": "none"}, "token-chunked 3-GEMM", 1, 4, id="no reduction"),
        pytest.param({"dtype": "fp16"}, "token-chunked 3-GEMM", 1, 4, id="fp16"),
        pytest.param(
            {"reduction": "none", "device": "rtx4090"},
            "token-chunked 3-GEMM",
            1,
            4,
            id="no reduction on a GPU of 24 GB",
        ),
        pytest.param({"dtype": torch.float32}, "token-chunked 3-GEMM", 4, 1, id="fp32"),
        pytest.param(
            {"accumulate_dtype": "bf16", "memory_budget": "600MiB"},
            "token-chunked 3-GEMM",
            4,
            1,
            id="bf16 sums",
        ),
    ],
)
def test_choices_for_a_large_head_on_an_h200(options, mode, chunks, slices):
    plan = so.plan(*R2, **{"dtype": "bf16", "device": "h200"} | options)
    assert (plan.mode, plan.num_chunks, plan.num_slices) == (mode, chunks, slices)


# Milliseconds computed by hand, from 790 TFLOP/s and 4.3 TB/s. They include the products, 4 bytes
# per logit for the row kernel (2 without gradients, 8 if logits are computed twice), and 8 bytes
# per weight and chunk for the sum in fp32.
ROOFLINE = {
    "token-chunked, 4096 rows": (BOTH, schedule.TOKEN_CHUNKED, 4096, 1, [35.9, 41.1, 9.2, 11.7]),
    "token-chunked, 2048 rows": (BOTH, schedule.TOKEN_CHUNKED, 2048, 1, [37.8, 43.3, 9.7, 12.3]),
    "vocab-sliced, 8 slices": (BOTH, schedule.VOCAB_SLICED, None, 8, [46, 52.5, 12.5, 17]),
    "frozen weight": (INPUT, schedule.TOKEN_CHUNKED, 4096, 1, [23, 27, 6, 8.5]),
    "no gradients": (NONE, schedule.TOKEN_CHUNKED, 4096, 1, [11.4, 13.2, 2.96, 3.97]),
}


@pytest.mark.parametrize("name", ROOFLINE)
def test_predictions_for_an_h200_are_those_of_the_roofline(name):
    grads, strategy, rows, slices, milliseconds = ROOFLINE[name]
    for (tokens, hidden, vocab), expected in zip((R2, R5, R6, R7), milliseconds, strict=True):
        mask = tuple(which in grads for which in ("input", "weight", "bias"))
        p = Problem(tokens, hidden, vocab, Aten(2, cuda=True), grads=mask)
        columns = vocab if slices == 1 else vocab // slices + 64
        tiles = planner.schedule(p, strategy, rows or tokens, columns)
        plan = planner.make(tiles, devices.GPUS["h200"])
        assert abs(plan.seconds * 1e3 / expected - 1) < 0.1, (plan, expected)


def problems():
    def size(bits):
        return st.integers(0, bits).flatmap(lambda k: st.integers(1 << k, 2 << k))

    flags = st.booleans()
    return st.builds(
        Problem, size(14), size(12), size(17), st.sampled_from([2, 4, 8]).map(Aten),
        grads=st.tuples(flags, flags, flags), sums_fp32=flags, in_forward=flags, into=flags,
        gathers=flags,
    )  # fmt: skip


@pytest.mark.in_turn
@given(
    problems(), st.sampled_from(list(devices.DEVICES)),
    st.sampled_from(["packed", "rounded", "aten", "upcast"]), st.sampled_from([1, 2, 16]),
    st.floats(1.01, 3),
)  # fmt: skip
# An example in which the widest slices that stay in the cache are not a multiple of 64 classes.
@example(
    Problem(3, 5462, 5441, Aten(8), grads=(False,) * 3, in_forward=False, gathers=True),
    "l40s", "aten", 1, 1.02,
)  # fmt: skip
def test_more_budget_is_never_slower_and_the_smallest_is_named(p, device, kind, threads, step):
    item = p.itemsize
    if device != "cpu":
        products = Aten(item, cuda=True)
    elif kind in ("packed", "rounded") and item < 8:
        products = Packed(item, threads, kind == "rounded" and item == 2)
    else:
        products = Aten(item, threads, upcasts=kind == "upcast" and item == 2)
    p = dataclasses.replace(p, matmul=products)
    budget = least = planner.smallest_budget(p)
    with pytest.raises(ValueError, match=f"Expected at least {least} "):
        planner.choose(p, least - 1, devices.named(device))
    whole = planner.peak_bytes(p, schedule.VOCAB_SLICED, p.tokens, p.vocab)
    # If all logits are stored, a wider last slice may divide the others into one slice more.
    slice_seconds = 5 * devices.named(device).launch_seconds * schedule.parks(p, p.tokens)
    before = float("inf")
    while True:
        plan = planner.choose(p, budget, devices.named(device))
        assert plan.peak_bytes <= budget
        # Larger tiles may leave a remainder that is slow for its size, because a chunk of one token
        # reads as much of the weight as a large one. Also, the package's products may copy more.
        assert plan.seconds <= before * 1.1 + slice_seconds
        before = min(before, plan.seconds)
        if budget > 2 * whole:
            break
        budget = int(budget * step) + 1


@pytest.mark.parametrize("options", [
    {}, {"strategy": "vocab-sliced"}, {"num_chunks": 5}, {"memory_budget": "150 KiB"},
    {"strategy": "vocab-sliced", "num_chunks": 3}, {"reduction": "none"},
    {"reduction": "none", "num_chunks": 2},
    {"grads": INPUT, "strategy": "running-rescale"}, {"max_valid": 90}, {"dtype": torch.float16},
])  # fmt: skip
def test_a_plan_is_followed_and_gives_the_same_loss(options, capsys):
    dtype = options.get("dtype", torch.float32)
    plan = so.plan(100, 32, 1000, **{"dtype": dtype, "device": "cpu"} | options)
    assert plan.mode in capsys.readouterr().out
    x = torch.randn(100, 32, dtype=dtype, requires_grad=True)
    w = torch.randn(1000, 32, dtype=dtype, requires_grad=options.get("grads") != INPUT)
    target = torch.randint(1000, (100,))
    target[:10] = -100
    reduction = options.get("reduction", "mean")
    results = []
    for chosen in (None, plan):
        loss = so.linear_cross_entropy(x, w, target, reduction=reduction, plan=chosen)
        loss.sum().backward()
        results.append((loss.detach(), x.grad))
        x.grad = None
    torch.testing.assert_close(*results, rtol=1e-3 if dtype == torch.float16 else 1e-5, atol=1e-5)


def test_the_caller_can_choose_strategy_and_number_of_chunks(capsys):
    plan = so.plan(*R2, "fp32", device="h200", num_chunks=2)
    assert (plan.strategy, plan.num_chunks, plan.num_slices) == (schedule.TOKEN_CHUNKED, 2, 1)
    assert "memory budget      none" in capsys.readouterr().out
    plan = so.plan(*R2, "fp32", device="h200", num_chunks=1)  # logits go to the weight gradient
    assert (plan.strategy, plan.num_chunks, plan.num_slices) == (schedule.TOKEN_CHUNKED, 1, 7)
    assert "1 GiB, the default;" in capsys.readouterr().out
    plan = so.plan(*R2, device="h200", num_chunks=3, strategy="vocab-sliced", memory_budget="1GiB")
    assert (plan.strategy, plan.num_chunks) == (schedule.VOCAB_SLICED, 3)
    assert plan.peak_bytes <= 1 << 30
    plan = so.plan(*R2, device="h200", grads=INPUT, strategy="running-rescale")
    assert plan.strategy == schedule.RUNNING_RESCALE
    assert so.plan(*R2, device="h200", num_chunks=8, reduction="sum").rows == 1024
    with pytest.raises(ValueError, match=r"`memory_budget` is 104857600 bytes\. Expected at least"):
        so.plan(*R2, device="h200", num_chunks=2, strategy="token-chunked", memory_budget="100MiB")


R8 = (4096, 4096, 32000)


@pytest.mark.parametrize(
    "sizes, options",
    [
        (R8, {"memory_budget": "4MB", "accumulate_dtype": "bf16"}),
        (R8, {"memory_budget": "24MiB"}),
        (R2, {"memory_budget": "40MiB"}),
        (R2, {"memory_budget": "40MiB", "reduction": "none"}),
        ((32768, 768, 50257), {"reduction": "none", "device": "h100"}),
    ],
)
def test_a_budget_that_makes_the_loss_slow_is_named(sizes, options, capsys):
    options = {"device": "h200"} | options
    so.plan(*sizes, **options)
    found = re.search(
        r"too small +(\S+) of the time of the products alone; a budget of (.*) takes at most 1.35",
        capsys.readouterr().out,
    )
    enough = parse_bytes(found[2], "enough")
    products = 3 * 2 * math.prod(sizes) / 790e12
    assert float(found[1]) > 1.35
    for share, is_slow in ((1, False), (0.95, True)):
        plan = so.plan(*sizes, **options | {"memory_budget": int(share * enough)})
        assert ("too small" in capsys.readouterr().out) == is_slow
        assert (plan.seconds > 1.35 * products) == is_slow


@pytest.mark.parametrize(
    "sizes, options",
    [
        (R2, {}),
        (R8, {"memory_budget": "16 MB", "accumulate_dtype": "bf16"}),
        (R2, {"strategy": "vocab-sliced", "num_chunks": 64}),  # slow for another reason
        ((64, 16, 1000), {"memory_budget": "100 KiB"}),  # slow with any budget
    ],
)
def test_a_budget_that_is_not_to_blame_is_not_named(sizes, options, capsys):
    so.plan(*sizes, device="h200", **options)
    assert "too small" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, options, error, complaint",
    [
        refused(TypeError, "`tokens` is 1.5. Expected an int", (1.5, 2, 3)),
        refused(ValueError, "`tokens` is -1. Expected at least 0", (-1, 2, 3)),
        refused(ValueError, "`vocab` is 0. Expected at least 1", (1, 2, 0)),
        refused(
            ValueError, "`dtype` is 'int8'. Expected one of float64, float32", (8, 4, 5, "int8")
        ),
        refused(ValueError, "`dtype` is torch.int8. Expected one of", (8, 4, 5, torch.int8)),
        refused(TypeError, "`dtype` is 7. Expected one of", (8, 4, 5, 7)),
        refused(ValueError, "`grads` is 'input'. Expected a sequence of", (8, 4, 5), grads="input"),
        refused(
            ValueError, "`grads` is ['x']. Expected a sequence of some of", (8, 4, 5), grads=["x"]
        ),
        refused(ValueError, "`reduction` is 'avg'. Expected one of", (8, 4, 5), reduction="avg"),
        refused(
            ValueError, "Expected None, bfloat16 or float32", (8, 4, 5), accumulate_dtype="fp16"
        ),
        refused(TypeError, "`max_valid` is 'sync'. Expected an int", (8, 4, 5), max_valid="sync"),
        refused(
            ValueError, "`device` is 'tpu'. Expected one of cpu, h200", (8, 4, 5), device="tpu"
        ),
        refused(
            ValueError, "`strategy` is 'fast'. Expected one of token-", (8, 4, 5), strategy="fast"
        ),
        refused(
            ValueError,
            "`strategy` is 'token-chunked'. Expected one of vocab-sliced",
            (8, 4, 5),
            strategy="token-chunked",
            reduction="none",
        ),
        refused(ValueError, "`num_chunks` is 9. Expected 1 to 8", (8, 4, 5), num_chunks=9),
        refused(
            TypeError, "`memory_budget` is []. Expected a number of", (8, 4, 5), memory_budget=[]
        ),
        refused(ValueError, "`memory_budget` is '1XB'. Expected", (8, 4, 5), memory_budget="1XB"),
        refused(
            ValueError,
            "`memory_budget` is 1048576 bytes. Expected at least 18219520 (17.4 MiB) for 8192",
            R2,
            memory_budget="1MiB",
            device="h200",
        ),
    ],
)
def test_errors_name_argument_value_and_what_was_expected(arguments, options, error, complaint):
    with pytest.raises(error) as raised:
        so.plan(*arguments, **options)
    assert complaint in str(raised.value)


@pytest.mark.parametrize(
    "name", ["bf16", "bfloat16", "torch.bfloat16", torch.bfloat16, "half", "fp16"]
)
def test_names_of_dtypes(name, capsys):
    so.plan(64, 8, 1000, name, device="h200")
    assert "790 TFLOP/s" in capsys.readouterr().out


def test_no_tokens():
    assert so.plan(0, 8, 100).num_chunks == 0


@pytest.mark.parametrize(
    "name, key",
    [
        ("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA L40S", "l40s"),
        ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA B200", "b200"), ("NVIDIA GB200", "gb200"), ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA B300 SXM6 AC", "b300"), ("NVIDIA GB300", "gb300"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("NVIDIA T4", None),
    ],
)  # fmt: skip
def test_gpus_are_known_by_name(name, key, monkeypatch):
    assert devices.of_gpu(name) is devices.GPUS.get(key)
    rates = devices.GPUS[key or "a100"]
    for spare, expected in ((300 << 20, rates.memory), (-1, rates.memory - (1 << 30))):
        present = SimpleNamespace(name=name, total_memory=rates.memory + spare)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, present=present: present)
        devices._rates_at.cache_clear()
        found = rates_of(torch.device("cuda", 0))
        assert found == dataclasses.replace(rates, memory=expected)
    devices._rates_at.cache_clear()
    assert rates_of(torch.device("cpu")) is devices.named("cpu")


@pytest.mark.parametrize(
    "text, count",
    [
        ("400MiB", 400 << 20), ("0.5 GiB", 1 << 29), ("2e8", 200_000_000), ("512k", 512 << 10),
        ("2.3GB", 2_300_000_000), ("1tib", 1 << 40), ("12 B", 12), (17, 17), (1.5e3, 1500),
        (".5K", 512), ("0e99999999", 0), ("1e-99999999GiB", 0),
    ],
)  # fmt: skip
def test_sizes_of_memory_as_text(text, count):
    assert parse_bytes(text, "x") == count


@pytest.mark.parametrize(
    "text", ["", "MiB", "-3", "nan", "inf", "1e999", "4..5", "1QiB", "5iB", -1]
)
def test_wrong_sizes_of_memory_are_refused(text):
    with pytest.raises(ValueError, match=r"x is .*. Expected a number of bytes"):
        parse_bytes(text, "x")


@pytest.mark.parametrize("value", [1.5, "1.5", 0.8, "0.5", "0.5B", "79.5", "1e-3", 0.25, 1023.5])
def test_fractions_of_a_byte_are_refused(value):
    """The caller probably meant another unit, or a share of the memory."""
    with pytest.raises(ValueError, match=f"x is {value!r}. Expected a whole number of bytes, or"):
        parse_bytes(value, "x")


def test_a_computed_size_is_rounded_down():
    assert parse_bytes(0.9 * 12345, "x") == 11110
    assert parse_bytes(24.0, "x") == 24


def budgets():
    """Return every function with a budget, and the name of the budget in its error."""
    x, w, t = torch.randn(4, 8), torch.randn(50, 8), torch.randint(50, (4,))
    layer, loss = torch.nn.Linear(8, 8), so.linear_cross_entropy
    head = so.LinearCrossEntropyLoss(8, 50, memory_budget=1.5)
    return {
        "linear_cross_entropy: `memory_budget`": lambda: loss(x, w, t, memory_budget=1.5),
        "linear_cross_entropy: `memory_budget` ": lambda: head(x, t),
        "linear_kl_div: `memory_budget`": lambda: so.linear_kl_div(x, w, x, w, memory_budget=1.5),
        "`memory_budget`": lambda: so.plan(4, 8, 50, memory_budget=1.5, device="cpu"),
        "tile: `budget`": lambda: so.tile(layer, budget=1.5),
        "`budget`": lambda: so.fit(layer, x, budget=1.5),
        "`budget` ": lambda: so.memory.will_it_fit(layer, x, budget=1.5),
        "`nbytes`": lambda: so.memory.limit(1.5).__enter__(),
    }


@pytest.mark.parametrize("name", list(budgets()))
def test_errors_of_fractional_budgets_name_the_argument(name):
    with pytest.raises(ValueError, match=f"^{name.strip()} is 1.5. Expected a whole number"):
        budgets()[name]()


@given(st.integers(0, 1 << 60))
def test_printed_sizes_can_be_parsed(count):
    assert parse_bytes(readable(count, up=True), "x") >= count
    assert abs(parse_bytes(readable(count), "x") - count) <= 0.05 * count


def test_quantities_are_shown_with_four_digits():
    assert metric(0, "B") == "0 B"
    assert metric(25.8213e12, "FLOP") == "25.82 TFLOP"
    assert metric(0.0458521, "s") == "45.85 ms"
    assert metric(67.1986, "s") == "67.2 s"
