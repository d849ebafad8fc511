"""`--packing`: one row of all sequences, and their starts in attention."""

import argparse

import pytest
import torch

from storage_ops.cli import hf_model
from storage_ops.cli.workload import workload
from storage_ops.memory import simulate_step
from tests import hf_config
from tests.commands import refused

tf = pytest.importorskip("transformers")
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128,
    "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def words(tmp_path):
    return ["--hf-config", hf_config.write(tmp_path, **SIZES), "--seq", "64", "--batch", "4"]


def step(words):
    parser = argparse.ArgumentParser()
    hf_model.add_arguments(parser)
    model, batch, _ = workload(parser.parse_args(words))
    return simulate_step(model, batch, device="h100"), batch


@pytest.mark.in_turn
def test_flash_attention_uses_as_much_as_padded_sequences(words):
    plain, _ = step(words)
    packed, batch = step([*words, "--packing", "flash"])
    assert batch["input_ids"].shape == (1, 256)
    assert batch["position_ids"].tolist() == [list(range(64)) * 4]
    difference = packed.peak_bytes - plain.peak_bytes
    # Each token, instead of each position, has an id, cosines and sines.
    positions = 256 * (8 + 2 * 2 * 16)
    # Transformers 4 creates a mask for padded sequences and repeats their keys.
    assert difference <= 2 * positions
    assert difference >= 0 or tf.__version__ < "5"


@pytest.mark.in_turn
def test_torchs_attention_uses_a_mask_and_repeated_keys(words):
    flash, _ = step([*words, "--packing", "flash"])
    sdpa, _ = step([*words, "--packing", "sdpa"])
    mask = 256 * 256
    repeated = 2 * 2 * 256 * 64 * 2  # keys and values of two layers in bf16
    assert sdpa.peak_bytes - flash.peak_bytes >= mask + repeated


def test_the_attention_equals_that_of_torch():
    """The replacement for flash attention computes attention to the whole row."""
    sizes = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}
    model, ids = tf.LlamaForCausalLM(tf.LlamaConfig(**sizes)), torch.randint(128, (1, 16))
    expected = model(input_ids=ids).logits
    from storage_ops.cli.packing import prepare

    prepare(model, argparse.Namespace(packing="flash"))
    torch.testing.assert_close(model(input_ids=ids).logits, expected)


def test_models_that_cannot_be_packed(words, tmp_path, capsys):
    packing = ["--packing", "sdpa"]
    command = ["will-it-fit", *words, *packing]
    assert "but --serve trains nothing" in refused([*command, "--serve"], capsys)
    error = refused([*command, "--reference", "dpo"], capsys)
    assert "the loss of --reference takes one sequence" in error
    error = refused(["will-it-fit", "--model", "model.py:make", *packing], capsys)
    assert "--packing is sdpa, but the function of --model" in error
    kind = {**SIZES, "model_type": "bert", "architectures": ["BertForSequenceClassification"]}
    other = hf_config.write(tmp_path, **kind)
    command = ["will-it-fit", "--hf-config", other, "--seq", "8", *packing]
    assert "with a label for each" in refused(command, capsys)
