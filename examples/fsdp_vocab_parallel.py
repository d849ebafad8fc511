"""FSDP2, and a head whose vocabulary is split over ranks, in two processes.

    torchrun --nproc-per-node 2 examples/fsdp_vocab_parallel.py

Each rank has half of every layer's parameters and half of the classes. Layers are checkpointed, and
the loss needs a few numbers per token from the other rank, never its logits.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from report import DEVICE, report
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import storage_ops
from storage_ops.memory import Measurement, measure

TOKENS, WIDTH, VOCAB = 2048, 256, 32000


def body() -> nn.Sequential:
    """Return four MLPs with residual connections, the same on every rank."""
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(F.gelu(self.up(x)))

    return nn.Sequential(*(Block() for _ in range(4))).to(DEVICE)


def step(net: nn.Module, x: torch.Tensor, target: torch.Tensor, ours: bool) -> torch.Tensor:
    """Compute loss and gradients of the same tokens on all ranks, as in tensor parallelism."""
    torch.manual_seed(1)
    weight = torch.randn(VOCAB, WIDTH, device=DEVICE) * 0.02
    if not ours:
        loss = F.cross_entropy(F.linear(net(x), weight.requires_grad_()), target)
    else:
        part = weight.chunk(dist.get_world_size())[dist.get_rank()].clone().requires_grad_()
        del weight
        world = dist.group.WORLD
        loss = storage_ops.linear_cross_entropy(net(x), part, target, process_group=world)
    loss.backward()
    return loss.detach()


def main() -> None:
    """Train without and with storage_ops on each of the ranks. Rank 0 reports."""
    if DEVICE == "cuda":
        torch.cuda.set_device(torch.distributed.get_node_local_rank())
    dist.init_process_group()
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    x, target = torch.randn(TOKENS, WIDTH), torch.randint(VOCAB, (TOKENS,))
    for shared in (x, target):
        dist.broadcast(shared, 0)
    x, target = x.to(DEVICE), target.to(DEVICE)

    measured: dict[str, Measurement] = {}
    for name, ours in {"FSDP2, all logits": False, "checkpointed, vocabulary split": True}.items():
        net = body()
        if ours:
            config = storage_ops.ActivationCheckpointConfig(layer_classes=["Block"])
            storage_ops.apply_activation_checkpoint(net, config)
        for block in net:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
        with measure(DEVICE) as measured[name]:
            loss = step(net, x, target, ours)
        if dist.get_rank() == 0:
            print(f"{name}: loss {loss.item():.6f}")
    if dist.get_rank() == 0:
        report("one step of rank 0 of two", measured)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
