"""Models under patch_causal_lm have the same loss and gradients, and compute no logits."""

import inspect

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import storage_ops

from .models import GROUPED, MODELS, SIZES, V, check_against_plain, loss_and_gradients, make, tf

every_model = pytest.mark.parametrize("name", MODELS)


@every_model
@pytest.mark.parametrize("training", [True, False])
def test_loss_and_gradients(name, training, batch):
    check_against_plain(make(name).train(training), lambda model: model(**batch))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fullgraph"),
    [("Llama", True), ("Gemma 2, soft-cap", True), ("GPT-2, tied", False)],
)
def test_compiled(name, fullgraph, batch):
    torch._dynamo.reset()
    model = make(name)
    expected, grads = loss_and_gradients(model, lambda model: model(**batch))
    storage_ops.patch_causal_lm(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
    outputs, patched_grads = loss_and_gradients(model, lambda model: compiled(**batch))
    torch.testing.assert_close(outputs.loss, expected.loss)
    torch.testing.assert_close(patched_grads, grads, rtol=1e-5, atol=1e-6)
    assert outputs.logits is None
    assert compiled(batch["input_ids"]).logits.shape == (3, 9, V)


@pytest.mark.in_turn
def test_one_graph_serves_all_sizes():
    torch._dynamo.reset()
    model, counter = make("Llama"), CompileCounter()
    storage_ops.patch_causal_lm(model)
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    for shape in ((3, 11), (6, 9), (12, 7), (8, 18)):
        ids = torch.randint(2, V, shape)
        torch.testing.assert_close(
            compiled(input_ids=ids, labels=ids).loss, model(input_ids=ids, labels=ids).loss
        )
    assert counter.frame_count == 1


@pytest.mark.in_turn
def test_a_model_that_is_compiled_already(batch):
    torch._dynamo.reset()
    model = make("Llama").train()
    compiled = torch.compile(model, backend="aot_eager")
    right = compiled(**batch)
    gradients = torch.autograd.grad(right.loss, list(model.parameters()))
    with storage_ops.patch_causal_lm(compiled):
        ours = compiled(**batch)
        assert ours.logits is None
        torch.testing.assert_close(ours.loss, right.loss)
        patched = torch.autograd.grad(ours.loss, list(model.parameters()))
    torch.testing.assert_close(patched, gradients)
    assert compiled(**batch).logits is not None
    plan = storage_ops.fit(compiled, dict(batch), "1GiB", actions=["linear_cross_entropy"])
    assert plan.apply() is compiled
    plan.undo()


@pytest.mark.parametrize("items", [17, torch.tensor(17)], ids=["int", "tensor"])
@pytest.mark.parametrize("name", ["Llama", "Gemma 2, soft-cap"])
def test_num_items_in_batch(name, items, batch):
    check_against_plain(make(name), lambda model: model(**batch, num_items_in_batch=items))


def test_shift_labels(batch):
    shifted = torch.roll(batch["labels"], -1, 1)
    check_against_plain(make("Llama"), lambda model: model(**batch, shift_labels=shifted))


def test_positional_arguments(batch):
    model = make("Llama")
    names = list(inspect.signature(model.forward).parameters)
    args = [batch.get(name) for name in names[: names.index("labels") + 1]]
    check_against_plain(model, lambda model: model(*args))


@pytest.mark.parametrize("kind", ["Bert", "Albert"])
def test_a_loss_with_a_second_label(kind, batch):
    config = getattr(tf, f"{kind}Config")(**SIZES, embedding_size=16)
    model = getattr(tf, f"{kind}ForPreTraining")(config).eval()
    name = {"Bert": "next_sentence_label", "Albert": "sentence_order_label"}[kind]
    inputs = {**batch, name: torch.tensor([0, 1, 1])}
    expected = model(**inputs)
    storage_ops.patch_causal_lm(model, logits="never")
    outputs = model(**inputs)
    torch.testing.assert_close(outputs.loss, expected.loss)
    assert outputs.prediction_logits is None
    with pytest.raises(NotImplementedError, match=f"It may need {name} too"):
        model(**batch)


def test_every_label_ignored(batch):
    batch["labels"] = torch.full_like(batch["labels"], -100)
    model = make("Llama")
    storage_ops.patch_causal_lm(model)
    outputs, grads = loss_and_gradients(model, lambda model: model(**batch))
    assert outputs.loss.isnan() and not grads["lm_head.weight"].any()


def test_autocast_and_16_bit_models(batch):
    def run(model):
        with torch.autocast("cpu", torch.bfloat16):
            return model(**batch)

    check_against_plain(make("Llama"), run, rtol=0.1, atol=0.02)
    model = make("Llama").bfloat16()
    check_against_plain(model, lambda model: model(**batch), rtol=0.1, atol=0.02)


def test_gradient_checkpointing(batch):
    model = make("Llama")
    modern = getattr(model, "activation_checkpointing_enable", None)
    (modern or model.gradient_checkpointing_enable)()
    check_against_plain(model, lambda model: model(**batch, use_cache=False))


def test_outputs_beside_the_logits(batch):
    model = make("Llama")
    expected = model(**batch, output_hidden_states=True)
    with storage_ops.patch_causal_lm(model):
        outputs = model(**batch, output_hidden_states=True)
        assert [k for k in expected if k != "logits"] == list(outputs)
        torch.testing.assert_close(outputs.hidden_states, expected.hidden_states)
        loss, logits, *_ = model(**batch, return_dict=False)
    torch.testing.assert_close(loss, expected.loss)
    assert logits is None


@every_model
def test_without_labels_nothing_changes(name, batch):
    model = make(name).eval()
    inputs = {k: batch[k] for k in ("input_ids", "attention_mask")}
    prompt = inputs["input_ids"][:1]
    with torch.no_grad():
        expected = model(**inputs).logits
        text = model.generate(prompt, max_new_tokens=4, do_sample=False)
        storage_ops.patch_causal_lm(model)
        model(**batch)
        assert torch.equal(model(**inputs).logits, expected)
        assert torch.equal(model.generate(prompt, max_new_tokens=4, do_sample=False), text)


@every_model
def test_the_output_layer_computes_no_logits(name, batch):
    class Watch(torch.overrides.TorchFunctionMode):
        products = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.products += func is nn.functional.linear and args[1] is weight
            return func(*args, **(kwargs or {}))

    model = make(name)
    weight = model.get_output_embeddings().weight
    with Watch() as watch:
        model(**batch)
    assert watch.products == 1
    with storage_ops.patch_causal_lm(model), Watch() as watch:
        model(**batch).loss.backward()
    assert watch.products == 0


@pytest.mark.in_turn
@pytest.mark.skipif(
    not any("cpu" in name for name in storage_ops.info()["loaded"]),
    reason="the row kernel in plain torch takes several times its tile",
)
@pytest.mark.parametrize("cap", [None, 5.0])
def test_peak_memory_is_less_than_the_logits(cap):
    tokens, vocab = 4096, 16384
    changes = {"vocab_size": vocab, "num_attention_heads": 1, "num_key_value_heads": 1}
    config = tf.Gemma2Config(**{**GROUPED, **changes}, head_dim=8, final_logit_softcapping=cap)
    model = tf.Gemma2ForCausalLM(config)
    ids = torch.randint(vocab, (tokens // 32, 32))

    def peak():
        with storage_ops.memory.measure() as m:
            model(ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()
        return m.peak_bytes

    logits = tokens * vocab * 4
    assert peak() > 2 * logits
    storage_ops.patch_causal_lm(model)
    assert peak() < 0.5 * logits


def test_a_loss_function_of_the_user(batch, monkeypatch):
    model = make("Llama")

    def smoothed(logits, labels, vocab_size, **kwargs):
        labels = nn.functional.pad(labels[..., 1:], (0, 1), value=-100)
        return nn.functional.cross_entropy(
            logits.float().view(-1, vocab_size), labels.reshape(-1), label_smoothing=0.1
        )

    # Patch the class, because transformers 4.46 has no setter on instances.
    monkeypatch.setattr(tf.LlamaForCausalLM, "loss_function", staticmethod(smoothed))
    check_against_plain(model, lambda model: model(**batch))
    squared = staticmethod(lambda logits, labels, vocab_size, **kwargs: logits.square().mean())
    monkeypatch.setattr(tf.LlamaForCausalLM, "loss_function", squared)
    with (
        pytest.raises(NotImplementedError, match="LlamaForCausalLM uses the attribute 'square'"),
        storage_ops.patch_causal_lm(model),
    ):
        model(**batch)
    assert model(**batch).logits is not None
