"""Logits that are never computed: what a model does to them is recorded and left to the loss.

A model turns hidden states into logits with a linear layer, may scale and cap them, and hands them
to a cross-entropy. `DeferredLogits` goes through that code in place of the tensor. It takes only
what `linear_cross_entropy` can repeat, so a model that does anything else gets an error, not
another loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from storage_ops.integrations.head_loss import head_cross_entropy, piece_rows
from storage_ops.loss.api import linear_cross_entropy

Head = Callable[[Tensor], Tensor]  # from hidden states (..., D) to logits (..., V), token by token

_IGNORED = -100  # of transformers' losses


@dataclass(frozen=True, eq=False)
class LossOptions:
    """What is asked of the loss of a patched model; see `patch_causal_lm`."""

    returns: tuple[str, ...] = ("loss",)
    token_weights: Tensor | str | None = None
    label_smoothing: float = 0.0
    logits: str = "eval"
    memory_budget: int | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """What to compare: of a tensor, whether it is the same one."""
        weights = self.token_weights
        same = id(weights) if isinstance(weights, Tensor) else weights
        return self.returns, same, self.label_smoothing, self.logits, self.memory_budget


class Refused(NotImplementedError):
    """The model does something to its logits that cannot be done without them."""


class Forward:
    """One forward of a model with labels.

    Attributes:
        model: name of the model's class, for errors.
        options: of its loss.
        labels: of the tokens.
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
        self, model: str, options: LossOptions, labels: Tensor, token_weights: Tensor | None
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
        self.max_valid: str | None = None

    @property
    def places(self) -> Tensor:
        """Where each label is; ignored ones stay."""
        places = torch.arange(self.labels.numel(), device=self.labels.device)
        return torch.where(self.labels == _IGNORED, _IGNORED, places.view(self.labels.shape))

    def targets_of(self, given: Tensor) -> tuple[Tensor, Tensor | None]:
        """Targets and their weights, of what the model has made of `labels` or `places`."""
        if self.token_weights is None:
            return given, None
        valid = given != _IGNORED
        place = torch.where(valid, given, 0).to(self.labels.device)
        labels, weights = self.labels.reshape(-1)[place], self.token_weights.reshape(-1)[place]
        return torch.where(valid, labels.to(given), _IGNORED), weights.to(given.device)

    def keep(self, found: dict[str, Tensor]) -> None:
        """Results per token, in the shape of the labels where there is one for each."""
        if self.results:
            return
        for name, value in found.items():
            fits = value.numel() == self.labels.numel()
            self.results[name] = value.view(self.labels.shape) if fits else value


class Origin:
    """One call of an output layer: its weight and what autocast_dtype() was."""

    def __init__(self, forward: Forward, weight: Tensor, autocast: torch.dtype | None) -> None:
        forward.calls += 1
        self.forward = forward
        self.weight = weight
        self.autocast = autocast
        self.has_loss = False

    def reaches_loss(self) -> None:
        """Count the loss, the first time."""
        if not self.has_loss:
            self.has_loss = True
            self.forward.losses += 1


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The dtype autocast runs a linear layer in on the tensor's device, None if it is off."""
    device = tensor.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def _refused(operator: str) -> Callable[..., Any]:
    def refuse(self: DeferredLogits, *args: Any) -> Any:
        raise self._error(f"the operator {operator}")

    return refuse


