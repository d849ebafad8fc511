"""Compiled losses whose logits exist only in chunks: time over their chunked products, and peaks.

The floor is only the matrix products of the same chunks of tokens. "cross-entropy" is exactly
linear cross-entropy and becomes its op. "focal" is not, and the general rewrite chunks it. All run
interleaved in one process. Times are process CPU times, after compilation. Peaks are of allocations
above inputs, with gradients. `--model` measures steps of a GPT-2 small instead, `--memory` peaks at
16 chunks, `--compilation` compile times. `--general` adds the general rewrite of losses whose
numbers per token are results of the op of linear cross-entropy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.nn import functional as F

from benchmarks._harness import MIB, Case, expect, finish, interleave, parser, peak, ratios
from benchmarks.linear_cross_entropy import GPU_SHAPES, QUICK_SHAPES, REHEARSED, SHAPES
from storage_ops.autochunk.backend import backend
from storage_ops.autochunk.cross_entropy.emit import Emitter
from storage_ops.autochunk.reasons import Conflict

FLOOR = "floor (chunked products)"
ALL_SHAPES = SHAPES | GPU_SHAPES | QUICK_SHAPES | REHEARSED
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def cross_entropy(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    """Return cross-entropy as usually written."""
    return F.cross_entropy(F.linear(x, w), t)


def focal(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    """Return the focal loss with gamma 2 (Lin et al. 2017)."""
    p = torch.log_softmax(F.linear(x, w).float(), -1).gather(1, t[:, None])
    return -((1 - p.exp()) ** 2 * p).mean()


def softmax_sum(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    """Return a sum of a softmax of a product."""
    return torch.softmax(F.linear(x, w), -1).square().sum()


def linear_softmax(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    """Return a sum of a softmax of a product with different weights."""
    return (torch.softmax(F.linear(x, w), -1) * torch.linspace(0, 1, len(w))).sum()


def biased(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    """Return cross-entropy of a layer with a bias, here a column of the weight."""
    return F.cross_entropy(F.linear(x, w, w[:, 0]), t)


def dpo(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    """Return DPO without a reference (Rafailov et al. 2023).

    The first half of the tokens is chosen.
    """
    p = torch.log_softmax(F.linear(x, w).float(), -1).gather(1, t[:, None]).view(4, -1).sum(1)
    return -F.logsigmoid(0.1 * (p[:2] - p[2:])).mean()


def jsd(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    """Return the Jensen-Shannon divergence from a teacher: the hidden states in another order."""
    q = torch.log_softmax(F.linear(x, w).float(), -1)
    p = torch.log_softmax(F.linear(x.detach().flip(0), w.detach()).float(), -1)
    m = torch.logaddexp(p, q) - math.log(2)
    return 0.5 * ((p.exp() * (p - m)).sum(-1) + (q.exp() * (q - m)).sum(-1)).mean()


LOSSES: dict[str, Loss] = {
    "cross-entropy": cross_entropy, "focal": focal, "softmax": softmax_sum, "dpo": dpo, "jsd": jsd,
}  # fmt: skip


# Name -> tokens, hidden size, classes, dtype, loss. Peaks are measured at 16 chunks.
MEMORY_CASES: dict[str, tuple[int, int, int, torch.dtype, Loss]] = {
    "matmul + softmax + sum, fp32": (8192, 32, 8192, torch.float32, softmax_sum),
    "linear + softmax, fp32": (8192, 32, 8192, torch.float32, linear_softmax),
    "linear + bias + cross-entropy, bf16": (4096, 768, 50257, torch.bfloat16, biased),
}


def compilers(num_chunks: list[int], theirs: list[int]) -> dict[str, Callable[..., Any]]:
    """Return compilers by name: ours in `num_chunks` chunks, that of Inductor in `theirs`."""
    by_name: dict[str, Callable[..., Any]] = {
        "torch.compile": lambda f: torch.compile(f, dynamic=False)
    }
    for count in theirs if hasattr(inductor_config, "auto_chunker") else []:
        settings = {"enable": True, "amplify_ratio_threshold": 0, "num_chunk": count}
        prefixed = {f"auto_chunker.{key}": value for key, value in settings.items()}
        by_name[f"Inductor auto_chunker, {count} chunks"] = lambda f, o=prefixed: torch.compile(
            f, dynamic=False, options=o
        )
    for count in num_chunks:
        ours = {"num_chunks": count, "strict": True}
        by_name[f"storage_ops, {count} chunks"] = lambda f, o=ours: torch.compile(
            f, dynamic=False, backend=backend, options=o
        )
    return by_name


def without_rows(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a loss with numbers per token by the general rewrite, at its first call."""

    def declined(emitter: Emitter) -> None:
        raise Conflict("is measured by the general rewrite", emitter.forward.product)

    def run(*args: Tensor) -> Any:
        with mock.patch.object(Emitter, "rows", declined):
            return compiled(*args)

    return run


