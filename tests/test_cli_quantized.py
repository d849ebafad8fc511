"""`will-it-fit` and `fit` of quantized models, and of adapters on them."""

import argparse
import json
import math

import pytest
import torch
from torch import nn

import storage_ops.simulate.step as simulated
from storage_ops.cli import hf_model, main
from storage_ops.cli.quantized.convert import linear_of
from storage_ops.cli.quantized.schemes import Scheme, scheme_of
from storage_ops.cli.workload import workload
from storage_ops.memory import estimate, simulate_step

tf = pytest.importorskip("transformers")
pytest.importorskip("peft")
# Transformers 4 runs one expert after the other, for the tokens that it reads from a tensor.
experts = pytest.mark.skipif(tf.__version__ < "5", reason="each expert is a module of its own")

WIDTH, INNER, LAYERS, VOCAB = 64, 160, 3, 128
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": WIDTH,
    "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": 2,
    "vocab_size": VOCAB, "max_position_embeddings": 256,
}  # fmt: skip
MOE = {
    "moe_intermediate_size": 64, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 2,
}  # fmt: skip
QWEN = LLAMA | MOE | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
GPT_OSS = LLAMA | MOE | {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]}
# Rows and columns of the linear layers of a layer.
SHAPES = [(WIDTH, WIDTH)] * 4 + [(INNER, WIDTH)] * 2 + [(WIDTH, INNER)]
BITS_4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.fixture
def words(tmp_path):
    def words(*options, config=LLAMA, quantization=None, seq=64):
        other = {} if quantization is None else {"quantization_config": quantization}
        (tmp_path / "config.json").write_text(json.dumps(config | other))
        return ["--hf-config", str(tmp_path), "--batch", "2", "--seq", str(seq), *options]

    return words


def build(words):
    """Return the model and the batch of a command line."""
    parser = argparse.ArgumentParser()
    hf_model.add_arguments(parser)
    return workload(parser.parse_args(words))[:2]


def nbytes(name, rows, columns):
    """Return the bytes of a quantized weight according to its library."""
    size = rows * columns
    maxima = math.ceil(size / 64)
    nested = maxima + 4 * math.ceil(maxima / 256) + 4 * 256 + 4
    return {
        "nf4": size // 2 + 4 * maxima + 4 * 16,
        "nf4-double": size // 2 + nested + 4 * 16,
        "int8": size + 4 * rows,
        "fp8": size + 4 * math.ceil(rows / 128) * math.ceil(columns / 128),
        # Each group has a scale in float16 and a zero in 4 bits. GPTQ has the group of each input.
        "gptq": size // 2 + math.ceil(columns / 128) * (2 * rows + rows // 2) + 4 * columns,
        "awq": size // 2 + math.ceil(columns / 128) * (2 * rows + rows // 2),
    }[name]


