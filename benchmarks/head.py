"""Heads of reinforcement learning and distillation: time over their products or peers, and memory.

The floor of the divergence of two heads is the products of both at the same shapes: three of the
student and one of the teacher. They run with the same code, in the same chunks of tokens. "floor by
torch" is the same four products by torch, without chunks. "kd" is the forward divergence plus the
nll of targets. Liger's loss also includes the nll of targets.

Log-probabilities of selected classes, and of the most probable ones, are compared with the nll of
every token by the same plan. DPO of chosen, rejected and reference in one call is compared with the
compiled formula in plain torch. DPO and the divergence are also compared with Liger's chunked
losses, if these are installed. All cases run interleaved in one process. Times are CPU times of the
process, or times between events on a GPU. Peaks include gradients, but not inputs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import storage_ops
from benchmarks._harness import (
    Case,
    expect,
    finish,
    interleave,
    milliseconds,
    parser,
    peak,
    ratios,
    real_logits,
    skip,
)
from storage_ops import losses
from storage_ops.divergence.call import DivergenceCall
from storage_ops.divergence.row_function import run_of

# Tokens, width of student and of teacher, classes. For DPO, the tokens are four sequences.
SHAPES = {
    "H0": (512, 1024, 1024, 32000),
    "H1": (1024, 2048, 2048, 32000),
    "H2": (512, 4096, 4096, 64000),
}
GPU_SHAPES = {"H3": (8192, 4096, 4096, 151936)}
QUICK_SHAPES = {"quick": (256, 256, 512, 8000), "least": (64, 32, 64, 1000)}
# For the shape of --real-logits: the file, and the hidden size or 0.
REAL_FILES: dict[str, tuple[Path, int]] = {}
FLOOR, COMPILED = "floor (products of both heads)", "plain torch, compiled"
NLL = "nll of every token"
DIVERGENCES = ("forward", "reverse", "jsd", "tvd")


def step(loss: Callable[[], Tensor], leaves: list[Tensor]) -> Case:
    """Return a function that runs forward and backward of a loss."""
    return lambda: torch.autograd.grad(loss(), leaves)


def products(call: DivergenceCall) -> Case:
    """Return a function that runs only the products of a call, in its chunks of tokens."""
    planned = run_of(call)
    rows, m, hidden = planned.schedule.rows, planned.schedule.problem.matmul, call.teacher_input
    x, w, t, head = call.input, call.weight, hidden, call.teacher_weight
    assert t is not None and head is not None

    def run() -> list[Tensor]:
        z, dx = x.new_empty(min(rows, len(x)), len(w)), torch.empty_like(x)
        wide = torch.float32 if rows < len(x) and x.element_size() < 4 else x.dtype
        dw = torch.empty(w.shape, dtype=wide, device=w.device)
        for begin in range(0, len(x), rows):
            part = slice(begin, begin + rows)
            tile = z[: len(x[part])]
            m.logits(t[part], head, tile)
            m.logits(x[part], w, tile)
            m.input_gradient(tile, w, dx[part], False)
            m.weight_gradient(tile, x[part], dw, begin > 0)
        return [dx, dw.to(w.dtype)]

    return run


def divergence_rows(
    shape: str, label: str, arguments: argparse.Namespace, dtype: torch.dtype
) -> Any:
    """Yield rows of the divergence of two heads over the sum of both heads' products."""
    x, w, t, head, target = inputs(shape, dtype, arguments.device)
    leaves, g = [x, w], torch.randn(len(x), len(w), device=x.device).to(dtype)
    cases: dict[str, Case] = {
        FLOOR: products(DivergenceCall(x.detach(), w.detach(), t, head)),
        "floor by torch": lambda: (t @ head.t(), x @ w.t(), g @ w, g.t() @ x),
    }
    for name in DIVERGENCES:
        cases[f"storage_ops.linear_kl_div, {name}"] = step(
            lambda name=name: storage_ops.linear_kl_div(x, w, t, head, divergence=name), leaves
        )

    cases["storage_ops.losses.kd"] = step(lambda: losses.kd(x, w, t, head, target), leaves)

    @torch.compile
    def plain(x: Tensor, w: Tensor, alpha: float) -> Tensor:
        log_q, log_p = (F.linear(*each).float().log_softmax(-1) for each in ((x, w), (t, head)))
        loss = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
        return loss if alpha == 1 else alpha * loss + (1 - alpha) * F.nll_loss(log_q, target)

    cases["plain torch, compiled, forward"] = step(lambda: plain(x, w, 1.0), leaves)
    cases["plain torch, compiled, kd"] = step(lambda: plain(x, w, 0.5), leaves)
    for compiled, liger in ligers("LigerFusedLinearJSDLoss", weight_hard_loss=0.5):
        cases[f"liger chunked JSD and nll{compiled}"] = step(
            lambda liger=liger: liger(x, w, t, head, target.clone()), leaves
        )
    seconds = interleave(cases, arguments.repeats, arguments.device, label)
    yield from rows_of(label, cases, seconds, FLOOR, "time / floor", arguments.device)


