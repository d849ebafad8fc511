"""Trainer of transformers with patched models, unchanged: training, label smoothing, metrics."""

import copy

import pytest
import torch

import storage_ops

from .models import V, make, tf

pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")


def trained(model, folder, evaluate=False, **options):
    """Parameters after three steps of Trainer, and what it has logged."""
    ids = torch.randint(3, V, (12, 9), generator=torch.Generator().manual_seed(5))
    data = [{"input_ids": row, "labels": row} for row in ids]
    options = {"max_steps": 3, "gradient_accumulation_steps": 2, **options}
    arguments = tf.TrainingArguments(
        output_dir=folder, use_cpu=True, report_to=[], per_device_train_batch_size=2,
        per_device_eval_batch_size=4, logging_steps=1, save_strategy="no", seed=3,
        disable_tqdm=True, learning_rate=1e-2, **options,
    )  # fmt: skip
    trainer = tf.Trainer(
        model, arguments, train_dataset=data, eval_dataset=data, compute_metrics=accuracy
    )
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
