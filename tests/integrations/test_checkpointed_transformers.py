"""Checkpointed layers of transformers with the default cache of keys and values."""

import warnings

import pytest
import torch

import storage_ops as so
from storage_ops.checkpoint.state import caches, code_writes
from storage_ops.checkpoint.state.reachable import Surroundings

from .models import GROUPED, V, tf

SMALL = {**GROUPED, "num_hidden_layers": 2, "head_dim": 8}
MODELS = {
    "LlamaDecoderLayer": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL)),
    "Qwen3DecoderLayer": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**SMALL)),
    "Gemma3DecoderLayer": lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**SMALL)),
}
# The model passes the cache to its layers as a positional argument.
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
GPT2["n_positions"] = 64  # transformers 4 stores a mask of all positions in each layer
MODELS["GPT2Block"] = lambda: tf.GPT2LMHeadModel(
    tf.GPT2Config(vocab_size=V, bos_token_id=1, eos_token_id=2, **GPT2)
)
if hasattr(tf, "Lfm2Config"):  # a cache of convolutions and keys
    MODELS["Lfm2DecoderLayer"] = lambda: tf.Lfm2ForCausalLM(
        tf.Lfm2Config(**SMALL, layer_types=["conv", "full_attention"])
    )
MODES = {
    "full": {}, "reentrant": {"use_reentrant": True},
    "selective": {"ops_to_save": ["aten.mm", "aten.addmm"]},
    "output_discard": {"mode": "output_discard"},
}  # fmt: skip


def gradients(model, ids):
    model.zero_grad()
    out = model(ids, labels=ids)
    out.loss.backward()
    return out, [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("layer", list(MODELS))
def test_gradients_with_the_default_use_cache(layer, mode):
    model, ids = MODELS[layer]().train(), torch.randint(V, (2, 32))
    expected, right = gradients(model, ids)
    if layer == "Gemma3DecoderLayer" and tf.__version__ < "5":
        assert expected.past_key_values is None  # the model creates no cache in training
        so.apply_activation_checkpoint(model, {"layer_classes": [layer], **MODES[mode]})
        out, grads = gradients(model, ids)
        torch.testing.assert_close((out.loss, grads), (expected.loss, right))
        return
    assert expected.past_key_values.get_seq_length() == 32
    caches._warn_once.cache_clear()
    so.apply_activation_checkpoint(model, {"layer_classes": [layer], **MODES[mode]})
    with pytest.warns(UserWarning, match=f"{layer} is checkpointed, and its model was"):
        out, grads = gradients(model, ids)
    torch.testing.assert_close((out.loss, grads), (expected.loss, right))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the warning is raised once
        assert gradients(model, ids)[0].past_key_values.get_seq_length() == 0


STATES = {  # options of the configuration, and the layers
    "Jamba": (
        {**SMALL, "num_hidden_layers": 3, "num_experts": 1, "attn_layer_offset": 1,
         "attn_layer_period": 2, "mamba_dt_rank": 4},
        ["JambaMambaDecoderLayer", "JambaAttentionDecoderLayer"],
    ),
    "Zamba2": (
        {**SMALL, "num_key_value_heads": 4, "layers_block_type": ["mamba", "hybrid"],
         "mamba_d_state": 8, "mamba_ngroups": 1, "n_mamba_heads": 4, "mamba_headdim": 16,
         "chunk_size": 8, "num_mem_blocks": 1, "adapter_rank": 4, "attention_head_dim": 16},
        ["Zamba2MambaDecoderLayer", "Zamba2HybridLayer"],
    ),
    "NemotronH": (
        {**SMALL, "head_dim": 8, "hybrid_override_pattern": "M*-", "num_hidden_layers": 3,
         "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1,
         "chunk_size": 8},
        ["NemotronHBlock"],
    ),
    "Mamba": ({"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}, ["MambaBlock"]),
    "Mamba2": (
        {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "num_heads": 4,
         "head_dim": 16, "n_groups": 1, "chunk_size": 8},
        ["Mamba2Block"],
    ),
    "FalconMamba": (
        {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}, ["FalconMambaBlock"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", STATES)
@pytest.mark.filterwarnings("ignore:.*is checkpointed, and its model was")
def test_layers_with_recurrent_states_instead_of_keys(name, mode):
    if not (hasattr(tf.DynamicCache, "update_conv_state") and hasattr(tf, f"{name}Config")):
        pytest.skip("this version of transformers has caches of its own for such models")
    sizes, layers = STATES[name]
    config = getattr(tf, f"{name}Config")(**{**sizes, "vocab_size": V})
    model, results = getattr(tf, f"{name}ForCausalLM")(config).train(), []
    ids = torch.randint(1, V, (2, 16))
    for checkpointed in (False, True):
        if checkpointed:
            so.apply_activation_checkpoint(model, {"layer_classes": layers, **MODES[mode]})
        model.zero_grad()
        loss = model(ids, labels=ids, use_cache=True).loss
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        results.append([loss, *map(torch.clone, grads)])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("layer", list(MODELS))
def test_a_model_in_eval_mode_has_a_cache(layer):
    model, ids = MODELS[layer](), torch.randint(1, V, (2, 8))
    expected, right = gradients(model.eval(), ids)
    text = model.generate(ids, max_new_tokens=4, do_sample=False)
    so.apply_activation_checkpoint(model, {"layer_classes": [layer]})
    out, grads = gradients(model, ids)
    torch.testing.assert_close((out.loss, grads), (expected.loss, right))
    assert out.past_key_values.get_seq_length() == 8
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), text)
    if layer != "Gemma3DecoderLayer" or tf.__version__ >= "5":
        with torch.no_grad():
            assert model.train()(ids).past_key_values.get_seq_length() == 8


def test_the_code_of_a_model_does_not_write_parameters_through_data():
    """Otherwise, a region that reaches the whole model would copy all parameters each time."""
    model = MODELS["LlamaDecoderLayer"]()
    surroundings = Surroundings.of(lambda ids: model(ids), [], [])
    assert model in surroundings.modules and not surroundings.writes & code_writes.UNSEEN


@pytest.mark.in_turn
def test_fit_with_a_cache_as_positional_argument():
    model, ids = MODELS["GPT2Block"]().train(), torch.randint(V, (2, 32))
    batch = {"input_ids": ids, "labels": ids}
    none = so.memory.simulate_step(model, batch).peak_bytes
    plan = so.fit(model, batch, int(none * 0.95))
    _, right = gradients(model, ids)
    plan.apply()
    torch.testing.assert_close(gradients(model, ids)[1], right)
