"""Equal layers of transformers are replayed although each puts keys and values into a cache."""

import pytest
import torch

from storage_ops.memory import simulate_step
from storage_ops.simulate.layers import replay_cache

from .test_step import replays_of

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.in_turn
SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64,
}  # fmt: skip
WINDOW = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}


def gpt2():
    config = transformers.GPT2Config(n_layer=4, n_embd=32, n_head=4, vocab_size=64)
    return transformers.GPT2LMHeadModel(config)


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def windowed():
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES, **WINDOW))


def t5():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 4, "num_heads": 4}
    config = transformers.T5Config(**sizes, vocab_size=64, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def whisper():
    sizes = {
        f"{part}_{name}": n
        for part in ("encoder", "decoder")
        for name, n in {"layers": 4, "attention_heads": 4, "ffn_dim": 64}.items()
    }
    config = transformers.WhisperConfig(
        **sizes, d_model=32, vocab_size=64, num_mel_bins=8, max_source_positions=24,
        decoder_start_token_id=1, pad_token_id=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


def hybrid():
    """Return a model whose even layers keep a state of linear attention, and no keys."""
    sizes = SIZES | {"num_hidden_layers": 4, "num_experts": 2, "mamba_d_state": 4}
    config = transformers.JambaConfig(**sizes, attn_layer_period=2, attn_layer_offset=1)
    return transformers.JambaForCausalLM(config)


def replayed_layers(*args, **kwargs):
    """Compare a simulation with and without replays. Return how many whole layers are replayed."""
    modules, plain = [], replay_cache.replayed

    def noted(simulation, recording, module, *rest):
        modules.append(type(module).__name__)
        return plain(simulation, recording, module, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay_cache, "replayed", noted)
        replays_of(*args, **kwargs)
    return sum(name.endswith(("Block", "EncoderLayer", "DecoderLayer")) for name in modules)


def ids():
    return torch.randint(0, 64, (2, 24))


@pytest.mark.parametrize("device", ["cpu", "h100"])
@pytest.mark.parametrize("make", [gpt2, llama, windowed])
def test_replays_store_keys_and_values_as_layers_do(make, device):
    model, x = make().train(), ids()
    assert model.config.use_cache
    assert replayed_layers(model, {"input_ids": x, "labels": x}, device=device) == 4


@pytest.mark.parametrize("device", ["cpu", "h100"])
@pytest.mark.parametrize("make", [t5, whisper])
def test_layers_of_encoders_and_decoders_are_replayed(make, device):
    # The first layers of T5 compute a bias of positions. Results of Whisper's encoder are permuted.
    model, x = make().train(), ids()
    assert model.config.use_cache
    batch = {"input_ids": x} if make is t5 else {"input_features": torch.randn(2, 8, 48)}
    replayed = replayed_layers(model, {**batch, "labels": x}, device=device)
    assert replayed >= (6 if make is t5 else 4)


def test_a_cache_of_an_encoder_is_empty_after_a_simulation():
    model, x = t5().train(), ids()
    cache = transformers.EncoderDecoderCache(*(transformers.DynamicCache() for _ in range(2)))
    batch = {"input_ids": x, "labels": x, "past_key_values": cache}
    assert replayed_layers(model, batch) >= 6
    assert not cache.is_updated and not cache.self_attention_cache.layers
    assert replayed_layers(Through(model), x) >= 6


class Through(torch.nn.Module):
    """Trains through the keys of the encoder's tokens that a T5 leaves in its cache."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        output = self.model(input_ids=x, labels=x)
        cache = output.past_key_values
        assert cache.is_updated == dict.fromkeys(range(4), True)
        layers = (*cache.cross_attention_cache.layers, *cache.self_attention_cache.layers)
        return output.loss + sum(entry.values.square().mean() for entry in layers)


def test_layers_of_linear_attention():
    x = ids()
    assert replays_of(hybrid().train(), {"input_ids": x, "labels": x}) > 0


class Kept(torch.nn.Module):
    """Returns what a model leaves in its cache, or trains through it."""

    def __init__(self, model, through):
        super().__init__()
        self.model, self.through = model, through

    def forward(self, x):
        first = self.model(input_ids=x)
        if self.through == "a second call":
            cache = first.past_key_values
            return self.model(input_ids=x, past_key_values=cache).logits.square().mean()
        keys = sum(entry.keys.square().mean() for entry in first.past_key_values.layers)
        return keys + first.logits.square().mean()


@pytest.mark.parametrize("through", ["keys", "a second call"])
def test_gradients_of_keys_and_values_are_those_of_the_layers(through):
    replays_of(Kept(llama().train(), through), ids())


def test_a_cache_with_contents_and_one_of_the_caller():
    model, x = llama().train(), ids()
    filled = transformers.DynamicCache()
    with torch.no_grad():
        model(input_ids=x, past_key_values=filled)
    contents = [entry.keys.clone() for entry in filled.layers]
    for cache, replays in ((filled, 0), (transformers.DynamicCache(), 4)):
        batch = {"input_ids": x, "labels": x, "past_key_values": cache}
        assert replayed_layers(model, batch) == replays
    for entry, keys in zip(filled.layers, contents, strict=True):
        assert torch.equal(entry.keys, keys)


def test_an_error_in_a_layer_is_its_own():
    model, x = llama().train(), ids()
    model.model.layers[2].mlp.down_proj.weight = torch.nn.Parameter(torch.randn(32, 65))
    with pytest.raises(RuntimeError, match="65"):
        simulate_step(model, {"input_ids": x, "labels": x})
