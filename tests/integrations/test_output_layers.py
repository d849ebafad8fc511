"""Output layers with more than a weight: adapters of PEFT, a scale per class, n-grams."""

import copy
import pickle

import pytest
import torch
from torch import nn

import storage_ops
from storage_ops.integrations import head_loss

from .models import GROUPED, V, loss_and_gradients, make, tf

peft = pytest.importorskip("peft")

HEAD = {"target_modules": ["lm_head"]}
ADAPTERS = {
    "LoRA": HEAD,
    "LoRA in layers too": {"target_modules": ["lm_head", "q_proj"], "use_rslora": True},
    "LoRA with a bias": {**HEAD, "lora_bias": True},
    "DoRA": {**HEAD, "use_dora": True},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [5, 9, 60]},
    "a copy": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "AdaLoRA": {**HEAD, "kind": "AdaLora", "total_step": 10},
    "IA3": {**HEAD, "kind": "IA3", "feedforward_modules": []},
    "IA3 of hidden states": {**HEAD, "kind": "IA3", "feedforward_modules": ["lm_head"]},
    "OFT": {**HEAD, "kind": "OFT", "oft_block_size": 4, "r": 0},
    "VeRA": {**HEAD, "kind": "Vera", "r": 4},
}
# PEFT 0.18 is the first that trains tokens of a tied layer with LoRA. It needs transformers 5.
if peft.__version__ >= "0.18" and tf.__version__ >= "5":
    ADAPTERS["LoRA and tokens"] = {**HEAD, "trainable_token_indices": [5, 9, 60]}


def exact_loss(logits, labels, vocab_size, **kwargs):
    """Return the causal loss of transformers without its cast to float32."""
    labels = nn.functional.pad(labels[..., 1:], (0, 1), value=-100)
    return nn.functional.cross_entropy(logits.view(-1, vocab_size), labels.reshape(-1))


def adapter_config(kind="Lora", **options):
    options = {"r": 4, "lora_alpha": 12, **options} if kind == "Lora" else options
    return getattr(peft, f"{kind}Config")(task_type="CAUSAL_LM", **options)


def adapted(name, kind="Llama", patch=None, dtype=torch.float64):
    """Return a model, optionally patched, and its PeftModel with adapters that are not zero."""
    tied = "trainable_token_indices" in ADAPTERS[name]
    model = make(f"{kind}, tied" if tied else kind).to(dtype).train()
    model.loss_function = exact_loss
    if patch is not None:
        patch(model)
    wrapper = peft.get_peft_model(model, adapter_config(**ADAPTERS[name])).to(dtype)
    with torch.no_grad():
        for p in wrapper.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p) * 0.2)
    return model, wrapper


def check(model, run, tolerance=1e-9):
    """Check that the patch changes neither the loss nor any gradient."""
    expected, grads = loss_and_gradients(model, run)
    with storage_ops.patch_causal_lm(model) as same:
        assert same is model
        outputs, ours = loss_and_gradients(model, run)
    assert outputs.logits is None and expected.logits is not None
    assert sorted(ours) == sorted(grads) and grads
    torch.testing.assert_close(outputs.loss, expected.loss, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours, grads, rtol=tolerance, atol=tolerance)


