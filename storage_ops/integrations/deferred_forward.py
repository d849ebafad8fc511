"""One forward whose logits are deferred: the options of its loss, and its results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from storage_ops.foundation.autocast import autocast_dtype
from storage_ops.storage.storage import is_discarded

if TYPE_CHECKING:
    from storage_ops.integrations.deferred_logits import DeferredLogits
    from storage_ops.integrations.gathered_head import Gathering

IGNORED = -100  # the ignored label in transformers' losses
_CHECKPOINTS = ("torch.utils.checkpoint", "storage_ops.checkpoint")


@dataclass(frozen=True, eq=False)
class LossOptions:
    """Options of the loss of a patched model. See `patch_causal_lm`."""

    returns: tuple[str, ...] = ("loss",)
    token_weights: Tensor | str | None = None
    label_smoothing: float = 0.0
    logits: str = "eval"
    memory_budget: int | None = None
    gradient_tolerance: float = 0.0

    @property
    def key(self) -> tuple[Any, ...]:
        """Return a key for equal options. Tensors compare by identity."""
        weights = self.token_weights
        same = id(weights) if isinstance(weights, Tensor) else weights
        numbers = self.label_smoothing, self.memory_budget, self.gradient_tolerance
        return self.returns, same, self.logits, numbers


class Refused(NotImplementedError):
    """Raised for an operation of a model on its logits that needs the logits' values."""


class StandIn:
    """Base of objects that replace tensors. A missing attribute is an error."""

    if TYPE_CHECKING:

        def _error(self, what: str) -> Refused: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python itself looks for these names, and expects this error
            raise AttributeError(name)
        raise self._error(f"the attribute {name!r}")


