"""Results of a patched model besides its loss: results per token, weights, requested logits."""

import copy

import pytest
import torch
from torch.nn import functional as F

import storage_ops

from .models import BART, GROUPED, loss_and_gradients, make, tf


def shifted_logits(model, batch):
    """Return the logits of all tokens but the last, and their labels."""
    logits = model(batch["input_ids"], attention_mask=batch.get("attention_mask")).logits
    return logits[:, :-1].double(), batch["labels"][:, 1:]


def test_results_per_token(batch):
    model = make("Llama")
    names = ("loss", "nll", "lse", "entropy", "argmax", "correct")
    logits, labels = shifted_logits(model, batch)
    with storage_ops.patch_causal_lm(model, returns=names):
        outputs = model(**batch)
        parts = model(**batch, return_dict=False)
    valid = labels != -100
    right = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    logp = logits.log_softmax(-1)
    for name, value in {
        "nll": right, "lse": logits.logsumexp(-1), "entropy": -(logp.exp() * logp).sum(-1),
    }.items():  # fmt: skip
        assert outputs[name].shape == batch["labels"].shape
        torch.testing.assert_close(
            outputs[name][:, :-1].double(), value.masked_fill(~valid, 0), rtol=1e-4, atol=1e-5
        )
        assert not outputs[name][:, -1].any()
    assert torch.equal(outputs.argmax[:, :-1][valid], logits.argmax(-1)[valid])
    assert (outputs.argmax[:, :-1][~valid] == -1).all()
    assert torch.equal(parts[-1], outputs.correct) and len(parts) == len(outputs) + 1


def test_results_of_a_model_that_shifts_by_slices(batch):
    """Such a model scores no last token, and has no result for it."""
    model = make("Llama")
    names = ("nll", "lse", "argmax", "correct")

    def sliced(logits, labels, vocab_size, **kwargs):
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    with storage_ops.patch_causal_lm(model, returns=names):
        expected = model(**batch)
        model.loss_function = sliced
        outputs = model(**batch)
    for name in names:
        torch.testing.assert_close(outputs[name], expected[name])


def test_results_are_differentiable(batch):
    model, weights = make("Gemma 2, soft-cap"), torch.rand(3, 9)
    logits, labels = shifted_logits(model, batch)
    right = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    model.zero_grad()
    (right * weights[:, :-1]).sum().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    storage_ops.patch_causal_lm(model, returns=["nll"])
    (model(**batch).nll * weights).sum().backward()
    ours = {n: p.grad for n, p in model.named_parameters()}
    torch.testing.assert_close(ours, grads, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "Bart, not shifted"])
@pytest.mark.parametrize("named", [False, True])
def test_a_weight_for_every_label(name, named, batch):
    model, weights = make(name), torch.rand(3, 9)
    logits = model(batch["input_ids"], attention_mask=batch.get("attention_mask")).logits.double()
    labels, w = batch["labels"], weights.double()
    if name == "Llama":
        logits, labels, w = logits[:, :-1], labels[:, 1:], w[:, 1:]
    nll = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    right = (nll * w).sum() / (w * (labels != -100)).sum()
    extra = {"weights": weights} if named else {}
    storage_ops.patch_causal_lm(model, token_weights="weights" if named else weights)
    for call in (model, torch.compile(model, backend="aot_eager")):
        torch.testing.assert_close(call(**batch, **extra).loss, right.float(), rtol=1e-4, atol=1e-5)


def test_label_smoothing_equals_that_of_trainer(batch):
    from transformers.trainer_pt_utils import LabelSmoother

    model = make("Llama")
    outputs = model(**{k: v for k, v in batch.items() if k != "labels"})
    right = LabelSmoother(epsilon=0.2)(outputs, batch["labels"].clone(), shift_labels=True)
    storage_ops.patch_causal_lm(model, label_smoothing=0.2)
    torch.testing.assert_close(model(**batch).loss, right)


def test_shift_labels_without_labels_give_the_loss(batch):
    model = make("Llama")
    labels = batch.pop("labels")
    right = model(**batch, labels=labels).loss
    storage_ops.patch_causal_lm(model)
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    outputs = model(**batch, shift_labels=shifted)
    torch.testing.assert_close(outputs.loss, right)
    assert outputs.logits is None


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("when", ["eval", "always", "never"])
def test_logits_are_returned_if_requested(training, when, batch):
    model = make("Gemma 2, soft-cap").train(training)
    right = model(**batch)
    storage_ops.patch_causal_lm(model, logits=when)
    outputs = model(**batch)
    torch.testing.assert_close(outputs.loss, right.loss)
    if when == "always" or (when == "eval" and not training):
        torch.testing.assert_close(outputs.logits, right.logits)
    else:
        assert outputs.logits is None