class DeferredLogits:
    """Stands for `c * tanh(scale * (hidden @ weight.T + bias))`, or that without the tanh.

    With a `head`, for `c * tanh(scale * (head(hidden) + bias))`; `normal`: for log_softmax of it.
    Not a Tensor: whatever is not defined here has no meaning by accident. Plain Python, so that
    torch.compile traces it away.
    """

    def __init__(
        self,
        origin: Origin,
        hidden: Tensor,
        dtype: torch.dtype,
        scale: float = 1.0,
        cap: float | None = None,
        bias: Tensor | None = None,
        head: Head | None = None,
        normal: bool = False,
    ) -> None:
        self._origin = origin
        self._hidden = hidden
        self._bias = bias
        self._head = head
        self._normal = normal
        self._dtype = dtype
        self._scale = scale
        self._cap = cap

    def _like(self, **changed: Any) -> DeferredLogits:
        """These, but for what has changed."""
        own = {
            "origin": self._origin, "hidden": self._hidden, "dtype": self._dtype,
            "scale": self._scale, "cap": self._cap, "bias": self._bias, "head": self._head,
            "normal": self._normal,
        }  # fmt: skip
        return DeferredLogits(**{**own, **changed})

    def through(self, head: Head) -> DeferredLogits:
        """What a function makes of the hidden states, in the place of the logits so far."""
        return DeferredLogits(self._origin, self._hidden, self._dtype, head=head)

    def formed(self) -> Tensor:
        """The logits after all, as the model would have made them."""
        return self._of(self._hidden)

    def _of(self, hidden: Tensor) -> Tensor:
        if self._head is None:
            z = F.linear(hidden, self._origin.weight, self._bias)
        else:
            z = self._head(hidden)
            z = z if self._bias is None else z + self._bias
        z = z if self._scale == 1 else z * self._scale
        z = z if self._cap is None else torch.tanh(z) * self._cap
        z = z.to(self._dtype)
        return z.log_softmax(-1) if self._normal else z

    def evaluate(self, target: Tensor, names: tuple[str, ...], **options: Any) -> dict[str, Tensor]:
        """The results of `linear_cross_entropy` that have these names, of logits (N, V)."""
        run = self._origin.forward
        options |= {"returns": names, "memory_budget": run.options.memory_budget}
        if self._head is not None:
            form = self._like(normal=False)._of
            found = head_cross_entropy(form, self.shape[-1], self._hidden, target, **options)
            return dict(zip(names, found, strict=True))
        scale = self._scale
        if self._cap is not None:
            scale *= self._cap  # c * tanh(s * x) is the cap c of (s * c) * x
        found = linear_cross_entropy(
            self._hidden, self._origin.weight, target, linear_bias=self._bias, softcap=self._cap,
            logit_scale=scale, max_valid=run.max_valid, **options,
        )  # fmt: skip
        return dict(zip(names, found if isinstance(found, tuple) else (found,), strict=True))

    def mean(self) -> Tensor:
        """The mean of each token's logits over the classes, (N,) of (N, V), without a gradient."""
        dtype = torch.promote_types(self._dtype, torch.float32)
        hidden, weight, bias = self._hidden.detach(), self._origin.weight.detach(), self._bias
        with torch.no_grad():
            if self._head is None and self._cap is None:
                mean = hidden.to(dtype) @ weight.mean(0, dtype=dtype)
                mean = mean if bias is None else mean + bias.mean(dtype=dtype)
                return mean * self._scale
            budget = self._origin.forward.options.memory_budget
            rows = piece_rows(len(hidden), len(weight), weight.element_size(), budget)
            return torch.cat([self._of(h).to(dtype).mean(-1) for h in hidden.split(rows)])

    def _error(self, what: str) -> Refused:
        return Refused(
            f"patch_causal_lm: {self._origin.forward.model} uses {what} on its logits, which "
            "linear_cross_entropy cannot repeat without them; expected scaling by numbers, tanh "
            "and torch.nn.functional.cross_entropy. storage_ops.unpatch_causal_lm(model) gives "
            "the model its own loss back"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # probed by Python itself, which expects this error
            raise AttributeError(name)
        raise self._error(f"the attribute {name!r}")

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Stand in for the tensor in `torch.tanh(logits)` and in the loss itself."""
        kwargs = kwargs or {}
        if func is torch.tanh:
            return args[0].tanh()
        if func in (torch.mul, Tensor.mul, Tensor.__rmul__) and len(args) == 2 and not kwargs:
            left, right = args
            return left * right if isinstance(left, cls) else right * left
        if func is F.log_softmax:
            given = dict(zip(("dim", "_stacklevel", "dtype"), args[1:], strict=False)) | kwargs
            if given.get("dim") is not None:
                return args[0].log_softmax(given["dim"], given.get("dtype"))
        if func is F.cross_entropy:
            return _cross_entropy(*args, **kwargs)
        if func is F.nll_loss and isinstance(args[0], cls) and args[0]._normal:
            return _cross_entropy(*args, **kwargs)
        found = [a for a in (*args, *kwargs.values()) if isinstance(a, cls)]
        name = getattr(func, "__name__", repr(func))
        if not found:  # inside a list, as in torch.stack
            raise Refused(f"patch_causal_lm: {name} of logits that are not computed")
        raise found[0]._error(f"the function {name!r}")

    @property
    def shape(self) -> torch.Size:
        """That of the logits."""
        return torch.Size((*self._hidden.shape[:-1], self._origin.weight.shape[0]))

    @property
    def ndim(self) -> int:
        """That of the logits."""
        return self._hidden.ndim

    @property
    def device(self) -> torch.device:
        """That of the logits."""
        return self._hidden.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the logits would have by now; the arithmetic is the loss's own."""
        return self._dtype

    def dim(self) -> int:
        """The number of dimensions."""
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        """The shape, or one size of it."""
        return self.shape if dim is None else self.shape[dim]

    def float(self) -> DeferredLogits:
        """As `to(torch.float32)`."""
        return self.to(torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> DeferredLogits:
        """Another dtype; the device must be the one the logits are on."""
        dtype = self._dtype
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.dtype):
                dtype = value
            elif not isinstance(value, bool) and value != self.device and value != str(self.device):
                raise self._error(f"to({value!r})")
        return self._like(dtype=dtype)

    def contiguous(self) -> DeferredLogits:
        """Itself."""
        return self

    def is_contiguous(self) -> bool:
        """Yes; a model that asks would copy them."""
        return True

    def transpose(self, dim0: int, dim1: int) -> DeferredLogits:
        """Two dimensions of the tokens exchanged."""
        if self.ndim - 1 in (dim0 % self.ndim, dim1 % self.ndim):
            raise self._error(f"transpose({dim0}, {dim1})")
        return self._like(hidden=self._hidden.transpose(dim0 % self.ndim, dim1 % self.ndim))

    def log_softmax(self, dim: int, dtype: torch.dtype | None = None) -> DeferredLogits:
        """The log-probabilities; only the loss of them can be computed."""
        if dim % self.ndim != self.ndim - 1:
            raise self._error(f"log_softmax in dimension {dim}")
        return self._like(normal=True, dtype=dtype or self._dtype)

    def view(self, *shape: Any) -> DeferredLogits:
        """Another shape of the tokens; the vocabulary stays the last dimension."""
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if sizes[-1] != self.shape[-1]:
            raise self._error(f"view{sizes}, which breaks up its {self.shape[-1]} classes,")
        hidden = self._hidden.reshape(*sizes[:-1], self._hidden.shape[-1])
        return self._like(hidden=hidden)

    reshape = view

    def __getitem__(self, index: Any) -> DeferredLogits:
        """A part of the tokens, such as `logits[..., :-1, :]` or `logits[:, 0]`."""
        items = index if isinstance(index, tuple) else (index,)
        if not all(item is Ellipsis or type(item) in (slice, int) for item in items):
            raise self._error(f"the index {index}")
        if any(item is Ellipsis for item in items) or len(items) == self.ndim:
            last = items[-1]
            if last != slice(None):
                raise self._error(f"the index {index}")
        hidden = self._hidden[index]
        return self._like(hidden=hidden)

    def _is_of_classes(self, other: Tensor) -> bool:
        """Whether it has one number, or one for each class."""
        return other.numel() == 1 or other.numel() == other.shape[-1] == self.shape[-1]

    def _times(self, factor: Any, inverse: bool) -> DeferredLogits:
        what = "division" if inverse else "multiplication"
        if self._normal:
            raise self._error(f"{what} after log_softmax")
        if isinstance(factor, Tensor) and self._is_of_classes(factor):
            by, dtype = factor.reshape(-1), self._dtype
            if factor.dim():
                dtype = torch.promote_types(dtype, factor.dtype)
            made = self.through(lambda x: self._of(x) / by if inverse else self._of(x) * by)
            return made._like(dtype=dtype)
        if not isinstance(factor, (int, float)):
            raise self._error(f"{what} by a {type(factor).__name__}")
        scale, cap = self._scale, self._cap
        if cap is not None:
            cap = cap / factor if inverse else cap * factor
        else:
            scale = scale / factor if inverse else scale * factor
        return self._like(scale=scale, cap=cap)

    def __mul__(self, factor: Any) -> DeferredLogits:
        return self._times(factor, inverse=False)

    __rmul__ = __mul__

    def __truediv__(self, factor: Any) -> DeferredLogits:
        return self._times(factor, inverse=True)

    def __add__(self, other: Any) -> DeferredLogits:
        """With a number for each class that is a bias, such as `final_logits_bias`."""
        bare = self._scale == 1 and self._cap is None and not self._normal
        if not bare or not isinstance(other, Tensor) or other.numel() != self.shape[-1]:
            raise self._error("the operator +")
        if not self._is_of_classes(other):
            raise self._error("the operator +")
        bias = other.reshape(-1).to(self._hidden.dtype)
        return self._like(bias=bias if self._bias is None else self._bias + bias)

    __radd__ = __add__
    __sub__ = __rsub__ = _refused("-")
    __neg__ = _refused("-")
    __matmul__ = __rmatmul__ = _refused("@")
    __rtruediv__ = _refused("/")
    __pow__ = __rpow__ = _refused("**")
    __lt__ = __gt__ = __le__ = __ge__ = _refused("<")
    __eq__ = __ne__ = _refused("==")
    __hash__ = object.__hash__
    __setitem__ = _refused("[]=")
    __iter__ = _refused("iter")

    def tanh(self) -> DeferredLogits:
        """Of what was recorded so far; what multiplies it from now on is the cap."""
        if self._cap is not None or self._normal:
            raise self._error("a second tanh" if self._cap is not None else "tanh of log_softmax")
        return self._like(cap=1.0)


def _cross_entropy(
    logits: DeferredLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`F.cross_entropy` without the logits; called with its arguments."""
    origin = logits._origin
    if size_average is not None or reduce is not None:
        raise logits._error("size_average or reduce")
    if logits.ndim > 2:  # the classes would be dimension 1
        raise logits._error(f"cross_entropy in {logits.ndim} dimensions")
    if autocast_dtype(logits._hidden) != origin.autocast:
        raise logits._error("another autocast in the loss than in the output layer")
    origin.reaches_loss()
    run = origin.forward
    options, smoothing = run.options, run.options.label_smoothing or label_smoothing
    if run.token_weights is not None and ignore_index != _IGNORED:
        raise logits._error(f"an ignore_index of {ignore_index} with token_weights")
    target, token_weight = run.targets_of(target)
    logits = logits if run.temperature == 1 else logits / run.temperature
    names = tuple(dict.fromkeys(("loss", *options.returns)))
    found = logits.evaluate(
        target, names, weight=weight, reduction=reduction, ignore_index=ignore_index,
        label_smoothing=smoothing, token_weight=token_weight,
    )  # fmt: skip
    others = {name: function(logits, target) for name, function in run.others.items()}
    loss = found.pop("loss")
    run.keep(found | others)
    # A model that casts float64 logits to float32 has a float32 loss; one in 16 bits keeps the
    # float32 that the loss was computed in.
    return loss.to(torch.promote_types(logits.dtype, torch.float32))
