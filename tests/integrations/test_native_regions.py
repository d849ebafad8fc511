"""Layers of transformers run as regions in C++, once what they reach is known."""

import pytest
import torch

import storage_ops as so

from ..checkpoint.paths import regions_in_python
from .models import GROUPED, V, tf

regions = regions_in_python()
pytestmark = [
    pytest.mark.skipif(
        tf.__version__ < "5", reason="layers of transformers 4 have other arguments"
    ),
    pytest.mark.skipif(so.info()["saved_tensors"] == "Python", reason="there is no library"),
]
SMALL = {**GROUPED, "num_hidden_layers": 2, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GPT2 = {"vocab_size": V, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": V}
PHI = {k: v for k, v in SMALL.items() if k != "head_dim"}
# The layers that are checkpointed, and how the model is created.
MODELS = {
    "Llama": ("LlamaDecoderLayer", SMALL),
    "Qwen3": ("Qwen3DecoderLayer", SMALL),
    "GPT2": ("GPT2Block", GPT2),  # draws dropout masks
    "Phi": ("PhiDecoderLayer", PHI),  # a set in the config
    "Bert": ("BertLayer", {**BERT, "intermediate_size": 48, "is_decoder": True}),
    "Mixtral": ("MixtralDecoderLayer", {**SMALL, "num_local_experts": 4}),  # in-place ops
    "Qwen3Moe": ("Qwen3MoeDecoderLayer", {**SMALL, **EXPERTS}),
}
HEADS = {"GPT2": "GPT2LMHeadModel", "Bert": "BertLMHeadModel"}
# Plans of `fit` have such policies.
CALLS = [("aten::mm", 1), ("aten::addmm", 0), ("aten::addmm", 2), ("attention", 0)]
MODES = {
    "full": {},
    "calls": {"policy": so.policies.save_calls(CALLS)},
    "selective": {"ops_to_save": ["aten.mm", "aten.addmm"]},
    "checksum": {"determinism_check": "checksum"},
}


def create(name):
    torch.manual_seed(0)
    config = getattr(tf, f"{name}Config")(**MODELS[name][1])
    return getattr(tf, HEADS.get(name, f"{name}ForCausalLM"))(config).train()


def step(model, ids):
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_layers_run_in_c(name, mode, regions):
    plain, model, ids = create(name), create(name), torch.randint(V, (2, 16))
    right = step(plain, ids)
    so.apply_activation_checkpoint(model, {"layer_classes": [MODELS[name][0]], **MODES[mode]})
    for _ in range(3):
        step(model, ids)
    assert len(regions) > 0  # the first steps find out what the layers reach
    regions.clear()
    assert all(map(torch.equal, step(model, ids), right))
    assert regions == []


@pytest.mark.parametrize("use_dora", [False, True])
def test_layers_with_adapters_run_in_c_until_these_are_merged(use_dora, regions):
    peft = pytest.importorskip("peft")
    models = []
    for _ in range(2):
        model = create("Llama")
        config = peft.LoraConfig(target_modules="all-linear", use_dora=use_dora)
        models.append(peft.get_peft_model(model, config))
        models[-1].enable_input_require_grads()  # else merged adapters leave nothing to train
    plain, model, ids = *models, torch.randint(V, (2, 16))
    so.apply_activation_checkpoint(model, {"layer_classes": ["LlamaDecoderLayer"]})

    def equal():
        return all(map(torch.equal, step(model, ids), step(plain, ids)))

    for _ in range(3):
        assert equal()
    regions.clear()
    assert equal() and regions == []
    for each in models:
        each.merge_adapter()
    assert equal() and equal()
    for each in models:
        each.unmerge_adapter()
    for _ in range(4):
        assert equal()
    regions.clear()
    # A merged DoRA adapter leaves a tensor in an attribute.
    assert equal() and (use_dora or regions == [])
