"""The fused head of TRL's trainers, computed by `linear_cross_entropy`.

`trl.trainer.add_fused_lm_head(model)` sets a forward on the model. With labels and
`fused_lm_head=True`, it returns results per token instead of logits: log-probabilities, entropies
and others that the losses and metrics of the trainers need. On a patched model such a call runs the
model's own forward with deferred logits, like any other call with labels. So the model's operations
on its logits are observed, not guessed from the names in its config.

The options of the fused head are in the closure of its function, under the public parameter names
of `add_fused_lm_head`. TRL itself is neither imported nor changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from storage_ops._subclass import like
from storage_ops.integrations.deferred_forward import IGNORED, Forward, LossOptions
from storage_ops.integrations.deferred_logits import DeferredLogits
from storage_ops.integrations.output_layers import replaced
from storage_ops.integrations.patched_model import deferred, has_patch, model_forward


def _log_sum_sq_probs(logits: DeferredLogits, target: Tensor) -> Tensor:
    """Return log sum_j p_j^2 = lse(2 z) - 2 lse(z)."""
    with torch.no_grad():
        twice, once = ((z.evaluate(target, ("lse",))["lse"]) for z in (logits * 2, logits))
        return twice - 2 * once


def _mean_logits(logits: DeferredLogits, target: Tensor) -> Tensor:
    return torch.where(target == IGNORED, 0, logits.class_means())


# The results per token of a fused head: results of the loss, and functions of the logits.
_RESULTS = {"log_probs": "nll", "entropy": "entropy", "is_top1": "correct"}
_OTHERS = {"mean_logits": _mean_logits, "log_sum_sq_probs": _log_sum_sq_probs}


def _closure_of(forward: object) -> inspect.ClosureVars | None:
    """Return the options of a fused head, or None for another forward or one of this module."""
    while forward is not None:
        function = getattr(forward, "__func__", forward)
        if is_replacement(function):
            return None
        # `__wrapped__` and `__signature__` may show the signature of the model's own forward.
        if isinstance(function, FunctionType) and "fused_lm_head" in (
            function.__kwdefaults__ or ()
        ):
            return inspect.getclosurevars(function)
        forward = getattr(function, "__wrapped__", None)
    return None


def _wraps_own(instance_forward: object, model: nn.Module) -> bool:
    """Return True if a forward runs the forward of the model's class, as accelerate's does."""
    if not isinstance(instance_forward, MethodType):
        return False
    cls = type(model)
    own = getattr(cls, "_original", cls).forward
    function: Any = instance_forward.__func__
    while function is not own and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function is own


def check(model: nn.Module, instance_forward: object, options: LossOptions) -> None:
    """Raise an error unless a patched forward can replace a model's forward, which may be None."""
    if instance_forward is None:
        return
    name, closure = type(model).__name__, _closure_of(instance_forward)
    if closure is None and _wraps_own(instance_forward, model):
        return
    if closure is None or not isinstance(instance_forward, MethodType):
        raise replaced(name)
    known = {"outputs", "temperature", "cast_lm_head_to_fp32"}
    outputs = set(closure.nonlocals.get("outputs", ()))
    if not known <= set(closure.nonlocals) or "FusedCausalLMOutput" not in closure.globals:
        raise NotImplementedError(
            f"patch_causal_lm: the fused head of {name} is not that of trl 1.15 or 1.16. Install "
            "one of these versions."
        )
    if closure.nonlocals["cast_lm_head_to_fp32"]:
        raise NotImplementedError(
            f"patch_causal_lm: the fused head of {name} has cast_lm_head_to_fp32=True. Expected "
            "False: results per token are float32 without it."
        )
    if outputs - set(_RESULTS) - set(_OTHERS):
        raise NotImplementedError(
            f"patch_causal_lm: the fused head of {name} has outputs {sorted(outputs)}. Expected "
            f"some of {sorted(_RESULTS | _OTHERS)}."
        )
    if options.token_weights is not None or options.label_smoothing:
        raise ValueError(
            f"patch_causal_lm: {name} has a fused head, whose losses a trainer computes. Expected "
            "token_weights=None and label_smoothing=0."
        )


def replacement(model: nn.Module, instance_forward: Any, options: LossOptions) -> Any:
    """Return the forward to set on a patched model in place of `instance_forward`.

    A fused head becomes one that scores tokens without logits. In a wrapper around the class's
    forward, the patched forward replaces that forward. Any other forward stays.

    Raises:
        NotImplementedError, ValueError: as `check`.
    """
    closure = _closure_of(instance_forward)
    if closure is None and _wraps_own(instance_forward, model):
        forward: Any = model_forward(instance_forward.__func__)
        forward._replaced = instance_forward.__func__
        # unwrap_model of accelerate follows `__wrapped__` to remove its own wrappers.
        forward.__wrapped__ = type(model).forward
        return MethodType(forward, model)
    if closure is None:
        return instance_forward
    check(model, instance_forward, options)
    return MethodType(_fused_forward(instance_forward.__func__, closure), model)


def is_replacement(forward: object) -> bool:
    """Return True if `replacement` created this forward."""
    return hasattr(getattr(forward, "__func__", forward), "_replaced")


def restore(model: nn.Module) -> None:
    """Undo `replacement`, unless another forward was set on top.

    In that case the replacement stays. It calls the original forward if the model has no patch.
    """
    forward = getattr(vars(model).get("forward"), "__func__", None)
    original = getattr(forward, "_replaced", None)
    if original is not None:
        model.forward = MethodType(original, model)


def _fused_forward(
    instance_forward: Callable[..., Any], closure: inspect.ClosureVars
) -> Callable[..., Any]:
    """Return the patched forward over a fused head's forward. Both are functions of the model."""
    plain, kind = model_forward(instance_forward), closure.globals["FusedCausalLMOutput"]
    requested = {"log_probs", *closure.nonlocals["outputs"]}

    @like(instance_forward)
    def forward(self: Any, *args: object, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return plain(self, *args, **kwargs)
        if not has_patch(self):  # the patch has been removed
            return instance_forward(self, *args, fused_lm_head=True, **kwargs)
        shifted = kwargs.get("shift_labels")
        labels: Tensor | None = kwargs.get("labels") if shifted is None else shifted
        if labels is None:
            raise ValueError("`fused_lm_head` is True without labels. Pass labels.")
        kwargs["labels"] = labels
        names = tuple(_RESULTS[name] for name in _RESULTS if name in requested)
        budget = self._loss_options.memory_budget
        run = Forward(type(self).__name__, LossOptions(names, memory_budget=budget), labels, None)
        run.temperature = closure.nonlocals["temperature"]
        run.others = {name: _OTHERS[name] for name in _OTHERS if name in requested}
        run.max_valid = "sync"
        outputs = deferred(self, run, instance_forward, args, {**kwargs, "use_cache": False})
        results = {name: run.results[_RESULTS.get(name, name)] for name in requested}
        if shifted is None:
            results = {name: _without_last(value, labels) for name, value in results.items()}
            labels = labels[:, 1:]
        results["log_probs"] = -results["log_probs"]
        aux = outputs.get("aux_loss")
        return kind(loss=outputs["loss"], label_mask=labels != IGNORED, aux_loss=aux, **results)

    forward._replaced = instance_forward  # type: ignore[attr-defined]
    return forward


def _without_last(value: Tensor, labels: Tensor) -> Tensor:
    """Return the results of all tokens except the last of each sequence, (B, T - 1)."""
    if value.numel() == labels.numel():
        return value.view(labels.shape)[:, :-1]
    return value.view(len(labels), -1)