@pytest.fixture(params=[False, True], ids=["one piece", "pieces"])
def pieces(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(head_loss, "piece_rows", lambda *sizes: 5)


@pytest.mark.in_turn
@pytest.mark.parametrize("wrapped", [False, True], ids=["model", "PeftModel"])
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters(name, wrapped, pieces, batch):
    model, wrapper = adapted(name)
    check(wrapper if wrapped else model, lambda model: model(**batch))
    assert not any("_deferred_in" in vars(m) for m in wrapper.modules())


def test_two_adapters(pieces, batch):
    model, wrapper = adapted("LoRA")
    wrapper.add_adapter("other", adapter_config(**HEAD, use_dora=True))
    wrapper.base_model.set_adapter(["default", "other"])
    wrapper.double()
    nn.init.normal_(model.lm_head.lora_B["other"].weight)
    check(wrapper, lambda model: model(**batch))
    wrapper.base_model.set_adapter("other")
    check(wrapper, lambda model: model(**batch))


@pytest.mark.parametrize("kind", ["Gemma 2, soft-cap", "Cohere, scale", "Phi, bias"])
def test_models_that_change_the_logits_of_an_adapter(kind, pieces, batch):
    _, wrapper = adapted("LoRA", kind)
    check(wrapper, lambda model: model(**batch))


@pytest.mark.parametrize("name", ["LoRA", "DoRA"])
def test_adapters_that_are_added_after_patching(name, batch):
    model, wrapper = adapted(name, patch=storage_ops.patch_causal_lm)
    outputs, ours = loss_and_gradients(wrapper, lambda model: model(**batch))
    assert outputs.logits is None
    storage_ops.unpatch_causal_lm(wrapper)
    assert type(model) is tf.LlamaForCausalLM and type(model.lm_head.base_layer) is nn.Linear
    expected, grads = loss_and_gradients(wrapper, lambda model: model(**batch))
    torch.testing.assert_close((outputs.loss, ours), (expected.loss, grads))


def test_adapters_off_merged_and_removed(batch):
    model, wrapper = adapted("LoRA")
    right = wrapper(**batch).loss
    storage_ops.patch_causal_lm(wrapper)
    with wrapper.disable_adapter():
        off = wrapper(**batch)
    model.lm_head.merge()
    merged = wrapper(**batch)
    assert off.logits is None and merged.logits is None
    torch.testing.assert_close(merged.loss, right)
    assert (off.loss - right).abs() > 1e-3
    model.lm_head.unmerge()
    plain = wrapper.merge_and_unload()
    assert plain is model and isinstance(model.lm_head, nn.Linear)
    outputs = plain(**batch)
    assert outputs.logits is None
    torch.testing.assert_close(outputs.loss, right)


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"]
)
def test_copies_keep_the_patch(clone, batch):
    model, wrapper = adapted("DoRA")
    right = wrapper(**batch).loss
    storage_ops.patch_causal_lm(model)
    other = clone(model)
    storage_ops.unpatch_causal_lm(model)
    outputs = other(**batch)
    assert outputs.logits is None
    torch.testing.assert_close(outputs.loss, right)


def test_results_per_token_and_weights(pieces, batch):
    names = ("loss", "nll", "lse", "entropy", "argmax", "correct")
    model, _ = adapted("LoRA")
    weights = torch.rand(3, 9, dtype=torch.float64)
    logits, labels = (
        model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits,
        (batch["labels"]),
    )
    whole, plain = copy.deepcopy(model), copy.deepcopy(model)
    layer = model.lm_head  # `plain` has the adapter merged into one weight
    merged = layer.base_layer.weight + layer.get_delta_weight("default")
    plain.lm_head = nn.Linear(merged.shape[1], V, bias=False, dtype=torch.float64)
    plain.lm_head.weight.data = merged.data
    options = {"returns": names, "token_weights": weights, "label_smoothing": 0.1}
    results = []
    for which in (whole, plain):
        storage_ops.patch_causal_lm(which, **options)
        results.append(which(**batch))
    torch.testing.assert_close({n: results[0][n] for n in names}, {n: results[1][n] for n in names})
    valid = labels[:, 1:] != -100
    right = torch.distributions.Categorical(logits=logits[:, :-1]).entropy()
    torch.testing.assert_close(results[0].entropy[:, :-1][valid], right[valid])


