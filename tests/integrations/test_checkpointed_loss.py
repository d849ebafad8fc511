"""Patched models whose output layer, loss or whole forward runs in an activation checkpoint."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import storage_ops

from .test_deferred_logits import Toy, V, check_against_plain, flat_loss


class InRegion(Toy):
    """A model whose forward calls its output layer, its loss or both in a checkpoint."""

    def __init__(self, region):
        super().__init__()
        self.region = region

    def forward(self, ids, labels=None):
        h = self.embed(ids)
        return {"loss": self.region(self.out, h, labels), "logits": None}


def plain(fn, *args):
    return checkpoint(fn, *args, use_reentrant=False)


class Region(nn.Module):
    def forward(self, head, h, labels):
        return flat_loss(head(h), labels)


REGIONS = {
    "the output layer": lambda head, h, t: flat_loss(plain(head, h), t),
    "the loss": lambda head, h, t: plain(flat_loss, head(h), t),
    "both, reentrant": lambda head, h, t: checkpoint(
        lambda h: flat_loss(head(h), t), h, use_reentrant=True
    ),
}
REFUSED_REGIONS = {
    "torch": lambda head, h, t: plain(lambda h: flat_loss(head(h), t), h),
    "torch, for each piece": lambda head, h, t: sum(
        plain(lambda a, b: flat_loss(head(a), b, reduction="sum"), *piece)
        for piece in zip(h.chunk(2), t.chunk(2), strict=True)
    ),
    "storage_ops": lambda head, h, t: storage_ops.CheckpointWrapper(Region())(head, h, t),
}


@pytest.mark.parametrize("where", REGIONS)
def test_checkpoints_of_the_output_layer_or_the_loss(where):
    ids = torch.randint(V, (3, 5))
    check_against_plain(InRegion(REGIONS[where]), lambda model: model(ids, labels=ids))


@pytest.mark.parametrize("where", REFUSED_REGIONS)
def test_a_checkpoint_of_the_output_layer_and_the_loss_is_refused(where):
    ids = torch.randint(V, (4, 5))
    model = InRegion(REFUSED_REGIONS[where])
    storage_ops.patch_causal_lm(model)
    with pytest.raises(NotImplementedError, match=r"InRegion .* in an activation checkpoint"):
        model(ids, labels=ids)
    storage_ops.unpatch_causal_lm(model)
    model(ids, labels=ids)["loss"].backward()


class Called(nn.Module):
    def forward(self, fn):
        return fn()


@pytest.mark.parametrize("around", [plain, storage_ops.CheckpointWrapper(Called())])
def test_a_checkpoint_around_a_patched_model(around):
    ids = torch.randint(V, (3, 5))

    def run(model):
        return {"loss": around(lambda: model(ids, labels=ids)["loss"]), "logits": None}

    check_against_plain(Toy(), run)
