"""Plans work with torch.compile before or after: the compiled graph recomputes what they say."""

import copy
import re

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import storage_ops
from storage_ops.fitting.actions import Action
from storage_ops.fitting.search import Search

from .models import gpt, llama
from .test_fit import gradients

pytestmark = pytest.mark.in_turn

ADAM = torch.optim.AdamW


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: gpt(0.0), llama], ids=["gpt", "llama"])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_gradients_of_a_compiled_model_with_a_plan(make, share):
    torch._dynamo.reset()
    model, batch = make()
    plain = copy.deepcopy(model)
    high = storage_ops.memory.simulate_step(model, batch, optimizer=ADAM).peak_bytes
    with pytest.raises(ValueError, match="needs at least") as error:
        storage_ops.fit(model, batch, 1, None, ADAM)
    low = int(re.findall(r"\((\d+) bytes\)", str(error.value))[-1])
    storage_ops.fit(model, batch, int(low + share * (high - low)), None, ADAM).apply()
    saved = []

    def pack(t):
        saved.append(t.untyped_storage())
        return t

    def kept(model):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            gradients(model, batch)
        return sum({s.data_ptr(): s.nbytes() for s in saved}.values())

    ours, right = (torch.compile(m, backend="aot_eager") for m in (model, plain))
    for one, other in zip(gradients(ours, batch)[:-1], gradients(plain, batch)[:-1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert kept(ours) < kept(right)


class Residual(nn.Module):
    """An MLP with a residual connection."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["the model", "its layers"])
def test_a_plan_for_a_model_that_is_compiled_already(how, tmp_path):
    recomputes = []  # for each compiled graph, whether it recomputes

    def backend(graph, inputs):
        recomputes.append(any("checkpoint" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    def compiled(module):
        return torch.compile(module, backend=backend)

    torch._dynamo.reset()
    plain = nn.Sequential(Residual(), Residual(), Residual())
    model = nn.Sequential(*map(compiled, plain)) if how == "its layers" else compiled(plain)
    x = torch.randn(1024, 16)
    right = model(x)
    assert recomputes and not any(recomputes)
    with pytest.raises(ValueError, match="needs at least") as error:
        storage_ops.fit(model, x, 1)
    budget = int(re.findall(r"\((\d+) bytes\)", str(error.value))[-1])
    plan = storage_ops.fit(model, x, budget)
    same = storage_ops.fit(plain, x, budget)
    # In eager mode the last layer can keep all, because its backward runs first and frees tensors.
    assert [(row.names, row.action) for row in plan.rows] == [(["0", "1", "2"], "full checkpoint")]
    assert [row.names for row in same.rows] == [["0", "1"], ["2"]]
    plan.save(tmp_path / "plan.json")
    assert plan.apply() is model
    torch.testing.assert_close(model(x), right)
    assert any(recomputes)
    plan.undo()
    seen = len(recomputes)
    torch.testing.assert_close(model(x), right)
    assert len(recomputes) == seen  # earlier compiled graphs are reused
    storage_ops.load_fit(tmp_path / "plan.json", copy.deepcopy(plain)).apply()


def test_a_compiled_layer_holds_saved_tensors_until_its_backward_ends():
    """Compiled code computes the gradients of weights last."""
    model, x = nn.Sequential(Residual(), Residual(), Residual()), torch.randn(1024, 16)
    eager, compiled = (Search(m, x)._variants[0].costs for m in (model, torch.compile(model)))
    for one, other in zip(map(dict, eager), map(dict, compiled), strict=True):
        keep, fused = one[Action("keep")], other[Action("keep")]
        assert fused.backward == keep.backward + keep.kept > keep.backward
        assert (fused.forward, fused.kept) == (keep.forward, keep.kept)


def test_compiled_code_keeps_products_of_experts():
    """From version 5 on, transformers has its own op for them in compiled code."""
    transformers = pytest.importorskip("transformers", "5")
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, use_cache=False,
    )  # fmt: skip
    model, ids = transformers.MixtralForCausalLM(config), torch.randint(0, 32, (1, 64))
    config = storage_ops.ActivationCheckpointConfig(
        layer_classes=["MixtralDecoderLayer"],
        policy=storage_ops.policies.save_calls([("grouped_mm", 0), ("grouped_mm", 1)]),
    )
    storage_ops.apply_activation_checkpoint(model, config)
    graphs = []

    def compiler(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=compiler))
    compiled(input_ids=ids, labels=ids).loss.backward()
    counts = [sum("grouped_mm_fallback.default" in name for name in names) for names in graphs]
    assert counts == [2, 0]


def test_recomputing_fused_ops_costs_little():
    model, x = nn.Sequential(*(Residual() for _ in range(4))), torch.randn(1024, 16)
    budget = int(0.8 * storage_ops.memory.simulate_step(model, x).peak_bytes)
    eager = storage_ops.fit(model, x, budget)
    compiled = storage_ops.fit(torch.compile(model, backend="eager"), x, budget)
    assert any(row.action != "keep" for row in compiled.rows)
    assert 0 < compiled.seconds < eager.seconds / 2  # both compute a product again
    assert 0 < compiled.step_seconds < eager.step_seconds


class Attention(nn.Module):
    """Matrix products, with ops between them that compiled code fuses, also random ones."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(32, 96), nn.Linear(32, 32), nn.LayerNorm(32)

    def forward(self, x):
        q, k, v = self.up(self.norm(x)).chunk(3, -1)
        weights = nn.functional.dropout((q @ k.transpose(-1, -2)).softmax(-1), 0.1)
        return x + nn.functional.dropout(self.down(weights @ v), 0.1)


def test_products_are_kept_and_fused_ops_are_recomputed_for_free():
    model, x = nn.Sequential(*(Attention() for _ in range(4))), torch.randn(2, 256, 32)
    highest = storage_ops.memory.simulate_step(model, x).peak_bytes
    plan = storage_ops.fit(torch.compile(model, backend="eager"), x, int(0.75 * highest))
    assert plan.seconds == 0.0
    recomputed = {row.action for row in plan.rows} - {"keep"}
    assert recomputed and all("addmm" in action for action in recomputed)
    assert storage_ops.fit(model, x, int(0.75 * highest)).seconds > 0.0
    # If everything fits, nothing is recomputed.
    whole = storage_ops.fit(torch.compile(model, backend="eager"), x, highest)
    assert [row.action for row in whole.rows] == ["keep"]
