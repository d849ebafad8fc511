"""The state of each optimizer that commands accept by name."""

import pytest
import torch
from torch import nn

from storage_ops.cli.optimizers import optimizer_named
from storage_ops.memory import simulate_step

SMALL, LARGE = 512 * 7, 512 * 600  # too small to be quantized, and large enough to be paged
BLOCKS = LARGE // 256


def model():
    with torch.device("meta"):
        layers = nn.Linear(512, 7, bias=False), nn.Linear(512, 600, bias=False)
        net = nn.ModuleList(layers).to(torch.bfloat16)
    net.forward = lambda x: sum(layer(x).sum() for layer in net)
    return net


MAP = 4 * 256
STATES = {
    "adamw8bit": 2 * (4 * SMALL + LARGE + 4 * BLOCKS) + 2 * MAP,
    "paged_adamw_8bit": 2 * (4 * SMALL + 4 * BLOCKS) + 2 * MAP,
    "paged-adamw": 2 * 4 * SMALL,
    "lion": 4 * (SMALL + LARGE),
    "lion_8bit": 4 * SMALL + LARGE + 4 * BLOCKS + MAP,
    "paged_lion_32bit": 4 * SMALL,
    "adamw": 2 * 2 * (SMALL + LARGE) + 2 * 4,
    "adamw_torch": 2 * 2 * (SMALL + LARGE) + 2 * 4,
    "AdamW_bnb_8bit": 2 * (4 * SMALL + LARGE + 4 * BLOCKS) + 2 * MAP,
    "adafactor": 2 * (512 + 7 + 512 + 600) + 2 * 4,
    "muon": 2 * (SMALL + LARGE),
    "sgd": 0,
}


@pytest.mark.parametrize("name", STATES)
def test_states(name):
    net = model()
    x = torch.empty(2, 512, dtype=torch.bfloat16, device="meta")
    step = simulate_step(net, x, optimizer=optimizer_named(name, net), device="h100")
    state = step.by_owner.get("optimizer state", 0)
    assert STATES[name] <= state < STATES[name] + 16 * 512  # blocks are whole ones of 512


def test_muon_leaves_embeddings_and_the_output_layer_to_adamw():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.layer = nn.Embedding(300, 64), nn.Linear(64, 64)
            self.head = nn.Linear(64, 300, bias=False)

        def get_output_embeddings(self):
            return self.head

        def forward(self, x):
            return self.head(self.layer(self.embed(x)))

    net = Model()
    optimizer = optimizer_named("muon", net)(list(net.parameters()))
    muon, adamw = optimizer._parts
    assert [p.shape for p in muon.param_groups[0]["params"]] == [(64, 64)]
    assert len(adamw.param_groups[0]["params"]) == 3
    plain = simulate_step(net, torch.zeros(2, 8, dtype=torch.int64), optimizer=type(optimizer))
    assert plain.by_owner["optimizer state"] == 4 * (64 * 64 + 2 * (2 * 300 * 64 + 64)) + 3 * 4


def test_none():
    assert optimizer_named("None", model()) is None
