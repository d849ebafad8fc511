"""Calls that type checkers must refuse, each with the comment that ignores its error.

mypy (`make lint`) reports a comment that ignores no error. The file is checked, not run.
"""

from torch import Tensor, nn

import storage_ops as so


def scaled(x: Tensor, scale: float = 1.0) -> Tensor:
    return x * scale


def wrong_names(x: Tensor, weight: Tensor, target: Tensor, model: nn.Module) -> None:
    so.linear_cross_entropy(x, weight, target, reduction="men")  # type: ignore[call-overload]
    so.linear_cross_entropy(x, weight, target, returns=("los",))  # type: ignore[arg-type]
    so.linear_cross_entropy(x, weight, target, input_grad="all")  # type: ignore[call-overload]
    so.LinearCrossEntropyLoss(4, 10, reduction="men")  # type: ignore[call-overload]
    so.linear_kl_div(x, weight, x, weight, divergence="kl")  # type: ignore[arg-type]
    so.losses.dpo(x, weight, target, loss_type="sigmiod")  # type: ignore[call-overload]
    so.ActivationCheckpointConfig(mode="all")  # type: ignore[arg-type]
    so.OutputDiscardCheckpoint(determinism_check="bytes")  # type: ignore[arg-type]
    so.OutputDiscardCheckpoint().checkpoint(scaled, x, scale="2")  # type: ignore[arg-type]
    so.output_discard(scaled, scaled)(x, "2")  # type: ignore[arg-type]
    so.CheckpointWrapper(model, policy="matmul")  # type: ignore[arg-type]
    so.fit(model, x, "1GiB", actions=["all"])  # type: ignore[list-item]
    so.patch_causal_lm(model, logits="none")  # type: ignore[arg-type]
    so.plan(8, 4, 16, strategy="chunked")  # type: ignore[arg-type]