@pytest.mark.parametrize("name", ["nf4", "nf4-double", "int8", "fp8", "gptq", "awq"])
def test_parameters_use_the_bytes_of_their_library(name, words):
    model, batch = build(words("--quantize", name, "--lora", "4"))
    adapters = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert adapters == 4 * LAYERS * 2 * 2 * 4 * WIDTH  # float32, on queries and values
    plain = 2 * (2 * VOCAB * WIDTH + (2 * LAYERS + 1) * WIDTH)  # heads, embeddings and norms
    linear = LAYERS * sum(nbytes(name, *shape) for shape in SHAPES)
    parameters = list(model.parameters())
    assert sum(p.nbytes for p in parameters) == adapters + plain + linear
    step = simulate_step(model, batch, optimizer=torch.optim.AdamW, device="h100")
    assert step.by_owner["parameters"] == sum(-(-p.nbytes // 512) * 512 for p in parameters)


QUESTIONS = {
    "4 bits": ("--quantize", "nf4", "--lora", "4"),
    "8 bits": ("--quantize", "int8", "--lora", "4:all-linear"),
    "fp8": ("--quantize", "fp8", "--lora", "4", "--lora-dropout", "0.1"),
    "gptq": ("--quantize", "gptq", "--lora", "4"),
    "awq": ("--quantize", "awq", "--lora", "4"),
    "prepared": ("--quantize", "nf4-double", "--lora", "4", "--prepare-kbit-training"),
}


@pytest.mark.in_turn
@pytest.mark.parametrize("name", QUESTIONS)
def test_reused_simulations_of_equal_layers_change_no_number(name, words, monkeypatch):
    def step():
        model, batch = build(words(*QUESTIONS[name]))
        return simulate_step(model, batch, optimizer=torch.optim.AdamW, device="h100")

    quick = step()
    monkeypatch.setattr(simulated, "_quickly", lambda *_: None)
    assert quick.by_owner == step().by_owner


@pytest.mark.parametrize("name", ["nf4", "nf4-double", "int8", "fp8"])
def test_a_weight_is_dequantized_for_each_product(name):
    """A product reads the weight in 16 bits. In forward, products read 8-bit weights directly."""
    plain = nn.Linear(1024, 2048, bias=False, dtype=torch.bfloat16, device="meta")
    layer = linear_of(plain, Scheme(name))
    x = torch.empty(1, 1024, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = 2 * 2048 * 1024
    forward = estimate(layer, x)
    both = estimate(lambda: layer(x).sum().backward())
    is_multiplied_as_it_is = name in ("int8", "fp8")
    for run, expected in ((forward, 0 if is_multiplied_as_it_is else weight), (both, weight)):
        maxima = 2 * 4 * weight // 128 if name == "nf4-double" else 0  # without and with offset
        assert expected + maxima <= run.peak_bytes - run.input_bytes < expected + maxima + 65536
    assert layer(x).shape == (1, 2048) and layer(x).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["nf4", "int8"])
def test_tensors_saved_for_the_backward(name):
    """8-bit layers save their input, 4-bit layers nothing."""
    layer = linear_of(nn.Linear(64, 64, bias=False, device="meta"), Scheme(name, torch.float32))

    def kept():
        return layer(torch.empty(512, 64, device="meta", requires_grad=True).clone())

    run = estimate(kept)
    leaf = output = copy = 4 * 512 * 64
    expected = leaf + output + (copy if name == "int8" else 0)
    assert run.kept_bytes - run.input_bytes == expected


def test_memory_of_packed_weights():
    """GPTQ saves the dequantized weight, AWQ its input. AWQ copies the weight in backward."""
    rows, columns, batch, tokens = 512, 1024, 4, 2
    x = torch.empty(batch, tokens, columns, dtype=torch.float16, device="meta", requires_grad=True)
    weight, inputs, output = 2 * rows * columns, 2 * x.numel(), 2 * batch * tokens * rows
    plain = nn.Linear(columns, rows, bias=False, dtype=torch.float16, device="meta")
    layers = {name: linear_of(plain, Scheme(name)) for name in ("gptq", "awq")}

    def kept(name):
        run = estimate(lambda: layers[name](x.clone()))
        return run.kept_bytes - run.input_bytes

    assert kept("gptq") == weight + output
    assert kept("awq") == inputs + output
    both = estimate(lambda: layers["awq"](x).sum().backward())
    needed = weight + batch * weight
    assert needed <= both.peak_bytes - both.input_bytes < needed + (1 << 16)
    for layer in layers.values():
        assert layer(x).shape == (batch, tokens, rows) and layer(x).dtype == torch.float16


@pytest.mark.parametrize("name", ["gptq", "awq"])
@pytest.mark.parametrize(("bits", "group"), [(4, 128), (4, -1), (4, 48)])
def test_shapes_of_packed_checkpoints(name, bits, group):
    layer = linear_of(nn.Linear(256, 64, device="meta"), Scheme(name, bits=bits, group=group))
    groups = {128: 2, -1: 1, 48: 6}[group]
    packed = (256, 64 * bits // 32) if name == "awq" else (256 * bits // 32, 64)
    assert layer.weight.shape == packed and layer.weight.dtype == torch.int32
    assert layer.qzeros.shape == (groups, 64 * bits // 32)
    assert layer.scales.shape == (groups, 64) and layer.scales.dtype == torch.float16
    assert hasattr(layer, "g_idx") == (name == "gptq")


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (BITS_4, Scheme("nf4", compute=torch.float32)),
        (
            BITS_4 | {
                "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16",
                "bnb_4bit_quant_storage": "bfloat16", "llm_int8_skip_modules": ["lm_head"],
            },
            Scheme("nf4-double", storage=torch.bfloat16, skipped=("lm_head",)),
        ),
        ({"load_in_4bit": True}, Scheme("fp4", compute=torch.float32)),
        (
            {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 0.0},
            Scheme("int8", outliers=0.0),
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [64, 32], "scale_fmt": "ue8m0"},
            Scheme("fp8", block=(64, 32), scale=torch.float8_e8m0fnu),
        ),
        ({"quant_method": "fp8", "weight_block_size": None}, Scheme("fp8", block=None)),
        ({"quant_method": "fp8", "dequantize": True}, None),
        (
            {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
            Scheme("mxfp4", skipped=("lm_head",)),
        ),
        (
            {"quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": True, "sym": True},
            Scheme("gptq", bits=8, group=-1),
        ),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "GEMM"},
            Scheme("awq", group=64),
        ),
        (None, None),
    ],
)  # fmt: skip
def test_quantization_configs(facts, expected):
    assert scheme_of(None, facts, torch.bfloat16) == expected
    assert scheme_of("none", facts, torch.bfloat16) is None
    assert scheme_of("nf4", facts, torch.float16) == Scheme("nf4", compute=torch.float16)


