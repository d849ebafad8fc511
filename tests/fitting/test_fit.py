"""Plans of small models: simulated and measured peaks, gradients, and refused arguments."""

import copy
import dataclasses
import gc
import itertools
import os

import pytest
import torch
from torch import nn

import storage_ops
from storage_ops.fitting.search import Search
from storage_ops.fitting.units import units_of
from storage_ops.loss.planning.devices import named
from storage_ops.loss.planning.op_times import HostTimes
from storage_ops.memory import measure, simulate_step
from storage_ops.simulate.rates import rates_for
from storage_ops.simulate.step import arguments, loss_of

from .models import MODELS, GatedMLP, GptBlock, LlamaBlock, gpt, llama

pytestmark = pytest.mark.in_turn

ADAM = torch.optim.AdamW
SHARES = (0.0, 0.4, 0.85) if os.environ.get("CI") else [i / 19 for i in range(20)]


def step(model, batch, optimizer=None):
    args, kwargs = arguments(batch)
    loss = loss_of(model(*args, **kwargs))
    loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return loss


def measured_peak(model, batch):
    optimizer = ADAM(model.parameters())
    step(model, batch, optimizer)
    args, kwargs = arguments(batch)
    static = sum(t.nbytes for t in (*args, *kwargs.values()))
    static += sum(b.nbytes for b in model.buffers()) + 3 * sum(p.nbytes for p in model.parameters())
    with measure() as m:
        step(model, batch, optimizer)
    return m.peak_bytes + static


def gradients(model, batch):
    model.zero_grad()
    torch.manual_seed(7)
    loss = step(model, batch)
    return [loss.detach(), *(p.grad for p in model.parameters()), torch.get_rng_state()]


@pytest.fixture
def one_thread():
    """Use one thread, because several sum gradients of convolutions in memory of their own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_peaks_and_gradients(name, one_thread):
    model, batch = MODELS[name]()
    plain = copy.deepcopy(model)
    expected = gradients(plain, batch)
    search = Search(model, batch, optimizer=ADAM)
    none = simulate_step(model, batch, optimizer=ADAM).peak_bytes
    with pytest.raises(ValueError, match="needs at least") as error:
        search.plan(1000)
    smallest = int(str(error.value).split("(")[2].split()[0])
    assert smallest < none
    before = None
    for share in SHARES:
        budget = int(smallest + (none - smallest) * share)
        plan = search.plan(budget)
        plan.apply()
        assert plan.peak_bytes <= budget
        if before is None:
            assert plan.peak_bytes == simulate_step(model, batch, optimizer=ADAM).peak_bytes
        for ours, theirs in zip(gradients(model, batch), expected, strict=True):
            assert torch.equal(ours, theirs)
        model.zero_grad()
        state = copy.deepcopy(model.state_dict())
        assert measured_peak(model, batch) <= budget * 1.01
        model.load_state_dict(state)
        model.zero_grad()
        plan.undo()
        # More budget never costs more time.
        assert before is None or plan.seconds <= before
        before = plan.seconds
    assert search.plan(none).seconds == 0 and not search.plan(none)._actions
    if smallest > 0:
        with pytest.raises(ValueError, match=f"{smallest} bytes"):
            search.plan(smallest - 1)


@pytest.fixture
def asking_is_free(monkeypatch):
    """Set the host's time of actions to 0, so that small layers are planned like large ones."""

    def rates(device, model):
        host = HostTimes(op=named("cpu").host.op)
        return dataclasses.replace(rates_for(device, model), host=host)

    monkeypatch.setattr("storage_ops.simulate.rates.rates_for", rates)


def test_no_assignment_of_actions_is_faster(asking_is_free):
    model, batch = MODELS["mixtral"]()
    search = Search(model, batch, optimizer=ADAM)
    problem = search.problem
    choices = list(itertools.product(*(range(len(o)) for o in problem.options)))
    assert len(choices) > 200
    costs = [(problem.peak(c), problem.seconds(c)) for c in choices]
    low, high = min(costs)[0], max(costs)[0]
    for share in (0, 0.1, 0.3, 0.6, 0.9):
        budget = int(low + (high - low) * share)
        best = min(seconds for peak, seconds in costs if peak <= budget)
        assert search.plan(budget).seconds <= 1.02 * best + 1e-12


