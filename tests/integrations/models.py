"""Small models of transformers with random weights, and comparisons of their results."""

import pytest
import torch

import storage_ops

tf = pytest.importorskip("transformers")

V, D = 97, 32
SIZES = {
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
GPT2 = {
    "vocab_size": V,
    "n_embd": D,
    "n_layer": 1,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 |= dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0)
BART = {"vocab_size": V, "d_model": D, "decoder_layers": 1, "decoder_attention_heads": 4}
BART |= {"decoder_ffn_dim": 48, "dropout": 0.0, "max_position_embeddings": 64}

MODELS = {
    "Llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**GROUPED)),
    "Llama, tied": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**GROUPED, tie_word_embeddings=True)),
    "GPT-2, tied": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2)),
    "Phi, bias": lambda: tf.PhiForCausalLM(tf.PhiConfig(**SIZES, resid_pdrop=0.0, embd_pdrop=0.0)),
    "Gemma 2, soft-cap": lambda: tf.Gemma2ForCausalLM(
        # A cap that is small enough to change the logits of random weights.
        tf.Gemma2Config(**GROUPED, head_dim=8, final_logit_softcapping=0.5)
    ),
    "Cohere, scale": lambda: tf.CohereForCausalLM(tf.CohereConfig(**GROUPED, logit_scale=0.3)),
    "Granite, scale": lambda: tf.GraniteForCausalLM(
        tf.GraniteConfig(**GROUPED, logits_scaling=0.2)
    ),
    "Mixtral, auxiliary loss": lambda: tf.MixtralForCausalLM(
        tf.MixtralConfig(**GROUPED, num_local_experts=4, output_router_logits=True)
    ),
    "Bart, not shifted": lambda: tf.BartForCausalLM(tf.BartConfig(**BART)),
}


def make(name):
    model = MODELS[name]()
    with torch.no_grad():
        for p in model.parameters():  # so that logits are not uniform, and biases not zero
            p.add_(torch.randn_like(p) * 0.1)
    return model


def loss_and_gradients(model, run):
    model.zero_grad()
    outputs = run(model)
    outputs.loss.backward()
    return outputs, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def check_against_plain(model, run, rtol=1e-5, atol=1e-6):
    expected, grads = loss_and_gradients(model, run)
    with storage_ops.patch_causal_lm(model):
        outputs, patched_grads = loss_and_gradients(model, run)
    assert type(outputs) is type(expected)
    if model.training:
        assert outputs.logits is None and expected.logits is not None
    else:
        torch.testing.assert_close(outputs.logits, expected.logits)
    torch.testing.assert_close(outputs.loss, expected.loss, rtol=rtol, atol=atol)
    torch.testing.assert_close(patched_grads, grads, rtol=rtol, atol=atol)
