"""Logits that are never computed: what is done to them is recorded and left to the loss.

A model turns hidden states into logits with a linear layer, may scale and cap them, and hands them
to a cross-entropy, or returns them to a caller who does. `DeferredLogits` goes through that code in
place of the tensor. It takes only what `linear_cross_entropy` can repeat, so code that does
anything else gets an error, not another loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import register_pytree_node

from storage_ops.integrations.deferred_forward import (
    IGNORED,
    Origin,
    Refused,
)
from storage_ops.integrations.head_loss import head_cross_entropy, piece_rows
from storage_ops.loss.api import linear_cross_entropy

Head = Callable[[Tensor], Tensor]  # from hidden states (..., D) to logits (..., V), token by token

_NO_CLASS = torch.iinfo(torch.int64).min  # an ignore_index that ignores nothing


def _refused(operator: str) -> Callable[..., Any]:
    def refuse(self: DeferredLogits, *args: Any) -> Any:
        raise self._error(f"the operator {operator}")

    return refuse


@dataclasses.dataclass(eq=False, repr=False)
class DeferredLogits:
    """Stands for `cap * tanh(scale * (hidden @ weight.T + bias))`, or that without the tanh.

    With a `head`, for `cap * tanh(scale * (head(hidden) + bias))`; `normal`: for log_softmax of it,
    and `negative` for minus that. Not a Tensor: whatever is not defined here has no meaning by
    accident. Plain Python, so that torch.compile traces it away. A dataclass and a node of pytrees
    with one leaf, so that DDP and FSDP find the tensor that the loss will be made of.
    """

    origin: Origin
    hidden: Tensor
    dtype: torch.dtype  # that the logits would have by now; the arithmetic is the loss's own
    scale: float = 1.0
    cap: float | None = None
    bias: Tensor | None = None
    head: Head | None = None
    normal: bool = False
    negative: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.hidden, Tensor) and self.hidden.dtype != self.origin.dtype:
            # FSDP casts what a model returns: that means the logits.
            self.dtype, self.hidden = self.hidden.dtype, self.hidden.to(self.origin.dtype)
        self._scores_of: dict[bool, dict[str, Tensor]] = {}  # by whether they have gradients
        self._row_of: tuple[DeferredLogits, Any] | None = None

    def _like(self, **changed: Any) -> DeferredLogits:
        """These, but for what has changed."""
        return dataclasses.replace(self, **changed)

    def through(self, head: Head) -> DeferredLogits:
        """What a function makes of the hidden states, in the place of the logits so far."""
        return DeferredLogits(self.origin, self.hidden, self.dtype, head=head)

    def formed(self) -> Tensor:
        """The logits after all, a tensor, as the model would have made them."""
        formed: Tensor = self.origin.use(self._of, self.hidden)
        return formed

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
        """The results of `linear_cross_entropy` that have these names, of logits (N, V)."""
        run = self.origin.forward
        options = {
            "weight": None, "token_weight": None, "reduction": "none", "ignore_index": IGNORED,
            "label_smoothing": 0.0, **options, "returns": names,
            "memory_budget": run.options.memory_budget,
        }  # fmt: skip

        def results(hidden: Tensor) -> tuple[Tensor, ...]:
            if self.head is not None:
                form = self._like(normal=False, negative=False)._of
                return head_cross_entropy(form, self.shape[-1], hidden, target, **options)
            scale, cap = self.scale, self.cap
            if cap is not None:
                scale, cap = scale * cap, abs(cap)  # c * tanh(s * x) is the cap |c| of (s * c) * x
            found = linear_cross_entropy(
                hidden, self.origin.weight, target, linear_bias=self.bias, softcap=cap,
                logit_scale=scale, max_valid=run.max_valid, **options,
            )  # fmt: skip
            return found if isinstance(found, tuple) else (found,)

        return dict(zip(names, self.origin.use(results, self.hidden), strict=True))

    def _scores(self, target: Tensor | None = None) -> dict[str, Tensor]:
        """Of each token nll, lse and "loss", the mean of lse - z over the classes.

        All are of one call. What does not depend on the target is kept for who asks without one,
        such as a label smoothing that sums the log-probabilities of which it has gathered some.
        """
        with_gradients = torch.is_grad_enabled()
        if target is None and with_gradients in self._scores_of:
            return self._scores_of[with_gradients]
        tokens = self.shape[:-1]
        if target is None:
            target = torch.zeros(tokens, dtype=torch.long, device=self.device)
        flat = self._like(hidden=self.hidden.reshape(-1, self.hidden.shape[-1]))
        found = flat.evaluate(
            target.reshape(-1), ("loss", "nll", "lse"), ignore_index=_NO_CLASS, label_smoothing=1.0
        )
        self._scores_of[with_gradients] = found = {k: v.view(tokens) for k, v in found.items()}
        return found

    def class_means(self) -> Tensor:
        """The mean of each token's logits over the classes, (N,) of (N, V), without a gradient."""
        dtype = torch.promote_types(self.dtype, torch.float32)

        def means(hidden: Tensor) -> Tensor:
            weight, bias = self.origin.weight, self.bias
            if self.head is None and self.cap is None:
                mean = hidden.to(dtype) @ weight.mean(0, dtype=dtype)
                mean = mean if bias is None else mean + bias.mean(dtype=dtype)
                return mean * self.scale
            budget = self.origin.forward.options.memory_budget
            rows = piece_rows(len(hidden), len(weight), weight.element_size(), budget)
            return torch.cat([self._of(h).to(dtype).mean(-1) for h in hidden.split(rows)])

        with torch.no_grad():
            found: Tensor = self.origin.use(means, self.hidden.detach())
        return found

    def _error(self, what: str) -> Refused:
        run = self.origin.forward
        if run.labels is None:
            return Refused(
                f"patch_causal_lm: {what} is used on the deferred logits of {run.model}, which "
                "linear_cross_entropy cannot repeat without them; expected scaling by numbers, "
                "torch.nn.functional.cross_entropy, or log_softmax or logsumexp over the classes "
                "and gather of a class for each token. formed() of them is the tensor, and "
                'patch_causal_lm(model, logits="eval") does not defer it'
            )
        return Refused(
            f"patch_causal_lm: {run.model} uses {what} on its logits, which "
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
        if func in (torch.mul, Tensor.mul, Tensor.__rmul__) and len(args) == 2 and not kwargs:
            left, right = args
            return left * right if isinstance(left, cls) else right * left
        logits, *rest = args or (kwargs.pop("input", None),)
        if isinstance(logits, cls):
            if func in _METHODS:
                return getattr(logits, func.__name__)(*rest, **kwargs)
            if func is F.log_softmax:
                given = dict(zip(("dim", "_stacklevel", "dtype"), rest, strict=False)) | kwargs
                if given.get("dim") is not None:
                    return logits.log_softmax(given["dim"], given.get("dtype"))
            if func is F.cross_entropy or (func is F.nll_loss and logits.normal):
                return _cross_entropy(logits, *rest, **kwargs)
        found = [a for a in (*args, *kwargs.values()) if isinstance(a, cls)]
        name = getattr(func, "__name__", repr(func))
        if not found:  # inside a list, as in torch.stack
            raise Refused(f"patch_causal_lm: {name} of logits that are not computed")
        raise found[0]._error(f"the function {name!r}")

    @property
    def shape(self) -> torch.Size:
        """That of the logits."""
        return torch.Size((*self.hidden.shape[:-1], self.origin.classes))

    @property
    def ndim(self) -> int:
        """That of the logits."""
        return self.hidden.ndim

    @property
    def device(self) -> torch.device:
        """That of the logits."""
        return self.hidden.device

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
        dtype = self.dtype
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
        return self._like(hidden=self.hidden.transpose(dim0 % self.ndim, dim1 % self.ndim))

    def log_softmax(self, dim: int, dtype: torch.dtype | None = None) -> DeferredLogits:
        """The log-probabilities."""
        self._over_classes(f"log_softmax in dimension {dim}", dim)
        if self.negative:
            raise self._error("log_softmax of negative log-probabilities")
        return self._like(normal=True, dtype=dtype or self.dtype)

    def _over_classes(self, what: str, dim: Any) -> None:
        if not isinstance(dim, int) or dim % self.ndim != self.ndim - 1:
            raise self._error(what)

    def gather(self, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
        """A class of each token, (..., 1), in float32: logits, or log-probabilities."""
        self._over_classes(f"gather in dimension {dim}", dim)
        if self.origin.forward.token_weights is not None:
            raise self._error("gather with token_weights")
        if index.shape != (*self.shape[:-1], 1):
            raise self._error(
                f"gather of {tuple(index.shape)} where one class of each token is "
                f"{(*self.shape[:-1], 1)}"
            )
        found = self._scores(index)
        if not self.normal:
            return (found["lse"] - found["nll"]).unsqueeze(-1)
        return (found["nll"] * (1 if self.negative else -1)).unsqueeze(-1)

    def sum(self, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        """The sum of log-probabilities over the classes, in float32."""
        self._over_classes(f"a sum over {dim}", dim)
        if not self.normal:
            raise self._error("a sum of logits")
        classes = self.shape[-1]
        total = self._scores()["loss"] * (classes if self.negative else -classes)
        total = total if dtype is None else total.to(dtype)
        return total.unsqueeze(-1) if keepdim else total

    def mean(self, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        """The mean of log-probabilities over the classes, in float32."""
        return self.sum(dim, keepdim, dtype=dtype) / self.shape[-1]

    def logsumexp(self, dim: Any, keepdim: bool = False) -> Tensor:
        """Of logits over the classes, in float32."""
        self._over_classes(f"logsumexp in dimension {dim}", dim)
        if self.normal:
            raise self._error("logsumexp of log_softmax")
        whole, row = self._row_of or (self, ...)
        lse = whole._scores()["lse"][row].clone()  # what is kept is not to be written into
        return lse.unsqueeze(-1) if keepdim else lse

    def argmax(self, dim: Any = None, keepdim: bool = False) -> Tensor:
        """The most probable class of each token."""
        self._over_classes(f"argmax in dimension {dim}", dim)
        if self.negative:
            raise self._error("argmax of negative log-probabilities")
        tokens = self.shape[:-1]
        target = torch.zeros(tokens.numel(), dtype=torch.long, device=self.device)
        with torch.no_grad():
            flat = self._like(hidden=self.hidden.reshape(-1, self.hidden.shape[-1]))
            best = flat.evaluate(target, ("argmax",))["argmax"].view(tokens)
        return best.unsqueeze(-1) if keepdim else best

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> DeferredLogits:
        """Dimensions of the tokens as one."""
        start, end = start_dim % self.ndim, end_dim % self.ndim
        if start != end == self.ndim - 1:
            raise self._error(f"flatten({start_dim}, {end_dim})")
        return self._like(hidden=self.hidden.flatten(start, end))

    def view(self, *shape: Any) -> DeferredLogits:
        """Another shape of the tokens; the vocabulary stays the last dimension."""
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if sizes[-1] != self.shape[-1]:
            raise self._error(f"view{sizes}, which breaks up its {self.shape[-1]} classes,")
        hidden = self.hidden.reshape(*sizes[:-1], self.hidden.shape[-1])
        return self._like(hidden=hidden)

    reshape = view

    def __getitem__(self, index: Any) -> DeferredLogits:
        """Some of the tokens, such as `logits[..., :-1, :]`, `logits[:, 0]` or `logits[mask]`."""
        if isinstance(index, Tensor) and index.dtype is torch.bool and index.ndim < self.ndim:
            return self._like(hidden=self.hidden[index])
        items = index if isinstance(index, tuple) else (index,)
        if not all(item is Ellipsis or type(item) in (slice, int) for item in items):
            raise self._error(f"the index {index}")
        if any(item is Ellipsis for item in items) or len(items) == self.ndim:
            last = items[-1]
            if last != slice(None):
                raise self._error(f"the index {index}")
        hidden = self.hidden[index]
        return self._like(hidden=hidden)

    def _is_of_classes(self, other: Tensor) -> bool:
        """Whether it has one number, or one for each class."""
        return other.numel() == 1 or other.numel() == other.shape[-1] == self.shape[-1]

    def _times(self, factor: Any, inverse: bool) -> DeferredLogits:
        what = "division" if inverse else "multiplication"
        if self.normal:
            raise self._error(f"{what} after log_softmax")
        if isinstance(factor, Tensor) and self._is_of_classes(factor):
            by, dtype = factor.reshape(-1), self.dtype
            if factor.dim():
                dtype = torch.promote_types(dtype, factor.dtype)
            made = self.through(lambda x: self._of(x) / by if inverse else self._of(x) * by)
            return made._like(dtype=dtype)
        if not isinstance(factor, (int, float)):
            raise self._error(f"{what} by a {type(factor).__name__}")
        scale, cap = self.scale, self.cap
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
    # Without these, Python would make a new object where another name is for the same tensor.
    __iadd__ = _refused("+=")
    __isub__ = _refused("-=")
    __imul__ = _refused("*=")
    __itruediv__ = _refused("/=")
    __lt__ = __gt__ = __le__ = __ge__ = _refused("<")
    __eq__ = __ne__ = _refused("==")
    __hash__ = object.__hash__
    __setitem__ = _refused("[]=")

    def neg(self) -> DeferredLogits:
        """Minus them."""
        if self.normal:
            return self._like(negative=not self.negative)
        return self._times(-1, inverse=False)

    __neg__ = neg

    def __iter__(self) -> Iterator[DeferredLogits]:
        """The parts of the first dimension of tokens; what was found of all is found of them."""
        if self.ndim < 2:
            raise self._error("the operator iter")
        for row in range(self.shape[0]):
            part = self[row]
            part._row_of = self, row
            yield part

    def tanh(self) -> DeferredLogits:
        """Of what was recorded so far; what multiplies it from now on is the cap."""
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
    """`F.cross_entropy` without the logits; called with its arguments."""
    origin = logits.origin
    if size_average is not None or reduce is not None:
        raise logits._error("size_average or reduce")
    if logits.ndim > 2:  # the classes would be dimension 1
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


register_pytree_node(
    DeferredLogits, lambda z: ([z.hidden], z), lambda leaves, z: z._like(hidden=next(iter(leaves)))
)

# Functions of torch that are its methods.
_METHODS = frozenset(
    (torch.argmax, torch.flatten, torch.gather, torch.log_softmax, torch.logsumexp, torch.mean,
     torch.neg, torch.sum, torch.tanh)
)  # fmt: skip
