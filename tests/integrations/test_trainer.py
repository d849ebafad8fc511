"""Trainer of transformers with patched models, unchanged: training, label smoothing, metrics."""

import copy

import pytest
import torch

import storage_ops
from storage_ops.integrations.patched_model import _say_that_labels_lack

from .models import V, make, tf

pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")


def trained(model, folder, evaluate=False, kind=tf.Trainer, function=None, **options):
    """Parameters after three steps of a Trainer, and what it has logged."""
    ids = torch.randint(3, V, (12, 9), generator=torch.Generator().manual_seed(5))
    data = [{"input_ids": row, "labels": row} for row in ids]
    options = {"max_steps": 3, "gradient_accumulation_steps": 2, **options}
    arguments = tf.TrainingArguments(
        output_dir=folder, use_cpu=True, report_to=[], per_device_train_batch_size=2,
        per_device_eval_batch_size=4, logging_steps=1, save_strategy="no", seed=3,
        disable_tqdm=True, learning_rate=1e-2, **options,
    )  # fmt: skip
    trainer = kind(
        model, arguments, train_dataset=data, eval_dataset=data, compute_metrics=accuracy,
        compute_loss_func=function,
    )  # fmt: skip
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
    ours, found, measured = trained(other, tmp_path, evaluate=True)
    assert len(losses) == 3 and losses == pytest.approx(found, rel=1e-3)
    torch.testing.assert_close(ours, right, rtol=1e-3, atol=2e-4)
    for name in ("eval_loss", "eval_accuracy"):
        assert measured[name] == pytest.approx(metrics[name], rel=1e-2)


def test_label_smoothing_without_logits(tmp_path):
    model = make("Llama")
    other = copy.deepcopy(model)
    right, losses, _ = trained(model, tmp_path, label_smoothing_factor=0.2)
    storage_ops.patch_causal_lm(other, label_smoothing=0.2)
    ours, found, _ = trained(other, tmp_path)
    assert losses == pytest.approx(found, rel=1e-3)
    torch.testing.assert_close(ours, right, rtol=1e-3, atol=2e-4)


def focal(nll, count):
    """A loss that a model does not have: tokens weigh the more, the worse they are."""
    return ((1 - (-nll.detach()).exp()) * nll).sum() / count


def focal_of_logits(outputs, labels, num_items_in_batch):
    logits = outputs.logits[:, :-1].flatten(0, 1).float()
    nll = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="none")
    return focal(nll, num_items_in_batch)


class Focal(tf.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = focal(outputs.nll, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


def test_a_loss_of_results_per_token(tmp_path):
    """In compute_loss(), as compute_loss_func gets the outputs of a call without labels."""
    model = make("Llama")
    other, third = copy.deepcopy(model), copy.deepcopy(model)
    right, losses, _ = trained(model, tmp_path, function=focal_of_logits)
    storage_ops.patch_causal_lm(other, returns=("nll",))
    ours, found, _ = trained(other, tmp_path, kind=Focal)
    assert losses == pytest.approx(found, rel=1e-3)
    torch.testing.assert_close(ours, right, rtol=1e-3, atol=2e-4)
    storage_ops.patch_causal_lm(third, returns=("nll",))
    _say_that_labels_lack.cache_clear()
    with pytest.warns(UserWarning, match=r"LlamaForCausalLM.*without labels.*compute_loss\(\)"):
        same, _, _ = trained(third, tmp_path, function=focal_of_logits)
    torch.testing.assert_close(same, right, rtol=1e-3, atol=2e-4)
