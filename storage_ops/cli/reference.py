"""`--reference`: a step of DPO or GRPO, which compares the policy with a frozen reference model."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from storage_ops import linear_cross_entropy, losses
from storage_ops._subclass import Replaced, like
from storage_ops.cli import output

if TYPE_CHECKING:
    from torch import nn

_ORDER = {
    "dpo": "the policy's forward comes first, as in TRL 1.16",
    "grpo": "the reference's forward comes first, and no old log-probabilities are kept",
}


def with_reference(model: nn.Module, args: argparse.Namespace) -> None:
    """Let the forward of a model of transformers return the algorithm's loss.

    The reference is a copy of the model. With adapters, it is the model without them.

    Raises:
        ValueError: the model is no causal language model.
    """
    if "linear_cross_entropy" in (getattr(args, "actions", None) or ()):  # an option of fit
        raise ValueError(
            f"--actions has linear_cross_entropy, but the loss of --reference {args.reference} "
            "has no logits. Leave out linear_cross_entropy."
        )
    if args.tensor_parallel > 1:
        raise ValueError(
            f"--tensor-parallel is {args.tensor_parallel}, but the loss of --reference "
            f"{args.reference} takes whole heads. Leave out one of them."
        )
    base: Any = _base(model)
    head = base.get_output_embeddings()
    kind = type(base).__name__
    if head is None or base.config.is_encoder_decoder or "CausalLM" not in kind:
        raise ValueError(
            f"--reference is {args.reference}, but --hf-config is of a {kind}. Pass the config "
            "of a causal language model."
        )
    reference = None
    if base is model:
        reference = copy.deepcopy(model).eval().requires_grad_(False)
        _Reference.change(reference)
    # It is an attribute of the policy but no submodule, so that plans have only the policy's
    # layers.
    vars(model)["_reference"] = reference
    {"dpo": _ByDpo, "grpo": _ByGrpo}[args.reference].change(model)
    whose = "the model without its adapters" if reference is None else "a frozen copy"
    output.note(
        f"--reference {args.reference}: the reference is {whose}, its forward keeps no "
        f"activations, and {_ORDER[args.reference]}. The loss is losses.{args.reference}, without "
        "logits."
    )


def loss_of(output: Tensor) -> Tensor:
    """Return the output of a model with a reference, which is the loss."""
    return output


def reference_of(model: nn.Module) -> nn.Module | None:
    """Return a model's reference, or None without one."""
    reference: nn.Module | None = vars(model).get("_reference")
    return reference


def _base(model: Any) -> Any:
    """Return a model without PEFT's wrappers."""
    return getattr(model, "get_base_model", lambda: model)()


class _Reference(Replaced):
    """A model whose forward returns the log-probability of each token."""

    @staticmethod
    def forward_over(original: Callable[..., Any]) -> Callable[..., Any]:
        @like(original)
        def forward(self: Any, **inputs: Any) -> Tensor:
            return _logps(self, inputs)

        return forward


class _ByDpo(Replaced):
    """A model whose forward returns the loss of DPO."""

    @staticmethod
    def forward_over(original: Callable[..., Any]) -> Callable[..., Any]:
        @like(original)
        def forward(self: Any, **inputs: Any) -> Tensor:
            scored = _scored(self, **inputs)
            loss: Tensor = losses.dpo(**scored, ref_logps=_reference_logps(self, inputs).sum(-1))
            return loss

        return forward


class _ByGrpo(Replaced):
    """A model whose forward returns the loss of GRPO."""

    @staticmethod
    def forward_over(original: Callable[..., Any]) -> Callable[..., Any]:
        @like(original)
        def forward(self: Any, **inputs: Any) -> Tensor:
            known = _reference_logps(self, inputs)
            advantages = torch.ones(len(known), device=known.device)
            loss: Tensor = losses.grpo(
                **_scored(self, **inputs), advantages=advantages, ref_logps=known, kl_weight=0.04
            )
            return loss

        return forward


def _reference_logps(policy: Any, inputs: dict[str, Any]) -> Tensor:
    """Return the reference's log-probability of each token, without keeping activations."""
    reference = policy._reference
    with torch.no_grad():
        if reference is not None:
            logps: Tensor = reference(**inputs)
            return logps
        with policy.disable_adapter():
            return _logps(policy, inputs)


def _logps(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    nll: Tensor = linear_cross_entropy(**_scored(model, **inputs), reduction="none")
    return -nll


def _scored(model: nn.Module, labels: Tensor, **inputs: Any) -> dict[str, Any]:
    """Return the arguments of a loss: last hidden states, output layer and targets."""
    base = _base(model)
    hidden = base.base_model(**inputs, use_cache=False).last_hidden_state
    head = base.get_output_embeddings()
    return {
        "input": hidden, "linear_weight": head.weight, "linear_bias": head.bias, "target": labels,
        "shift": True,
    }  # fmt: skip
