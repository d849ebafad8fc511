"""`patch_causal_lm(gradient_tolerance=)` passes the option to the loss."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import storage_ops

from ..loss.test_gradient_tolerance import relative


def model_and_ids():
    """Return a model that predicts few classes: its output layer has large rows for them."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=5000, hidden_size=256, intermediate_size=64, num_hidden_layers=1,
            num_attention_heads=2,
        )
    )  # fmt: skip
    with torch.no_grad():
        model.lm_head.weight *= 2
        model.model.norm.weight[:] = 1
        model.lm_head.weight[:, 0] = -torch.arange(1.0, 5001).log()
        model.model.norm.register_forward_hook(_first_is_one)
    return model, torch.randint(40, (4, 128))


def _first_is_one(module, args, out):
    first = torch.arange(out.shape[-1]) == 0
    return torch.where(first, 1.0, out)


def gradients(model, ids):
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), model.lm_head.weight.grad.clone()


def test_a_patched_model():
    model, ids = model_and_ids()
    loss, exact = gradients(model, ids)
    with storage_ops.patch_causal_lm(model, gradient_tolerance=0.1):
        got = gradients(model, ids)
    torch.testing.assert_close(got[0], loss)
    assert 1e-4 < relative(got[1], exact) < 0.06


def test_errors_change_nothing():
    model, _ = model_and_ids()
    for options, kind in (
        ({"gradient_tolerance": 2}, ValueError),
        ({"gradient_tolerance": "1e-3"}, TypeError),
        ({"gradient_tolerance": 0.1, "label_smoothing": 0.1}, ValueError),
        ({"gradient_tolerance": 0.1, "returns": ("loss", "entropy")}, ValueError),
    ):
        with pytest.raises(kind, match="`gradient_tolerance` is"):
            storage_ops.patch_causal_lm(model, **options)
        assert type(model) is LlamaForCausalLM
