"""Time and peak memory of a stack of transformer layers with every kind of checkpoint.

Peers are no checkpoint, torch.utils.checkpoint of every layer, and its selective checkpointing
(SAC) that saves matrix products, as in torchtitan. Ours are the same rules, and discarding the
output of the MLP's activation. The classes of OLMo-core and Megatron-LM discard the same
activation, if they are installed. Each runs eagerly, under torch.compile, and as a traced step.
Times are over the eager run without checkpoints in the same process. Peaks are above parameters and
input, with gradients.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import storage_ops
from benchmarks._discarding import by_hook, peers
from benchmarks._harness import (
    Case,
    expect,
    finish,
    interleave,
    milliseconds,
    parser,
    peak,
    ratios,
    skip,
)

PLAIN = "plain"
PRODUCTS = ["aten.mm", "aten.addmm"]
SIZES = {
    "cpu": {"layers": 4, "width": 256, "heads": 4, "batch": 4, "tokens": 256},
    "cuda": {"layers": 8, "width": 2048, "heads": 16, "batch": 4, "tokens": 2048},
}
Discard = Callable[[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], Tensor], Tensor]


class Layer(nn.Module):
    """Attention and an MLP, each after a norm and with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.discard: Discard | None = None

    def activation(self, x: Tensor) -> Tensor:
        """Return the wide activation of the MLP."""
        return F.gelu(self.up(x))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        batch, tokens, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, tokens, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(mixed.transpose(1, 2).reshape(batch, tokens, width))
        h = self.mlp_norm(x)
        if self.discard is None:
            return x + self.down(self.activation(h))
        return x + self.discard(self.activation, self.down, h)


class Stack(nn.Module):
    """Layers, each called as `way` says."""

    def __init__(self, layers: list[nn.Module], way: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.layers, self.way = nn.ModuleList(layers), way

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        for layer in self.layers:
            x = layer(x) if self.way is None else self.way(layer, x)
        return x


def stacks(sizes: dict[str, int], device: str, dtype: torch.dtype, mode: str) -> dict[str, Stack]:
    """Return by name a stack for each kind of checkpoint. All have the same parameters."""

    def stack(way: Callable[..., Tensor] | None = None, discard: Discard | None = None) -> Stack:
        torch.manual_seed(0)
        layers = [Layer(sizes["width"], sizes["heads"]) for _ in range(sizes["layers"])]
        for layer in layers:
            layer.discard = discard
        return Stack(list(layers), way).to(device, dtype)

    def ours(**rules: Any) -> Stack:
        cfg = storage_ops.ActivationCheckpointConfig(layer_classes=["Layer"], **rules)
        applied = storage_ops.apply_activation_checkpoint(stack(), cfg)
        assert isinstance(applied, Stack)
        return applied

    aten = torch.ops.aten
    products = [aten.mm.default, aten.addmm.default]
    contexts = partial(create_selective_checkpoint_contexts, products)
    whole = partial(checkpoint, use_reentrant=False)
    by_name = {
        PLAIN: stack(),
        "torch.utils.checkpoint": stack(whole),
        "storage_ops, full": ours(),
        "torch SAC, products saved": stack(partial(whole, context_fn=contexts)),
        "storage_ops, products saved": ours(ops_to_save=PRODUCTS),
    }
    if mode == "compiled":
        return by_name  # discarding an activation becomes a checkpoint of it there
    discard = storage_ops.output_discard
    by_name["storage_ops, activation discarded"] = stack(
        discard=lambda producer, consumer, x: discard(producer, consumer)(x)
    )
    if mode == "eager":
        for name, make in peers(device).items():
            by_name[f"{name}, activation discarded"] = stack(discard=partial(by_hook, make))
    return by_name


def step_of(model: Callable[..., Tensor], x: Tensor) -> Tensor:
    """Run forward, loss and backward."""
    loss = model(x).float().square().mean()
    loss.backward()
    return loss.detach()


def cases_of(
    mode: str, sizes: dict[str, int], device: str, dtype: torch.dtype
) -> tuple[dict[str, Case], dict[str, Stack]]:
    """Return all steps of one mode and their models, first the eager one for comparison."""
    x = torch.randn(sizes["batch"], sizes["tokens"], sizes["width"], device=device, dtype=dtype)

    def case(model: Stack, step: Callable[[Tensor], Tensor]) -> Case:
        def run() -> Tensor:
            model.zero_grad()
            return step(x)

        return run

    cases: dict[str, Case] = {}
    models = stacks(sizes, device, dtype, mode)
    if mode != "eager":
        base = models[f"{PLAIN}, eager"] = stacks(sizes, device, dtype, "compiled")[PLAIN]
        cases[f"{PLAIN}, eager"] = case(base, partial(step_of, base))
    for name, model in models.items():
        if name in cases:
            continue
        step: Callable[[Tensor], Tensor] = partial(step_of, model)
        if mode == "compiled":
            torch._dynamo.reset()
            step = partial(step_of, torch.compile(model, dynamic=False))
        elif mode == "traced":
            try:
                step = storage_ops.graph.trace_step(step, x)
            except Exception as error:
                skip(f"traced: {name}", f"{type(error).__name__}: {error}")
                continue
        cases[name] = case(model, step)
        if mode == "compiled":
            cases[name]()  # compiled now, because the caches are emptied before the next
    return cases, models


def all_rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of all modes."""
    device = arguments.device
    sizes = {**SIZES[device], **({"layers": 2} if arguments.quick else {})}
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    expect(len(arguments.modes))
    for mode in arguments.modes:
        cases, models = cases_of(mode, sizes, device, dtype)
        base = PLAIN if mode == "eager" else f"{PLAIN}, eager"
        seconds = interleave(cases, arguments.repeats, device, mode)
        times = ratios(seconds, base)
        for name, run in cases.items():
            median, least, most = times[name]
            models[name].zero_grad()
            yield {
                "shape": mode,
                "case": name,
                "time / eager plain": round(median, 3),
                "least - most": f"{least:.2f} - {most:.2f}",
                "ms": milliseconds(seconds[name]),
                "peak (MiB)": peak(run, device),
            }


def main() -> None:
    """Measure, write and print."""
    options = parser(__doc__)
    modes = ("eager", "compiled", "traced")
    options.add_argument("--modes", nargs="+", default=modes, choices=modes)
    arguments = options.parse_args()
    finish("selective_checkpoint", all_rows(arguments), arguments)


if __name__ == "__main__":
    main()
