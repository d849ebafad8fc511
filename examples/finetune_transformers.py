"""Fine-tune a model of transformers with Trainer: `python examples/finetune_transformers.py`.

The model and the Trainer do not change. `patch_causal_lm` computes the loss without the logits, and
a plan of `fit` recomputes as little as possible within a budget. Needs transformers and accelerate.
"""

from __future__ import annotations

import tempfile

import torch
import transformers
from report import DEVICE, report

import storage_ops
from storage_ops.integrations import trainer_callback
from storage_ops.memory import Measurement, measure

VOCAB = 16000
TOKENS = torch.randint(VOCAB, (8, 512))


def model() -> transformers.LlamaForCausalLM:
    """Return a small Llama. `from_pretrained` returns a trained one."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=704, num_hidden_layers=4,
        use_cache=False, num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=512,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def train(net: transformers.PreTrainedModel, *callbacks: object) -> tuple[Measurement, float]:
    """Train two steps. Return their memory and their mean loss."""
    data = [{"input_ids": ids, "labels": ids} for ids in TOKENS]
    with tempfile.TemporaryDirectory() as folder:
        options = transformers.TrainingArguments(
            folder, max_steps=2, per_device_train_batch_size=4, report_to=[],
            save_strategy="no", use_cpu=DEVICE == "cpu", seed=0, disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(net, options, train_dataset=data, callbacks=list(callbacks))
        with measure(DEVICE) as measurement:
            loss = trainer.train().training_loss
    return measurement, loss


def main() -> None:
    """Train three times from the same weights."""
    plain, loss = train(model())

    net = model()
    storage_ops.patch_causal_lm(net)
    patched, same = train(net)

    net = model()
    storage_ops.patch_causal_lm(net)
    batch = {"input_ids": TOKENS[:4], "labels": TOKENS[:4]}
    plan = storage_ops.fit(net, batch, budget="270MiB", optimizer=torch.optim.AdamW)
    print(plan)
    planned, with_plan = train(net, trainer_callback(plan))

    print(f"loss {loss:.5f}, {same:.5f}, {with_plan:.5f}")
    cases = {"unchanged": plain, "patch_causal_lm": patched, "and fit": planned}
    report("two steps of a Llama", cases)


if __name__ == "__main__":
    main()