@pytest.fixture(scope="module")
def searched():
    """Return a model that no test changes, its batch, and a finished search."""
    model, batch = llama()
    return model, batch, Search(model, batch, optimizer=ADAM)


def test_plans_between_the_extremes_are_faster_than_full_checkpoints(searched):
    *_, search = searched
    plan = search.plan(1 << 30)
    none, full = plan.totals["none"], plan.totals["full checkpoint"]
    assert plan.seconds == none[1] == 0 < full[1]
    middle = search.plan((none[0] + full[0]) // 2)
    assert middle.seconds < 0.6 * full[1]
    same = search.plan(full[0])
    assert same.seconds <= full[1]


def test_a_plan_prints_saves_and_loads(tmp_path, searched):
    model, batch, search = searched
    names = list(model.state_dict())
    plan = search.plan(7_500_000)
    text = str(plan)
    for word in ("layers", "action", "bytes kept", "at the peak", "seconds added", "none: peak"):
        assert word in text
    assert sum(len(row.names) for row in plan.rows) == 5
    plan.save(tmp_path / "fit.json")
    other, _ = llama()
    loaded = storage_ops.load_fit(tmp_path / "fit.json", other)
    assert str(loaded) == text and loaded.peak_bytes == plan.peak_bytes
    calls = []
    other.layers[0].register_forward_hook(lambda *_: calls.append(1))
    assert loaded.apply() is other and list(other.state_dict()) == names
    assert simulate_step(other, batch, optimizer=ADAM).peak_bytes == plan.peak_bytes
    calls.clear()
    step(other, batch)
    assert len(calls) == 1
    with pytest.raises(RuntimeError, match="applied already"):
        loaded.apply()
    loaded.undo()
    assert type(other.layers[0]) is LlamaBlock
    with pytest.raises(RuntimeError, match="not applied"):
        loaded.undo()
    with pytest.raises(ValueError, match="of another model"):
        storage_ops.load_fit(tmp_path / "fit.json", gpt()[0])
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a plan"):
        storage_ops.load_fit(tmp_path / "bad.json", other)
    with pytest.raises(TypeError, match=r"`path` is a LlamaBlock\. Expected"):
        storage_ops.load_fit(other.layers[0], "fit.json")
    with pytest.raises(TypeError, match="`model` is 3, a int"):
        storage_ops.load_fit(tmp_path / "fit.json", 3)
    with pytest.raises(TypeError, match=r"`loss` is 3\. Expected"):
        storage_ops.load_fit(tmp_path / "fit.json", model, 3)


def test_a_changed_model_is_refused_and_an_error_does_not_change_it(monkeypatch):
    model, batch = llama()
    plan = storage_ops.fit(model, batch, "6MB", optimizer=ADAM)
    model.eval()
    with pytest.raises(RuntimeError, match="not what it was"):
        plan.apply()
    model.train()
    first = model.layers[0]
    model.layers[0] = LlamaBlock(64, 0)
    with pytest.raises(RuntimeError, match="not what it was"):
        plan.apply()
    model.layers[0] = first
    apply = storage_ops.fitting.actions.apply_activation_checkpoint

    def failing(layer, cfg):
        if layer is model.layers[3]:
            raise KeyboardInterrupt
        return apply(layer, cfg)

    monkeypatch.setattr(storage_ops.fitting.actions, "apply_activation_checkpoint", failing)
    with pytest.raises(KeyboardInterrupt):
        plan.apply()
    assert all(type(layer) is LlamaBlock for layer in model.layers)
    monkeypatch.undo()
    plan.apply()
    with pytest.raises(RuntimeError, match=r"layers.0 is checkpointed or tiled already"):
        storage_ops.fit(model, batch, "9MB")


def test_fitting_changes_nothing(monkeypatch):
    model, batch = gpt()
    step(model, batch)
    optimizer = ADAM(model.parameters())
    values = copy.deepcopy(model.state_dict())
    before = [p.grad.clone() for p in model.parameters()]
    random = torch.get_rng_state()
    attributes = {name: set(vars(m)) for name, m in model.named_modules()}
    storage_ops.fit(model, batch, "4MB", optimizer=optimizer)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))
    assert all(torch.equal(v, values[k]) for k, v in model.state_dict().items())
    assert not optimizer.state and torch.equal(torch.get_rng_state(), random)
    assert {name: set(vars(m)) for name, m in model.named_modules()} == attributes


