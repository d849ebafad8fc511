"""Logits that are never computed. They record operations for the loss.

A model turns hidden states into logits by a linear layer, and may scale and cap them. Then it
computes a cross-entropy, or returns the logits to a caller that does. `DeferredLogits` replaces the
logits in that code. It supports only operations that `linear_cross_entropy` can repeat. Any other
operation is an error, instead of another loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import register_pytree_node

from storage_ops.integrations.deferred_entropy import Probabilities
from storage_ops.integrations.deferred_forward import (
    IGNORED,
    Origin,
    Refused,
)
from storage_ops.integrations.deferred_tokens import Tokens
from storage_ops.integrations.head_loss import head_cross_entropy, piece_rows
from storage_ops.loss.api import linear_cross_entropy

Head = Callable[[Tensor], Tensor]  # maps hidden states (..., D) to logits (..., V), token by token

_NO_CLASS = torch.iinfo(torch.int64).min  # an ignore_index that ignores no token


def _refused(operator: str) -> Callable[..., Any]:
    def refuse(self: DeferredLogits, *args: object) -> Any:
        raise self._error(f"the operator {operator}")

    return refuse


@dataclasses.dataclass(eq=False, repr=False)
class DeferredLogits(Tokens):
    """Represents `cap * tanh(scale * (hidden @ weight.T + bias))`, or the same without tanh.

    With a `head` it represents `cap * tanh(scale * (head(hidden) + bias))`. With `normal` it is the
    log_softmax of these logits, and with `negative` the negated log_softmax. If `detached`, results
    have no gradients. It is not a Tensor, so undefined operations always raise an error. It is
    plain Python, which torch.compile removes from the graph. It is a dataclass and a pytree node
    with one leaf, so that DDP and FSDP find the tensor that the loss depends on.
    """

    origin: Origin
    hidden: Tensor
    dtype: torch.dtype  # the current dtype of the logits; the loss computes in its own dtype
    scale: float = 1.0
    cap: float | None = None
    bias: Tensor | None = None
    head: Head | None = None
    normal: bool = False
    negative: bool = False
    detached: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.hidden, Tensor) and self.hidden.dtype != self.origin.dtype:
            # FSDP casts the outputs of a model, which means the logits.
            self.dtype, self.hidden = self.hidden.dtype, self.hidden.to(self.origin.dtype)
        # The key says whether they have gradients.
        self._scores_of: dict[bool, dict[str, Tensor]] = {}
        self._row_of: tuple[DeferredLogits, Any] | None = None

    def _like(self, **changed: Any) -> DeferredLogits:
        """Return these logits with some attributes changed."""
        return dataclasses.replace(self, **changed)

    def through(self, head: Head) -> DeferredLogits:
        """Return logits that a function computes from the hidden states, instead of these."""
        return DeferredLogits(
            self.origin, self.hidden, self.dtype, head=head, detached=self.detached
        )

    def formed(self) -> Tensor:
        """Return the logits as a tensor, as the model would have computed them."""
        with self._gradients():
            formed: Tensor = self.origin.use(self._of, self.hidden)
        return formed

    def _gradients(self) -> Any:
        return torch.set_grad_enabled(torch.is_grad_enabled() and not self.detached)

    def _of(self, hidden: Tensor) -> Tensor:
        if self.head is None:
            z = F.linear(hidden, self.origin.weight, self.bias)
        else:
            z = self.head(hidden)
            z = z if self.bias is None else z + self.bias
        z = z if self.scale == 1 else z * self.scale
        z = z if self.cap is None else torch.tanh(z) * self.cap
        z = z.to(self.dtype)
        z = z.log_softmax(-1) if self.normal else z
        return -z if self.negative else z

    def evaluate(self, target: Tensor, names: tuple[str, ...], **options: Any) -> dict[str, Tensor]:
        """Return the results of `linear_cross_entropy` with these names, for logits (N, V)."""
        run = self.origin.forward
        options = {
            "weight": None, "token_weight": None, "reduction": "none", "ignore_index": IGNORED,
            "label_smoothing": 0.0, **options, "returns": names,
            "memory_budget": run.options.memory_budget,
        }  # fmt: skip

        is_bounded = not options["label_smoothing"] and "entropy" not in names
        tolerance = run.options.gradient_tolerance if is_bounded else 0.0

        def results(hidden: Tensor) -> tuple[Tensor, ...]:
            if self.head is not None:
                form = self._like(normal=False, negative=False)._of
                return head_cross_entropy(form, self.shape[-1], hidden, target, **options)
            scale, cap = self.scale, self.cap
            if cap is not None:
                scale, cap = scale * cap, abs(cap)  # c * tanh(s * x) is the cap |c| of (s * c) * x
            evaluated = linear_cross_entropy(
                hidden, self.origin.weight, target, linear_bias=self.bias, softcap=cap,
                logit_scale=scale, max_valid=run.max_valid, gradient_tolerance=tolerance,
                **options,
            )  # fmt: skip
            return evaluated if isinstance(evaluated, tuple) else (evaluated,)

        with self._gradients():
            return dict(zip(names, self.origin.use(results, self.hidden), strict=True))

    def _scores(self, target: Tensor | None = None) -> dict[str, Tensor]:
        """Return nll, lse and "loss" of each token. "loss" is the mean of lse - z over classes.

        One call computes all of them. Results that do not depend on the target are stored for calls
        without one. An example is label smoothing, which gathers log-probabilities and then sums
        them.
        """
        with_gradients = torch.is_grad_enabled() and not self.detached
        if target is None and with_gradients in self._scores_of:
            return self._scores_of[with_gradients]
        tokens = self.shape[:-1]
        if target is None:
            target = torch.zeros(tokens, dtype=torch.long, device=self.device)
        flat = self._like(hidden=self.hidden.reshape(-1, self.hidden.shape[-1]))
        scores = flat.evaluate(
            target.reshape(-1), ("loss", "nll", "lse"), ignore_index=_NO_CLASS, label_smoothing=1.0
        )
        self._scores_of[with_gradients] = scores = {k: v.view(tokens) for k, v in scores.items()}
        return scores

    def class_means(self) -> Tensor:
        """Return the mean of each token's logits over the classes, (...,), without a gradient."""
        dtype = torch.promote_types(self.dtype, torch.float32)

        def means(hidden: Tensor) -> Tensor:
            weight, bias = self.origin.weight, self.bias
            if self.head is None and self.cap is None:
                mean = hidden.to(dtype) @ weight.mean(0, dtype=dtype)
                mean = mean if bias is None else mean + bias.mean(dtype=dtype)
                return mean * self.scale
            budget = self.origin.forward.options.memory_budget
            rows = piece_rows(hidden, len(weight), weight.element_size(), budget)
            return torch.cat([self._of(h).to(dtype).mean(-1) for h in hidden.split(rows)])

        with torch.no_grad():
            flat = self.hidden.detach().reshape(-1, self.hidden.shape[-1])
            means_per_token: Tensor = self.origin.use(means, flat)
        return means_per_token.view(self.shape[:-1])

    def _error(self, operation: str) -> Refused:
        run = self.origin.forward
        if run.labels is None:
            divergence = (
                "For divergences of two models, as GKDTrainer of TRL computes them, call "
                "storage_ops.linear_kl_div, which takes hidden states. "
            )
            return Refused(
                f"patch_causal_lm: {operation} is used on the deferred logits of {run.model}, "
                "which linear_cross_entropy cannot repeat without them. Expected scaling by "
                "numbers, torch.nn.functional.cross_entropy, or log_softmax or logsumexp over the "
                f"classes and gather of a class for each token. {divergence * self.normal}Call "
                'formed() of them for the tensor, or patch_causal_lm(model, logits="eval"), which '
                "does not defer it."
            )
        return Refused(
            f"patch_causal_lm: {run.model} uses {operation} on its logits, which "
            "linear_cross_entropy cannot repeat without them. Expected scaling by numbers, tanh "
            "and torch.nn.functional.cross_entropy. Call storage_ops.unpatch_causal_lm(model) to "
            "give the model its own loss back."
        )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Replace the tensor in `torch.tanh(logits)` and in the loss itself."""
        kwargs = kwargs or {}
        if func in (torch.mul, Tensor.mul, Tensor.__rmul__) and len(args) == 2 and not kwargs:
            left, right = args
            return left * right if isinstance(left, cls) else right * left
        logits, *rest = args or (kwargs.pop("input", None),)
        if isinstance(logits, cls):
            if func in _METHODS:
                return getattr(logits, func.__name__)(*rest, **kwargs)
            if func is F.log_softmax:
                softmax_args = (
                    dict(zip(("dim", "_stacklevel", "dtype"), rest, strict=False)) | kwargs
                )
                if softmax_args.get("dim") is not None:
                    return logits.log_softmax(softmax_args["dim"], softmax_args.get("dtype"))
            if func is F.cross_entropy or (func is F.nll_loss and logits.normal):
                return _cross_entropy(logits, *rest, **kwargs)
        deferred_args = [a for a in (*args, *kwargs.values()) if isinstance(a, cls)]
        name = getattr(func, "__name__", repr(func))
        if not deferred_args:  # in a list, as in torch.stack
            raise Refused(
                f"patch_causal_lm: {name} gets a list with logits that are not computed. Call "
                "formed() of them first."
            )
        raise deferred_args[0]._error(f"the function {name!r}")

    def float(self) -> DeferredLogits:
        """Return the logits in float32."""
        return self.to(torch.float32)

    def to(self, *args: object, **kwargs: object) -> DeferredLogits:
        """Return the logits in another dtype. The device must not change."""
        dtype = self.dtype
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.dtype):
                dtype = value
            elif not isinstance(value, bool) and value != self.device and value != str(self.device):
                raise self._error(f"to({value!r})")
        return self._like(dtype=dtype)

    def log_softmax(self, dim: int, dtype: torch.dtype | None = None) -> DeferredLogits:
        """Return the log-probabilities."""
        self._over_classes(f"log_softmax in dimension {dim}", dim)
        if self.negative:
            raise self._error("log_softmax of negative log-probabilities")
        return self._like(normal=True, dtype=dtype or self.dtype)

    def _over_classes(self, what: str, dim: object) -> None:
        if not isinstance(dim, int) or dim % self.ndim != self.ndim - 1:
            raise self._error(what)

    def gather(self, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
        """Return one class of each token, (..., 1), in float32: logits, or log-probabilities."""
        self._over_classes(f"gather in dimension {dim}", dim)
        if self.origin.forward.token_weights is not None:
            raise self._error("gather with token_weights")
        if index.shape != (*self.shape[:-1], 1):
            raise self._error(
                f"gather of {tuple(index.shape)} where one class of each token is "
                f"{(*self.shape[:-1], 1)}"
            )
        scores = self._scores(index)
        if not self.normal:
            return (scores["lse"] - scores["nll"]).unsqueeze(-1)
        return (scores["nll"] * (1 if self.negative else -1)).unsqueeze(-1)

    def take_along_dim(self, indices: Tensor, dim: int | None = None) -> Tensor:
        """Return the result of `gather`."""
        if dim is None:
            raise self._error("take_along_dim without a dimension")
        return self.gather(dim, indices)

    def sum(
        self, dim: object = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return the sum of log-probabilities over the classes, in float32."""
        self._over_classes(f"a sum over {dim}", dim)
        if not self.normal:
            raise self._error("a sum of logits")
        classes = self.shape[-1]
        total = self._scores()["loss"] * (classes if self.negative else -classes)
        total = total if dtype is None else total.to(dtype)
        return total.unsqueeze(-1) if keepdim else total

    def mean(
        self, dim: object = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return the mean over the classes, in float32. For logits it has no gradient.

        Without a gradient, trainers can also log the mean of all logits.
        """
        if self.normal:
            return self.sum(dim, keepdim, dtype=dtype) / self.shape[-1]
        if torch.is_grad_enabled() and not self.detached:
            raise self._error("a mean of logits, with gradients,")
        if dim is None:
            return self.class_means().mean(dtype=dtype)
        self._over_classes(f"a mean over {dim}", dim)
        means = self.class_means() if dtype is None else self.class_means().to(dtype)
        return means.unsqueeze(-1) if keepdim else means

    def detach(self) -> DeferredLogits:
        """Return the same logits. Their results have no gradients."""
        return self._like(detached=True)

    def exp(self) -> Probabilities:
        """Return the probabilities, which support only the entropy."""
        if not self.normal or self.negative:
            raise self._error("exp of anything but log_softmax")
        return Probabilities(self)

    def entropy(self) -> Tensor:
        """Return the entropy of each token, (...,), in float32."""
        tokens = self.shape[:-1]
        target = torch.zeros(tokens.numel(), dtype=torch.long, device=self.device)
        flat = self._like(hidden=self.hidden.reshape(-1, self.hidden.shape[-1]))
        return flat.evaluate(target, ("entropy",))["entropy"].view(tokens)

    def logsumexp(self, dim: object, keepdim: bool = False) -> Tensor:
        """Return the logsumexp of logits over the classes, in float32."""
        self._over_classes(f"logsumexp in dimension {dim}", dim)
        if self.normal:
            raise self._error("logsumexp of log_softmax")
        whole, row = self._row_of or (self, ...)
        lse = whole._scores()["lse"][row].clone()  # callers must not write into the stored result
        return lse.unsqueeze(-1) if keepdim else lse

    def argmax(self, dim: object = None, keepdim: bool = False) -> Tensor:
        """Return the most probable class of each token."""
        self._over_classes(f"argmax in dimension {dim}", dim)
        if self.negative:
            raise self._error("argmax of negative log-probabilities")
        tokens = self.shape[:-1]
        target = torch.zeros(tokens.numel(), dtype=torch.long, device=self.device)
        with torch.no_grad():
            flat = self._like(hidden=self.hidden.reshape(-1, self.hidden.shape[-1]))
            best = flat.evaluate(target, ("argmax",))["argmax"].view(tokens)
        return best.unsqueeze(-1) if keepdim else best

    def _is_of_classes(self, other: Tensor) -> bool:
        """Return True if a tensor has one number, or one for each class."""
        return other.numel() == 1 or other.numel() == other.shape[-1] == self.shape[-1]

    def _times(self, factor: object, inverse: bool) -> DeferredLogits:
        operation = "division" if inverse else "multiplication"
        if self.normal:
            raise self._error(f"{operation} after log_softmax")
        if isinstance(factor, Tensor) and self._is_of_classes(factor):
            by, dtype = factor.reshape(-1), self.dtype
            if factor.dim():
                dtype = torch.promote_types(dtype, factor.dtype)
            scaled = self.through(lambda x: self._of(x) / by if inverse else self._of(x) * by)
            return scaled._like(dtype=dtype)
        if not isinstance(factor, (int, float)):
            raise self._error(f"{operation} by a {type(factor).__name__}")
        scale, cap = self.scale, self.cap
        if cap is not None:
            cap = cap / factor if inverse else cap * factor
        else:
            scale = scale / factor if inverse else scale * factor
        return self._like(scale=scale, cap=cap)

    def __mul__(self, factor: object) -> Any:
        if isinstance(factor, Probabilities):
            return factor * self
        return self._times(factor, inverse=False)

    __rmul__ = __mul__

    def __truediv__(self, factor: object) -> DeferredLogits:
        return self._times(factor, inverse=True)

    def __add__(self, other: object) -> DeferredLogits:
        """Add a number for each class, which is a bias such as `final_logits_bias`."""
        bare = self.scale == 1 and self.cap is None and not self.normal
        if not bare or not isinstance(other, Tensor) or other.numel() != self.shape[-1]:
            raise self._error("the operator +")
        if not self._is_of_classes(other):
            raise self._error("the operator +")
        bias = other.reshape(-1).to(self.hidden.dtype)
        return self._like(bias=bias if self.bias is None else self.bias + bias)

    __radd__ = __add__
    __sub__ = __rsub__ = _refused("-")
    __matmul__ = __rmatmul__ = _refused("@")
    __rtruediv__ = _refused("/")
    __pow__ = __rpow__ = _refused("**")
    # Without these, Python would create a new object, although other names refer to the same
    # tensor.
    __iadd__ = _refused("+=")
    __isub__ = _refused("-=")
    __imul__ = _refused("*=")
    __itruediv__ = _refused("/=")
    __lt__ = __gt__ = __le__ = __ge__ = _refused("<")
    __eq__ = __ne__ = _refused("==")
    __hash__ = object.__hash__
    __setitem__ = _refused("[]=")

    def neg(self) -> DeferredLogits:
        """Return the negated logits."""
        if self.normal:
            return self._like(negative=not self.negative)
        return self._times(-1, inverse=False)

    __neg__ = neg

    def tanh(self) -> DeferredLogits:
        """Return the tanh of the logits. A factor that follows is the cap."""
        if self.cap is not None or self.normal:
            raise self._error("a second tanh" if self.cap is not None else "tanh of log_softmax")
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
    """Return `F.cross_entropy` without the logits, from the same arguments."""
    origin = logits.origin
    if size_average is not None or reduce is not None:
        raise logits._error("size_average or reduce")
    if logits.ndim > 2:  # the classes would be in dimension 1
        raise logits._error(f"cross_entropy in {logits.ndim} dimensions")
    if logits.negative:
        raise logits._error("cross_entropy of negative log-probabilities")
    origin.reaches_loss()
    run = origin.forward
    options, smoothing = run.options, run.options.label_smoothing or label_smoothing
    if run.token_weights is not None and ignore_index != IGNORED:
        raise logits._error(f"an ignore_index of {ignore_index} with token_weights")
    target, token_weight = run.targets_of(target)
    logits = logits if run.temperature == 1 else logits / run.temperature
    names = tuple(dict.fromkeys(("loss", *options.returns)))
    results = logits.evaluate(
        target, names, weight=weight, reduction=reduction, ignore_index=ignore_index,
        label_smoothing=smoothing, token_weight=token_weight,
    )  # fmt: skip
    others = {name: function(logits, target) for name, function in run.others.items()}
    loss = results.pop("loss")
    run.keep(results | others)
    # If a model casts float64 logits to float32, the loss is float32. If it casts to 16 bits, the
    # loss stays float32.
    return loss.to(torch.promote_types(logits.dtype, torch.float32))


register_pytree_node(
    DeferredLogits, lambda z: ([z.hidden], z), lambda leaves, z: z._like(hidden=next(iter(leaves)))
)

# Functions of torch that are also methods.
_METHODS = frozenset(
    (torch.argmax, torch.chunk, torch.detach, torch.exp, torch.flatten, torch.gather,
     torch.log_softmax, torch.logsumexp, torch.mean, torch.neg, torch.split, torch.sum,
     torch.take_along_dim, torch.tanh)
)  # fmt: skip
