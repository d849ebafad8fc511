"""`will-it-fit --serve` gives the peaks and caches of small models that generate on a CPU."""

import json

import pytest
import torch
from torch.utils._pytree import tree_leaves

from storage_ops.cli import main
from storage_ops.memory import measure
from storage_ops.simulate import serve

pytestmark = pytest.mark.in_turn

tf = pytest.importorskip("transformers")

TEXT = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128,
    "vocab_size": 128,
}  # fmt: skip
BATCH, TOKENS = 2, 256
CONFIGS = {
    "LlamaForCausalLM": ("llama", {**TEXT, "num_key_value_heads": 2}),
    "MistralForCausalLM": ("mistral", {**TEXT, "num_key_value_heads": 2, "sliding_window": 32}),
    "Gemma3ForCausalLM": (
        "gemma3_text",
        {**TEXT, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 32,
         "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "DeepseekV3ForCausalLM": (
        "deepseek_v3",
        {**TEXT, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24,
         "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
         "first_k_dense_replace": 4, "num_attention_heads": 4},
    ),
    "MambaForCausalLM": (
        "mamba",
        {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128, "state_size": 8},
    ),
    "T5ForConditionalGeneration": (
        "t5",
        {"d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 4,
         "vocab_size": 128},
    ),
}  # fmt: skip
KINDS = {
    "LlamaForCausalLM": {serve.FULL},
    "MistralForCausalLM": {serve.SLIDING},
    "Gemma3ForCausalLM": {serve.FULL, serve.SLIDING},
    "DeepseekV3ForCausalLM": {serve.LATENT},
    "MambaForCausalLM": {serve.STATES},
    "T5ForConditionalGeneration": {serve.FULL},
}


def written(folder, name):
    kind, sizes = CONFIGS[name]
    config = {"model_type": kind, "architectures": [name], **sizes}
    (folder / "config.json").write_text(json.dumps(config))
    return ["will-it-fit", "--serve", "--hf-config", str(folder), "--batch", str(BATCH),
            "--seq", str(TOKENS), "--dtype", "fp32", "--device", "cpu"]  # fmt: skip


def build(name):
    kind, sizes = CONFIGS[name]
    model = getattr(tf, name)(tf.AutoConfig.for_model(kind, **sizes)).eval()
    inputs = {"input_ids": torch.randint(0, 128, (BATCH, TOKENS))}
    if name.startswith("T5"):
        inputs["decoder_input_ids"] = inputs["input_ids"].clone()
    return model, inputs


def storages(things):
    """Return the bytes of the storages of tensors. Shared storages count once."""
    nbytes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in things}
    return sum(nbytes.values())


@torch.no_grad()
def generated(model, inputs):
    """Process a prompt and the next token. Return the peaks of both and the bytes of the cache."""
    before = storages([*model.parameters(), *model.buffers(), *inputs.values()])
    options = {"use_cache": True}
    if not hasattr(model, "encoder"):
        options["logits_to_keep"] = 1
    with measure() as prompt:
        output = model(**inputs, **options)
    name = next(name for name in serve._NAMES if getattr(output, name, None) is not None)
    cache = getattr(output, name)
    tensors = [t for _, tensors_of_kind in serve._by_kind(cache, model) for t in tensors_of_kind]
    cached = storages(tensors)
    following = serve._following(inputs, output)
    encoded = storages(tree_leaves(following.get("encoder_outputs", ())))
    del output, tensors
    with measure() as token:
        model(**following, **options, **{name: cache})
    peaks = before + prompt.peak_bytes, before + cached + encoded + token.peak_bytes
    return *peaks, cached


@pytest.mark.parametrize("name", CONFIGS)
def test_peaks_and_the_cache_are_those_of_a_run(name):
    model, inputs = build(name)
    simulated = serve.simulate_serving(model, inputs, "cpu")
    generated(model, inputs)  # a first call allocates memory that stays
    prefill, decode, cached = generated(model, inputs)
    assert {kind for kind, n in simulated.cache_bytes.items() if n} == KINDS[name]
    assert sum(simulated.cache_bytes.values()) == cached
    # With a mask, each thread of the attention kernel has a buffer, which is not counted.
    assert simulated.prefill_bytes == pytest.approx(prefill, rel=0.01, abs=160 << 10)
    assert simulated.decode_bytes == pytest.approx(decode, rel=0.01)
    assert simulated.by_owner["parameters"] == storages(model.parameters())


@pytest.mark.parametrize("name", CONFIGS)
def test_the_command_has_the_cache_of_a_run(name, tmp_path, capsys):
    assert main([*written(tmp_path, name), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {kind for kind, n in facts["cache_bytes"].items() if n} == KINDS[name]
    assert sum(facts["cache_bytes"].values()) == generated(*build(name))[2]
    assert facts["peak_bytes"] == max(facts["prefill_bytes"], facts["decode_bytes"])


def test_a_table_and_exit_codes(tmp_path, capsys):
    command = written(tmp_path, "Gemma3ForCausalLM")
    assert main(command) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "fits, " in shown and "after 256 tokens: KV cache of" in shown
    assert "in plain PyTorch" in shown and "an engine with a paged cache" in shown
    assert main([*command, "--budget", "10KiB"]) == 1
    assert "does not fit, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--optimizer", "sgd"], "--optimizer is sgd, but --serve"),
        (["--accumulate"], "--accumulate is given, but --serve"),
        (["--plot", "x.svg"], "--plot is x.svg, but --serve"),
        (["--html", "x.html"], "--html is x.html, but --serve"),
    ],
)
def test_options_of_training_are_refused(options, said, tmp_path, capsys):
    assert main([*written(tmp_path, "LlamaForCausalLM"), *options]) == 2
    assert said in capsys.readouterr().err


def test_models_that_do_not_generate_are_refused(tmp_path, capsys):
    config = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], **TEXT}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = ["will-it-fit", "--serve", "--hf-config", str(tmp_path), "--seq", "8"]
    assert main(command) == 2
    assert "BertForSequenceClassification, which has no cache" in capsys.readouterr().err