@pytest.mark.parametrize(
    "facts",
    [
        {"quant_method": "gptq", "bits": 5}, {"quant_method": "compressed-tensors"}, {"bits": 4},
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
        {"quant_method": "awq", "bits": 4, "version": "gemv"}, {"quant_method": "awq", "bits": 3},
        BITS_4 | {"bnb_4bit_quant_type": "int4"}, BITS_4 | {"bnb_4bit_compute_dtype": "float17"},
        {"load_in_8bit": True, "llm_int8_has_fp16_weight": True},
        {"quant_method": "fp8", "activation_scheme": "static"},
        {"quant_method": "fp8", "expert_dtype": "fp4"},
    ],
)  # fmt: skip
def test_configs_that_are_not_simulated(facts, words, capsys):
    command = ["will-it-fit", *words("--lora", "4", quantization=facts)]
    assert main(command) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("--hf-config has ") and "Expected" in err
    assert main([*command, "--quantize", "none"]) == 0


def test_modules_that_a_config_skips_keep_their_weights(words):
    facts = BITS_4 | {"llm_int8_skip_modules": ["lm_head", "q_proj", "model.layers.1.mlp"]}
    model, _ = build(words("--lora", "4:gate_proj", quantization=facts))
    layers = model.get_base_model().model.layers
    for index, layer in enumerate(layers):
        assert layer.self_attn.q_proj.weight.dtype == torch.bfloat16
        assert layer.self_attn.k_proj.weight.dtype == torch.uint8
        kept = index == 1
        assert layer.mlp.up_proj.weight.dtype == (torch.bfloat16 if kept else torch.uint8)


