"""limit and explain_oom: an error where such a device runs out of memory, and its owners."""

import gc
import importlib
import re
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import storage_ops as so
from storage_ops.memory import explain_oom, limit, simulate_step
from tests.simulate.models import MODELS, build, run

MIB = 1 << 20


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_limit_is_the_peak(name):
    """A second step fits into the simulated peak, but not into one per cent less."""
    model, batch, loss = build(name)
    optimizer = torch.optim.AdamW(model.parameters())
    run(model, batch, loss, optimizer)
    optimizer.zero_grad()
    # Convolutions allocate copies while they run, which nothing outside can measure.
    peak = simulate_step(model, batch, loss=loss, optimizer=optimizer).peak_bytes
    with limit(peak):
        run(model, batch, loss, optimizer)
    optimizer.zero_grad()
    share = 0.85 if name == "unet" else 0.99
    with pytest.raises(torch.OutOfMemoryError, match="limit: out of memory"), \
            limit(peak * share):  # fmt: skip
        run(model, batch, loss, optimizer)
    optimizer.zero_grad()
    run(model, batch, loss, optimizer)  # the limit has ended


def test_counted_bytes():
    kept = torch.zeros(MIB)  # allocated before the limit and not used under it
    with limit("5 MiB"):
        for _ in range(10):  # freed each time
            torch.zeros(MIB).view(2, -1)[1].mul_(2)
        other = torch.zeros(MIB // 4).untyped_storage()
        with pytest.raises(torch.OutOfMemoryError):
            other.resize_(5 * MIB)
            torch.zeros(256)
        other.resize_(0)
        with pytest.raises(torch.OutOfMemoryError):
            kept.add_(torch.zeros(MIB))
    del kept


def test_an_error_that_the_block_catches_keeps_no_memory():
    """A program that tries smaller batches until one fits."""
    mlp = nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 64))

    def try_batch(size):
        hidden = mlp[:2](torch.randn(size, 64))  # a variable of this frame
        mlp[2](hidden).sum().backward()

    def fits(size):
        try:
            try_batch(size)
        except torch.OutOfMemoryError:
            return False
        return True

    with limit("8 MiB"), explain_oom() as report:
        gc.disable()
        try:
            sizes = [size for size in (1024, 900, 800, 256) if fits(size)]
        finally:
            gc.enable()
    assert sizes == [256] and "activations of 1" in report.by_owner


def test_a_cpu_with_a_number_and_nested_tensors():
    two = [torch.ones(1000), torch.ones(24)]
    with explain_oom("cpu:0") as report, pytest.raises(torch.OutOfMemoryError), \
            limit("6 KiB", "cpu:0"):  # fmt: skip
        torch.nested.as_nested_tensor(two).sin()  # has no shape
    assert report.by_owner


def test_discarded_storages_do_not_count(path):
    with limit("9 MiB"):
        first = torch.zeros(MIB)
        so.discard_storage(first)
        second = torch.zeros(MIB)
        so.share_storage(first, second)
        del second
        torch.zeros(MIB // 4)
        assert first.sum() == 0
        so.discard_storage(first)
        torch.zeros(2 * MIB)


def test_nested_limits_other_threads_and_compiled_functions():
    with limit("8 MiB"), limit("100 MiB"):
        with pytest.raises(torch.OutOfMemoryError, match="of 8 MiB"):
            torch.zeros(4 * MIB)
        thread = threading.Thread(target=torch.zeros, args=(4 * MIB,))
        thread.start()
        thread.join()
        with pytest.raises(torch.OutOfMemoryError):
            torch.compile(lambda x: (x + 1).sin(), fullgraph=True)(torch.zeros(MIB))
    torch.zeros(4 * MIB)


def test_values_that_are_no_number_of_bytes():
    with pytest.raises(ValueError, match="`nbytes` is 'many'"), limit("many"):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.95, 0.7, 0.5])
