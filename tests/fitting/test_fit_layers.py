"""Which modules `fit` plans as layers, which of them share a simulation, and which it tiles."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

import storage_ops
from storage_ops.fitting import choices
from storage_ops.fitting.search import Search
from storage_ops.fitting.units import units_of
from storage_ops.memory import simulate_step

from .models import LlamaBlock

pytestmark = pytest.mark.in_turn

ADAM = torch.optim.AdamW


class Part(nn.Module):
    """A layer whose memory depends on an attribute."""

    def __init__(self, **attributes):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        vars(self).update(attributes)

    def forward(self, x):
        times = 4 if self.is_large() else 1
        return x + self.down(self.up(x).repeat(times, 1, 1, 1).exp().sum(0))

    def is_large(self):
        seen = vars(self)
        if "act" in seen:
            return seen["act"](torch.tensor(1.0)).item() > 1
        key = next(key for key in ("shape", "parts", "_large", "layer_idx") if key in seen)
        return {"shape": lambda v: v[0] == 4, "parts": len, "_large": bool,
                "layer_idx": lambda v: v == 1}[key](seen[key])  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("small", "large"),
    [
        ({"shape": (1, 4)}, {"shape": (4, 1)}),
        ({"parts": []}, {"parts": [1]}),
        ({"_large": False}, {"_large": True}),
        ({"layer_idx": 0}, {"layer_idx": 1}),
        ({"act": torch.sin}, {"act": torch.exp}),
        ({"act": lambda x: x * 1}, {"act": lambda x: x * 2}),
    ],
    ids=["tuple", "list", "private", "number", "function", "lambda"],
)
def test_layers_that_compute_something_else_by_an_attribute_are_simulated_apart(small, large):
    model, x = nn.Sequential(Part(**small), Part(**small), Part(**large)), torch.randn(8, 16, 32)
    search = Search(model, x, actions=["full"])
    none = simulate_step(model, x).peak_bytes
    assert abs(search.problem.peak([0] * 3) - none) <= 16
    kept = [options[0].kept for options in search.problem.options]
    assert kept[0] == kept[1] < kept[2]


def test_a_plan_still_applies_after_deepspeed_has_partitioned_the_model():
    """ZeRO-3 empties parameters, and sets attributes on them and on every module."""
    model = nn.Sequential(*(nn.TransformerEncoderLayer(16, 2, 64) for _ in range(3)))
    x = torch.randn(8, 2, 16)
    plan = storage_ops.fit(model, x, "1GiB", actions=["full", "selective"])
    for number, module in enumerate(model.modules()):
        vars(module).update(
            ds_id=number, ds_grads_remaining=0, ds_recompute_parameters=set(),
            ds_external_parameters=module.parameters, all_parameters=module.parameters,
            applied_pre_backward_ref_cnt=0, pre_bwd_fn=torch.autograd.Function,
            post_bwd_fn=torch.autograd.Function,
        )  # fmt: skip
    whole = [p.data for p in model.parameters()]
    for p in model.parameters():
        p.ds_shape, p.data = p.shape, torch.empty(0)
    plan.apply()
    for p, data in zip(model.parameters(), whole, strict=True):
        p.data = data
    model(x).sum().backward()


def test_a_plan_is_refused_for_a_model_that_differs_by_a_tuple(tmp_path):
    x = torch.randn(8, 16, 32)
    plan = storage_ops.fit(nn.Sequential(Part(shape=(1, 4)), Part(shape=(4, 1))), x, "1GiB")
    plan.save(tmp_path / "fit.json")
    storage_ops.load_fit(
        tmp_path / "fit.json", nn.Sequential(Part(shape=(1, 4)), Part(shape=(4, 1)))
    )
    with pytest.raises(ValueError, match="of another model"):
        storage_ops.load_fit(
            tmp_path / "fit.json", nn.Sequential(Part(shape=(4, 1)), Part(shape=(1, 4)))
        )
    text = (tmp_path / "fit.json").read_text().replace('"format": 5', '"format": 1')
    (tmp_path / "fit.json").write_text(text)
    with pytest.raises(ValueError, match="`format` is 1, which another version of storage_ops"):
        storage_ops.load_fit(tmp_path / "fit.json", nn.Sequential(Part(shape=(1, 4))))


class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return self.b(self.a(x).cumsum(1))


@pytest.mark.parametrize(
    ("middle", "is_tiled"),
    [
        (nn.GELU(), True), (nn.LayerNorm(64), True), (nn.Softmax(-1), True),
        (nn.BatchNorm1d(16), False), (nn.LayerNorm((16, 64)), False), (nn.Softmax(1), False),
        (nn.PReLU(16), False), (nn.Sequential(nn.Linear(64, 32), Mixing()), False),
    ],
    ids=str,
)  # fmt: skip
def test_only_token_wise_modules_are_tiled(middle, is_tiled):
    last = nn.Linear(32 if isinstance(middle, nn.Sequential) else 64, 32)
    layer = nn.ModuleDict({"body": nn.Sequential(nn.Linear(32, 64), middle, last)})
    assert choices._token_wise(layer) == (("body",) if is_tiled else ())


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)
        )

    def forward(self, x):
        for row in self.rows:
            x = x + row(x)
        return x


def test_rows_in_a_list_are_layers():
    model, x = Rows(), torch.randn(4, 16, 32)
    search = Search(model, x, optimizer=ADAM)
    assert len(search.problem.options) == 3
    none = simulate_step(model, x, optimizer=ADAM).peak_bytes
    assert search.problem.peak([0] * 3) == none


class Stage(nn.Module):
    """Widens its input, and then has layers of one width."""

    def __init__(self, size, width, layers):
        super().__init__()
        self.widen = nn.Linear(size, width)
        self.blocks = nn.ModuleList(Gated(width) for _ in range(layers))

    def forward(self, x):
        x = self.widen(x)
        for block in self.blocks:
            x = block(x)
        return x


class Gated(nn.Module):
    """Has lists of modules of one class, as a layer with experts or heads has."""

    def __init__(self, width):
        super().__init__()
        self.ways = nn.ModuleList(nn.Sequential(nn.Linear(width, width)) for _ in range(2))

    def forward(self, x):
        return x + self.ways[0](x).sin() * self.ways[1](x).exp()


def test_layers_of_stages_are_layers():
    model, x = (
        nn.Sequential(Stage(8, 32, 2), Stage(32, 64, 3), Stage(64, 96, 2)),
        torch.ones(512, 8),
    )
    plain = simulate_step(model, x).peak_bytes
    search = Search(model, x)
    assert abs(search.problem.peak([0] * 7) - plain) <= 16
    plan = storage_ops.fit(model, x, int(0.6 * plain))
    plan.apply()
    assert simulate_step(model, x).peak_bytes == plan.peak_bytes < plain


@pytest.mark.parametrize(
    ("members", "names"),
    [
        (
            [Stage(8, 16, 2), Stage(16, 16, 2)],
            ["0.blocks.0", "0.blocks.1", "1.blocks.0", "1.blocks.1"],
        ),
        ([Stage(16, 16, 2), Stage(16, 16, 2)], ["0", "1"]),
        ([Stage(8, 16, 3)], ["0"]),
        ([nn.ReLU(), Stage(8, 16, 2), nn.ReLU()], ["1.blocks.0", "1.blocks.1"]),
        ([Part(), Stage(32, 16, 1)], ["0", "1.blocks.0"]),
    ],
    ids=["stages", "alike", "one", "an encoder in a sequence", "one layer"],
)
def test_which_members_of_a_list_are_stages(members, names):
    assert [unit.name for unit in units_of(nn.Sequential(*members))] == names


@dataclasses.dataclass
class Out:
    hidden: torch.Tensor


class Boxed(Part):
    def forward(self, x):
        return Out(super().forward(x.hidden if isinstance(x, Out) else x))


def test_layers_that_return_objects_are_not_planned():
    model = nn.Sequential(*(Boxed(shape=(4, 1)) for _ in range(3)))
    x = torch.randn(4, 16, 32)

    def loss(out):
        return out.hidden.sum()

    search = Search(model, x, loss, ADAM)
    none = simulate_step(model, x, loss=loss, optimizer=ADAM).peak_bytes
    assert search.problem.options == [] and search.problem.peak([]) == none


class Cache:
    def __init__(self, prefix):
        self.tokens = [prefix]


class Cached(Part):
    def forward(self, x, cache):
        cache.tokens.append(x)
        return super().forward(x) + sum(t.mean(1, keepdim=True) for t in cache.tokens)


class Prefixed(nn.Module):
    """Trains a prefix in a cache that its layers extend, as prefix tuning does."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Cached(shape=(4, 1)) for _ in range(3))
        self.layers.requires_grad_(False)
        self.prefix = nn.Parameter(torch.randn(4, 2, 32))

    def forward(self, x):
        for layer in self.layers:
            cache = Cache(self.prefix * 2)
            x = layer(x, cache)
            assert len(cache.tokens) == 2
        return x.square().mean()