def selected_rows(
    shape: str, label: str, arguments: argparse.Namespace, dtype: torch.dtype
) -> Iterator[dict[str, Any]]:
    """Yield rows of log-probabilities of given and of most probable classes, over the nll."""
    x, w, _, _, target = inputs(shape, dtype, arguments.device)
    ids = torch.randint(len(w), (len(x), 16), device=x.device)
    plan = storage_ops.plan(len(x), x.shape[1], len(w), dtype, reduction="none",
                            device=None if x.is_cuda else "cpu")  # fmt: skip

    def ours(name: str, **options: Any) -> Case:
        options = {"plan": plan} | options

        def loss() -> Tensor:
            result = storage_ops.linear_cross_entropy(x, w, target, returns=(name,), **options)
            return (result[0] if isinstance(result, tuple) else result).sum()

        return step(loss, [x, w])

    cases: dict[str, Case] = {
        NLL: ours("nll"),
        "1 selected": ours("selected", selected_ids=target.unsqueeze(1)),
        "16 selected": ours("selected", selected_ids=ids),
        "16 most probable": ours("topk", top_k=16),
        "1 selected, budget logits": ours(
            "selected", selected_ids=target.unsqueeze(1), plan=None,
            memory_budget=(len(w) + 64) * len(x) * x.element_size() * 33 // 32,
        ),
    }  # fmt: skip
    seconds = interleave(cases, arguments.repeats, arguments.device, f"{label}, selected")
    yield from rows_of(f"{label}, selected", cases, seconds, NLL, "time / nll", arguments.device)


def ligers(name: str, **options: Any) -> Iterator[tuple[str, Any]]:
    """Yield a chunked loss of Liger, compiled and uncompiled, if Liger is installed."""
    try:
        from liger_kernel import chunked_loss
    except Exception as error:
        skip("liger-kernel", f"{type(error).__name__}: {str(error).splitlines()[0][:100]}")
        return
    for compiled in (True, False):
        loss = getattr(chunked_loss, name)(compiled=compiled, **options)
        yield ", compiled" if compiled else "", loss


