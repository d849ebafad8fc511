"""Estimated peaks against measured peaks that others published for GPUs, with their sources.

Each case is rebuilt from its source's shapes, dtypes and code. The estimate is not adjusted to any
of them. Most cases are from Liger-Kernel. Its repository has the peaks of plain torch and of
transformers beside those of its own kernels, with the scripts that measured them. GPUs are NVIDIA
A100, H100, B200 and RTX 4090. The scripts run forward and backward several times, and count all
memory on the device.

Another case is the loss of Gemma 2 (2B) from the abstract of "Cut Your Losses in Large-Vocabulary
Language Models". Its 24 and 28 GB are thousands of MiB in its script. torchtitan publishes the
memory that the allocator reserved for Llama 3.1 (8B) on 8 and 128 H100 under FSDP2. Whole steps of
SantaCoder with transformers' Trainer are from fms-acceleration (foundation-model-stack), and so are
the fine-tuning steps in `published_finetuning.py`. Steps of vision models are in
`published_vision.py`, with their sources.

`estimate` does not know the GPU. So it does not count the workspaces of cuBLAS in each thread that
multiplies, mostly two. They are added here, as in `simulate_step`.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from benchmarks import published_finetuning, published_vision
from benchmarks._harness import MIB, expect, finish, parser
from benchmarks._one_rank import one_of
from benchmarks.fit.ways import selective_contexts
from storage_ops.memory import estimate, simulate_step
from storage_ops.simulate.kernels.cuda import workspace_bytes

BF16 = torch.bfloat16
DEVICES = {
    "A100": "a100", "RTX 4090": "rtx4090", "H100": "h100", "H100 PCIe": "h100", "B200": "b200",
}  # fmt: skip
LLAMA_VOCAB = 128256
Step = Callable[[], Any]
Cell = tuple[str, str, Callable[[int], Step], dict[int, float], int]

RESERVED = "published is what the allocator reserved, not what was allocated"


def forward_and_backward(layer: Callable[[Tensor], Tensor], x: Tensor) -> Step:
    """Return a step that runs the forward, and the backward from a random gradient."""

    def step() -> None:
        y = layer(x)
        y.backward(torch.randn_like(y), retain_graph=True)

    return step


class MLP(nn.Module):
    """A gated MLP, as Llama's."""

    def __init__(self, width: int, within: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, within, bias=False, dtype=BF16) for _ in range(2))
        self.down, self.activation = nn.Linear(within, width, bias=False, dtype=BF16), activation

    def forward(self, x: Tensor) -> Tensor:
        """Map a batch of sequences to the same shape."""
        result: Tensor = self.down(self.activation(self.gate(x)) * self.up(x))
        return result


def mlp(batch: int, width: int, within: int, activation: Any, tokens: int) -> Step:
    """Return a step of a gated MLP on this many tokens of each sequence."""
    x = torch.randn(batch, tokens, width, dtype=BF16, requires_grad=True)
    return forward_and_backward(MLP(width, within, activation), x)


class Norm(nn.Module):
    """The former RMSNorm of transformers, with a weight in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize rows in bfloat16."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


def rms_norm(width: int) -> Step:
    """Return a step of 2048 rows, whose gradient exists before the step."""
    layer, x = Norm(width), torch.randn(2048, width, dtype=BF16, requires_grad=True)
    gradient = torch.randn_like(x)
    return lambda: layer(x).backward(gradient, retain_graph=True)


def layer_norm(width: int) -> Step:
    """Return a step of 4096 rows in float32."""
    return forward_and_backward(nn.LayerNorm(width), torch.randn(4096, width, requires_grad=True))


def group_norm(channels: int) -> Step:
    """Return a step of 128 images of 512 places in float32, in groups of 4 channels."""
    x = torch.randn(128, channels, 512, requires_grad=True)
    return forward_and_backward(nn.GroupNorm(channels // 4, channels), x)


def rope(tokens: int) -> Step:
    """Return a step of rotary embeddings of 32 and 8 heads of 256."""

    def heads(number: int) -> Tensor:
        x = torch.randn(1, tokens, number, 256, dtype=BF16, requires_grad=True)
        return x.transpose(1, 2)

    q, k, (cos, sin) = heads(32), heads(8), torch.randn(2, 1, 1, tokens, 256, dtype=BF16)
    gradients = torch.randn_like(q), torch.randn_like(k)

    def crossed(x: Tensor) -> Tensor:
        # Two slices, in the order of transformers: the gradient of each is as large as x.
        left, right = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return torch.cat((-right, left), -1)

    def turned(x: Tensor) -> Tensor:
        return x * cos + crossed(x) * sin

    def step() -> None:
        torch.autograd.grad((turned(q), turned(k)), (q, k), gradients, retain_graph=True)

    return step


def gated_halves(width: int) -> Step:
    """Return a step of Megatron's activation of the halves of 8192 rows, unfused."""
    x = torch.randn(2048, 4, 2 * width, dtype=BF16, requires_grad=True)

    def step() -> None:
        x.grad = None
        left, right = torch.chunk(x, 2, -1)
        y = F.silu(left) * right
        y.sum().backward()

    return step


