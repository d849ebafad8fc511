"""Output layers whose weight exists only during their call, as under FSDP2 and ZeRO-3."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import storage_ops

from ..ranks import run_on_ranks
from .models import V, make

NAMES = ["Llama", "Phi, bias", "Gemma 2, soft-cap", "Cohere, scale", "Bart, not shifted"]


class Gathers:
    """Imitates ZeRO-3: the weight is empty except in calls of the layer and their backward."""

    def __init__(self, layer):
        self.layer, self.whole = layer, [p.data for p in layer.parameters()]
        self.open = self.calls = 0
        layer.register_forward_pre_hook(self.before)
        layer.register_forward_hook(self.after)
        self.free()

    def gather(self, *_):
        self.open += 1
        for p, data in zip(self.layer.parameters(), self.whole, strict=True):
            p.data = data

    def free(self, *_):
        for p in self.layer.parameters():
            p.data = torch.empty(0)

    def before(self, layer, args):
        self.gather()
        self.calls += 1
        if args[0].requires_grad:
            args[0].register_hook(self.free)

    def after(self, layer, args, outputs):
        tensors = outputs if isinstance(outputs, tuple) else (outputs,)
        for out in tensors:
            assert isinstance(out, torch.Tensor)
            if out.requires_grad:
                out.register_hook(self.gather)
        self.free()


# The package recognises a library by the module of its hooks.
for name in ("before", "after"):
    getattr(Gathers, name).__module__ = "deepspeed.runtime.zero.parameter_offload"


def untied(name):
    model = make(name)
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())
    return model


def gradients(model, batch):
    outputs = model(**batch)
    outputs.loss.backward()
    return outputs, [p.grad for p in model.parameters()]


@pytest.fixture
def batch():
    ids = torch.randint(3, V, (2, 16))
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients(name, batch):
    model = untied(name)
    right, grads = gradients(copy.deepcopy(model), batch)
    gathers = Gathers(model.get_output_embeddings())
    storage_ops.patch_causal_lm(model, returns=["nll"])
    got, ours = gradients(model, batch)
    torch.testing.assert_close(got.loss, right.loss)
    torch.testing.assert_close(ours, grads, rtol=1e-4, atol=1e-5)
    assert gathers.calls == 1 and got.logits is None and not gathers.layer.weight.numel()
    assert got.nll.shape == batch["labels"].shape
    model.zero_grad()
    torch.testing.assert_close(gradients(model, batch)[1], grads, rtol=1e-4, atol=1e-5)


def test_logits_in_evaluation_and_without_a_patch(batch):
    model = make("Llama").eval()
    right = copy.deepcopy(model)(**batch)
    gathers = Gathers(model.lm_head)
    with storage_ops.patch_causal_lm(model):
        got = model(**batch)
        torch.testing.assert_close((got.loss, got.logits), (right.loss, right.logits))
        assert gathers.calls == 2  # for the loss and for the logits
        torch.testing.assert_close(model(batch["input_ids"]).logits, right.logits)
    assert gathers.calls == 3
    got = model(**batch)
    torch.testing.assert_close((got.loss, got.logits), (right.loss, right.logits))


def test_hooks_are_restored_after_an_error(batch):
    model = make("Llama")
    Gathers(model.lm_head)
    storage_ops.patch_causal_lm(model)
    head, broken = model.lm_head, {**batch, "labels": batch["labels"] + V}
    before = [dict(head._forward_hooks), dict(head._forward_pre_hooks)]
    with pytest.raises((RuntimeError, IndexError)):
        model(**broken)
    assert [dict(head._forward_hooks), dict(head._forward_pre_hooks)] == before
    assert head._deferred_in is head._gathering is head._use is None
    gradients(model, batch)


def test_other_hooks_are_refused(batch):
    model = make("Llama").train()
    Gathers(model.lm_head)
    storage_ops.patch_causal_lm(model, logits="deferred")
    with pytest.raises(RuntimeError, match="gathered for that call only"):
        model(batch["input_ids"])
    gradients(model, batch)
    model.lm_head.register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match=r"forward or backward hooks, which would see no logits"):
        model(**batch)


def sharded(name, patch, group):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = untied(name)
    if patch == "before":
        storage_ops.patch_causal_lm(model, returns=["nll"])
    head = model.get_output_embeddings()
    norms = [m for m in model.modules() if m is getattr(model.model, "norm", None)]
    fully_shard([*norms, head] if group and norms else head)
    fully_shard(model)
    if patch == "after":
        storage_ops.patch_causal_lm(model, returns=["nll"])
    return model


def on_ranks(rank):
    for name in ("Llama", "Phi, bias", "Gemma 2, soft-cap"):
        for group in (False, True):
            results = {}
            for patch in ("", "before", "after"):
                model = sharded(name, patch, group)
                torch.manual_seed(rank)
                ids = torch.randint(3, V, (2, 12))
                for _ in range(2):
                    model.zero_grad()
                    outputs, grads = gradients(model, {"input_ids": ids, "labels": ids})
                results[patch] = [outputs.loss, *(g.full_tensor() for g in grads)]
                assert (outputs.logits is None) == bool(patch)
                assert isinstance(model.get_output_embeddings().weight, dist.tensor.DTensor)
            for patch in ("before", "after"):
                torch.testing.assert_close(results[patch], results[""], rtol=1e-4, atol=1e-5)


@pytest.mark.in_turn
@pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed")
def test_fully_shard_on_the_layer():
    run_on_ranks(on_ranks, 2)
