"""Models with layers of bitsandbytes give the peaks of the command line and of a CPU."""

import pytest
import torch
from torch import nn

import storage_ops.simulate.step as simulated
from storage_ops.cli.optimizers import optimizer_named
from storage_ops.cli.quantized.convert import linear_of
from storage_ops.cli.quantized.options import Lora
from storage_ops.cli.quantized.schemes import Scheme
from storage_ops.memory import estimate, measure, simulate_step

bnb = pytest.importorskip("bitsandbytes")
tf = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
BF16 = torch.bfloat16
NAMES = ["nf4", "nf4-double", "fp4", "int8"]
UNREAD = 512  # bytes of the map of 4-bit codes, which kernels have built in and never read


def quantized(plain, name, dtype=BF16):
    """Return a layer of bitsandbytes on the CPU that has the weight of a plain one."""
    shape, bias = (plain.in_features, plain.out_features), plain.bias is not None
    weight = plain.weight.data.to(dtype)
    if name == "int8":
        layer = bnb.nn.Linear8bitLt(*shape, bias=bias, has_fp16_weights=False, threshold=6.0)
        layer.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    else:
        kind, double = name[:3], name.endswith("-double")
        layer = bnb.nn.Linear4bit(*shape, bias, dtype, compress_statistics=double, quant_type=kind)
        layer.weight = bnb.nn.Params4bit(
            weight, requires_grad=False, compress_statistics=double, quant_type=kind, module=layer
        )
    if bias:
        layer.bias = nn.Parameter(plain.bias.data.to(dtype), requires_grad=False)
    return layer.to("cpu")


class Two(nn.Module):
    """A trained layer, and a frozen one whose input requires grad."""

    def __init__(self, frozen, device):
        super().__init__()
        self.first, self.frozen = nn.Linear(1024, 1024, dtype=BF16, device=device), frozen

    def forward(self, x):
        return self.frozen(self.first(x))


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("rows", [64, 4096])
@pytest.mark.parametrize("name", NAMES)
def test_a_layer_takes_the_memory_of_the_command_line(name, rows, bias):
    plain = nn.Linear(1024, 2048, bias=bias, dtype=BF16)
    theirs = Two(quantized(plain, name), "cpu")
    ours = Two(linear_of(plain.to("meta"), Scheme(name)), "meta")
    steps = [
        simulate_step(model, torch.empty(rows, 1024, dtype=BF16, device=device), device="h100")
        for model, device in ((theirs, "cpu"), (ours, "meta"))
    ]
    unread = 0 if name == "int8" else UNREAD
    assert steps[1].peak_bytes == steps[0].peak_bytes + unread


# On a CPU, a 16-bit weight is copied to float32 and scaled in place. Estimates do not count this.
@pytest.mark.parametrize("name", NAMES[:3])
def test_a_layer_takes_the_measured_memory_on_a_cpu(name):
    layer = Two(quantized(nn.Linear(1024, 2048, dtype=BF16), name), "cpu")
    x = torch.randn(256, 1024, dtype=BF16)

    def step():
        layer(x).sum().backward()
        layer.zero_grad()

    step()
    with measure() as measured:
        step()
    expected = estimate(step)
    above = expected.peak_bytes - expected.input_bytes
    assert above == pytest.approx(measured.peak_bytes, rel=0.05)


def llama(name, device):
    config = tf.LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        vocab_size=256, use_cache=False,
    )  # fmt: skip
    with torch.device(device):
        model = tf.LlamaForCausalLM(config).to(BF16).train()
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and path != "lm_head":
            new = quantized(module, name) if device == "cpu" else linear_of(module, Scheme(name))
            model.set_submodule(path, new)
    return model


@pytest.mark.in_turn
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("name", ["nf4-double", "int8"])
def test_adapters_of_peft_take_the_memory_of_the_command_line(name, autocast, monkeypatch):
    from storage_ops.cli.quantized import adapters

    def step(device):
        model = llama(name, device)
        if device == "cpu":
            setattr(model, f"is_loaded_in_{8 if name == 'int8' else 4}bit", True)
            config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.1)
            model = peft.get_peft_model(model, config)
            assert type(model.base_model.model.model.layers[0].self_attn.q_proj).__module__ == (
                "peft.tuners.lora.bnb"
            )
        else:
            lora = Lora(4, ["q_proj", "down_proj"], 0.1)
            model = adapters.with_lora(model, peft, lora)
            if autocast:  # autocast does not cast tensors on the meta device
                model.to_empty(device="cpu")
        where = next(model.parameters()).device
        ids = torch.empty(2, 128, dtype=torch.int64, device=where)
        batch = {"input_ids": ids, "labels": ids}
        with torch.autocast("cpu", BF16, enabled=autocast):
            return simulate_step(model, batch, optimizer=torch.optim.AdamW, device="h100")

    theirs, ours = step("cpu"), step("meta")
    unread = 0 if name == "int8" else 3 * 7 * UNREAD
    assert ours.peak_bytes == theirs.peak_bytes + unread
    monkeypatch.setattr(simulated, "_quickly", lambda *_: None)
    assert step("cpu").by_owner == theirs.by_owner


@pytest.mark.parametrize("name", ["AdamW8bit", "Lion", "Lion8bit"])
def test_optimizers_take_the_memory_of_the_command_line(name):
    model = nn.Sequential(nn.Linear(512, 1000), nn.LayerNorm(1000)).to(BF16)
    x = torch.empty(4, 512, dtype=BF16)
    steps = [
        simulate_step(model, x, optimizer=kind, device="h100")
        for kind in (getattr(bnb.optim, name), optimizer_named(name, model))
    ]
    assert steps[0].by_owner["optimizer state"] == steps[1].by_owner["optimizer state"]
    assert steps[0].kept_bytes == steps[1].kept_bytes
    # bitsandbytes creates a map of codes at the start, which Lion does not use.
    assert 0 <= steps[0].peak_bytes - steps[1].peak_bytes <= 1024
