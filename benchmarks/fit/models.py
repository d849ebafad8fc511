"""The models of six families, a training step, and its peak."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import storage_ops
from benchmarks._harness import MIB
from storage_ops.fitting.plan import FitPlan

Step = Callable[[], None]
Parts = tuple[nn.Module, Any, Callable[[Any], torch.Tensor] | None]  # a model, its batch, its loss


class Residual(nn.Module):
    """A convolution that runs twice, with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1)
        self.body = nn.Sequential(*layers, *layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images to images of the same shape."""
        return x + self.body(x)


class UNet(nn.Module):
    """Two levels, with a skip connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 1)
        self.down = nn.Sequential(Residual(width), Residual(width))
        self.shrink = nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.middle = nn.Sequential(*(Residual(2 * width) for _ in range(4)))
        self.grow = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.up = nn.Sequential(Residual(width), Residual(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images to images of the same size."""
        skip_ = self.down(self.enter(x))
        return self.leave(self.up(self.grow(self.middle(self.shrink(skip_))) + skip_))


def models(
    tokens: int,
    width: int,
    layers: int,
    vocab: int,
    image: int,
    batch: int = 4,
    inner: float = 3,
    kv_share: int = 2,
) -> dict[str, Callable[[], Parts]]:
    """Return functions that create each model, its batch and its loss.

    Args:
        image: height and width of the images. A batch has twice as many images as sequences.
        inner: width of the MLPs of a Llama over the width of the model.
        kv_share: number of a Llama's heads that share keys and values.
    """
    import transformers as t

    heads = max(8, width // 128)
    sizes = {"num_attention_heads": heads, "num_hidden_layers": layers, "hidden_size": width}
    llama = {
        **sizes,
        "num_key_value_heads": heads // kv_share,
        "intermediate_size": int(inner * width),
    }
    llama["vocab_size"] = vocab

    def text(cls: Any, config: Any) -> Parts:
        config.use_cache = False  # a recompute would extend it again
        ids = torch.randint(0, vocab, (batch, tokens))
        return cls(config), {"input_ids": ids, "labels": ids}, None

    def images() -> torch.Tensor:
        return torch.randn(2 * batch, 3, image, image)

    vit = {**sizes, "intermediate_size": 4 * width, "image_size": image}
    t5 = {"d_model": width, "d_ff": 4 * width, "d_kv": width // heads, "num_layers": layers}
    gpt = t.GPT2Config(
        n_embd=width, n_layer=layers, n_head=heads, vocab_size=vocab, n_positions=max(tokens, 1024)
    )
    t5_config = t.T5Config(**t5, num_heads=heads, vocab_size=vocab, decoder_start_token_id=0)
    return {
        "GPT": lambda: text(t.GPT2LMHeadModel, gpt),
        "Llama": lambda: text(t.LlamaForCausalLM, t.LlamaConfig(**llama)),
        "Mixtral": lambda: text(
            t.MixtralForCausalLM, t.MixtralConfig(**llama, num_local_experts=4)
        ),
        "ViT": lambda: (
            t.ViTForImageClassification(t.ViTConfig(**vit)),
            {"pixel_values": images(), "labels": torch.zeros(2 * batch, dtype=torch.int64)}, None,
        ),
        "T5": lambda: text(t.T5ForConditionalGeneration, t5_config),
        "UNet": lambda: (UNet(64), {"x": images()}, lambda y: y.square().mean()),
    }  # fmt: skip


def placed(parts: Parts, device: str, dtype: torch.dtype | None = None) -> Parts:
    """Move a model and its batch to a device, in bfloat16 on a GPU and float32 on a CPU."""
    model, batch, loss = parts
    dtype = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
    batch = {k: v.to(device, dtype if v.is_floating_point() else None) for k, v in batch.items()}
    return model.to(device, dtype).train(), batch, loss


def loss_of(model: nn.Module, batch: Any, loss: Any) -> torch.Tensor:
    """Run the model and return its loss."""
    output = model(**batch)
    value: torch.Tensor = output.loss if loss is None else loss(output)
    return value


def step_of(model: nn.Module, batch: Any, loss: Any) -> Step:
    """Return a function that runs a training step with a new optimizer."""
    optimizer = torch.optim.AdamW(model.parameters())

    def run() -> None:
        loss_of(model, batch, loss).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def facts_of(plan: FitPlan, budget: int) -> dict[str, float]:
    """Return the predictions of a plan, as columns of a row."""
    return {
        "budget (MiB)": round(budget / MIB, 2),
        "simulated (MiB)": round(plan.peak_bytes / MIB, 2),
        "predicted": round(1 + plan.seconds / plan.step_seconds, 3),
    }


def measured(model: nn.Module, batch: Any, loss: Any) -> int:
    """Return the peak bytes of a second step, including all memory allocated before."""
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        loss_of(model, batch, loss).backward()
        optimizer.step()

    step()
    optimizer.zero_grad()
    state = [t for s in optimizer.state.values() for t in s.values()]
    storages = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in (*model.parameters(), *model.buffers(), *state, *batch.values())
    }
    above = _above(step, next(model.parameters()).device)
    optimizer.zero_grad()
    return sum(storages.values()) + above


def _above(step: Step, device: torch.device) -> int:
    """Return the peak bytes of a step above the memory allocated before it."""
    if device.type == "cpu":
        with storage_ops.memory.measure() as m:
            step()
        return m.peak_bytes
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    step()
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    torch._C._cuda_clearCublasWorkspaces()  # they existed before and after
    without: int = torch.cuda.memory_stats()["requested_bytes.all.current"]
    workspaces = after["requested_bytes.all.current"] - without
    peak: int = after["requested_bytes.all.peak"]
    return peak - before + workspaces
