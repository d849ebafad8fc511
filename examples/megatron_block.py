"""A block of Megatron-LM whose outputs are discarded: `python examples/megatron_block.py`.

The calls are those of Megatron's CheckpointWithoutOutput, so only its import changes. Norm and
activation have wide outputs that only the next product reads.
"""

from __future__ import annotations

import torch
from report import DEVICE, report
from torch import nn
from torch.nn import functional as F

from storage_ops import OutputDiscardCheckpoint as CheckpointWithoutOutput
from storage_ops.memory import Measurement, measure

TOKENS, WIDTH = 2048, 256


class Block(nn.Module):
    """A norm and a SwiGLU MLP."""

    def __init__(self, discard: bool) -> None:
        super().__init__()
        self.discard = discard
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 8 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    @staticmethod
    def swiglu(x: torch.Tensor) -> torch.Tensor:
        """Return the product of the values and their activated gate."""
        gate, value = x.chunk(2, -1)
        return F.silu(gate) * value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the block, with or without its two checkpoints."""
        if not self.discard:
            return x + self.down(self.swiglu(self.up(self.norm(x))))
        norm, activation = CheckpointWithoutOutput(), CheckpointWithoutOutput()
        up = self.up(norm.checkpoint(self.norm, x))
        norm.discard_output_and_register_recompute(up)
        y = self.down(activation.checkpoint(self.swiglu, up))
        activation.discard_output_and_register_recompute(y)
        return x + y


def main() -> None:
    """Run a step of four blocks with and without discarding. The gradients are bit-equal."""
    measured: dict[str, Measurement] = {}
    gradients = []
    for name, discard in {"plain": False, "outputs discarded": True}.items():
        torch.manual_seed(0)
        net = nn.Sequential(*(Block(discard) for _ in range(4))).to(DEVICE)
        x = torch.randn(TOKENS, WIDTH, device=DEVICE, requires_grad=True)
        with measure(DEVICE) as measured[name]:
            net(x).square().mean().backward()
        gradients.append([x.grad, *(p.grad for p in net.parameters())])
    print("equal gradients:", all(map(torch.equal, *gradients)))
    report("a step of four blocks", measured)


if __name__ == "__main__":
    main()
