"""One training job: batches, steps, checkpoints, a log."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import storage_ops
from benchmarks._gpt import Config, Decoder, features_of
from benchmarks._harness import Clock
from storage_ops.measure.measurement import Measurement


@dataclass(frozen=True)
class Settings:
    """The settings that determine the losses of a job together with its features.

    Args:
        steps: optimizer steps. The learning rate rises over the first tenth and falls as a cosine.
        accumulate: batches whose gradients are summed for one step.
        dtype: "float32", or "bfloat16" for autocast.
    """

    config: Config
    steps: int
    accumulate: int = 1
    dtype: str = "float32"
    seed: int = 0


class Job:
    """A model in training, with its own parameters, optimizer and random numbers.

    A step depends only on its number, not on earlier work of the process. So jobs can alternate,
    and a resumed job continues exactly.

    Args:
        case: features joined by +, or "plain".
        data: (tokens,) int64, indices below the vocabulary's size.
        folder: the folder of the log and the checkpoint. With None, neither is written.
    """

    def __init__(
        self, case: str, settings: Settings, data: Tensor, device: torch.device,
        folder: Path | None = None,
    ) -> None:  # fmt: skip
        self.case, self.settings, self.data, self.device = case, settings, data, device
        self.features, self.folder = features_of(case), folder
        torch.manual_seed(settings.seed)
        with device:  # a CPU takes half a minute for the numbers of a billion parameters
            self.model = Decoder(settings.config, self.features)
        groups = [
            {"params": [p for p in self.model.parameters() if (p.dim() == 2) == matrix], **options}
            for matrix, options in ((True, {"weight_decay": 0.1}), (False, {"weight_decay": 0.0}))
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95))
        self.losses: list[float] = []
        self.seconds: list[tuple[float, float]] = []  # of a step: wall clock and CPU
        self._forward = self._compiled()
        self._run: Callable[..., Tensor] = self._forward_and_backward
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def _compiled(self) -> Callable[..., Tensor]:
        if "compile" in self.features:
            return torch.compile(self.model, dynamic=False)
        if "auto_chunker" in self.features:
            options = {"auto_chunker.enable": True, "auto_chunker.amplify_ratio_threshold": 0}
            return torch.compile(self.model, dynamic=False, options=options)
        if "autochunk" in self.features:
            return torch.compile(self.model, dynamic=False, backend="storage_ops")
        return self.model

    def batch(self, step: int, part: int) -> tuple[Tensor, Tensor]:
        """Return tokens and targets, (batch, context) each, of one part of a step."""
        config = self.settings.config
        seed = (self.settings.seed * 1_000_003 + step) * 1_009 + part
        generator = torch.Generator().manual_seed(seed)
        most = len(self.data) - config.context
        starts = torch.randint(most, (config.batch, 1), generator=generator)
        rows = self.data[starts + torch.arange(config.context + 1)].to(self.device)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def _forward_and_backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        dtype = getattr(torch, self.settings.dtype)
        enabled = dtype != torch.float32
        with torch.autocast(self.device.type, dtype if enabled else torch.bfloat16, enabled):
            loss = self._forward(tokens, targets) / self.settings.accumulate
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def run(self, step: int, part: int) -> Tensor:
        """Add the gradients of one part of a step. Return its part of the loss."""
        inputs = self.batch(step, part)
        if "traced" in self.features and self._run == self._forward_and_backward:
            self._run = storage_ops.graph.trace_step(self._forward_and_backward, *inputs)
        return self._run(*inputs)

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        warm = max(self.settings.steps // 10, 1)
        done = min(step / self.settings.steps, 1)
        cosine = 0.1 + 0.45 * (1 + math.cos(math.pi * done))
        return self.settings.config.learning_rate * min((step + 1) / warm, cosine)

    def step(self) -> dict[str, Any]:
        """Run one optimizer step. Return the entry for the log."""
        step = len(self.losses)
        torch.manual_seed(self.settings.seed + step)
        clock = Clock(self.device.type)
        self.optimizer.zero_grad(set_to_none=True)
        total = sum(self.run(step, part) for part in range(self.settings.accumulate))
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(step)
        self.optimizer.step()
        self.seconds.append(clock.stop())
        assert isinstance(total, Tensor)
        self.losses.append(total.item())
        config = self.settings.config
        tokens = config.batch * config.context * self.settings.accumulate
        record = {
            "case": self.case, "step": step + 1, "loss": self.losses[-1], "lr": self.rate(step),
            "gradient_norm": norm.item(), "tokens_per_second": tokens / self.seconds[-1][0],
        }  # fmt: skip
        if self.folder is not None:
            with self._log.open("a") as file:
                file.write(json.dumps(record) + "\n")
        return record

    def memory(self) -> Measurement:
        """Measure forward and backward above existing parameters, optimizer state and gradients."""
        if any(p.grad is None for p in self.model.parameters()):
            self.run(0, 0)
        with storage_ops.memory.measure(self.device) as result:
            self.run(0, 0)
        return result

    @property
    def _log(self) -> Path:
        assert self.folder is not None
        return self.folder / f"{self.case}.jsonl"

    @property
    def _state(self) -> Path:
        assert self.folder is not None, "a job without a folder has no checkpoint"
        return self.folder / f"{self.case}.pt"

    def save(self) -> None:
        """Write the checkpoint. The previous one exists until this one is complete."""
        state = {
            "settings": asdict(self.settings), "losses": self.losses,
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
        }  # fmt: skip
        temporary = self._state.with_suffix(".part")
        torch.save(state, temporary)
        os.replace(temporary, self._state)

    def resume(self) -> bool:
        """Continue from the checkpoint if there is one. Return whether there is.

        Raises:
            ValueError: the checkpoint has other settings.
        """
        if not self._state.exists():
            self._log.unlink(missing_ok=True)
            return False
        state = torch.load(self._state, map_location=self.device, weights_only=True)
        mine = asdict(self.settings)
        for key, value in mine.items():
            if state["settings"][key] != value:
                raise ValueError(
                    f"{self._state} was trained with {key} {state['settings'][key]}. Expected "
                    f"{value}, the setting of this run."
                )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.losses = state["losses"]
        # Steps after the last checkpoint run again and are logged again.
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        self._log.write_text("".join(line + "\n" for line in lines[: len(self.losses)]))
        return True
