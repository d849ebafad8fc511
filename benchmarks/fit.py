"""Simulated peaks of whole training steps against measured ones, and what simulating takes.

Models of six families (GPT, Llama, Mixtral, ViT, T5 of transformers, and a UNet), in fp32 and bf16,
without and with full checkpoints: the peak of a second step with AdamW, everything on the device
included, as `simulate_step` has it, against allocation events of a real step. And the CPU seconds
of `will_it_fit` for Llama-8B on the meta device, with 32 and 80 layers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import storage_ops
from benchmarks._harness import expect, finish, group_done, parser, skip, tick

MIB = 1 << 20
LAYERS = ["GPT2Block", "LlamaDecoderLayer", "MixtralDecoderLayer", "ViTLayer", "T5Block",
          "Residual"]  # fmt: skip
SIZES = {
    "quick": {"tokens": 128, "width": 128, "layers": 3, "vocab": 4096, "image": 64},
    "whole": {"tokens": 256, "width": 256, "layers": 4, "vocab": 4096, "image": 96},
}
Made = tuple[nn.Module, Any, Callable[[Any], torch.Tensor] | None]


class Residual(nn.Module):
    """Two convolutions around which the input goes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half = [(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))] * 2
        self.body = nn.Sequential(*(type_of for part in half for type_of in part))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, width, height, width) to the same."""
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
        """Images to images of the same size."""
        skip_ = self.down(self.enter(x))
        return self.leave(self.up(self.grow(self.middle(self.shrink(skip_))) + skip_))


def models(
    tokens: int, width: int, layers: int, vocab: int, image: int, batch: int = 4
) -> dict[str, Callable[[], Made]]:
    """What makes each model, a batch (of twice as many images as sequences) and a loss."""
    import transformers as t

    heads = max(8, width // 128)
    sizes = {"num_attention_heads": heads, "num_hidden_layers": layers, "hidden_size": width}
    llama = {**sizes, "num_key_value_heads": heads // 2, "intermediate_size": 3 * width}
    llama["vocab_size"] = vocab

    def text(cls: Any, config: Any) -> Made:
        config.use_cache = False  # a recompute would fill it again
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


def placed(made: Made, device: str, dtype: torch.dtype | None = None) -> Made:
    """The same on a device, in training; by default in float32 on a CPU, in bfloat16 on a GPU."""
    model, batch, loss = made
    dtype = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
    batch = {k: v.to(device, dtype if v.is_floating_point() else None) for k, v in batch.items()}
    return model.to(device, dtype).train(), batch, loss


def loss_of(model: nn.Module, batch: Any, loss: Any) -> torch.Tensor:
    """What a step of a model minimizes."""
    output = model(**batch)
    value: torch.Tensor = output.loss if loss is None else loss(output)
    return value


def measured(model: nn.Module, batch: Any, loss: Any) -> int:
    """The peak of a second step by allocation events, with all that is there before."""
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        loss_of(model, batch, loss).backward()
        optimizer.step()

    step()
    optimizer.zero_grad()
    state = [t for s in optimizer.state.values() for t in s.values()]
    there = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in (*model.parameters(), *model.buffers(), *state, *batch.values())
    }
    above = _above(step, next(model.parameters()).device)
    optimizer.zero_grad()
    return sum(there.values()) + above


def _above(step: Callable[[], None], device: torch.device) -> int:
    """The peak of a step above what was there before it."""
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
    torch._C._cuda_clearCublasWorkspaces()  # they were there before and after
    without: int = torch.cuda.memory_stats()["requested_bytes.all.current"]
    workspaces = after["requested_bytes.all.current"] - without
    peak: int = after["requested_bytes.all.peak"]
    return peak - before + workspaces


def compare(name: str, make: Callable[[], Made], dtype: torch.dtype, way: str) -> dict[str, Any]:
    """A row: simulated and measured peak of a model."""
    torch.manual_seed(0)
    model, batch, loss = placed(make(), "cpu", dtype)
    if way == "full":
        cfg = storage_ops.ActivationCheckpointConfig(LAYERS, allow_no_match=True)
        storage_ops.apply_activation_checkpoint(model, cfg)
    began = time.process_time()
    assume = {"topk": 0.25} if name == "Mixtral" else None
    e = storage_ops.memory.simulate_step(
        model, batch, loss=loss, optimizer=torch.optim.AdamW, assume=assume
    )
    seconds = time.process_time() - began
    peak = measured(model, batch, loss)
    return {
        "case": name, "dtype": str(dtype).removeprefix("torch."), "checkpoint": way,
        "simulated_MiB": round(e.peak_bytes / MIB, 2), "measured_MiB": round(peak / MIB, 2),
        "error_percent": round(100 * (e.peak_bytes / peak - 1), 3),
        "cpu_seconds": round(seconds, 2),
    }  # fmt: skip


def llama(layers: int) -> dict[str, Any]:
    """A row: what will_it_fit takes for Llama-8B, or for the same with more layers."""
    import transformers as t

    config = t.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, vocab_size=128256,
        num_attention_heads=32, num_key_value_heads=8, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = t.LlamaForCausalLM(config).bfloat16()
    ids = torch.empty(4, 8192, dtype=torch.int64, device="meta")
    began = time.process_time()
    report = storage_ops.memory.will_it_fit(model, {"input_ids": ids, "labels": ids})
    return {
        "case": f"Llama-8B, {layers} layers", "dtype": "bfloat16", "checkpoint": "none",
        "simulated_MiB": round(report.peak_bytes / MIB, 2),
        "cpu_seconds": round(time.process_time() - began, 2),
    }  # fmt: skip


def all_rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Models of every family, then the times of will_it_fit."""
    try:
        made = models(**SIZES["quick" if arguments.quick else "whole"])
    except ImportError as error:
        skip("all models", f"transformers is not installed: {error}")
        return
    ways = [(d, w) for d in (torch.float32, torch.bfloat16) for w in ("none", "full")]
    expect(len(made) * len(ways) + 2)
    for name, make in made.items():
        for dtype, way in ways:
            tick(f"{name}, {dtype}, {way}", 0.0)
            yield compare(name, make, dtype, way)
            group_done()
    for layers in (32, 80):
        tick(f"Llama-8B, {layers} layers", 0.0)
        yield llama(layers)
        group_done()


def main() -> None:
    """Measure, write and print."""
    arguments = parser(__doc__).parse_args()
    finish("fit", all_rows(arguments), arguments)


if __name__ == "__main__":
    main()