class Forward:
    """One forward of a model, in which its output layer returns deferred logits.

    Attributes:
        model: name of the model's class, for errors.
        options: options of its loss.
        labels: labels of the tokens. None if the caller computes a loss of the returned logits.
        token_weights: weights in the shape of the labels, or None. With weights, the model gets
            `places` as labels. It may shift and cut them, and the loss still finds each label and
            weight.
        calls: how many times the output layer was called.
        losses: how many of those calls led to a loss.
        results: results per token of the first loss, by name.
        temperature: the divisor of the logits before the loss.
        others: functions that compute per-token values from the logits and targets (N,) of a loss,
            by name.
        max_valid: as in `linear_cross_entropy`.
        region: the hooks of the activation checkpoint around the forward, or None.
    """

    def __init__(
        self,
        model: str,
        options: LossOptions,
        labels: Tensor | None,
        token_weights: Tensor | None = None,
    ) -> None:
        self.model = model
        self.options = options
        self.labels = labels
        self.token_weights = token_weights
        self.calls = 0
        self.losses = 0
        self.results: dict[str, Tensor] = {}
        self.temperature = 1.0
        self.others: dict[str, Callable[[DeferredLogits, Tensor], Tensor]] = {}
        self.max_valid: Literal["sync"] | None = None
        self.region = _region()

    @property
    def places(self) -> Tensor:
        """Return the index of each label. Ignored labels stay unchanged."""
        assert self.labels is not None
        places = torch.arange(self.labels.numel(), device=self.labels.device)
        return torch.where(self.labels == IGNORED, IGNORED, places.view(self.labels.shape))

    def targets_of(self, given: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return targets and their weights, from the model's version of `labels` or `places`."""
        if self.token_weights is None or self.labels is None:
            return given, None
        valid = given != IGNORED
        place = torch.where(valid, given, 0).to(self.labels.device)
        labels, weights = self.labels.reshape(-1)[place], self.token_weights.reshape(-1)[place]
        return torch.where(valid, labels.to(given), IGNORED), weights.to(given.device)

    def keep(self, found: dict[str, Tensor]) -> None:
        """Store results per token, in the shape of the labels if there is one for each.

        A model that shifts the labels by slices has no result for the last token of a row. It is
        ignored, as in models that shift by padding.
        """
        if self.results or self.labels is None:
            return
        for name, value in found.items():
            if value.numel() == self.labels.numel():
                value = value.view(self.labels.shape)
            elif value.numel() == (scored := self.labels[..., 1:]).numel():
                fill = -1 if name == "argmax" else 0
                value = nn.functional.pad(value.view(scored.shape), (0, 1), value=fill)
            self.results[name] = value


class _Reaching(torch.autograd.Function):
    """Returns hidden states, and shows autograd the parameters that their loss will use."""

    generate_vmap_rule = True  # with `setup_context`, transforms of torch.func work, too

    @staticmethod
    def forward(hidden: Tensor, *parameters: Tensor) -> Tensor:
        return hidden.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.others = len(inputs) - 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (grad, *[None] * ctx.others)


class Versions:
    """Tensors that must not change before they are read again, as autograd requires."""

    def __init__(self, tensors: Iterable[Tensor | None]) -> None:
        # A compiled graph would repeat the recorded version numbers, which are not part of it.
        watched = () if torch.compiler.is_compiling() else tensors
        self._seen = [(t, t._version) for t in watched if t is not None and not t.is_inference()]

    def check(self) -> None:
        """Raise a RuntimeError if one of the tensors was modified since."""
        for tensor, version in self._seen:
            if tensor._version != version:
                raise RuntimeError(
                    f"patch_causal_lm: a tensor of shape {tuple(tensor.shape)} that the loss is "
                    "computed from was modified by an in-place operation after the forward. Keep "
                    "parameters, hidden states and labels unchanged until the backward."
                )


class Origin:
    """One call of an output layer.

    Attributes:
        forward: the forward of its model.
        gathering: gathers the layer's weight if a library has sharded it, else None.
        classes: V.
        hidden: (..., D), the argument of the call.
        dtype: dtype of the hidden states.
        autocast: the dtype of autocast during the call.
        has_loss: whether the logits have led to a loss.
        versions: versions of the layer's parameters and the hidden states.
        region: the hooks of the activation checkpoint around the call, or None.
    """

    def __init__(self, forward: Forward, weight: Tensor, hidden: Tensor, layer: nn.Module) -> None:
        forward.calls += 1
        self.forward = forward
        self._weight = weight
        self.gathering: Gathering | None = getattr(layer, "_gathering", None)
        self.classes = int(weight.shape[0])
        if self.gathering is not None:
            self.gathering.check_labels(forward)
            self.classes = self.gathering.classes
        self.dtype = hidden.dtype
        self.autocast = autocast_dtype(hidden.device.type)
        self.has_loss = False
        self.region = _region()
        self.versions = Versions((hidden, *layer.parameters()))
        if forward.labels is None:  # DDP looks for unused parameters in the output of a model
            hidden = _Reaching.apply(hidden, *layer.parameters())  # type: ignore[no-untyped-call]
        self.hidden = hidden

    @property
    def weight(self) -> Tensor:
        """Return the layer's weight, (V, D). A gathered weight exists only inside `use`."""
        return self._weight if self.gathering is None else self.gathering.weight

    def use(self, function: Callable[[Tensor], Any], hidden: Tensor) -> Any:
        """Return a function's result for hidden states, with the layer of the original call.

        Raises:
            RuntimeError: the forward has returned the logits, and the weight was freed since. Or
                one of the layer's tensors was modified.
        """
        with self._again(hidden):
            return function(hidden) if self.gathering is None else self.gathering(function, hidden)

    def reaches_loss(self) -> None:
        """Record that the logits led to a loss.

        Raises:
            Refused: an activation checkpoint inside the forward contains the layer and the loss.
        """
        region, name = _region(), self.forward.model
        if region is not None and region == self.region != self.forward.region:
            raise Refused(
                f"patch_causal_lm: the forward of {name} computes its output layer and its loss in "
                "an activation checkpoint, whose recompute runs after the forward and would form "
                "the logits. Call them without that checkpoint, because the patched loss keeps no "
                "logits, or call storage_ops.unpatch_causal_lm(model)."
            )
        if not self.has_loss:
            self.has_loss = True
            self.forward.losses += 1

    def _again(self, hidden: Tensor) -> contextlib.AbstractContextManager[Any]:
        returned = self.forward.labels is None and not torch.compiler.is_compiling()
        if returned and is_discarded(self.weight):
            raise RuntimeError(
                f"patch_causal_lm: the weight of the output layer of {self.forward.model} was "
                "freed after the forward, before the loss of its deferred logits. Pass "
                "reshard_after_forward=False to fully_shard of the module that it belongs to. This "
                "is the default for the whole model."
            )
        self.versions.check()
        device_type = hidden.device.type
        if autocast_dtype(device_type) == self.autocast:
            return contextlib.nullcontext()
        return torch.autocast(device_type, self.autocast, enabled=self.autocast is not None)


def _region() -> Any:
    """Return the saved-tensor hooks of the activation checkpoint around the caller, or None."""
    if torch.compiler.is_compiling():  # the graph contains the recompute
        return None
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    module = getattr(hooks[0], "__module__", "") if hooks else ""
    return hooks if module.startswith(_CHECKPOINTS) else None