def test_tied_weights_and_transposed_layers(words):
    """GPT-2 ties its output layer and has layers of a class of transformers."""
    config = {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": WIDTH, "n_layer": 1,
        "n_head": 2, "vocab_size": VOCAB, "n_positions": 256,
    }  # fmt: skip
    model, batch = build(words("--quantize", "nf4", "--lora", "4", config=config))
    base = model.get_base_model()
    assert base.lm_head.weight is base.transformer.wte.weight
    assert base.transformer.h[0].mlp.c_fc.weight.shape == (WIDTH * 4 * WIDTH // 2, 1)
    step = simulate_step(model, batch, device="h100")
    assert step.peak_bytes > 0


@experts
@pytest.mark.in_turn
@pytest.mark.parametrize("config", [QWEN, GPT_OSS], ids=["Qwen3-MoE", "GPT-OSS"])
def test_experts(config, words, capsys):
    name = "mxfp4" if config is GPT_OSS else "fp8"
    model, batch = build(words("--lora", "4:q_proj", config=config, quantization={
        "quant_method": name,
    }))  # fmt: skip
    experts = model.get_base_model().model.layers[0].mlp.experts
    nbytes_of = {key: p.nbytes for key, p in experts.named_parameters() if "bias" not in key}
    within = INNER if config is GPT_OSS else 64
    numbers = 4 * WIDTH * within
    if config is GPT_OSS:
        weights = {"gate_up_proj": numbers, "gate_up_proj_scales": 2 * numbers // 32,
                   "down_proj": numbers // 2, "down_proj_scales": numbers // 32}  # fmt: skip
    else:
        weights = {"gate_up_proj": 2 * numbers, "gate_up_proj_scale_inv": 4 * 2 * 4,
                   "down_proj": numbers, "down_proj_scale_inv": 4 * 4}  # fmt: skip
    assert nbytes_of == weights
    step = simulate_step(model, batch, optimizer=torch.optim.AdamW, device="h100")
    plain, batch = build(words("--lora", "4:q_proj", "--quantize", "none", config=config))
    more = simulate_step(plain, batch, optimizer=torch.optim.AdamW, device="h100")
    saved = sum(p.nbytes for p in plain.parameters()) - sum(p.nbytes for p in model.parameters())
    assert more.peak_bytes - step.peak_bytes > saved / 2
    build(words("--lora", "4:q_proj", "--quantize", "nf4", config=config))
    assert "Experts as they are" in capsys.readouterr().err


@experts
def test_experts_are_dequantized_only_for_the_backward(words):
    """The backward dequantizes all experts at once, because they take less than 1 GiB."""
    model, _ = build(words("--lora", "4:q_proj", "--quantize", "fp8", config=QWEN))
    experts = model.get_base_model().model.layers[0].mlp.experts
    x = torch.empty(8, WIDTH, dtype=torch.bfloat16, device="meta", requires_grad=True)
    chosen = torch.empty(8, 2, dtype=torch.int64, device="meta")
    shares = torch.empty(8, 2, dtype=torch.bfloat16, device="meta")
    forward = estimate(experts, x, chosen, shares)
    both = estimate(lambda: experts(x, chosen, shares).sum().backward())
    weight = 2 * 4 * 2 * 64 * WIDTH  # gate_up_proj, the larger one
    assert both.peak_bytes - forward.peak_bytes > weight / 2


@pytest.mark.in_turn
def test_fit_plans_a_quantized_model(words, capsys):
    options = ("--quantize", "nf4", "--lora", "4:all-linear", "--optimizer", "adamw")
    assert main(["will-it-fit", *words(*options, seq=256), "--json"]) == 0
    peak = json.loads(capsys.readouterr().out)["peak_bytes"]
    budget = str(peak - (1 << 20))
    assert main(["fit", *words(*options, seq=256), "--budget", budget, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peak_bytes"] <= peak - (1 << 20)


@pytest.mark.in_turn
def test_the_largest_batch_of_a_model_with_adapters(words, capsys):
    options = ("--quantize", "nf4", "--lora", "4", "--find", "batch", "--budget", "150MiB")
    assert main(["fit", *words(*options)[:2], *words(*options)[4:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["found"] > 1


@pytest.mark.in_turn
@pytest.mark.parametrize("quantize", [(), ("--quantize", "nf4"), ("--quantize", "int8")])
def test_autocast_and_gradient_checkpointing_of_transformers(quantize, words, capsys):
    options = (*quantize, "--lora", "4:all-linear", "--dtype", "bf16", "--autocast", "bf16")
    assert main(["will-it-fit", *words(*options, seq=256), "--json"]) == 0
    kept = json.loads(capsys.readouterr().out)
    options = (*options, "--gradient-checkpointing")
    assert main(["will-it-fit", *words(*options, seq=256), "--json"]) == 0
    checkpointed = json.loads(capsys.readouterr().out)
    assert checkpointed["peak_bytes"] < kept["peak_bytes"]


def test_prepared_layers_are_in_float32_and_recompute(words):
    options = ("--quantize", "nf4", "--lora", "4", "--prepare-kbit-training")
    model, _ = build(words(*options))
    base = model.get_base_model()
    assert base.is_gradient_checkpointing
    assert {p.dtype for p in base.parameters()} == {torch.float32, torch.uint8}


def test_serving_takes_quantized_weights_and_adapters(words, capsys):
    """A quantized model without adapters is accepted, because nothing is trained."""

    def weights(*options):
        assert main(["will-it-fit", "--serve", "--json", *words(*options)]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert sum(facts["cache_bytes"].values()) > 0
        return facts["by_owner"]["parameters"]

    saved = sum(2 * r * c - nbytes("nf4", r, c) for r, c in SHAPES) * LAYERS
    packed = weights("--quantize", "nf4")
    assert weights() - packed == pytest.approx(saved, rel=0.1)  # the allocator rounds sizes up
    adapters = sum(2 * 4 * (WIDTH + WIDTH) for _ in range(LAYERS)) * 2
    assert weights("--quantize", "nf4", "--lora", "4:q_proj") - packed >= adapters


def test_classifiers_train_their_head_too(words):
    config = LLAMA | {"architectures": ["LlamaForSequenceClassification"], "pad_token_id": 0}
    model, batch = build(words("--lora", "4", config=config))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert any("score" in name for name in trained) and any("lora_A" in name for name in trained)
    assert simulate_step(model, batch, device="h100").by_owner["gradients"] > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--quantize", "nf4"), "--quantize is nf4, which freezes the weights. Pass --lora"),
        (("--lora", "0"), "--lora is 0. Expected a rank of 1 or more"),
        (("--lora", "x"), "--lora is x. Expected a rank"),
        (("--lora", "4:"), "--lora is 4:. Expected a rank"),
        (("--lora", "4:q_proj,"), "--lora is 4:q_proj,. Expected a rank"),
        (("--lora", "4:nosuch"), "--lora has modules that PEFT refuses: "),
        (("--lora", "4", "--lora-dropout", "1"), "--lora-dropout is 1.0. Expected at least 0"),
        (("--lora-dropout", "0.1"), "--lora-dropout is 0.1 without --lora"),
        (("--lora", "4", "--prepare-kbit-training"), "without --quantize"),
        (("--quantize", "mxfp4", "--lora", "4"), "has no experts of GPT-OSS"),
    ],
)
def test_options_that_contradict(options, said, words, capsys):
    assert main(["will-it-fit", *words(*options)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and err.count("\n") == 1


def test_a_function_adds_its_own_adapters(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("def model(): ...")
    command = ["will-it-fit", "--model", f"{tmp_path / 'mine.py'}:model", "--lora", "4"]
    assert main(command) == 2
    assert "--lora is 4, but --model" in capsys.readouterr().err


def test_model_types_without_a_default_require_modules(words, capsys):
    assert main(["will-it-fit", *words("--lora", "4", config=GPT_OSS)]) == 2
    assert "no default for gpt_oss. Expected modules, such as 4:all" in capsys.readouterr().err


@experts
def test_adapters_of_quantized_experts_are_refused(words, capsys):
    options = words("--quantize", "fp8", "--lora", "4:all-linear", config=QWEN)
    code, err = main(["will-it-fit", *options]), capsys.readouterr().err
    # PEFT adapts experts of transformers 5 from 0.18 on.
    assert code == 0 or "whose weights are quantized. Expected other modules" in err
