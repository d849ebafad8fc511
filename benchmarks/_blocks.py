"""The blocks of the benchmarks of output discarding, and the ways to run them.

Six of them come from OLMo-core's benchmark of its OutputDiscardCheckpoint (allenai/OLMo-core, pull
request 682), which publishes their peaks. The other three are our own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import storage_ops
from benchmarks._discarding import Make, by_hook


class Block(nn.Module):
    """A producer, whose output may be discarded, and its consumer."""

    def __init__(self, d_model: int, d_ff: int, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.d_model, self.d_ff, self.dtype, self.device = d_model, d_ff, dtype, device

    def linear(self, inputs: int, outputs: int, dtype: torch.dtype | None = None) -> nn.Linear:
        """Return a layer without bias."""
        return nn.Linear(inputs, outputs, False, self.device, dtype or self.dtype)

    def producer(self, x: Tensor) -> Tensor:
        """Return the output that a checkpoint recomputes."""
        raise NotImplementedError

    def consumer(self, h: Tensor, x: Tensor) -> Tensor:
        """Return the block's result from the producer's output and the block's input `x`."""
        raise NotImplementedError

    def plain(self, x: Tensor) -> Tensor:
        """Run the block without a checkpoint."""
        return self.consumer(self.producer(x), x)

    def checkpointed(self, x: Tensor) -> Tensor:
        """Run the producer under torch.utils.checkpoint."""
        return self.consumer(checkpoint(self.producer, x, use_reentrant=False), x)

    def discarded(self, x: Tensor) -> Tensor:
        """Run the block and discard the producer's output."""
        return self.hooked(storage_ops.OutputDiscardCheckpoint, x)

    def hooked(self, make: Make, x: Tensor) -> Tensor:
        """Run the block and discard the producer's output by a class with the calls of ours."""
        return by_hook(make, self.producer, lambda h: self.consumer(h, x), x)


class Fp32Cast(Block):
    """A router with float32 from its input on. A float32 input leaves nothing to free."""

    def __init__(self, *sizes: object) -> None:
        super().__init__(*sizes)  # type: ignore[arg-type]
        self.out = self.linear(self.d_model, self.d_model, torch.float32)

    def producer(self, x: Tensor) -> Tensor:
        return x.float()

    def consumer(self, h: Tensor, x: Tensor) -> Tensor:
        return self.out(h).to(self.dtype)


class UpProj(Block):
    """A wide layer and a narrow one."""

    def __init__(self, *sizes: object) -> None:
        super().__init__(*sizes)  # type: ignore[arg-type]
        self.up, self.down = (
            self.linear(self.d_model, self.d_ff),
            self.linear(self.d_ff, self.d_model),
        )

    def producer(self, x: Tensor) -> Tensor:
        return self.up(x)

    def consumer(self, h: Tensor, x: Tensor) -> Tensor:
        return self.down(h)


class SiluUp(UpProj):
    """UpProj with an activation in the producer."""

    def producer(self, x: Tensor) -> Tensor:
        return F.silu(self.up(x))


class SwiGLU(Block):
    """The MLP of Llama and OLMo."""

    def __init__(self, *sizes: object) -> None:
        super().__init__(*sizes)  # type: ignore[arg-type]
        self.gate, self.up = (self.linear(self.d_model, self.d_ff) for _ in range(2))
        self.down = self.linear(self.d_ff, self.d_model)

    def producer(self, x: Tensor) -> Tensor:
        return F.silu(self.gate(x)) * self.up(x)

    def consumer(self, h: Tensor, x: Tensor) -> Tensor:
        return self.down(h)


class SwiGLUAct(SwiGLU):
    """SwiGLU that recomputes only the elementwise product and keeps both of its inputs."""

    @staticmethod
    def product(gate: Tensor, up: Tensor) -> Tensor:
        """Return the activation."""
        return F.silu(gate) * up

    def checkpointed(self, x: Tensor) -> Tensor:
        h = checkpoint(self.product, self.gate(x), self.up(x), use_reentrant=False)
        return self.down(h)

    def discarded(self, x: Tensor) -> Tensor:
        return storage_ops.output_discard(self.product, self.down)(self.gate(x), self.up(x))


