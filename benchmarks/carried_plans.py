"""Plans that `fit` makes without a GPU, carried out on one: predicted and measured peaks, and time.

A Llama of 1.5 billion parameters, transformers' own model in bfloat16 with AdamW, trains on two
sequences of 8192 tokens. The plans are made on the meta device for an H100, as on a laptop, and
then applied to the real model. Compared are training without checkpoints and with those of
transformers, of every layer. Each case trains alone, the first two steps are not counted; peaks are
all bytes that the steps asked the device for, workspaces of cuBLAS, which are told apart, among
them.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import storage_ops
from benchmarks._harness import MIB, Clock, expect, finish, group_done, parser, skip, tick
from benchmarks.fit import measured
from storage_ops.memory import simulate_step

SIZES = {
    False: {"width": 2048, "layers": 16, "heads": 16, "vocab": 128256, "batch": 2, "tokens": 8192},
    True: {"width": 64, "layers": 3, "heads": 4, "vocab": 8192, "batch": 2, "tokens": 256},
}
BITWISE = ["output_discard", "selective", "full"]
HEAD = [*BITWISE, "linear_cross_entropy"]
ALL = [*HEAD, "offload", "tile"]
# What the plans may do, and their budgets as shares of the peak without checkpoints.
PLANS = {
    "default": (None, (0.84, 0.67)),
    "with the loss": (HEAD, (0.51, 0.34)),
    "with the loss and offloading": ([*HEAD, "offload"], (0.51,)),
    "with all": (ALL, (0.40, 0.30)),
}
STEPS, WARM = 5, 2


def make(size: dict[str, int], device: str, dtype: torch.dtype) -> nn.Module:
    """The model, in training."""
    import transformers as t

    options: dict[str, Any] = {"attn_implementation": "sdpa", "use_cache": False}
    config = t.LlamaConfig(
        hidden_size=size["width"], intermediate_size=4 * size["width"],
        num_hidden_layers=size["layers"], num_attention_heads=size["heads"],
        num_key_value_heads=size["heads"] // 2, vocab_size=size["vocab"],
        max_position_embeddings=2 * size["tokens"], **options,
    )  # fmt: skip
    with torch.device(device):
        model: nn.Module = t.LlamaForCausalLM(config)
    return model.to(dtype).train()


def batch_of(size: dict[str, int], device: str) -> dict[str, torch.Tensor]:
    """Random tokens."""
    ids = torch.randint(size["vocab"], (size["batch"], size["tokens"]), device=device)
    return {"input_ids": ids, "labels": ids}


def carried(model: nn.Module, batch: dict[str, torch.Tensor], name: str) -> tuple[float, int]:
    """Median seconds of a step, and the peak of steps in bytes."""
    device = batch["input_ids"].device.type
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for k in range(STEPS):
        tick(name, k / STEPS)
        clock = Clock(device)
        step()
        seconds.append(clock.stop()[1])
    if device == "cuda":
        return statistics.median(seconds), torch.cuda.memory_stats()["requested_bytes.all.peak"]
    return statistics.median(seconds), measured(model, batch, None)


def workspaces() -> int:
    """Bytes that cuBLAS had taken for the case, which the next takes anew."""
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated()


def cases(
    size: dict[str, int], dtype: torch.dtype, folder: Path
) -> Iterator[tuple[str, Callable[[nn.Module], nn.Module], dict[str, Any]]]:
    """Name of a case, what makes it of the model, and what is predicted of it."""

    def checkpointed(model: Any) -> nn.Module:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        found: nn.Module = model
        return found

    planned, batch = make(size, "meta", dtype), batch_of(size, "cpu")
    none = simulate_step(planned, batch, optimizer=torch.optim.AdamW, device="h100").peak_bytes
    yield "none", lambda model: model, {"simulated (MiB)": round(none / MIB, 2), "predicted": 1.0}
    yield "transformers, every layer", checkpointed, {}
    for kind, (actions, shares) in PLANS.items():
        for share in shares:
            name = f"storage_ops, {kind}, {share:.0%}"
            try:
                plan = storage_ops.fit(planned, batch, int(share * none), None, torch.optim.AdamW,
                                       "h100", actions)  # fmt: skip
            except ValueError as error:
                skip(name, str(error))
                continue
            plan.save(path := folder / f"{len(list(folder.iterdir()))}.json")
            yield (
                name,
                lambda model, path=path: storage_ops.load_fit(path, model).apply(),
                {  # type: ignore[misc]
                    "budget (MiB)": round(share * none / MIB, 2),
                    "simulated (MiB)": round(plan.peak_bytes / MIB, 2),
                    "predicted": round(1 + plan.seconds / plan.step_seconds, 3),
                },
            )


def all_rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Case by case."""
    size, device = SIZES[arguments.quick], arguments.device
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    expect(2 + sum(len(shares) for _, shares in PLANS.values()))
    label = f"Llama, {size['batch']} x {size['tokens']} tokens"
    none = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for name, apply, facts in cases(size, dtype, Path(folder)):
            model = apply(make(size, device, dtype))
            seconds, peak = carried(model, batch_of(size, device), name)
            none = none or seconds
            if device == "cuda":
                facts["workspaces (MiB)"] = round(workspaces() / MIB, 2)
            group_done()
            yield {
                "shape": label, "case": name, "time / none": round(seconds / none, 3),
                "ms": round(seconds * 1e3, 1), "peak (MiB)": round(peak / MIB, 2), **facts,
            }  # fmt: skip
            del model
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()


def main() -> None:
    """Measure, write and print."""
    arguments = parser(__doc__).parse_args()
    finish("carried_plans", all_rows(arguments), arguments)


if __name__ == "__main__":
    main()
