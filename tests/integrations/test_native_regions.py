"""Layers of transformers run as regions in C++, once what they reach is known."""

import pytest
import torch

import storage_ops as so
from storage_ops.checkpoint.region.region import Region

from .models import GROUPED, V, tf

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
MODES = {
    "full": {},
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
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.skipif(tf.__version__ < "5", reason="layers of transformers 4 have other arguments")
@pytest.mark.skipif(so.info()["saved_tensors"] == "Python", reason="there is no library")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_layers_run_in_c(name, mode, monkeypatch):
    made, set_up = [], Region.set_up

    def noted(self, *args):
        made.append(self)
        set_up(self, *args)

    monkeypatch.setattr(Region, "set_up", noted)
    plain, model, ids = create(name), create(name), torch.randint(V, (2, 16))
    right = step(plain, ids)
    so.apply_activation_checkpoint(model, {"layer_classes": [MODELS[name][0]], **MODES[mode]})
    for _ in range(3):
        step(model, ids)
    assert len(made) > 0  # the first steps find out what the layers reach
    made.clear()
    assert all(map(torch.equal, step(model, ids), right))
    assert made == []
