"""The unchanged Trainer of transformers trains patched models as before."""

import copy
import re
import warnings

import pytest
import torch
from torch.nn import functional as F

import storage_ops
from storage_ops.integrations.patched_model import _warn_of_missing_labels

from .models import GROUPED, V, make, tf

pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")


def a_trainer(model, folder, kind=tf.Trainer, function=None, vocabulary=V, length=9, **options):
    """Return a Trainer with SGD, whose steps are proportional to the gradients."""
    generator = torch.Generator().manual_seed(5)  # a Trainer seeds torch's own generator
    ids = torch.randint(3, vocabulary, (12, length), generator=generator)
    labels = ids.clone()
    labels[::3, :4] = -100
    data = [{"input_ids": a, "labels": b} for a, b in zip(ids, labels, strict=True)]
    options = {"max_steps": 3, "gradient_accumulation_steps": 2, **options}
    arguments = tf.TrainingArguments(
        output_dir=folder, use_cpu=True, report_to=[], per_device_train_batch_size=2,
        per_device_eval_batch_size=4, logging_steps=1, save_strategy="no", seed=3,
        disable_tqdm=True, learning_rate=0.3, optim="sgd", **options,
    )  # fmt: skip
    return kind(
        model, arguments, train_dataset=data, eval_dataset=data, compute_metrics=accuracy,
        compute_loss_func=function,
    )  # fmt: skip


def trained(model, folder, evaluate=False, **options):
    """Return the parameters after three steps of a Trainer, and its log."""
    trainer = a_trainer(model, folder, **options)
    trainer.train()
    logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    metrics = trainer.evaluate() if evaluate else {}
    return dict(model.named_parameters()), logged, metrics


def accuracy(prediction):
    right = prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]
    return {"accuracy": float(right.mean())}


@pytest.mark.parametrize("adapted", [False, True], ids=["whole", "LoRA on the output layer"])
def test_training_and_metrics(adapted, tmp_path):
    model = make("Llama")
    if adapted:
        config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["lm_head", "q_proj"], r=4)
        model = peft.get_peft_model(model, config)
    other = copy.deepcopy(model)
    right, losses, metrics = trained(model, tmp_path, evaluate=True)
    storage_ops.patch_causal_lm(other)
    ours, got, measured = trained(other, tmp_path, evaluate=True)
    assert len(losses) == 3 and losses == pytest.approx(got, rel=1e-3)
    torch.testing.assert_close(ours, right, rtol=1e-3, atol=1e-5)
    for name in ("eval_loss", "eval_accuracy"):
        assert measured[name] == pytest.approx(metrics[name], rel=1e-2)


@pytest.mark.skipif(
    tf.__version__ < "5",
    reason="label smoothing of transformers 4 divides by another number of tokens than its loss",
)
def test_label_smoothing_without_logits(tmp_path):
    model = make("Llama")
    other = copy.deepcopy(model)
    right, losses, _ = trained(model, tmp_path, label_smoothing_factor=0.2)
    storage_ops.patch_causal_lm(other, label_smoothing=0.2)
    ours, got, _ = trained(other, tmp_path)
    assert losses == pytest.approx(got, rel=1e-3)
    torch.testing.assert_close(ours, right, rtol=1e-3, atol=1e-5)


def focal(nll, count):
    """Return a loss in which improbable tokens have larger weights."""
    return ((1 - (-nll.detach()).exp()) * nll).sum() / count


def focal_of_logits(outputs, labels, num_items_in_batch):
    logits = outputs.logits[:, :-1].flatten(0, 1).float()
    nll = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="none")
    return focal(nll, num_items_in_batch)