def test_a_cache_with_an_autograd_graph_is_extended_once():
    model, x = Prefixed(), torch.randn(4, 16, 32)
    none = simulate_step(model, x).peak_bytes
    assert storage_ops.fit(model, x, "1GiB").peak_bytes == none


class Recurrent(nn.Module):
    """Keeps a state with a graph, which its model replaces before each step."""

    def __init__(self, is_buffer):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        if is_buffer:
            self.register_buffer("state", torch.zeros(32))
        else:
            self.state = torch.zeros(32)

    def forward(self, x):
        x = x + self.down(self.up(x + self.state).exp())
        self.state = x.mean((0, 1))
        return x


class OfRecurrent(nn.Module):
    def __init__(self, is_buffer):
        super().__init__()
        self.layers = nn.ModuleList(Recurrent(is_buffer) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            layer.state = torch.zeros(32)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("is_buffer", [False, True])
def test_states_from_an_earlier_step(is_buffer):
    model, x = OfRecurrent(is_buffer), torch.randn(8, 16, 32)
    budget = int(0.9 * simulate_step(model, x).peak_bytes)
    plan = storage_ops.fit(model, x, budget)
    model(x).backward()
    states = [layer.state for layer in model.layers]
    model.zero_grad()
    assert storage_ops.fit(model, x, budget).peak_bytes == plan.peak_bytes <= budget
    assert all(layer.state is s for layer, s in zip(model.layers, states, strict=True))


def test_scripted_modules_beside_layers():
    scripted = torch.jit.script(nn.Linear(32, 32))
    model, x = (
        nn.Sequential(scripted, Part(shape=(1, 4)), Part(shape=(1, 4))),
        torch.randn(8, 16, 32),
    )
    assert storage_ops.fit(model, x, "1GiB").peak_bytes > 0


class Features(nn.Module):
    """Returns the outputs of its second and third layers, like the vision tower of LLaVA."""

    def __init__(self):
        super().__init__()
        layers = (nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0) for _ in range(4))
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        outputs = [x]
        for layer in self.layers:
            outputs.append(layer(outputs[-1]))
        return outputs[2].sum() + outputs[3].sum()


