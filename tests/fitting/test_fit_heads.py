"""Plans that choose the budgets of `LinearCrossEntropyLoss` modules in a user's own model."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

import storage_ops
from storage_ops.fitting import actions
from storage_ops.fitting.search import Search
from storage_ops.memory import measure, simulate_step

pytestmark = pytest.mark.in_turn

ADAM = torch.optim.AdamW
ACTIONS = ["output_discard", "selective", "full", "linear_cross_entropy"]
VOCAB, WIDTH = 4096, 64


class Body(nn.Module):
    """The layers of a small language model, without a head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 192, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Model(Body):
    """A language model that returns its loss."""

    def __init__(self, **options):
        super().__init__()
        self.head = storage_ops.LinearCrossEntropyLoss(WIDTH, VOCAB, **options)

    def forward(self, ids):
        return self.head(super().forward(ids), ids)


class Tied(Model):
    """A language model with one weight for the embedding and the head."""

    def __init__(self):
        super().__init__()
        self.head.linear.weight = self.embed.weight


class Within(nn.Module):
    """A language model whose head is nested in other modules."""

    def __init__(self):
        super().__init__()
        self.lm = Model(label_smoothing=0.1)

    def forward(self, ids):
        return self.lm(ids)


class Several(Body):
    """A language model with two heads in a list, as for multi-token prediction."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(
            storage_ops.LinearCrossEntropyLoss(WIDTH, VOCAB // n) for n in (1, 2)
        )

    def forward(self, ids):
        x = super().forward(ids)
        return self.heads[0](x, ids) + self.heads[1](x[:, 1:], ids[:, 1:] % (VOCAB // 2))


class Sequence(nn.Module):
    """A model whose head is called with keyword arguments."""

    def __init__(self):
        super().__init__()
        self.body = Body()
        self.head = storage_ops.LinearCrossEntropyLoss(WIDTH, VOCAB, bias=True)

    def forward(self, ids):
        return self.head(self.body(ids), target=ids)


MODELS = {
    "plain": Model, "tied": Tied, "deep": Within, "several": Several, "keywords": Sequence,
    "with its own budget": functools.partial(Model, memory_budget="2MiB"),
}  # fmt: skip


def batch():
    return torch.randint(0, VOCAB, (4, 128))


def peak_of_a_step(model, ids, loss=None, beside=()):
    """Return the measured peak of a step, including parameters, inputs and optimizer state."""
    parameters = list({id(p): p for m in (model, *beside) for p in m.parameters()}.values())
    optimizer = ADAM(parameters)

    def step():
        output = model(ids)
        (output if loss is None else loss(output)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    state = [t for s in optimizer.state.values() for t in s.values() if t.dim()]
    steps = [t for s in optimizer.state.values() for t in s.values() if not t.dim()]
    with measure() as m:
        step()
    return m.peak_bytes + sum(t.nbytes for t in (*parameters, *state, *steps, ids))


def gradients(model, ids):
    model.zero_grad()
    model(ids).backward()
    gradients_ = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return gradients_


def smallest_of(search):
    with pytest.raises(ValueError, match="needs at least") as error:
        search.plan(1000)
    return int(str(error.value).split("(")[2].split()[0])


@pytest.mark.kernels
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_measured_peaks(name):
    torch.manual_seed(0)
    model, ids = MODELS[name](), batch()
    expected, names = gradients(model, ids), list(model.state_dict())
    search = Search(model, ids, optimizer=ADAM, actions=ACTIONS)
    smallest = smallest_of(search)
    none = simulate_step(model, ids, optimizer=ADAM).peak_bytes
    if name != "with its own budget":
        assert smallest < none - 4 * ids.numel() * VOCAB // 2  # saves at least half of the logits
    seconds = []
    for share in (0.0, 0.5):
        budget = int(smallest + share * (none - smallest))
        plan = search.plan(budget)
        seconds.append(plan.seconds)
        before = str(model)
        plan.apply()
        rows = [row for row in plan.rows if "linear_cross_entropy" in row.action]
        assert bool(rows) == (str(model) != before)
        if budget < none and name != "with its own budget":
            assert rows and all("head" in name for row in rows for name in row.names)
            assert all("sums in another order" in row.action for row in rows)
        for ours, theirs in zip(gradients(model, ids), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        assert list(model.state_dict()) == names
        measured = peak_of_a_step(copy.deepcopy(model), ids)
        assert plan.peak_bytes <= budget and measured <= budget * 1.01
        assert measured == pytest.approx(plan.peak_bytes, rel=1e-3)
        plan.undo()
        assert str(model) == before
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.kernels
def test_a_loss_function_that_contains_the_head(tmp_path):
    torch.manual_seed(0)
    body, ids = Body(), batch()

    def loss_of(head):
        return lambda hidden: head(hidden, ids)

    head = storage_ops.LinearCrossEntropyLoss(WIDTH, VOCAB)
    loss = loss_of(head)
    both = nn.ModuleList([body, head])
    optimizer = ADAM(both.parameters())
    search = Search(body, ids, loss, optimizer, actions=ACTIONS)
    plan = search.plan(smallest_of(search))
    assert any(row.names == ["(loss)"] for row in plan.rows)
    plan.apply()
    assert head.options["memory_budget"] is not None
    measured = peak_of_a_step(body, ids, loss, [head])
    assert measured == pytest.approx(plan.peak_bytes, rel=1e-3)
    plan.undo()
    assert "memory_budget" not in head.options
    plan.save(tmp_path / "fit.json")
    with pytest.raises(ValueError, match=r"`loss` is None\. Pass a loss like that one"):
        storage_ops.load_fit(tmp_path / "fit.json", Body())
    with pytest.raises(ValueError, match="Pass a loss like that one"):
        other = loss_of(storage_ops.LinearCrossEntropyLoss(WIDTH, VOCAB, label_smoothing=0.1))
        storage_ops.load_fit(tmp_path / "fit.json", Body(), other)
    fresh = storage_ops.LinearCrossEntropyLoss(WIDTH, VOCAB)
    loaded = storage_ops.load_fit(tmp_path / "fit.json", Body(), loss_of(fresh))
    assert str(loaded) == str(plan)
    loaded.apply()
    assert fresh.options["memory_budget"] > 0
    loaded.undo()


def test_saved_and_loaded(tmp_path):
    ids = batch()
    search = Search(Model(), ids, optimizer=ADAM, actions=["linear_cross_entropy"])
    plan = search.plan(smallest_of(search))
    plan.save(tmp_path / "fit.json")
    model = Model()
    loaded = storage_ops.load_fit(tmp_path / "fit.json", model)
    assert str(loaded) == str(plan) and "head" in str(loaded)
    loaded.apply()
    assert "memory_budget" in str(model.head)
    assert simulate_step(model, ids, optimizer=ADAM).peak_bytes == plan.peak_bytes
    with pytest.raises(RuntimeError, match=r"head is checkpointed or tiled already \(its budget"):
        storage_ops.fit(model, ids, budget="1GiB")
    loaded.undo()
    with pytest.raises(ValueError, match="a plan of another model"):
        storage_ops.load_fit(tmp_path / "fit.json", Model(label_smoothing=0.1))


def test_the_whole_model_is_a_head():
    head, hidden = storage_ops.LinearCrossEntropyLoss(WIDTH, VOCAB), torch.randn(4, 128, WIDTH)
    search = Search(head, (hidden, batch()), actions=["linear_cross_entropy"])
    plan = search.plan(smallest_of(search))
    plan.apply()
    assert head.options["memory_budget"] > 0
    plan.undo()


@pytest.mark.kernels
def test_a_plan_of_the_head_is_replaced_and_restored():
    ids = batch()
    own = storage_ops.plan(512, WIDTH, VOCAB, dtype=torch.float32, device="cpu")
    model = Model(plan=own)
    search = Search(model, ids, optimizer=ADAM, actions=["linear_cross_entropy"])
    plan = search.plan(smallest_of(search))
    with_it = peak_of_a_step(copy.deepcopy(plan.apply()), ids)
    assert with_it == pytest.approx(plan.peak_bytes, rel=1e-3)
    plan.undo()
    assert model.head.options["plan"] is own


def test_models_without_a_head_or_with_a_shared_head_are_refused():
    body, ids = Body(), batch()
    with pytest.raises(ValueError, match="there is no loss that it can change"):
        storage_ops.fit(body, ids, "1GiB", actions=["linear_cross_entropy"])
    model = Model()
    model.same = model.head
    with pytest.raises(ValueError, match="is in several places"):
        storage_ops.fit(model, ids, "1GiB", actions=["linear_cross_entropy"])


@pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed")
def test_a_slice_of_the_vocabulary(monkeypatch):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    monkeypatch.setattr(actions, "_SHARES", (1 / 4,))  # smaller shares simulate thousands of tiles
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        with torch.device("meta"):
            model, ids = Body(), batch()
            model.head = storage_ops.LinearCrossEntropyLoss(
                WIDTH, VOCAB // 4, process_group=dist.group.WORLD
            )
            loss = functools.partial(model.head, target=ids)
        search = Search(model, ids, loss, ADAM, "h100", ["linear_cross_entropy"])
        plan = search.plan(smallest_of(search))
        assert any(row.names == ["head"] and row.action != "keep" for row in plan.rows)
        plan.apply()
        step = simulate_step(model, ids, loss=loss, optimizer=ADAM, device="h100")
        assert step.peak_bytes == plan.peak_bytes
        plan.undo()
    finally:
        dist.destroy_process_group()