class Focal(tf.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = focal(outputs.nll, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


def test_a_loss_of_results_per_token(tmp_path):
    """The loss is in compute_loss(), because compute_loss_func gets outputs without labels."""
    model = make("Llama")
    other, third = copy.deepcopy(model), copy.deepcopy(model)
    right, losses, _ = trained(model, tmp_path, function=focal_of_logits)
    storage_ops.patch_causal_lm(other, returns=("nll",))
    ours, got, _ = trained(other, tmp_path, kind=Focal)
    assert losses == pytest.approx(got, rel=1e-3)
    torch.testing.assert_close(ours, right, rtol=1e-3, atol=1e-5)
    storage_ops.patch_causal_lm(third, returns=("nll",))
    _warn_of_missing_labels.cache_clear()
    with pytest.warns(UserWarning, match="without labels") as record:
        same, _, _ = trained(third, tmp_path, function=focal_of_logits)
    (warning,) = [w for w in record if re.search(r"Llama.*compute_loss\(\)", str(w.message))]
    assert warning.filename == __file__  # the warning points to the call of Trainer.train()
    torch.testing.assert_close(same, right, rtol=1e-3, atol=1e-5)


def mean_of_logits(outputs, labels, num_items_in_batch):
    logits = outputs.logits[..., :-1, :].contiguous()
    loss = torch.nn.CrossEntropyLoss(reduction="sum")
    return loss(logits.view(-1, V), labels[..., 1:].reshape(-1)) / num_items_in_batch


def the_loss_of_transformers(outputs, labels, num_items_in_batch):
    return tf.loss.loss_utils.ForCausalLMLoss(outputs.logits, labels, V, num_items_in_batch)


SMOOTHED = {"label_smoothing_factor": 0.1}
WITHOUT_LABELS = {
    "smoothed": ("Llama", SMOOTHED),
    "smoothed, GPT-2": ("GPT-2, tied", SMOOTHED),
    "smoothed, soft-cap": ("Gemma 2, soft-cap", SMOOTHED),
    "smoothed, LoRA": ("LoRA", SMOOTHED),
    "smoothed, checkpoints": ("Llama", SMOOTHED | {"gradient_checkpointing": True}),
    "smoothed, mixed precision": ("Llama", SMOOTHED | {"bf16": True}),
    "a function": ("Llama", {"function": mean_of_logits}),
    "a function, GPT-2": ("GPT-2, tied", {"function": mean_of_logits}),
    "a function, scale": ("Granite, scale", {"function": the_loss_of_transformers}),
    "a function, mixed precision": ("Llama", {"function": focal_of_logits, "bf16": True}),
}  # fmt: skip


@pytest.mark.parametrize("case", WITHOUT_LABELS)
def test_losses_of_deferred_logits(case, tmp_path):
    name, options = WITHOUT_LABELS[case]
    model = make("Llama" if name == "LoRA" else name)
    if name == "LoRA":
        config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["lm_head", "q_proj"], r=4)
        model = peft.get_peft_model(model, config)
    other = copy.deepcopy(model)
    right, losses, metrics = trained(model, tmp_path, evaluate=True, **options)
    storage_ops.patch_causal_lm(other, logits="deferred")
    _warn_of_missing_labels.cache_clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*without labels.*")
        ours, got, measured = trained(other, tmp_path, evaluate=True, **options)
    exact = "bf16" not in options
    assert losses == pytest.approx(got, rel=1e-4 if exact else 1e-2)
    torch.testing.assert_close(ours, right, rtol=1e-3, atol=1e-5 if exact else 1e-2)
    rel, off = (1e-4, 0) if exact else (0.1, 0.05)  # rounding changes the best class of some tokens
    for name in ("eval_loss", "eval_accuracy"):  # metrics of logits
        assert measured[name] == pytest.approx(metrics[name], rel=rel, abs=off)


@pytest.mark.parametrize(
    "options", [SMOOTHED, {"function": focal_of_logits}], ids=["smoothed", "own"]
)
def test_a_trainer_computes_no_logits(options, tmp_path):
    vocabulary, length = 8192, 128
    config = tf.LlamaConfig(**{**GROUPED, "vocab_size": vocabulary, "max_position_embeddings": 128})
    options = {"vocabulary": vocabulary, "length": length, "max_steps": 1, **options}
    logits = 2 * length * vocabulary * 4  # bytes of the logits of a batch

    def largest(model):
        trainer = a_trainer(model, tmp_path, **options)
        with storage_ops.memory.measure() as m:
            trainer.train()
        return max(life.nbytes for life in m.lives)

    model = tf.LlamaForCausalLM(config)
    assert largest(model) >= logits
    storage_ops.patch_causal_lm(model, logits="deferred", memory_budget="1 MiB")
    assert largest(model) < logits / 4