def chunked_products(x: Tensor, w: Tensor, count: int) -> object:
    """Compute the logits and both gradients by chunks, summed in float32."""
    grad_x, total = torch.empty_like(x), None
    for part, out in zip(x.chunk(count), grad_x.chunk(count), strict=True):
        z = part @ w.t()
        torch.mm(z, w, out=out)
        if total is None:
            total = (z.t() @ part).float()
        elif total.dtype == w.dtype:
            torch.addmm(total, z.t(), part, out=total)
        else:
            total += z.t() @ part
    return grad_x, total


def rows_of(
    label: str, cases: dict[str, Case], base: str, arguments: Any, clear: Any
) -> Iterator[dict[str, Any]]:
    """Yield one row per case."""
    times = ratios(interleave(cases, arguments.repeats, arguments.device, label), base)
    for name, run in cases.items():
        clear()
        median, least, most = times[name]
        result = {"shape": label, "case": name, "time / base": round(median, 3)}
        result["least - most"] = f"{least:.2f} - {most:.2f}"
        yield {**result, "peak (MiB)": peak(run, arguments.device)}


def loss_rows(shape: str, dtype: str, name: str, arguments: Any) -> Iterator[dict[str, Any]]:
    """Yield all rows of one shape, dtype and loss."""
    tokens, hidden, vocab = ALL_SHAPES[shape]
    kind, device = getattr(torch, dtype), arguments.device
    x = torch.randn(tokens, hidden, device=device).to(kind).requires_grad_()
    w = (torch.randn(vocab, hidden, device=device) * hidden**-0.5).to(kind).requires_grad_()
    t = torch.randint(vocab, (tokens,), device=device)

    def step(f: Loss) -> Callable[[], object]:
        def run() -> object:
            x.grad = w.grad = None
            f(x, w, t).backward()
            return x.grad, w.grad

        return run

    def clear() -> None:
        x.grad = w.grad = None

    count = arguments.chunks[0]
    cases = {FLOOR: lambda: chunked_products(x.detach(), w.detach(), count)}
    by_name = compilers(arguments.chunks, arguments.peer_chunks)
    # Not strict, because logits stay whole if sums over chunks would be larger.
    half = {"memory_budget": tokens * vocab * kind.itemsize // 2}
    by_name["storage_ops, half the logits"] = lambda f: torch.compile(
        f, dynamic=False, backend=backend, options=half
    )
    if arguments.general:
        label = f"storage_ops, {count} chunks"
        by_name[f"{label}, general rewrite"] = lambda f, like=by_name[label]: without_rows(like(f))
    for label, compiler in by_name.items():
        torch._dynamo.reset()
        cases[label] = step(compiler(LOSSES[name]))
        cases[label]()
    return rows_of(f"{shape} {dtype} {name}", cases, FLOOR, arguments, clear)


class GPT2(nn.Module):
    """GPT-2 small: 12 layers, width 768, vocabulary 50257, tied weights."""

    def __init__(self, layers: int = 12, width: int = 768, vocab: int = 50257) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(1024, width)
        block = nn.TransformerEncoderLayer(
            width, 12, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of predicting every token from the previous ones."""
        length = tokens.shape[1] - 1
        h = self.tokens(tokens[:, :-1]) + self.places(torch.arange(length, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        h = self.norm(self.blocks(h, mask=mask, is_causal=True))
        logits = F.linear(h, self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def model_rows(arguments: Any) -> Iterator[dict[str, Any]]:
    """Yield rows of steps of GPT-2 small at several numbers of chunks."""
    model = GPT2().to(arguments.device)
    tokens = torch.randint(50257, (arguments.batch, 257), device=arguments.device)

    def clear() -> None:
        model.zero_grad()

    def step(compiled: Callable[..., Tensor]) -> Callable[[], object]:
        def run() -> object:
            clear()
            return compiled(tokens).backward()  # type: ignore[no-untyped-call]

        return run

    cases = {}
    for label, compiler in compilers(arguments.chunks, arguments.peer_chunks).items():
        torch._dynamo.reset()
        cases[label] = step(compiler(model))
        cases[label]()
    label = f"GPT-2 small, {arguments.batch} x 256 tokens"
    return rows_of(label, cases, "torch.compile", arguments, clear)


def memory_rows(arguments: Any) -> Iterator[dict[str, Any]]:
    """Yield peaks at 16 chunks, with gradients, over the bytes of one chunk and the gradients."""
    for name, (tokens, hidden, vocab, dtype, loss) in MEMORY_CASES.items():
        torch._dynamo.reset()
        x = torch.randn(tokens, hidden, device=arguments.device).to(dtype).requires_grad_()
        w = torch.randn(vocab, hidden, device=arguments.device) * hidden**-0.5
        w = w.to(dtype).requires_grad_()
        t = torch.randint(vocab, (tokens,), device=arguments.device)
        options = {"num_chunks": 16, "strict": True}
        compiled = torch.compile(loss, dynamic=False, backend=backend, options=options)
        for _ in range(2):
            x.grad = w.grad = None
            measured = peak(lambda f=compiled, a=(x, w, t): f(*a).backward(), arguments.device)
        logits, grads = (n * dtype.itemsize / MIB for n in (tokens * vocab, x.numel() + w.numel()))
        yield {
            "shape": name, "case": "storage_ops, 16 chunks", "peak (MiB)": measured,
            "logits (MiB)": round(logits, 1), "gradients (MiB)": round(grads, 1),
            "peak / (logits / 16 + gradients)": round(measured / (logits / 16 + grads), 3),
        }  # fmt: skip


def compile_rows(arguments: Any) -> Iterator[dict[str, Any]]:
    """Yield rows of the first step of a model in Inductor's caches."""
    model, tokens = GPT2(layers=4).to(arguments.device), torch.randint(50257, (2, 65))
    tokens = tokens.to(arguments.device)

    def first_step(compiler: Callable[..., Any]) -> Callable[[], object]:
        def run() -> object:
            torch._dynamo.reset()
            model.zero_grad()
            return compiler(model)(tokens).backward()

        return run

    cases = {name: first_step(compiler) for name, compiler in compilers([8], []).items()}
    for run in cases.values():
        run()
    label = "warm compilation of a GPT-2 of 4 layers, and its first step"
    yield from rows_of(label, cases, "torch.compile", arguments, model.zero_grad)


def all_rows(arguments: Any) -> Iterator[dict[str, Any]]:
    """Yield rows of losses at every shape, or of steps of a model."""
    if arguments.model:
        expect(1)
        yield from model_rows(arguments)
        return
    if arguments.memory or arguments.compilation:
        expect(1)
        yield from (memory_rows if arguments.memory else compile_rows)(arguments)
        return
    expect(len(arguments.dtypes) * len(arguments.shapes) * len(arguments.losses))
    for dtype in arguments.dtypes:
        for shape in arguments.shapes:
            for name in arguments.losses:
                yield from loss_rows(shape, dtype, name, arguments)


def main() -> None:
    """Measure, write and print."""
    options = parser(__doc__)
    options.add_argument("--shapes", nargs="+", choices=list(ALL_SHAPES))
    options.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"])
    options.add_argument("--losses", nargs="+", choices=list(LOSSES))
    options.add_argument("--chunks", nargs="+", type=int, default=[8])
    options.add_argument(
        "--peer-chunks", nargs="*", type=int,
        help="those of Inductor's auto_chunker, if others: it writes each one out, and takes many "
        "minutes to compile 64 of a model",
    )  # fmt: skip
    options.add_argument("--model", action="store_true", help="steps of GPT-2 small")
    options.add_argument("--memory", action="store_true", help="peaks of small losses, no times")
    options.add_argument("--compilation", action="store_true", help="warm compile times")
    options.add_argument("--general", action="store_true", help="also without the op per token")
    options.add_argument("--batch", type=int, default=4, help="sequences of the model's step")
    arguments = options.parse_args()
    on_gpu, quick = arguments.device == "cuda", arguments.quick
    if arguments.peer_chunks is None:
        arguments.peer_chunks = arguments.chunks
    arguments.shapes = arguments.shapes or ["R8" if on_gpu else "quick" if quick else "S1"]
    arguments.dtypes = arguments.dtypes or ["bfloat16" if on_gpu else "float32"]
    arguments.losses = arguments.losses or (["focal"] if quick else list(LOSSES)[:3])
    parts = [n for n in ("model", "memory", "compilation") if getattr(arguments, n)]
    finish("_".join(["autochunk", *parts[:1]]), all_rows(arguments), arguments)


if __name__ == "__main__":
    main()
