"""DDP and FSDP find the tensors that the loss uses in deferred logits that a model returns."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import storage_ops as so

from ..ranks import run_on_ranks

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed")
D, V = 8, 19


class Model(nn.Module):
    """A model with the interface of transformers."""

    def __init__(self):
        super().__init__()
        self.embed, self.layer, self.out = nn.Embedding(V, D), nn.Linear(D, D), nn.Linear(D, V)

    def get_output_embeddings(self):
        return self.out

    def forward(self, ids, labels=None):
        return {"logits": self.out(torch.tanh(self.layer(self.embed(ids))))}


def loss(model, ids):
    log_probs = model(ids)["logits"].log_softmax(-1)
    return -log_probs.gather(-1, ids.unsqueeze(-1)).mean() - log_probs.sum(-1).mean()


def replicated(model, **how):
    return DistributedDataParallel(model, **how)


def sharded(model, **how):
    fully_shard(model.layer)
    return fully_shard(model, **how)


ROUNDED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
WAYS = {
    "find unused parameters": (replicated, {"find_unused_parameters": True}),
    "static graph": (replicated, {"static_graph": True}),
    "sharded": (sharded, {}),
    "another dtype of outputs": (fully_shard, {"mp_policy": ROUNDED}),
}


def gradients_equal(rank):
    ids = torch.randint(V, (2, 3, 5))
    for way, (wrap, how) in WAYS.items():
        plain = Model().double()
        (sum(loss(plain, part) for part in ids) / 2).backward()
        model = Model().double()
        model.load_state_dict(plain.state_dict())
        so.patch_causal_lm(model, logits="deferred")
        wrapped = wrap(model, **how)
        for _ in range(2):  # the first step of a static graph differs
            model.zero_grad()
            loss(wrapped, ids[rank]).backward()
        rounding = 1e-10 if "mp_policy" not in how else 0.1
        for p, right in zip(model.parameters(), plain.parameters(), strict=True):
            grad = p.grad if wrap is replicated else p.grad.full_tensor()
            assert torch.allclose(grad, right.grad, rtol=rounding, atol=rounding), way


def freed_after_the_forward():
    model = Model()
    so.patch_causal_lm(model, logits="deferred")
    fully_shard(model, reshard_after_forward=True)
    with pytest.raises(RuntimeError, match="was freed after the forward"):
        loss(model, torch.randint(V, (3, 5)))


def on_a_rank(rank):
    gradients_equal(rank)
    freed_after_the_forward()


@pytest.mark.in_turn
def test_gradients_under_ddp_and_fsdp():
    run_on_ranks(on_a_rank, 2)