@pytest.mark.parametrize("order", ["inside", "outside"])
@pytest.mark.parametrize("name", MODELS)
def test_owners_of_the_memory(name, order, share, monkeypatch):
    module = importlib.import_module("storage_ops.oom.explain_oom")
    monkeypatch.setattr(module, "advise", lambda *_: (None, ""))  # slow, and tested below
    model, batch, loss = build(name)
    optimizer = torch.optim.AdamW(model.parameters())
    run(model, batch, loss, optimizer)
    optimizer.zero_grad()
    peak = simulate_step(model, batch, loss=loss, optimizer=optimizer).peak_bytes
    share *= 0.85 if name == "unet" else 1
    inner, outer = limit(peak * share), explain_oom()
    with pytest.raises(torch.OutOfMemoryError, match="limit: out of memory") as raised:
        if order == "inside":
            with inner, outer as report:
                run(model, batch, loss, optimizer)
        else:
            with outer as report, inner:
                run(model, batch, loss, optimizer)
    assert type(raised.value) is torch.OutOfMemoryError
    if hasattr(raised.value, "__notes__"):
        assert raised.value.__notes__ == [str(report)]
    owners = report.by_owner
    assert sum(owners.values()) == report.in_use_bytes
    # The op requested the rest.
    assert 0.6 * peak * share < report.in_use_bytes <= peak * share
    kinds = ("parameters", "gradients", "optimizer state", "activations of", "temporaries of aten.",
             "input", "buffers")  # fmt: skip
    known = sum(n for owner, n in owners.items() if owner.startswith(kinds))
    assert known >= 0.95 * report.in_use_bytes and report.attributed_share >= 0.95
    parameters = sum(n for owner, n in owners.items() if owner.startswith("parameters"))
    assert parameters == sum(p.nbytes for p in model.parameters())
    state = sum(t.nbytes for s in optimizer.state.values() for t in s.values())
    assert owners["optimizer state of AdamW"] == state


def test_activations_have_the_names_of_their_modules():
    model = nn.ModuleDict({"up": nn.Linear(256, 1024), "down": nn.Linear(1024, 256)})
    x = torch.randn(1024, 256)
    with pytest.raises(torch.OutOfMemoryError), limit("12 MiB"), explain_oom() as report:
        model["down"](F.gelu(model["up"](x)))
    assert report.by_owner["activations of up"] == 4 * MIB
    assert report.by_owner["temporaries of aten.gelu.default"] == 4 * MIB
    assert report.by_owner["input (1024, 256) float32"] == MIB
    assert report.failed == "aten.addmm.default of down"


@pytest.mark.parametrize(
    "wrong, message",
    [({"loss": F.mse_loss}, "`loss` is mse_loss"), ({"model": nn.Linear}, "`model` is <class")],
)
def test_a_loss_that_takes_no_output_and_a_class_are_refused(wrong, message):
    with pytest.raises(TypeError, match=message), explain_oom(**wrong):
        pytest.fail("the block ran")


def test_without_an_error_the_report_is_empty():
    with explain_oom() as report:
        torch.zeros(4)
    assert not report.by_owner and report.in_use_bytes == 0
    assert "memory has not run out" in str(report)
    with pytest.raises(KeyboardInterrupt), explain_oom() as report:
        raise KeyboardInterrupt
    assert not report.by_owner
    with pytest.raises(torch.OutOfMemoryError, match="mine"), explain_oom() as report:
        kept = torch.zeros(MIB)
        raise torch.OutOfMemoryError("mine")
    assert report.by_owner["temporaries of aten.zeros.default"] == kept.nbytes
    assert report.failed == "code outside of ops"


def layers():
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(32, 2, 256, 0.0, batch_first=True) for _ in range(4)]
    return nn.Sequential(*blocks), torch.randn(8, 64, 32)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["inside", "outside"])