def test_parameters_that_a_step_does_not_use_have_no_state():
    """An unused pooler adds its parameters to every plan's peak, and changes nothing else."""
    model, batch = llama()
    used = Search(copy.deepcopy(model), batch, optimizer=ADAM)
    model.pooler = nn.Linear(512, 512)
    more = sum(p.nbytes for p in model.pooler.parameters())
    search = Search(model, batch, optimizer=ADAM)
    assert search.curve() == [(peak + more, seconds) for peak, seconds in used.curve()]
    budget = search.curve()[3][0]
    plan = search.plan(budget)
    assert plan.peak_bytes <= budget and plan.seconds == used.plan(budget - more).seconds


def test_objects_that_the_caller_froze_in_gc_stay_frozen():
    model, batch = llama()
    try:
        gc.freeze()
        before = gc.get_freeze_count()
        storage_ops.fit(model, batch, "1GiB")
        assert 0.99 * before < gc.get_freeze_count() <= before  # some were deleted meanwhile
        gc.unfreeze()
        storage_ops.fit(model, batch, "1GiB")
        assert gc.get_freeze_count() == 0 and gc.isenabled()
    finally:
        gc.freeze()  # as the module's fixture did


def test_tiles_lower_the_peak_and_are_printed():
    model, batch = llama()
    for block in model.layers:
        block.mlp = GatedMLP(64, 1024)
    exact = Search(model, batch, optimizer=ADAM)
    tiled = Search(model, batch, optimizer=ADAM, actions=["full", "selective", "tile"])
    lowest = [s.problem.peak(s.problem.smallest()) for s in (exact, tiled)]
    assert lowest[1] < lowest[0]
    plan = tiled.plan(lowest[1])
    assert "sums in another order" in str(plan)
    expected = gradients(model, batch)
    plan.apply()
    for ours, theirs in zip(gradients(model, batch), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    model.zero_grad()
    assert measured_peak(model, batch) <= plan.budget * 1.01


def test_the_largest_of_several_batches_decides(searched):
    model, batch, search = searched
    short = tuple(t[:, :16] for t in batch)
    one = search.plan(7_500_000)
    several = storage_ops.fit(model, [short, batch, short], "7.5MB", optimizer=ADAM)
    assert several.peak_bytes == one.peak_bytes and several.seconds == one.seconds


def test_frozen_layers_layers_used_twice_and_a_loss():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(LlamaBlock(32, i) for i in range(4))
            self.layers[0].requires_grad_(False)

        def forward(self, x):
            for layer in (*self.layers, self.layers[3]):
                x = layer(x)
            return x

    model, x = Twice(), torch.randn(2, 64, 32)
    search = Search(model, x, loss=lambda y: y.square().mean(), optimizer=torch.optim.SGD)
    lowest = search.problem.peak(search.problem.smallest())
    plan = search.plan(int(lowest * 1.05))
    assert plan.peak_bytes <= lowest * 1.05
    assert {u.name for u, _ in plan._actions} == {"layers.1", "layers.2", "layers.3"}
    assert sum(name == "layers.3" for row in plan.rows for name in row.names) == 1


class BiEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(GptBlock(32, 0.1) for _ in range(4)))

    def forward(self, questions, answers):
        scores = self.layers(questions).mean(1) @ self.layers(answers).mean(1).T
        return torch.nn.functional.cross_entropy(scores, torch.arange(len(scores)))


