"""Models whose forward with labels computes its loss without logits."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from storage_ops._callers import warn_caller
from storage_ops._subclass import like
from storage_ops.integrations.deferred_forward import Forward, LossOptions, Refused
from storage_ops.integrations.deferred_logits import DeferredLogits
from storage_ops.integrations.gathered_head import hooks_taken_off, is_hooked
from storage_ops.integrations.output_layers import patched_heads
from storage_ops.integrations.patch_probe import other_labels


def has_patch(model: object) -> bool:
    """Return True if `patch_causal_lm` has changed this module and has not been undone."""
    return getattr(model, "_loss_options", None) is not None


def model_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of a patched model, which calls the original one.

    Both are functions of the model.
    """
    position = list(inspect.signature(original).parameters).index("labels") - 1  # without self

    @like(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        shifted = kwargs.get("shift_labels")
        labels = args[position] if len(args) > position else kwargs.get("labels")
        labels = shifted if shifted is not None else labels
        # Another wrapper can keep this function after `unpatch_causal_lm`.
        if not has_patch(self):
            return original(self, *args, **kwargs)
        if self._is_watched:
            self._has_run = True
        name, options = type(self).__name__, self._loss_options
        training = self.training and torch.is_grad_enabled()
        if labels is None and not (training and options.logits == "deferred"):
            if training:
                column = options.token_weights
                if isinstance(column, str) and column in kwargs:
                    _refuse_without_labels(name, "token_weights", column)
                if not torch.compiler.is_compiling():
                    _warn_of_missing_labels(name)
            return original(self, *args, **kwargs)
        if any(head._deferred_in is not None for head in patched_heads(self, name)):
            # A patched model around this one is waiting for the logits.
            return original(self, *args, **kwargs)
        if labels is None:
            _check_is_whole(self, name)
            for option in ("token_weights", "label_smoothing"):
                _refuse_without_labels(name, option, getattr(options, option))
            run = Forward(name, LossOptions(memory_budget=options.memory_budget), None)
            return deferred(self, run, original, args, kwargs)
        weights = _weights(self, options.token_weights, labels, kwargs)
        run = Forward(name, options, labels, weights)
        labels_or_places = labels if weights is None else run.places
        if len(args) > position:
            args = (*args[:position], labels_or_places, *args[position + 1 :])
        else:
            kwargs["labels"] = labels_or_places
        if shifted is not None:
            kwargs["shift_labels"] = labels_or_places
        outputs = deferred(self, run, original, args, kwargs)
        formed = options.logits == "always" or (options.logits != "never" and not self.training)
        return _finished(outputs, formed, run.results)

    return forward


def deferred(
    model: nn.Module,
    run: Forward,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a forward of the model while its output layer defers its logits.

    Raises:
        Refused: there are labels, but the model computed no cross-entropy of the logits.
    """
    heads = patched_heads(model, run.model)
    for head in heads:
        head._deferred_in = run
    hooked = [head for head in heads if is_hooked(head)]
    try:
        # Dynamo of torch 2.10 does not trace the block that removes hooks.
        with hooks_taken_off(hooked) if hooked else nullcontext():
            outputs = forward(model, *args, **kwargs)
    finally:
        for head in heads:
            head._deferred_in = None
    if run.labels is not None and run.losses < max(run.calls, 1):
        missing = "a cross-entropy of its logits" if run.calls else "get_output_embeddings()"
        if run.losses:
            missing = (
                f"a loss for {run.calls - run.losses} of the {run.calls} calls of its output layer"
            )
        others = [name for name in other_labels(forward) if kwargs.get(name) is None]
        also = f" It may need {' and '.join(others)} too." if others else ""
        raise Refused(
            f"patch_causal_lm: the forward of {run.model} with labels ended without {missing}. "
            f"Expected a causal language modeling loss of the logits of its output layer.{also} "
            "Call storage_ops.unpatch_causal_lm(model) to give the model its own loss back."
        )
    return outputs


def _check_is_whole(model: nn.Module, name: str) -> None:
    """Raise an error for a replica of `torch.nn.DataParallel`, which gathers results."""
    if getattr(model, "_is_replica", False):
        raise RuntimeError(
            f'patch_causal_lm: {name} with logits="deferred" is called by torch.nn.DataParallel, '
            "which gathers its logits on one device. Use DistributedDataParallel, one process for "
            "each device, as torchrun starts them."
        )


def _refuse_without_labels(name: str, option: str, value: object) -> None:
    """Raise an error for an option of the model's loss in a call without labels."""
    if isinstance(value, Tensor) or value:
        shown = "a tensor" if isinstance(value, Tensor) else repr(value)
        raise ValueError(
            f"patch_causal_lm: `{option}` is {shown}, and {name} is called in training without "
            "labels, so another loss is used, which ignores it. Pass labels in the call. Trainer "
            "removes them from the call if it has a compute_loss_func or label_smoothing_factor."
        )


@functools.cache
def _warn_of_missing_labels(name: str) -> None:
    """Warn once if a trainer may have removed the labels from the model's call."""
    warn_caller(
        f"patch_causal_lm: {name} is called in training without labels, so its logits are formed "
        "and it has no loss and no results per token. Trainer removes the labels from the call if "
        "it has a compute_loss_func or label_smoothing_factor, and so do the ORPO, CPO, TPO and "
        'OnlineDPO trainers of TRL. With patch_causal_lm(model, logits="deferred") their losses '
        "need no logits. A compute_loss() of your own can pass the labels, and read outputs.nll."
    )


def _weights(
    model: nn.Module, weights: object, labels: Tensor, kwargs: dict[str, Any]
) -> Tensor | None:
    """Return the weights of a call's tokens, and remove them from its keywords."""
    name = "token_weights" if weights is None else weights
    if isinstance(name, str):
        weights_arg = kwargs.pop(name, None)
        # Transformers would accept it without an effect.
        if weights is None and weights_arg is not None:
            raise TypeError(
                "patch_causal_lm: the model is called with `token_weights`, but was patched "
                "without that keyword. Call storage_ops.patch_causal_lm(model, "
                'token_weights="token_weights").'
            )
        if weights is not None and weights_arg is None and model.training:
            raise ValueError(
                f"patch_causal_lm: `token_weights` is {name!r}, and a call in training has no "
                "keyword of that name. Put it into the batch, for which Trainer needs "
                "remove_unused_columns=False."
            )
        weights = weights_arg
    if weights is None:
        return None
    if not isinstance(weights, Tensor) or weights.shape != labels.shape:
        value = f"of shape {tuple(weights.shape)}" if isinstance(weights, Tensor) else repr(weights)
        raise ValueError(
            f"patch_causal_lm: `token_weights` is {value}. Expected a tensor of the labels' shape, "
            f"{tuple(labels.shape)}."
        )
    return weights


def _finished(outputs: object, formed: bool, results: dict[str, Tensor]) -> Any:
    """Return a model's outputs with results per token, and with the logits removed or computed."""
    deferred_outputs: list[tuple[DeferredLogits, Tensor]] = []

    def one(value: object) -> Any:
        """Return the value or its replacement, also inside outputs of a submodule."""
        if isinstance(value, DeferredLogits):
            if not formed:
                return None
            tensor = next((t for logits, t in deferred_outputs if logits is value), None)
            if tensor is None:
                tensor = value.formed()
                deferred_outputs.append((value, tensor))
            return tensor
        if type(value) is tuple or type(value) is list:
            return type(value)(one(v) for v in value)
        before = _items_of(value)
        items = {k: one(v) for k, v in before.items()}
        if all(items[k] is v for k, v in before.items()):
            return value
        if isinstance(value, dict):
            return type(value)(**items)
        if isinstance(value, tuple):
            return value._replace(**items)  # type: ignore[attr-defined]
        changed = {k: v for k, v in items.items() if v is not before[k]}
        return dataclasses.replace(value, **changed)  # type: ignore[type-var]

    outputs = one(outputs)
    if not results:
        return outputs
    if isinstance(outputs, tuple):
        return (*outputs, *results.values())
    if isinstance(outputs, dict):
        for name, result in results.items():  # a ModelOutput has no update()
            outputs[name] = result
    elif dataclasses.is_dataclass(outputs):
        vars(outputs).update(results)
    else:
        raise TypeError(
            f"patch_causal_lm: `returns` has {', '.join(results)}, for which the output of the "
            f"model, a {type(outputs).__name__}, has no place. Expected a tuple, a dict or a "
            "dataclass."
        )
    return outputs


def _items_of(value: object) -> dict[str, Any]:
    """Return the items of a dict, or the fields of a named tuple or a dataclass, by name."""
    if isinstance(value, dict):
        return value
    if isinstance(value, tuple):
        return dict(zip(getattr(value, "_fields", ()), value, strict=False))
    if not dataclasses.is_dataclass(value) or isinstance(value, (type, DeferredLogits)):
        return {}
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