@pytest.mark.in_turn
def test_neither_logits_nor_a_copy_of_the_weight_are_allocated():
    vocab, tokens, width = 8192, 4096, 64
    model = tf.LlamaForCausalLM(
        tf.LlamaConfig(**{**GROUPED, "vocab_size": vocab, "hidden_size": width})
    ).train()
    config = peft.LoraConfig(target_modules=["lm_head"], r=4)
    wrapper = peft.get_peft_model(model, config)
    ids = torch.randint(vocab, (tokens // 32, 32))

    def peak():
        with storage_ops.memory.measure() as m:
            wrapper(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        wrapper.zero_grad()
        return m.peak_bytes

    logits = tokens * vocab * 4
    plain = peak()
    storage_ops.patch_causal_lm(wrapper)
    assert plain > 3 * logits and peak() < 0.6 * logits


@pytest.mark.in_turn
def test_compiled(batch):
    torch._dynamo.reset()
    model, _ = adapted("LoRA", dtype=torch.float32)
    expected, grads = loss_and_gradients(model, lambda model: model(**batch))
    storage_ops.patch_causal_lm(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    outputs, ours = loss_and_gradients(model, lambda model: compiled(**batch))
    assert outputs.logits is None
    torch.testing.assert_close((outputs.loss, ours), (expected.loss, grads), rtol=1e-4, atol=1e-5)


def test_dropout_of_an_adapter_is_the_same_in_the_backward(pieces, batch):
    """Compare the derivative along the gradient, because pieces draw other masks than one call."""
    model, wrapper = adapted("LoRA")
    model.lm_head.lora_dropout["default"] = nn.Dropout(0.5)
    storage_ops.patch_causal_lm(wrapper)
    down = model.lm_head.lora_A["default"].weight

    def loss():
        torch.manual_seed(3)
        return model(**batch).loss

    loss().backward()
    step = down.grad * (1e-5 / down.grad.norm())
    with torch.no_grad():
        down.add_(step)
        right = loss()
        down.sub_(2 * step)
        right -= loss()
    torch.testing.assert_close(2 * (down.grad * step).sum(), right, rtol=1e-3, atol=1e-12)


REFUSED = {
    "hra": {**HEAD, "kind": "HRA", "r": 4},
    "loha": {**HEAD, "kind": "LoHa"},
    "randlora": {**HEAD, "kind": "RandLora"},
    "ParamWrapper": {"target_modules": [], "target_parameters": ["lm_head.weight"]},
}
if peft.__version__ >= "0.18":  # the first with aLoRA
    REFUSED["ALora"] = {**HEAD, "alora_invocation_tokens": [1, 2]}


@pytest.mark.parametrize("name", REFUSED)
def test_other_adapters_are_refused_when_patching(name):
    model = make("Llama")
    wrapper = peft.get_peft_model(model, adapter_config(**REFUSED[name]))
    with pytest.raises(TypeError, match=rf"output layer of LlamaForCausalLM.*{name}.*modules_to"):
        storage_ops.patch_causal_lm(wrapper)
    assert type(model) is tf.LlamaForCausalLM


def test_prompt_tuning(batch):
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    wrapper = peft.get_peft_model(make("Llama").double(), config).double()
    wrapper.get_base_model().loss_function = exact_loss
    check(wrapper, lambda model: model(**batch))


def dory():
    """Return a model whose output layer scales the logits of each class, in float32."""
    if not hasattr(tf, "DoryConfig"):
        pytest.skip("an older transformers")
    sizes = {**GROUPED, "head_dim": 8, "num_hidden_layers": 3, "n_input_layers": 1}
    sizes |= {"n_output_layers": 1, "layer_types": ["full_attention"] * 3}
    model = tf.DoryForCausalLM(tf.DoryConfig(**sizes)).train()
    model.lm_head.logit_scale.data.uniform_(0.01, 0.03)
    return model


def test_a_scale_per_class(pieces, batch):
    check(dory().double(), lambda model: model(**batch), 1e-5)  # the model casts to float32


def test_logits_of_float32_in_a_model_of_16_bits(batch):
    model = dory().bfloat16()
    right = model(**batch)
    storage_ops.patch_causal_lm(model, logits="always")
    outputs = model(**batch)
    assert outputs.logits.dtype == right.logits.dtype == torch.float32
    torch.testing.assert_close(outputs.loss, right.loss, rtol=1e-6, atol=1e-6)


def test_logits_of_n_grams(pieces, batch):
    config = tf.ProphetNetConfig(
        vocab_size=V, hidden_size=32, num_encoder_layers=1, num_decoder_layers=1,
        encoder_ffn_dim=48, decoder_ffn_dim=48, num_encoder_attention_heads=2,
        num_decoder_attention_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
    )  # fmt: skip
    model = tf.ProphetNetForConditionalGeneration(config).double().train()
    del batch["attention_mask"]  # with a mask, the model's loss is nan in float64
    check(model, lambda model: model(**batch), 1e-5)  # the model casts to float32


def test_unsupported_changes_of_logits_are_refused_when_patching(monkeypatch):
    squared = staticmethod(lambda logits, labels, vocab_size, **kwargs: logits.square().mean())
    monkeypatch.setattr(tf.LlamaForCausalLM, "loss_function", squared)
    model = make("Llama").train()
    before, state = dict(vars(model)), torch.get_rng_state()
    with pytest.raises(NotImplementedError, match="LlamaForCausalLM uses the attribute 'square'"):
        storage_ops.patch_causal_lm(model)
    assert type(model) is tf.LlamaForCausalLM and vars(model) == before
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("autocast", [False, True])
def test_16_bits(autocast, pieces, batch):
    model, wrapper = adapted("LoRA", dtype=torch.float32)
    exact, right = loss_and_gradients(copy.deepcopy(wrapper), lambda model: model(**batch))
    if not autocast:
        model.to(torch.bfloat16)
    storage_ops.patch_causal_lm(wrapper)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outputs = wrapper(**batch)
    outputs.loss.backward()
    assert outputs.loss.dtype == torch.float32
    torch.testing.assert_close(outputs.loss, exact.loss, rtol=0.02, atol=0.02)
    for name, p in wrapper.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(p.grad.float(), right[name], rtol=0.1, atol=0.02)


def two_adapters():
    """Return a patched PeftModel, and the trained tensors of the active adapter."""
    model, wrapper = adapted("LoRA")
    model.lm_head.lora_dropout["default"] = nn.Dropout(0.5)
    trained = [p for p in wrapper.parameters() if p.requires_grad]
    wrapper.add_adapter("other", adapter_config(**HEAD))
    storage_ops.patch_causal_lm(wrapper.double())
    return wrapper, trained


STATES = {
    "the other adapter": lambda wrapper: wrapper.set_adapter("other"),
    "no adapter": lambda wrapper: wrapper.base_model.disable_adapter_layers(),
    "evaluation": lambda wrapper: wrapper.eval(),
    "an adapter deleted": lambda wrapper: wrapper.delete_adapter("default"),
}


@pytest.mark.parametrize("state", STATES)
def test_the_backward_uses_the_adapters_and_modes_of_the_forward(state, pieces, batch):
    wrapper, trained = two_adapters()

    def loss():
        torch.manual_seed(3)
        return wrapper(**batch).loss

    right = torch.autograd.grad(loss(), trained)
    value = loss()
    STATES[state](wrapper)
    for p in trained:  # PEFT freezes adapters that are not active
        p.requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(value, trained), right)


def test_a_functional_call(pieces, batch):
    _, wrapper = adapted("DoRA")
    trained = {n: p for n, p in wrapper.named_parameters() if p.requires_grad}
    others = {n: (p + torch.rand_like(p)).detach().requires_grad_() for n, p in trained.items()}

    def gradients():
        loss = torch.func.functional_call(wrapper, others, (), batch).loss
        return loss, torch.autograd.grad(loss, list(others.values()))

    right = gradients()
    storage_ops.patch_causal_lm(wrapper)
    torch.testing.assert_close(gradients(), right)


def test_parameters_that_are_modified_before_the_backward(batch):
    wrapper, trained = two_adapters()
    loss = wrapper(**batch).loss
    with torch.no_grad():
        trained[0].mul_(1)
    with pytest.raises(
        RuntimeError, match=r"of shape \(4, 32\) that .* was modified by an in-place"
    ):
        loss.backward()


@pytest.mark.parametrize("which", [0, 1, 2])
def test_arguments_modified_before_the_backward_of_pieces(which):
    arguments = torch.randn(6, 4), torch.randint(9, (6,)), torch.rand(9)
    layer = nn.Linear(4, 9)
    (loss,) = head_loss.head_cross_entropy(
        layer, 9, *arguments[:2], weight=arguments[2], reduction="mean", ignore_index=-100,
        label_smoothing=0.0, token_weight=None, returns=("loss",), memory_budget=None,
    )  # fmt: skip
    arguments[which].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_copies_of_the_layer_for_two_adapters_and_none(batch):
    model, wrapper = adapted("a copy")
    storage_ops.patch_causal_lm(wrapper)
    wrapper.add_adapter("other", adapter_config(**ADAPTERS["a copy"]))
    nn.init.normal_(wrapper.double().get_base_model().lm_head.modules_to_save["other"].weight)

    def results():
        gradients = []
        for adapter in ("default", "other"):
            wrapper.set_adapter(adapter)
            gradients.append(loss_and_gradients(wrapper, lambda model: model(**batch))[1])
        with wrapper.disable_adapter():
            return [*gradients, wrapper(**batch).loss]

    ours = results()
    storage_ops.unpatch_causal_lm(wrapper)
    assert not any(type(m) is not nn.Linear for m in model.lm_head.modules_to_save.values())
    torch.testing.assert_close(ours, results())
