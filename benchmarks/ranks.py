"""Estimated memory and traffic of one rank in a training step of a model like Llama 3 70B.

Nothing of that size is allocated. The model is on the meta device, and the other ranks are those of
torch's process group "fake". Each rank of FSDP2 has one sequence of 8192 tokens. Parameters are
gathered in bfloat16, gradients are reduced in float32, and AdamW and full checkpoints of layers are
used. With tensor parallelism the sequence is split over 8 ranks inside FSDP2. Bytes sent are those
of ring algorithms.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import storage_ops
from benchmarks._harness import expect, finish, group_done, parser
from benchmarks._one_rank import one_of
from storage_ops.memory import StepEstimate

WORLDS, TENSOR_PARALLEL = (8, 64, 512, 4096), 8
WIDTH, HIDDEN, HEAD, KEYS, VOCAB, LAYERS, TOKENS = 8192, 28672, 128, 1024, 128256, 80, 8192


class Attention(nn.Module):
    """64 heads of queries, 8 of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(WIDTH, KEYS, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Map a batch of sequences to the same shape."""
        layers = (self.q, self.k, self.v)
        q, k, v = (p(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for p in layers)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        result: Tensor = self.o(out.transpose(1, 2).flatten(2))
        return result


class Layer(nn.Module):
    """Attention and a SwiGLU, each on a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.attention = Attention()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map a batch of sequences to the same shape."""
        x = x + self.attention(self.norms[0](x))
        y = self.norms[1](x)
        result: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return result


class Llama(nn.Module):
    """A Llama without rotary embeddings, which save nothing large. Returns logits."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Map token numbers to logits."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(self.norm(x))
        return result


def loss(logits: Tensor) -> Tensor:
    """Return cross-entropy with any targets."""
    flat = logits.flatten(0, 1).float()
    return F.cross_entropy(flat, torch.zeros(len(flat), dtype=torch.int64, device=flat.device))


def parallel(model: Llama, mesh: DeviceMesh) -> None:
    """Split heads, hidden units and the vocabulary over ranks."""
    column, row = ColwiseParallel(), RowwiseParallel()
    parallelize_module(
        model, mesh, {"embedding": RowwiseParallel(input_layouts=Replicate()), "head": column}
    )
    for layer in model.layers:
        plan = dict.fromkeys(("attention.q", "attention.k", "attention.v", "gate", "up"), column)
        parallelize_module(layer, mesh, plan | {"attention.o": row, "down": row})


def estimated(world: int, tensor_parallel: int, layers: int) -> StepEstimate:
    """Return the estimated step of one of `world` ranks."""
    with one_of(world):
        with torch.device("meta"):
            model = Llama(layers)
        shape = (world // tensor_parallel, tensor_parallel)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        if tensor_parallel > 1:
            parallel(model, mesh["tp"])
        config = {"layer_names": ["layers.*"], "mode": "full"}
        storage_ops.apply_activation_checkpoint(model, config)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh["dp"], mp_policy=policy)
        ids = torch.zeros(1, TOKENS, dtype=torch.int64, device="meta")
        return storage_ops.memory.simulate_step(
            model, ids, loss=loss, optimizer=torch.optim.AdamW, device="h100"
        )


def all_rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield rows for all numbers of ranks, with and without tensor parallelism."""
    cases = [(world, over) for over in (1, TENSOR_PARALLEL) for world in WORLDS]
    cases = cases[-1:] if arguments.quick else cases
    expect(len(cases))
    for world, over in cases:
        begun = time.perf_counter()
        step = estimated(world, over, 2 if arguments.quick else LAYERS)
        owned = ("parameters", "optimizer state", "gathered parameters", "gradients to reduce")
        gib = 1 << 30
        yield {
            "ranks": world, "case": "FSDP2" if over == 1 else f"FSDP2 x TP {over}",
            "peak (GiB)": round(step.peak_bytes / gib, 2),
            "kept (GiB)": round(step.kept_bytes / gib, 2),
            **{f"{name} (GiB)": round(step.by_owner.get(name, 0) / gib, 2) for name in owned},
            **{f"{name} sent (GiB)": round(step.sent_bytes.get(name, 0) / gib, 1)
               for name in ("all_gather", "reduce_scatter", "all_reduce")},
            "seconds": round(time.perf_counter() - begun),
        }  # fmt: skip
        group_done()


def main() -> None:
    """Estimate, write and print."""
    arguments = parser(__doc__).parse_args()
    arguments.device = "cpu"  # nothing is computed
    finish("ranks", all_rows(arguments), arguments)


if __name__ == "__main__":
    main()