def test_a_layer_whose_output_has_no_gradient():
    """Attention on a CPU computed the copy of a gradient that did not exist."""
    model, x = Features(), torch.randn(64, 4, 32)
    highest = simulate_step(model, x).peak_bytes
    plan = storage_ops.fit(model, x, int(0.8 * highest))
    assert plan.peak_bytes <= 0.8 * highest


class Force(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(Part(shape=(1, 4)), Part(shape=(1, 4)))

    def forward(self, x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.layers(x).sum(), x, create_graph=True)[0].square().sum()


def test_second_derivatives_are_refused():
    with pytest.raises(RuntimeError, match=r"layer layers\.1 is differentiated with create_graph"):
        storage_ops.fit(Force(), torch.randn(8, 16, 32), "1GiB")


def test_a_model_in_eval_mode_with_a_cache():
    """from_pretrained returns such a model. Its layers write into a cache that it creates."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model, ids = transformers.LlamaForCausalLM(config).eval(), torch.randint(0, 64, (2, 64))
    batch = {"input_ids": ids, "labels": ids}
    highest = simulate_step(model, batch).peak_bytes
    assert [row.action for row in storage_ops.fit(model, batch, highest).rows] == ["keep"]
    right = copy.deepcopy(model)
    plan = storage_ops.fit(model, batch, int(0.7 * highest), actions=["full"])
    plan.apply()
    assert simulate_step(model, batch).peak_bytes == plan.peak_bytes <= 0.7 * highest
    for fitted_or_plain in (model, right):
        fitted_or_plain(**batch).loss.backward()
    for ours, theirs in zip(model.parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0)


def mlps():
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4))
    )


def test_another_plan_leaves_the_first_one_applied(tmp_path):
    model, x = (
        nn.Sequential(*(nn.TransformerEncoderLayer(32, 2, 64) for _ in range(4))),
        torch.randn(8, 64, 32),
    )
    search = Search(model, x)
    highest = search.curve()[-1][0]
    first, second = search.plan(int(0.8 * highest)), search.plan(int(0.7 * highest))
    second.save(tmp_path / "plan.json")
    first.apply()
    before = simulate_step(model, x).peak_bytes
    for other in (storage_ops.load_fit(tmp_path / "plan.json", model), second):
        with pytest.raises(RuntimeError, match=r"checkpointed or tiled already .* earlier plan"):
            other.apply()
        assert simulate_step(model, x).peak_bytes == before == first.peak_bytes
    with pytest.raises(
        ValueError, match=r"differs in: modules\. Pass a model like the one that.*ted\.$"
    ):
        storage_ops.load_fit(tmp_path / "plan.json", mlps()[:3].eval())
    first.undo()
    second.apply()
    assert simulate_step(model, x).peak_bytes == second.peak_bytes


def test_the_peak_without_a_plan_is_simulated_if_the_sum_over_layers_is_inexact(monkeypatch):
    model, x = mlps(), torch.randn(512, 32)
    highest = simulate_step(model, x).peak_bytes
    whole = storage_ops.fit(model, x, 2 * highest)
    assert whole.peak_bytes == whole.totals["none"][0] == highest
    monkeypatch.setattr("storage_ops.fitting.search._EXACT", -1)
    plan = storage_ops.fit(model, x, int(0.8 * highest))
    assert plan.peak_bytes < plan.totals["none"][0] == highest
    config = storage_ops.ActivationCheckpointConfig(layer_names=["[0-3]"])
    storage_ops.apply_activation_checkpoint(model, config)
    assert plan.totals["full checkpoint"][0] == simulate_step(model, x).peak_bytes


def ending_in(*last):
    return nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), *last)


class TwoHeads(nn.Module):
    """An actor and a critic on one trunk, whose output gets two gradients."""

    def __init__(self, trunk):
        super().__init__()
        self.trunk, self.actor, self.critic = trunk, nn.Linear(32, 8), nn.Linear(32, 1)

    def forward(self, x):
        features = self.trunk(x)
        return self.actor(features).logsumexp(-1).mean() + self.critic(features).square().mean()


class Added(nn.Module):
    """Sums the outputs of its layers, so that none of them is saved."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


@pytest.mark.parametrize(
    "make",
    [
        lambda: TwoHeads(nn.Sequential(*(ending_in(nn.Tanh()) for _ in range(3)))),
        lambda: TwoHeads(nn.Sequential(*(ending_in(nn.GELU()) for _ in range(3)))),
        lambda: TwoHeads(nn.Sequential(ending_in(nn.ReLU()), ending_in(nn.Sigmoid()))),
        lambda: TwoHeads(
            nn.Sequential(ending_in(nn.Tanh()), nn.Sequential(nn.Tanh(), ending_in()))
        ),
        lambda: Added(nn.ModuleList(ending_in(nn.Tanh()) for _ in range(3))),
    ],
    ids=["tanh", "gelu", "relu and sigmoid", "a layer that does not save its input", "added"],
)
def test_outputs_that_layers_save_count_once(make):
    model, x = make(), torch.randn(512, 32)
    none = simulate_step(model, x, loss=lambda value: value).peak_bytes
    search = Search(model, x, loss=lambda value: value)
    assert search.problem.peak([0] * len(search.problem.options)) == none
    plan = storage_ops.fit(model, x, none, loss=lambda value: value)
    assert plan.peak_bytes == none and plan.seconds == 0


def test_the_peak_of_a_step_is_never_refused(monkeypatch):
    """`fit` accepts it as a budget although the sum over layers may be larger."""
    model, x = mlps(), torch.randn(512, 32)
    highest = simulate_step(model, x).peak_bytes
    kind = storage_ops.fitting.solve.ActionProblem
    plain = kind.at_peak

    def too_high(self, choice):
        moment = plain(self, choice)
        return dataclasses.replace(moment, level=2 * moment.level)

    monkeypatch.setattr(kind, "at_peak", too_high)
    monkeypatch.setattr(kind, "fastest", lambda self, budget: None)
    monkeypatch.setattr(Search, "_least", lambda self: None)
    assert storage_ops.fit(model, x, highest, actions=["full"]).peak_bytes == highest


def test_layers_share_a_simulation_although_the_first_gets_other_numbers(monkeypatch):
    seen, plain = [], choices.costs_of
    count = "storage_ops.fitting.search.costs_of"
    monkeypatch.setattr(count, lambda call, *rest: seen.append(call) or plain(call, *rest))
    blocks = (LlamaBlock(32, i) for i in range(4))
    model = nn.Sequential(nn.Embedding(8, 32), *blocks, nn.Linear(32, 8))
    search = Search(model, torch.randint(0, 8, (2, 16)), actions=["full"])
    assert len(search.problem.options) == 4
    assert len(seen) == 1
