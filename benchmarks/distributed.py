"""Linear cross-entropy with a slice of the vocabulary on every rank: bytes sent, time and peak.

Peers are torch's loss_parallel and the formula of Megatron-LM's vocab-parallel cross-entropy in
torch's ops. Both have the rank's whole part of the logits in memory. "sharded" cases begin with a
part of the tokens on every rank, gather them, and return to each rank the gradient of its part.
Bytes are those that ring algorithms send from each rank. For n bytes in all, an all-reduce sends
2 n (R - 1) / R. An all-gather, a reduce or a reduce-scatter sends n (R - 1) / R. Times are process
CPU times over "products", those of the logits and of both gradients.
"""

from __future__ import annotations

import argparse
import datetime
import json
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn import functional as F

import storage_ops
from benchmarks._harness import expect, finish, group_done, interleave, parser, peak, ratios

SHAPE, QUICK = (2048, 512, 32768), (256, 64, 2048)
SENT = {"all_reduce": 2.0, "all_gather": 1.0, "reduce": 1.0, "reduce_scatter": 1.0}
WIDTHS = {"float": 4, "double": 8, "c10::BFloat16": 2, "int": 4, "long int": 8}
FLOOR = "products"


class _Megatron(torch.autograd.Function):
    """Vocab-parallel cross-entropy as Megatron-LM computes it, by its formula."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, target: Tensor, first: int) -> Tensor:
        z = z.float()
        largest = z.amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        z = z - largest[:, None]
        in_slice = (target >= first) & (target < first + z.shape[1])
        column = torch.where(in_slice, target - first, 0)
        chosen = torch.where(in_slice, z.gather(1, column[:, None])[:, 0], 0)
        dist.all_reduce(chosen)
        p = z.exp_()
        total = p.sum(-1)
        dist.all_reduce(total)
        ctx.save_for_backward(p.div_(total[:, None]), in_slice, column)
        return total.log() - chosen

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        p, in_slice, column = ctx.saved_tensors
        dz = p.clone()
        rows = torch.arange(len(dz))
        dz[rows, column] -= in_slice.float()
        return dz.mul_(g[:, None]), None, None


class _Copied(torch.autograd.Function):
    """The input of a layer split by columns. Its gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        g = g.contiguous()
        dist.all_reduce(g)
        return g


def megatron(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    """Return the loss by Megatron-LM's formula."""
    logits = F.linear(_Copied.apply(x), w)  # type: ignore[no-untyped-call]
    losses: Tensor = _Megatron.apply(logits, target, dist.get_rank() * len(w))  # type: ignore[no-untyped-call]
    return losses.mean()


def parallel_loss(sharded: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return torch's loss_parallel on a head split by columns."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import loss_parallel

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def run(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        of_x = [Shard(0) if sharded else Replicate()]
        x = DTensor.from_local(x, mesh, of_x, run_check=False).redistribute(mesh, [Replicate()])
        logits = F.linear(x, DTensor.from_local(w, mesh, [Shard(0)], run_check=False))
        with loss_parallel():
            # The backward computes the gradient of the logits, so it must be inside as well.
            F.cross_entropy(logits, target).backward()
        return logits

    return run


def ours(**options: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return the loss of this package."""
    group = dist.group.WORLD
    return lambda x, w, t: storage_ops.linear_cross_entropy(x, w, t, process_group=group, **options)


def steps(x: Tensor, w: Tensor, target: Tensor) -> dict[str, Callable[[], object]]:
    """Return forward and backward of every case."""
    ranks = dist.get_world_size()
    part = x.detach().chunk(ranks)[dist.get_rank()].clone().requires_grad_()
    narrow = {"accumulate_dtype": x.dtype} if x.dtype == torch.bfloat16 else {}
    scattered = {"input_grad": "reduce_scatter"}
    losses: dict[str, tuple[Callable[..., Tensor], Tensor]] = {
        "storage_ops": (ours(), x),
        "torch loss_parallel": (parallel_loss(False), x),
        "Megatron-LM's formula": (megatron, x),
        "storage_ops, sharded": (ours(**scattered), part),
        "torch loss_parallel, sharded": (parallel_loss(True), part),
    }
    if narrow:
        losses["storage_ops, sums in bf16"] = ours(**narrow), x
        losses["storage_ops, sharded, sums in bf16"] = ours(**narrow, **scattered), part

    def step(loss: Callable[..., Tensor], tokens: Tensor) -> Callable[[], object]:
        def run() -> object:
            tokens.grad = w.grad = None
            result = loss(tokens, w, target)
            if result.dim() == 0:
                result.backward()  # type: ignore[no-untyped-call]
            return tokens.grad, w.grad

        return run

    g = torch.randn(len(x), len(w)).to(x.dtype)
    plain, weight = x.detach(), w.detach()
    cases = {FLOOR: lambda: (plain @ weight.t(), g @ weight, g.t() @ plain)}
    return cases | {name: step(*case) for name, case in losses.items()}


def sent(run: Callable[[], object]) -> float:
    """Return the bytes that this rank sends during a run."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    total, ranks = 0.0, dist.get_world_size()
    for event in events:
        name = str(event.get("name", ""))
        if not name.startswith("gloo:"):
            continue
        facts = event["args"]
        sizes, kind = facts["Input Dims"][0], facts["Input type"][0]
        whole = torch.Size(sizes).numel() * WIDTHS[kind] * SENT[name.removeprefix("gloo:")]
        whole *= ranks if name == "gloo:all_gather" else 1  # its input is that of one rank
        total += whole * (ranks - 1) / ranks
    return total


def _rank(rank: int, ranks: int, port: int, dtype: str, arguments: Any, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks,
        timeout=datetime.timedelta(seconds=300),
    )  # fmt: skip
    torch.manual_seed(0)
    tokens, hidden, vocab = QUICK if arguments.quick else SHAPE
    kind = getattr(torch, dtype)
    x = torch.randn(tokens, hidden).to(kind).requires_grad_()
    w = (torch.randn(vocab // ranks, hidden) * hidden**-0.5).to(kind).requires_grad_()
    cases = steps(x, w, torch.randint(vocab, (tokens,)))
    times = ratios(interleave(cases, arguments.repeats), FLOOR)
    rows = []
    for name, run in cases.items():
        bytes_per_token = sent(run) / tokens
        x.grad = w.grad = None
        rows.append({
            "shape": f"{ranks} ranks, {tokens} x {hidden} x {vocab} {dtype}", "case": name,
            "time / products": round(times[name][0], 3), "peak (MiB)": peak(run),
            "bytes sent per token": round(bytes_per_token, 1),
        })  # fmt: skip
    if rank == 0:
        Path(out).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def all_rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield rows for all numbers of ranks and dtypes."""
    cases = [(ranks, dtype) for ranks in (2, 4) for dtype in ("float32", "bfloat16")]
    cases = cases[:1] if arguments.quick else cases
    expect(len(cases))
    for ranks, dtype in cases:
        with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
            free.bind(("127.0.0.1", 0))
            port, out = free.getsockname()[1], str(Path(folder, "rows.json"))
            free.close()
            mp.spawn(_rank, (ranks, port, dtype, arguments, out), nprocs=ranks)  # type: ignore[no-untyped-call]
            yield from json.loads(Path(out).read_text())
        group_done()


def main() -> None:
    """Measure, write and print."""
    arguments = parser(__doc__).parse_args()
    arguments.device = "cpu"  # processes of one machine that communicate by gloo
    finish("distributed", all_rows(arguments), arguments)


if __name__ == "__main__":
    main()
