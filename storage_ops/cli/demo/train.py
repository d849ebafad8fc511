"""Trains two equal models with alternating steps, and records their losses, time and memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from storage_ops.cli.demo.model import GPT, Config
from storage_ops.measure.measurement import Measurement, measure

WARM_STEPS = 2  # the first steps create optimizer state and warm caches


@dataclass
class TrainingRun:
    """One of the two trainings."""

    label: str
    model: GPT
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    memory: Measurement = field(init=False, repr=False)  # memory of the last step

    @property
    def step_seconds(self) -> float:
        """Return the median time of a step."""
        return statistics.median(self.seconds[WARM_STEPS:] or self.seconds)

    def step(self, tokens: Tensor, targets: Tensor) -> None:
        """Take one optimizer step."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(tokens, targets)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())

    def timed_step(self, tokens: Tensor, targets: Tensor) -> None:
        """Run a step and record its time. Reading the loss waits for the device."""
        begin = time.perf_counter()
        self.step(tokens, targets)
        self.seconds.append(time.perf_counter() - begin)

    def measured_step(self, tokens: Tensor, targets: Tensor) -> None:
        """Run a step and record its memory."""
        self.optimizer.zero_grad(set_to_none=True)
        with measure(tokens.device) as self.memory:
            self.step(tokens, targets)


def make_run(
    label: str, config: Config, device: torch.device, *, save_memory: bool, seed: int
) -> TrainingRun:
    """Build a model and its optimizer. The same seed gives the same parameters."""
    torch.manual_seed(seed)
    model = GPT(config, save_memory).to(device)
    return TrainingRun(label, model, torch.optim.AdamW(model.parameters(), lr=config.learning_rate))


def train(
    config: Config,
    data: Tensor,
    device: torch.device,
    steps: int,
    seed: int,
    progress: Callable[[TrainingRun], None],
) -> tuple[TrainingRun, TrainingRun]:
    """Train in plain PyTorch and with storage_ops on the same batches, alternating steps.

    Args:
        data: (tokens,) int64.
        steps: optimizer steps of each training. The last one is measured for memory and not timed.
        progress: called after every step.
    """
    plain = make_run("plain PyTorch", config, device, save_memory=False, seed=seed)
    ours = make_run("storage_ops", config, device, save_memory=True, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    windows = torch.arange(config.context + 1)
    for step in range(steps):
        starts = torch.randint(len(data) - config.context, (config.batch, 1), generator=generator)
        batch = data[starts + windows].to(device)
        tokens, targets = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
        for run in (plain, ours):
            if step == steps - 1:
                run.measured_step(tokens, targets)
            else:
                run.timed_step(tokens, targets)
            progress(run)
    return plain, ours