def dpo_rows(
    shape: str, label: str, arguments: argparse.Namespace, dtype: torch.dtype
) -> Iterator[dict[str, Any]]:
    """Yield rows of DPO with a reference over the plain formula, compiled."""
    x, w, t, head, target = inputs(shape, dtype, arguments.device)
    length = len(x) // 4
    target = target.view(4, length)
    leaves, beta = [x, w], 0.1

    def ours(budget: int | None) -> Callable[[], Tensor]:
        return lambda: losses.dpo(
            x.view(4, length, -1), w, target, beta=beta, ref_input=t.view(4, length, -1),
            ref_weight=head, memory_budget=budget,
        )  # fmt: skip

    def logps(x: Tensor, w: Tensor) -> Tensor:
        log_p = F.linear(x, w).float().log_softmax(-1)
        return log_p.gather(1, target.view(-1, 1)).view(4, length).sum(1)

    @torch.compile
    def plain(x: Tensor, w: Tensor) -> Tensor:
        h = logps(x, w) - logps(t, head).detach()
        return -F.logsigmoid(beta * (h[:2] - h[2:])).mean()

    cases: dict[str, Case] = {COMPILED: step(lambda: plain(x, w), leaves)}
    logits = len(x) * len(w) * x.element_size()
    for share in arguments.shares:
        cases[f"storage_ops.losses.dpo, budget logits / {share}"] = step(
            ours(logits // share * 33 // 32), leaves
        )
    cases["storage_ops.losses.dpo"] = step(ours(None), leaves)
    for compiled, liger in ligers("LigerFusedLinearDPOLoss", beta=beta, use_ref_model=True):
        cases[f"liger chunked DPO{compiled}"] = step(
            lambda liger=liger: liger(
                w, x.view(4, length, -1), target.clone(), ref_input=t.view(4, length, -1),
                ref_weight=head,
            )[0],  # a clone, because Liger marks its target as dynamic
            leaves,
        )  # fmt: skip
    seconds = interleave(cases, arguments.repeats, arguments.device, f"{label}, DPO")
    base = "time / plain compiled"
    yield from rows_of(f"{label}, DPO", cases, seconds, COMPILED, base, arguments.device)


def rows_of(
    label: str, cases: dict[str, Case], seconds: Any, base: str, name: str, device: str
) -> Iterator[dict[str, Any]]:
    """Yield a row for each case: time over that of `base`, in the column `name`, and peak."""
    over = ratios(seconds, base)
    for case, run in cases.items():
        median, low, high = (round(value, 3) for value in over[case])
        yield {
            "shape": label, "case": case, name: median, "spread": f"{low} to {high}",
            "ms": milliseconds(seconds[case]), "peak (MiB)": peak(run, device),
        }  # fmt: skip


def inputs(shape: str, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """Return hidden states and heads of student and teacher, and targets.

    They are random or from a language model. From a model, the teacher's are nearly the same.
    """
    if shape in REAL_FILES:
        file, hidden = REAL_FILES[shape]
        x, w, target = real_logits(file, hidden, device, dtype, device == "cpu")
        t, head = (z + 0.1 * z.std() * torch.randn_like(z) for z in (x, w))
        return x.requires_grad_(), w.requires_grad_(), t, head, target
    tokens, hidden, teacher, vocab = (SHAPES | GPU_SHAPES | QUICK_SHAPES)[shape]
    tensors = []
    for width in (hidden, teacher):
        tensors.append(torch.randn(tokens, width, device=device).to(dtype))
        tensors.append((torch.randn(vocab, width, device=device) * width**-0.5).to(dtype))
    x, w, t, head = tensors
    target = torch.randint(vocab, (tokens,), device=device)
    return x.requires_grad_(), w.requires_grad_(), t, head, target


PARTS = {"divergence": divergence_rows, "selected": selected_rows, "dpo": dpo_rows}


def all_rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of all shapes."""
    expect(len(arguments.parts) * len(arguments.dtypes) * len(arguments.shapes))
    for name in arguments.dtypes:
        for shape in arguments.shapes:
            torch._dynamo.reset()
            for part in arguments.parts:
                yield from PARTS[part](shape, f"{shape} {name}", arguments, getattr(torch, name))


def main() -> None:
    """Measure, write and print."""
    options = parser(__doc__)
    options.add_argument("--shapes", nargs="+", choices=[*SHAPES, *GPU_SHAPES, *QUICK_SHAPES])
    options.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"])
    options.add_argument("--shares", nargs="+", type=int, default=[4, 16],
                         help="budgets of DPO: the logits' bytes divided by these")  # fmt: skip
    options.add_argument("--parts", nargs="+", choices=[*PARTS], default=[*PARTS])
    options.add_argument("--real-logits", type=Path, metavar="FILE",
                         help="measure the head of a language model in an .npz file")  # fmt: skip
    options.add_argument("--hidden", type=int, default=0,
                         help="hidden size of --real-logits; 0: that of the file")  # fmt: skip
    arguments = options.parse_args()
    if arguments.real_logits:
        REAL_FILES["real logits"] = arguments.real_logits, arguments.hidden
        arguments.shapes = list(REAL_FILES)
    full_shapes = GPU_SHAPES if arguments.device == "cuda" else SHAPES
    arguments.shapes = arguments.shapes or list(["quick"] if arguments.quick else full_shapes)
    full = ["bfloat16"] if arguments.device == "cuda" else ["float32", "bfloat16"]
    arguments.dtypes = arguments.dtypes or (full[:1] if arguments.quick else full)
    finish("head", all_rows(arguments), arguments)


if __name__ == "__main__":
    main()
