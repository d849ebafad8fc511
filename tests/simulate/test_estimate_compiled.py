"""Steps with a loss compiled by torch.compile(backend="storage_ops") take the measured memory."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import storage_ops
from storage_ops.memory import simulate_step

VOCAB, WIDTH = 4096, 32


@pytest.fixture
def parts():
    """Return a model, its input, a head and labels."""
    torch.manual_seed(0)
    layers = (
        nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True) for _ in range(3)
    )
    labels = torch.randint(VOCAB, (4, 256))
    head = nn.Linear(WIDTH, VOCAB, bias=False)
    return nn.Sequential(*layers), torch.randn(4, 256, WIDTH), head, labels


def losses(head, labels):
    def recognised(h):
        return functional.cross_entropy(head(h).flatten(0, 1), labels.flatten())

    def chunked(h):
        return torch.softmax(head(h), -1).square().sum()

    return {"recognised": recognised, "chunked": chunked}


def measured_peak(model, x, head, labels, loss):
    def step():
        loss(model(x)).backward()

    step()
    for p in (*model.parameters(), *head.parameters()):
        p.grad = None
    inputs = (*model.parameters(), *head.parameters(), x, labels)
    with storage_ops.memory.measure() as m:
        step()
    for p in (*model.parameters(), *head.parameters()):
        p.grad = None
    return m.peak_bytes + sum(t.nbytes for t in inputs)


@pytest.mark.in_turn
@pytest.mark.kernels
@pytest.mark.parametrize("name", ["recognised", "chunked"])
def test_simulated_peaks_are_those_of_the_compiled_loss(parts, name):
    model, x, head, labels = parts
    plain = losses(head, labels)[name]
    peaks = {}
    for budget in ("1 MiB", "4 MiB"):
        loss = torch.compile(plain, backend="storage_ops", options={"memory_budget": budget})
        peaks[budget] = simulate_step(model, x, loss=loss).peak_bytes
    assert peaks["1 MiB"] < peaks["4 MiB"] < simulate_step(model, x, loss=plain).peak_bytes - 2**24
    # In torch 2.10 and 2.11, chunks take more, because Inductor must not overwrite the logits.
    apart = 0.002 if name == "recognised" else 0.03
    assert measured_peak(*parts, loss) == pytest.approx(peaks["4 MiB"], rel=apart)


@pytest.mark.in_turn
def test_plans_include_the_compiled_loss(parts):
    model, x, head, labels = parts
    options = {"memory_budget": "1 MiB"}
    loss = torch.compile(losses(head, labels)["recognised"], backend="storage_ops", options=options)
    none = simulate_step(model, x, loss=loss).peak_bytes
    budget = int(0.8 * none)
    plan = storage_ops.fit(model, x, budget, loss=loss)
    assert plan.seconds > 0 and plan.peak_bytes <= budget
    plan.apply()
    assert measured_peak(*parts, loss) <= 1.01 * budget


@pytest.mark.in_turn
def test_on_the_meta_device(parts):
    model, x, head, labels = (each.to("meta") for each in parts)
    plain = losses(head, labels)["recognised"]
    loss = torch.compile(plain, backend="storage_ops", options={"memory_budget": "1 MiB"})
    whole = simulate_step(model, x, loss=plain).peak_bytes
    assert simulate_step(model, x, loss=loss).peak_bytes < whole - 2**24


def test_another_backend_runs_op_by_op(parts):
    model, x, head, labels = parts
    plain = losses(head, labels)["chunked"]
    loss = torch.compile(plain, backend="eager")
    peaks = [simulate_step(model, x, loss=each).peak_bytes for each in (loss, plain)]
    assert peaks[0] == peaks[1]


def test_more_than_one_graph_is_refused(parts):
    model, x, *_ = parts

    @torch.compile(backend="storage_ops")
    def loss(h):
        torch._dynamo.graph_break()
        return h.square().mean()

    with pytest.raises(RuntimeError, match="the function itself, which is simulated op by op"):
        simulate_step(model, x, loss=loss)
    assert torch.get_default_device().type == "cpu"
    simulate_step(model, x)  # works, because the error left nothing behind
