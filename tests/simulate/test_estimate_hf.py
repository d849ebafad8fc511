"""Simulated steps of transformers create the masks that a real run creates, and no others."""

import copy

import pytest
import torch

from storage_ops.memory import measure, simulate_step

transformers = pytest.importorskip("transformers")

BATCH, TOKENS = 2, 256


def llama(device="cpu"):
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=128, use_cache=False,
    )  # fmt: skip
    with torch.device(device):
        return transformers.LlamaForCausalLM(config).train()


def batch_of(masked):
    ids = torch.randint(0, 128, (BATCH, TOKENS))
    batch = {"input_ids": ids, "labels": ids}
    if masked != "none":
        batch["attention_mask"] = torch.ones_like(ids)
    if masked == "padded":
        batch["attention_mask"][1, TOKENS // 2 :] = 0
    if masked == "packed":
        places = torch.arange(TOKENS) % (TOKENS // 2)
        del batch["attention_mask"]
        batch["position_ids"] = places.expand(BATCH, -1).contiguous()
    return batch


def measured(model, batch):
    before = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), *batch.values()))
    with measure() as m:
        model(**batch).loss.backward()
    model.zero_grad()
    return m.peak_bytes + before


@pytest.mark.parametrize("masked", ["none", "ones", "padded", "packed"])
def test_a_mask_is_created_if_a_run_creates_one(masked):
    model, batch = llama(), batch_of(masked)
    before = dict(vars(transformers.masking_utils))
    step = simulate_step(model, batch)
    assert vars(transformers.masking_utils) == before
    assert step.peak_bytes == pytest.approx(measured(copy.deepcopy(model), batch), rel=1e-3)


@pytest.mark.in_turn
def test_on_the_meta_device():
    real = simulate_step(llama(), batch_of("none"), device="h100").peak_bytes
    batch = {name: t.to("meta") for name, t in batch_of("none").items()}
    meta = simulate_step(llama("meta"), batch, device="h100").peak_bytes
    assert meta == pytest.approx(real, rel=2e-3)
    # With unknown values, a mask is created. The model is in 16 bits, because in 32 bits attention
    # without a mask has scores on a GPU if heads share keys.
    half = llama("meta").to(torch.bfloat16)
    plain = simulate_step(half, batch, device="h100").peak_bytes
    batch["attention_mask"] = batch["labels"]
    masked = simulate_step(half, batch, device="h100")
    workspaces = masked.by_owner["workspaces of cuBLAS"]
    if transformers.__version__ < "5":  # it always creates a mask
        assert masked.peak_bytes == plain
    else:
        assert masked.peak_bytes - workspaces > 1.02 * (plain - workspaces)