def test_a_bias_that_is_added_to_the_logits(batch):
    sizes = {**BART, "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 48}
    model = tf.BartForConditionalGeneration(tf.BartConfig(**sizes)).train()
    model.final_logits_bias.normal_()
    right, grads = loss_and_gradients(model, lambda m: m(**batch))
    storage_ops.patch_causal_lm(model)
    outputs, patched = loss_and_gradients(model, lambda m: m(**batch))
    torch.testing.assert_close(outputs.loss, right.loss)
    torch.testing.assert_close(patched, grads, rtol=1e-4, atol=1e-5)
    assert outputs.logits is None
    other = tf.BartForConditionalGeneration(tf.BartConfig(**sizes))
    with pytest.raises(TypeError, match="is an encoder-decoder"):
        storage_ops.patch_causal_lm(other, token_weights="weights")


def test_copies_keep_options_and_unknown_options_are_refused(batch):
    model = make("Llama")
    storage_ops.patch_causal_lm(model, returns=("loss", "nll"))
    storage_ops.patch_causal_lm(model, returns=("loss", "nll"))
    assert copy.deepcopy(model)(**batch).nll.shape == (3, 9)
    with pytest.raises(RuntimeError, match="is patched already, with"):
        storage_ops.patch_causal_lm(model)
    storage_ops.unpatch_causal_lm(model)
    assert "_loss_options" not in vars(model)
    for options, message in (
        ({"returns": "nll"}, "`returns` is 'nll'. Expected some of"),
        ({"logits": True}, "`logits` is True. Expected one of .'eval'"),
        ({"label_smoothing": 2}, "`label_smoothing` is 2. Expected a number"),
        ({"label_smoothing": True}, "`label_smoothing` is True. Expected a number"),
    ):
        with pytest.raises(ValueError, match=message):
            storage_ops.patch_causal_lm(model, **options)
    storage_ops.patch_causal_lm(model, token_weights=torch.rand(2, 2))
    with pytest.raises(ValueError, match=r"`token_weights` is of shape \(2, 2\). Expected"):
        model(**batch)


def test_missing_weights_are_errors(batch):
    """transformers accepts any keyword, and its Trainer removes columns that it does not know."""
    model = make("Llama").train()
    storage_ops.patch_causal_lm(model)
    with pytest.raises(TypeError, match=r'Call .*token_weights="token_weights"'):
        model(**batch, token_weights=torch.rand(batch["labels"].shape))
    storage_ops.unpatch_causal_lm(model)
    storage_ops.patch_causal_lm(model, token_weights="weights")
    with pytest.raises(ValueError, match="'weights', and a call in training has no keyword"):
        model(**batch)
    assert model.eval()(**batch).loss is not None
    storage_ops.unpatch_causal_lm(model.train())
    with pytest.raises(ValueError, match="'attention_mask', which the forward of Llama"):
        storage_ops.patch_causal_lm(model, token_weights="attention_mask")


@pytest.mark.parametrize("logits", ["deferred", "eval"])
def test_calls_without_labels_are_errors_with_weights_or_smoothing(logits, batch):
    """Trainer passes no labels to the model if it smooths them itself."""
    model, labels = make("Llama").train(), batch.pop("labels")
    with storage_ops.patch_causal_lm(model, token_weights="weights", logits=logits):
        with pytest.raises(
            ValueError, match="`token_weights` is 'weights', and LlamaForCausalLM is"
        ):
            model(**batch, weights=torch.rand(labels.shape))
        assert model.eval()(**batch).logits is not None
    with storage_ops.patch_causal_lm(model.train(), label_smoothing=0.1, logits=logits):
        if logits == "deferred":
            with pytest.raises(ValueError, match=r"`label_smoothing` is 0.1, .* Pass labels in"):
                model(**batch)
        else:  # the outputs of the plain model, without a loss
            assert isinstance(model(**batch).logits, torch.Tensor)


def test_checkpointed_layers_keep_no_cache_in_training():
    config = tf.LlamaConfig(**{**GROUPED, "num_hidden_layers": 4, "hidden_size": 128})
    model = tf.LlamaForCausalLM(config).train()
    ids = torch.randint(97, (2, 64))

    def run(use_cache):  # transformers 4 passes a mask to its layers if there is no cache
        return loss_and_gradients(model, lambda m: m(ids, labels=ids, use_cache=use_cache))

    expected = {use_cache: run(use_cache) for use_cache in (False, True)}
    options = {"layer_classes": ["LlamaDecoderLayer"]}
    storage_ops.apply_activation_checkpoint(model, options)
    peaks = []
    for use_cache, (right, grads) in expected.items():
        with storage_ops.memory.measure() as measured:
            outputs, ours = run(use_cache)
        peaks.append(measured.peak_bytes)
        torch.testing.assert_close(outputs.loss, right.loss, rtol=0, atol=0)
        torch.testing.assert_close(ours, grads, rtol=0, atol=0)
    assert peaks[1] < 1.02 * peaks[0]  # keys and values of every layer would give 1.6 times