class SwiGLUChain(SwiGLUAct):
    """SwiGLU with each step as a region of a chain, so that each is freed after its use."""

    def checkpointed(self, x: Tensor) -> Tensor:
        return SwiGLU.checkpointed(self, x)

    def discarded(self, x: Tensor) -> Tensor:
        with storage_ops.OutputDiscardChain() as chain:
            gate, up = chain.checkpoint(self.gate, x), chain.checkpoint(self.up, x)
            return self.down(chain.checkpoint(self.product, gate, up))


class _Product(torch.autograd.Function):
    """silu(gate) * up as one function, whose backward needs five tensors at once.

    Autograd of torch's functions needs six.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        d_up = F.silu(gate).mul_(grad)
        d_gate = grad * up
        torch.ops.aten.silu_backward.grad_input(d_gate, gate, grad_input=d_gate)
        return d_gate, d_up


class SwiGLUOneOp(SwiGLU):
    """SwiGLU with the activation and the product as one autograd function."""

    def producer(self, x: Tensor) -> Tensor:
        return _Product.apply(self.gate(x), self.up(x))


class RMSNorm(Block):
    """A norm before a layer, with a residual connection."""

    def __init__(self, *sizes: object) -> None:
        super().__init__(*sizes)  # type: ignore[arg-type]
        self.norm = nn.RMSNorm(self.d_model, device=self.device, dtype=self.dtype)
        self.out = self.linear(self.d_model, self.d_model)

    def producer(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def consumer(self, h: Tensor, x: Tensor) -> Tensor:
        return self.out(h) + x


class Fp32Softmax(Block):
    """A softmax in float32, as in attention and routing."""

    def __init__(self, *sizes: object) -> None:
        super().__init__(*sizes)  # type: ignore[arg-type]
        self.out = self.linear(self.d_model, self.d_model)

    def producer(self, x: Tensor) -> Tensor:
        return x.float().softmax(dim=-1)

    def consumer(self, h: Tensor, x: Tensor) -> Tensor:
        return self.out(h.to(self.dtype))


PUBLISHED_BLOCKS: dict[str, type[Block]] = {
    "fp32_cast": Fp32Cast,
    "up_proj": UpProj,
    "silu_up": SiluUp,
    "swiglu": SwiGLU,
    "rms_norm": RMSNorm,
    "fp32_softmax": Fp32Softmax,
}
BLOCKS = {
    **PUBLISHED_BLOCKS,
    "swiglu_act": SwiGLUAct,
    "swiglu_chain": SwiGLUChain,
    "swiglu_one_op": SwiGLUOneOp,
}
WAYS: dict[str, Callable[[Block, Tensor], Tensor]] = {
    "plain": lambda block, x: block.plain(x),
    "checkpoint": lambda block, x: block.checkpointed(x),
    "discard": lambda block, x: block.discarded(x),
}
# Peak MB at d_model 2048, d_ff 8192, batch 2 of 2048 tokens, 8 layers, float32, as published:
# plain, torch.utils.checkpoint, their checkpoint with its C++ extension and without.
PUBLISHED_MB = {
    "fp32_cast": (544.3, 544.3, 544.3, 544.3),
    "up_proj": (2560.3, 2560.3, 2400.3, 2464.3),
    "silu_up": (3584.3, 2656.3, 2560.3, 2592.3),
    "swiglu": (6240.3, 3776.3, 3904.3, 3904.3),
    "rms_norm": (800.4, 800.3, 560.3, 560.3),
    "fp32_softmax": (576.3, 800.3, 560.3, 560.3),
}


def stack(
    name: str, layers: int, d_model: int, d_ff: int, dtype: torch.dtype, device: str
) -> nn.ModuleList:
    """Return several blocks of one kind."""
    return nn.ModuleList([BLOCKS[name](d_model, d_ff, dtype, device) for _ in range(layers)])


def step(
    blocks: nn.ModuleList, x: Tensor, run: Callable[[Block, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Run forward and backward of a stack.

    The caller keeps the output, as in OLMo-core's benchmark.
    """
    y = x
    for block in blocks:
        y = run(block, y)
    loss = y.square().mean()
    loss.backward()
    return loss, y
