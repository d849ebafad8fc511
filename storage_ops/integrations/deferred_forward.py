"""One forward whose logits are deferred: what is asked of its loss, and what was found."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from storage_ops.integrations.deferred_logits import DeferredLogits
    from storage_ops.integrations.gathered_head import Gathering

IGNORED = -100  # of transformers' losses


@dataclass(frozen=True, eq=False)
class LossOptions:
    """What is asked of the loss of a patched model; see `patch_causal_lm`."""

    returns: tuple[str, ...] = ("loss",)
    token_weights: Tensor | str | None = None
    label_smoothing: float = 0.0
    logits: str = "eval"
    memory_budget: int | None = None
    gradient_tolerance: float = 0.0

    @property
    def key(self) -> tuple[Any, ...]:
        """What to compare: of a tensor, whether it is the same one."""
        weights = self.token_weights
        same = id(weights) if isinstance(weights, Tensor) else weights
        numbers = self.label_smoothing, self.memory_budget, self.gradient_tolerance
        return self.returns, same, self.logits, numbers


class Refused(NotImplementedError):
    """The model does something to its logits that cannot be done without them."""


class StandIn:
    """Base of objects in the place of tensors: an attribute that they lack is an error."""

    if TYPE_CHECKING:

        def _error(self, what: str) -> Refused: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # probed by Python itself, which expects this error
            raise AttributeError(name)
        raise self._error(f"the attribute {name!r}")


class Forward:
    """One forward of a model, in which its output layer returns deferred logits.

    Attributes:
        model: name of the model's class, for errors.
        options: of its loss.
        labels: of the tokens; None where the caller makes a loss of the logits that are returned.
        token_weights: in the shape of the labels, or None. The model is given `places` as labels
            then: it may shift them and cut them, and the loss sees which label and weight is meant.
        calls: how many times the output layer was called.
        losses: how many of those calls led to a loss.
        results: per token, by name, of the first loss.
        temperature: logits are divided by it before the loss.
        others: by name, what else to make of the logits and targets (N,) of a loss, per token.
        max_valid: that of `linear_cross_entropy`.
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

    @property
    def places(self) -> Tensor:
        """Where each label is; ignored ones stay."""
        assert self.labels is not None
        places = torch.arange(self.labels.numel(), device=self.labels.device)
        return torch.where(self.labels == IGNORED, IGNORED, places.view(self.labels.shape))

    def targets_of(self, given: Tensor) -> tuple[Tensor, Tensor | None]:
        """Targets and their weights, of what the model has made of `labels` or `places`."""
        if self.token_weights is None or self.labels is None:
            return given, None
        valid = given != IGNORED
        place = torch.where(valid, given, 0).to(self.labels.device)
        labels, weights = self.labels.reshape(-1)[place], self.token_weights.reshape(-1)[place]
        return torch.where(valid, labels.to(given), IGNORED), weights.to(given.device)

    def keep(self, found: dict[str, Tensor]) -> None:
        """Results per token, in the shape of the labels where there is one for each."""
        if self.results or self.labels is None:
            return
        for name, value in found.items():
            fits = value.numel() == self.labels.numel()
            self.results[name] = value.view(self.labels.shape) if fits else value


class _Reaching(torch.autograd.Function):
    """Hidden states, from which autograd finds the parameters too that a loss of them will use."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *parameters: Tensor) -> Tensor:
        ctx.others = len(parameters)
        return hidden.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (grad, *[None] * ctx.others)


class Versions:
    """Tensors that are to be as they are now when they are read again, as autograd asks it."""

    def __init__(self, tensors: Iterable[Tensor | None]) -> None:
        # A graph that is compiled repeats what it saw, and numbers of versions are not of it.
        given = () if torch.compiler.is_compiling() else tensors
        self._seen = [(t, t._version) for t in given if t is not None and not t.is_inference()]

    def check(self) -> None:
        """Raise a RuntimeError if one of them was written since."""
        for tensor, version in self._seen:
            if tensor._version != version:
                raise RuntimeError(
                    f"patch_causal_lm: a tensor of shape {tuple(tensor.shape)} that the loss is "
                    "made of was modified by an in-place operation after the forward; expected "
                    "parameters, hidden states and labels to stay until the backward"
                )


class Origin:
    """One call of an output layer.

    Attributes:
        forward: the one of its model.
        gathering: of the layer's weight, where that is not there by itself.
        classes: V.
        hidden: (..., D), what it was called with.
        dtype: that of the hidden states.
        autocast: what autocast_dtype() was.
        has_loss: whether the logits have led to a loss.
        versions: of the layer's parameters and the hidden states.
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
        self.autocast = autocast_dtype(hidden)
        self.has_loss = False
        self.versions = Versions((hidden, *layer.parameters()))
        if forward.labels is None:  # DDP looks for unused parameters in what a model returns
            hidden = _Reaching.apply(hidden, *layer.parameters())  # type: ignore[no-untyped-call]
        self.hidden = hidden

    @property
    def weight(self) -> Tensor:
        """Of the layer, (V, D); where it is gathered, inside of `use` only."""
        return self._weight if self.gathering is None else self.gathering.weight

    def use(self, function: Callable[[Tensor], Any], hidden: Tensor) -> Any:
        """What a function makes of hidden states, with the layer as it was in the call.

        Raises:
            RuntimeError: the forward has returned the logits, and the weight was freed since; or a
                tensor that they are made of was modified.
        """
        with self._again(hidden):
            return function(hidden) if self.gathering is None else self.gathering(function, hidden)

    def reaches_loss(self) -> None:
        """Count the loss, the first time."""
        if not self.has_loss:
            self.has_loss = True
            self.forward.losses += 1

    def _again(self, hidden: Tensor) -> contextlib.AbstractContextManager[Any]:
        returned = self.forward.labels is None and not torch.compiler.is_compiling()
        if returned and self.weight.numel() and not self.weight.untyped_storage().size():
            raise RuntimeError(
                f"patch_causal_lm: the weight of the output layer of {self.forward.model} was "
                "freed after the forward, before the loss of its deferred logits; expected "
                "reshard_after_forward=False of the module that it belongs to, as fully_shard has "
                "it for the whole model"
            )
        self.versions.check()
        if autocast_dtype(hidden) == self.autocast:
            return contextlib.nullcontext()
        on = self.autocast is not None
        return torch.autocast(hidden.device.type, self.autocast, enabled=on)


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The dtype autocast runs a linear layer in on the tensor's device, None if it is off."""
    device = tensor.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)