def cross_entropy(classes: int) -> Step:
    """Return a step with 16384 rows of logits in float32."""
    x = torch.randn(16384, classes, requires_grad=True)
    target = torch.randint(classes, (16384,))
    return lambda: F.cross_entropy(x, target).backward()


def head(tokens: int) -> Step:
    """Return a step of a linear layer and cross-entropy, beside Liger's layer of the same size."""
    layers = [nn.Linear(4096, LLAMA_VOCAB, bias=False, dtype=BF16) for _ in range(2)]
    x = torch.randn(tokens, 4096, dtype=BF16, requires_grad=True)
    target = torch.randint(LLAMA_VOCAB, (tokens,))
    return lambda: F.cross_entropy(layers[0](x), target).backward()


def of_distributions(loss: Any, rows: int, normed: Any, theirs: Any, classes: int) -> Step:
    """Return a step of a loss of two float32 distributions, with a backward to the student's."""
    x = torch.randn(rows, classes, requires_grad=True)
    ours, other = normed(x, -1), theirs(torch.randn(rows, classes), -1)

    def step() -> Tensor:
        loss(ours, other).backward(retain_graph=True)
        return x

    return step


def kl(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the KL divergence, mean over rows."""
    return F.kl_div(ours, theirs, reduction="batchmean")


def total_variation(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return half of the absolute difference, mean over rows."""
    return torch.sum(torch.abs(ours - theirs) / 2.0) / ours.size(0)


def jensen_shannon(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the Jensen-Shannon divergence of logarithms, in float32, mean over rows."""
    ours, theirs = ours.float(), theirs.float()
    middle = torch.lerp(ours.exp(), theirs.exp(), 0.5)
    divergence = partial(F.kl_div, reduction="none", log_target=True)
    rows = 0.5 * divergence(middle.log(), theirs).sum(-1)
    rows = rows + 0.5 * divergence(middle.log(), ours).sum(-1)
    return (rows / len(ours)).sum()


def distillation(tokens: int) -> Step:
    """Return a step of two linear layers and the Jensen-Shannon divergence of their outputs."""
    student, teacher = (nn.Linear(4096, LLAMA_VOCAB, bias=False, dtype=BF16) for _ in range(2))
    x = torch.rand(tokens, 4096, dtype=BF16, requires_grad=True)
    other = torch.rand(tokens, 4096, dtype=BF16)

    def loss() -> Tensor:  # all logits and logarithms exist until it returns
        ours, theirs = student(x), teacher(other)
        logs = [torch.log_softmax(logits / 1.0, dim=-1) for logits in (ours, theirs)]
        return jensen_shannon(*logs).to(BF16)

    return lambda: loss().backward()


JSD = partial(of_distributions, jensen_shannon, 8192, torch.log_softmax, torch.log_softmax)
# Name, GPU, function that builds a step of a size, MiB by size, and number of multiplying threads.
# The MiB are from Liger-Kernel's benchmark/data/all_benchmark_data.csv (provider "huggingface" or
# "torch", mode "full"). In rotary embeddings, only the angles are a product, computed before.
LIGER: list[Cell] = [
    ("SwiGLU 4096-11008", "A100", partial(mlp, 4, 4096, 11008, F.silu),
     {1024: 1294.25, 8192: 6372.25}, 2),
    ("GeGLU 4096-11008", "A100", partial(mlp, 8, 4096, 11008, partial(F.gelu, approximate="tanh")),
     {1024: 1992.25, 8192: 12212.25}, 2),
    ("SwiGLU 2048-4096", "RTX 4090", partial(mlp, 2, 2048, 4096, F.silu),
     {1024: 264.25, 16384: 2416.25}, 2),
    ("RMSNorm", "A100", rms_norm, {1024: 80.01, 32768: 2560.38}, 0),
    ("LayerNorm", "H100", layer_norm, {1024: 80.06, 16384: 1280.47}, 0),
    ("GroupNorm", "B200", group_norm, {32: 40.1, 2048: 2564.1}, 0),
    ("rotary embeddings", "A100", rope, {1024: 121.1, 16384: 1816.3}, 1),
    ("gated halves", "H100", gated_halves, {1024: 112.0, 32768: 3584.0}, 0),
    ("cross-entropy", "A100", cross_entropy, {4096: 1280.1, 131072: 40960.1}, 0),
    ("linear + cross-entropy", "A100", head, {4096: 6092.3, 32768: 27582.5}, 2),
    ("KL divergence", "H100 PCIe", partial(
        of_distributions, kl, 16384, torch.log_softmax, torch.softmax
    ), {4096: 1792.0, 131072: 57344.0}, 0),
    ("total variation", "H100", partial(
        of_distributions, total_variation, 16384, torch.softmax, torch.softmax
    ), {4096: 2048.0, 131072: 65536.0}, 0),
    ("Jensen-Shannon", "H100 PCIe", JSD, {4096: 1664.0, 131072: 53248.0}, 0),
    ("linear + Jensen-Shannon", "H100", distillation, {1024: 10609.0, 8192: 56368.0}, 2),
]  # fmt: skip


def liger(cells: Sequence[Cell] = LIGER) -> Iterator[dict[str, Any]]:
    """Yield the cells of Liger-Kernel."""
    for name, gpu, make, published, threads in cells:
        for size, peak in published.items():
            with torch.device("meta"):
                step = make(size)

            def twice(step: Step = step) -> None:  # in the second, gradients of the first exist
                step()
                step()

            workspaces = threads * workspace_bytes(DEVICES[gpu], nn.Identity())
            there = estimate(twice).peak_bytes + workspaces
            yield row("Liger-Kernel", f"{name}, {size}", gpu, peak, there)


def cut_cross_entropy() -> Iterator[dict[str, Any]]:
    """Yield the baseline of the paper: 8192 tokens, 2304 wide, 256000 classes with a soft cap."""
    with torch.device("meta"):
        x = torch.randn(8192, 2304, dtype=BF16, requires_grad=True)
        weight = torch.randn(256000, 2304, dtype=BF16, requires_grad=True)
        target = torch.randint(256000, (8192,))

    def loss() -> Tensor:
        logits = torch.tanh(x @ weight.T / 30.0) * 30.0
        return F.cross_entropy(logits.float(), target)

    for name, step, published in (
        ("loss", loss, 24000.0), ("loss and gradients", lambda: loss().backward(), 28000.0),
    ):  # fmt: skip
        e = estimate(step)
        what = f"Gemma 2 (2B), {name}, above its inputs"
        above = e.peak_bytes - e.input_bytes
        yield row("Cut Your Losses", what, "A100", published, above)


class Attention(nn.Module):
    """32 heads of queries, 8 of keys and values, with rotary embeddings as complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = (nn.Linear(4096, 4096, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(4096, 1024, bias=False) for _ in range(2))

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Map a batch of sequences to the same shape."""

        def turned(t: Tensor) -> Tensor:
            pairs = torch.view_as_complex(t.float().unflatten(-1, (-1, 2)))
            return torch.view_as_real(pairs * angles[:, None]).flatten(3).type_as(t)

        def repeated(t: Tensor) -> Tensor:
            return t.unsqueeze(3).expand(-1, -1, -1, 4, -1).reshape(*t.shape[:2], 32, 128)

        q, k, v = (p(x).unflatten(-1, (-1, 128)) for p in (self.q, self.k, self.v))
        q, k, v = turned(q), repeated(turned(k)), repeated(v)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        result: Tensor = self.o(out.contiguous().flatten(2))
        return result


class Layer(nn.Module):
    """Attention and a SwiGLU, each on a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(4096) for _ in range(2))
        self.attention, self.mlp = Attention(), MLP(4096, 14336, F.silu).float()

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Map a batch of sequences to the same shape."""
        x = x + self.attention(self.norms[0](x), angles)
        result: Tensor = x + self.mlp(self.norms[1](x))
        return result


class Llama(nn.Module):
    """Llama 3.1 (8B), to the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(LLAMA_VOCAB, 4096)
        self.layers = nn.ModuleList(Layer() for _ in range(32))
        self.norm, self.out = nn.RMSNorm(4096), nn.Linear(4096, LLAMA_VOCAB, bias=False)
        self.register_buffer("angles", torch.empty(8192, 64, dtype=torch.complex64))

    def forward(self, ids: Tensor) -> Tensor:
        """Map token numbers to logits."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.angles)
        result: Tensor = self.out(self.norm(x))
        return result


def torchtitan() -> Iterator[dict[str, Any]]:
    """Yield two sequences of 8192 tokens per FSDP2 rank, selective checkpoints, no compile."""
    for world, published in ((8, 82.4), (128, 67.0)):
        with one_of(world):
            peak = one_rank(world)
        what = f"Llama 3.1 (8B), FSDP2 over {world}"
        yield row("torchtitan", what, "H100", published * 1024, peak, RESERVED)


def one_rank(world: int) -> int:
    """Return the peak of one of `world` ranks in a step with AdamW."""
    with torch.device("meta"):
        model, ids = Llama(), torch.empty(2, 8192, dtype=torch.int64)

    mesh = init_device_mesh("cpu", (world,))
    how = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(BF16, torch.float32)}
    for index, layer in enumerate(model.layers):
        wrapped = checkpoint_wrapper(layer, context_fn=selective_contexts, preserve_rng_state=False)
        model.layers[index] = fully_shard(wrapped, reshard_after_forward=index < 31, **how)
    fully_shard(model, reshard_after_forward=True, **how)

    def loss(logits: Tensor) -> Tensor:
        target = torch.empty(2 * 8192, dtype=torch.int64, device=logits.device)
        return F.cross_entropy(logits.flatten(0, 1).float(), target)

    step = simulate_step(model, ids, loss=loss, optimizer=torch.optim.AdamW, device="h100")
    return step.peak_bytes


class SantaCoder(nn.Module):
    """The model of transformers 4.48, whose outputs include keys and values with `use_cache`."""

    def __init__(self) -> None:
        super().__init__()
        transformers: Any = importlib.import_module("transformers")
        config = transformers.GPTBigCodeConfig(
            vocab_size=49280, n_positions=2048, n_embd=2048, n_layer=24, n_head=16, n_inner=8192,
            bos_token_id=0, eos_token_id=0, use_cache=False,
        )  # fmt: skip
        self.model = transformers.GPTBigCodeForCausalLM(config)
        self.model.gradient_checkpointing_enable()
        self.cache: list[Tensor] | None = None  # while a forward runs
        for name, module in self.named_modules():
            if name.endswith("attn.c_attn"):
                module.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: object, output: Tensor) -> None:
        if self.cache is not None:  # not in a recompute
            self.cache.append(output.detach())

    def forward(self, ids: Tensor) -> Tensor:
        """Return the loss of shifted logits, in their own dtype."""
        self.cache = []
        output = self.model(input_ids=ids)
        logits = output.logits[..., :-1, :].contiguous()
        loss = F.cross_entropy(logits.flatten(0, 1), ids[..., 1:].contiguous().flatten())
        self.cache = None
        return loss


def fms_acceleration() -> Iterator[dict[str, Any]]:
    """Yield steps of full bfloat16 fine-tuning: checkpoints, AdamW, packed sequences of 2048."""
    for batch, published in ((4, 11267745280), (8, 15193274880)):
        with torch.device("meta"):
            model = SantaCoder().to(BF16).train()
            ids = torch.empty(batch, 2048, dtype=torch.int64)
        adamw = torch.optim.AdamW
        step = simulate_step(model, ids, loss=lambda x: x, optimizer=adamw, device="a100")
        what = f"SantaCoder, whole step, batch {batch}"
        yield row("fms-acceleration", what, "A100", published / MIB, step.peak_bytes)


def fms_acceleration_finetuning(
    cells: Sequence[published_finetuning.Cell] = (
        *published_finetuning.CELLS,
        *published_finetuning.TOO_LOW,
    ),
) -> Iterator[dict[str, Any]]:
    """Yield steps of the same benchmarks: adapters, also on 4-bit bases, and all parameters."""
    for cell in cells:
        why = "not known" if cell in published_finetuning.TOO_LOW else ""
        for what, published, peak in published_finetuning.peaks(cell):
            yield row("fms-acceleration", what, "A100", published / MIB, peak, why)


def vision(
    cells: Sequence[published_vision.Cell] = published_vision.CELLS,
) -> Iterator[dict[str, Any]]:
    """Yield steps of vision models."""
    for cell in cells:
        peak = published_vision.peak(cell)
        yield row(cell.source, cell.what, cell.gpu, cell.published, peak, cell.why)


def row(
    source: str, what: str, gpu: str, published: float, peak: int, why: str = ""
) -> dict[str, Any]:
    """Return a row of a published peak in MiB and an estimated one in bytes."""
    missing = peak / MIB / published - 1
    return {
        "shape": source, "case": what, "on": gpu, "published (MiB)": round(published, 1),
        "estimate (MiB)": round(peak / MIB, 1), "difference": f"{missing:+.2%}",
        "because of": why if abs(missing) >= 5e-4 else "",
    }  # fmt: skip


def all_rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of all sources."""
    sources = [liger, cut_cross_entropy]
    if not arguments.quick:
        sources += [torchtitan, fms_acceleration, fms_acceleration_finetuning, vision]
    expect(len(sources))
    for source in sources:
        yield from source()


def main() -> None:
    """Estimate, write and print."""
    arguments = parser(__doc__).parse_args()
    finish("published_peaks", all_rows(arguments), arguments)


if __name__ == "__main__":
    main()