def test_layers_that_run_twice_are_planned():
    model, batch = BiEncoder(), (torch.randn(4, 64, 32), torch.randn(4, 96, 32))
    expected = gradients(copy.deepcopy(model), batch)
    none = simulate_step(model, batch).peak_bytes
    search = Search(model, batch, actions=["full"])
    some = search.plan(int(0.7 * none))
    plan = search.plan(int(0.4 * none))
    assert 0 < some.seconds < plan.seconds
    plan.apply()
    assert all(map(torch.equal, gradients(model, batch), expected))
    assert simulate_step(model, batch).peak_bytes == plan.peak_bytes <= 0.4 * none


class Residual(nn.Module):
    def __init__(self, size=32):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.mlp = nn.Sequential(
            nn.Linear(size, 4 * size), nn.GELU(), nn.Dropout(0.2), nn.Linear(4 * size, size)
        )

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class InAutocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(Residual() for _ in range(3)))

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.layers(x).float().square().mean()


def test_a_forward_in_autocast():
    model, x = InAutocast(), torch.randn(4, 128, 32)
    none = simulate_step(model, x).peak_bytes
    expected = gradients(copy.deepcopy(model), x)
    plan = storage_ops.fit(model, x, int(none * 0.7))
    assert plan.seconds > 0
    plan.apply()
    for ours, theirs in zip(gradients(model, x), expected, strict=True):
        assert torch.equal(ours, theirs)
    computed, _ = plan.totals["none"]
    assert computed == pytest.approx(none, rel=0.05)


@pytest.mark.parametrize("accumulate", [False, True])
def test_peaks_in_an_autocast_block(accumulate):
    """Autocast's casts stay in memory to the end of the forward, whatever a layer recomputes."""
    model = nn.Sequential(*(Residual() for _ in range(3)))
    with torch.autocast("cpu", torch.bfloat16):
        search = Search(model, torch.randn(16, 32), actions=["full"], accumulate=accumulate)
        for choice in map(list, itertools.product((0, 1), repeat=3)):
            computed = search.problem.peak(choice)
            assert search._simulated(0, choice).peak_bytes == pytest.approx(computed, abs=4)
        alone = simulate_step(model, torch.randn(16, 32), accumulate=accumulate)
        plan = storage_ops.fit(model, torch.randn(16, 32), alone.peak_bytes, accumulate=accumulate)
    assert plan.seconds == 0 and plan.peak_bytes == alone.peak_bytes


def test_a_model_without_layers():
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    plan = storage_ops.fit(model, x, "1KiB")
    assert plan.seconds == 0 and plan.apply() is model
    with pytest.raises(ValueError, match="needs at least"):
        storage_ops.fit(model, x, 100)


def test_a_saved_plan_has_a_fingerprint_of_each_layer():
    model, _ = llama()
    prints = [unit.print for unit in units_of(model)]
    assert [unit.print for unit in units_of(copy.deepcopy(model))] == prints
    model.layers[2].mlp.down.requires_grad_(False)
    pairs = zip(prints, [unit.print for unit in units_of(model)], strict=True)
    assert [before == now for before, now in pairs].count(False) == 1


@pytest.mark.parametrize("value", [None, 1.5, (torch.ones(()),), torch.ones(2)], ids=str)
def test_a_loss_that_is_not_a_scalar_is_refused(value):
    model, batch = llama()
    with pytest.raises(ValueError, match="Expected a scalar tensor"):
        storage_ops.fit(model, batch, "9MB", lambda _: value)


def test_wrong_arguments():
    model, batch = llama()
    for wrong, message in [
        ({"budget": "many"}, "`budget` is 'many'"),
        ({"budget": "9MB", "actions": ["tiles"]}, "`actions` has 'tiles'"),
        ({"budget": "9MB", "actions": "tile"}, "`actions` is 'tile'"),
        ({"budget": "9MB", "device": "h99"}, "`device` is 'h99'"),
        ({"budget": "9MB", "optimizer": 3}, "`optimizer` is 3"),
        ({"budget": "9MB", "loss": lambda output, labels: output}, "`loss` is .*'labels'"),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            storage_ops.fit(model, batch, **wrong)
    with pytest.raises(ValueError, match="`batch` is an empty list"):
        storage_ops.fit(model, [], "9MB")
    with pytest.raises(TypeError, match="`model` is 3, a int"):
        storage_ops.fit(3, batch, "9MB")