@pytest.mark.parametrize("fails", ["forward", "backward"])
def test_the_advice_is_a_call_of_fit(order, fails):
    model, x = layers()
    optimizer = torch.optim.AdamW(model.parameters())

    def train():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    train()
    peak = simulate_step(model, x, optimizer=optimizer).peak_bytes
    most = int(peak * (0.6 if fails == "forward" else 0.97))
    with pytest.raises(torch.OutOfMemoryError) as raised:
        if order == "inside":
            with explain_oom() as report, limit(most):
                train()
        else:
            with limit(most), explain_oom() as report:
                train()
    assert (" of " in report.failed) == (fails == "forward")
    assert report.plan.budget == most >= report.plan.peak_bytes
    assert "what fit would do for" in report.advice and "AdamW" in report.advice
    shown = str(report)
    assert report.advice in " ".join(shown.split()) and str(report.plan).splitlines()[1] in shown
    if hasattr(raised.value, "__notes__"):
        assert raised.value.__notes__ == [shown]
    del raised
    optimizer.zero_grad()
    report.plan.apply()
    with limit(most):
        train()


@pytest.mark.in_turn
def test_arguments_in_the_advice():
    model, x = layers()

    def loss(y):
        return y.float().logsumexp(-1).mean()

    with pytest.raises(torch.OutOfMemoryError), limit("3 MiB"), explain_oom(
        model=model, batch=x, loss=loss, optimizer=torch.optim.SGD
    ) as report:  # fmt: skip
        torch.zeros(MIB)
    assert "for 3 MiB and SGD:" in report.advice
    assert report.plan.peak_bytes <= 3 * MIB < simulate_step(model, x, loss=loss).peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("no model", "give explain_oom a model and a batch"),
        ("freed", "give explain_oom a model and a batch"),
        ("no limit", r"call storage_ops.fit\(.*\), with the bytes that there are"),
        ("nothing fits", "but a step of this model and batch needs at least"),
    ],
)
def test_cases_without_advice(case, message):
    model, x = layers()
    with pytest.raises(torch.OutOfMemoryError), explain_oom() as report:
        if case == "no limit":
            model(x)
            raise torch.OutOfMemoryError("mine")
        if case == "freed":
            model(torch.randn(8, 64, 32))
        with limit("1 MiB" if case == "nothing fits" else "3 MiB"):
            if case != "nothing fits":
                torch.zeros(MIB)
            model(x)
    assert report.plan is None and re.search(message, report.advice)
    assert " ".join(report.advice.split()) in " ".join(str(report).split())


def test_following_calls_keeps_nothing_alive():
    model, x = layers()
    gone = weakref.ref(x)
    with explain_oom():
        model[0](x, src_mask=None)
        del x
        assert gone() is None
    assert "__call__" not in vars(type(model))


class Half(nn.Module):
    def __init__(self, kept):
        kept.append(self)
        raise KeyError


class HalfOptimizer(torch.optim.Optimizer):
    def __init__(self, kept):
        kept.append(self)
        raise KeyError


def test_uninitialized_parameters_are_no_problem():
    kept = [nn.LazyLinear(4)]
    for half in (Half, HalfOptimizer):
        with pytest.raises(KeyError):
            half(kept)
    with limit("1 MiB"), explain_oom():
        torch.ones(4) + 1
    assert len(kept) == 3


@pytest.mark.in_turn
@pytest.mark.parametrize("with_optimizer", [True, False])
def test_an_optimizer_created_in_the_block(with_optimizer):
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))
    )
    x = torch.randn(512, 64)
    peak = simulate_step(model, x, optimizer=torch.optim.AdamW).peak_bytes

    def train():
        optimizer = torch.optim.AdamW(model.parameters()) if with_optimizer else None
        for _ in range(2):
            model(x).sum().backward()
            if optimizer is not None:
                optimizer.step()
                model.zero_grad()

    most = int(0.97 * peak) if with_optimizer else int(0.6 * peak)
    with pytest.raises(torch.OutOfMemoryError), limit(most), explain_oom() as report:
        train()
    state = sum(n for owner, n in report.by_owner.items() if owner.startswith("optimizer state"))
    assert "parameters of 0.0" in report.by_owner  # names of the model
    if with_optimizer:
        weights = sum(p.nbytes for p in model.parameters())
        assert abs(state - 2 * weights) <= 8 * sum(1 for _ in model.parameters())
        assert "and AdamW" in report.advice and report.plan.peak_bytes <= most
    else:
        assert state == 0 and "no optimizer (none was found" in str(report)
