"""A Lightning module whose layers recompute by a plan: `python examples/lightning_module.py`.

`fit` chooses which activations each layer keeps so that a step fits into a budget. A callback
applies the plan when training starts. The module itself does not change. Needs lightning.
"""

from __future__ import annotations

import logging

import lightning
import torch
from report import DEVICE, report
from torch import nn
from torch.nn import functional as F

import storage_ops
from storage_ops.integrations import lightning_callback
from storage_ops.memory import Measurement, measure

BATCH, LENGTH, WIDTH = 8, 256, 128


class Denoiser(lightning.LightningModule):
    """Six layers that learn to remove noise."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.TransformerEncoderLayer(WIDTH, 4, 512, batch_first=True) for _ in range(6))
        self.model = nn.Sequential(*layers)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        """Return the error of one batch."""
        return F.mse_loss(self.model(batch + 0.1 * torch.randn_like(batch)), batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW, as usual."""
        return torch.optim.AdamW(self.parameters(), 1e-3)


def train(module: Denoiser, *callbacks: lightning.Callback) -> Measurement:
    """Train two steps and return their memory."""
    data = torch.utils.data.DataLoader(torch.randn(2 * BATCH, LENGTH, WIDTH), BATCH)
    trainer = lightning.Trainer(
        max_steps=2, accelerator=DEVICE, devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=list(callbacks),
    )  # fmt: skip
    with measure(DEVICE) as measurement:
        trainer.fit(module, data)
    return measurement


def main() -> None:
    """Train without and with a plan."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    plain = train(Denoiser())

    module, batch = Denoiser(), torch.randn(BATCH, LENGTH, WIDTH)
    plan = storage_ops.fit(module.model, batch, budget="120MiB", optimizer=torch.optim.AdamW)
    print(plan)
    planned = train(module, lightning_callback(plan, "model"))
    report("two steps of a Lightning module", {"as it is": plain, "with a plan": planned})


if __name__ == "__main__":
    main()
