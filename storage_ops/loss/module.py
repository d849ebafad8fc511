"""Linear cross-entropy as a module."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, overload

import torch
from torch import Tensor, nn
from typing_extensions import TypeVar, Unpack

from storage_ops._subclass import runs
from storage_ops.loss import checks
from storage_ops.loss.api import linear_cross_entropy
from storage_ops.loss.call import RULES, ModuleOptions, Result, Several, TensorResult
from storage_ops.loss.engine import ranks

# The type of the result of a call. An overload without brackets has the default type.
T = TypeVar("T", default=Tensor)


_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"


_NAME = "LinearCrossEntropyLoss"


def _check_size(name: str, size: object) -> None:
    """Raise a TypeError or ValueError unless a size is a positive integer."""
    if isinstance(size, bool) or not isinstance(size, numbers.Integral):
        raise checks.wrong(TypeError, f"{name} is", repr(size), "an integer", _NAME)
    if size < 1:
        raise checks.wrong(ValueError, f"{name} is", size, "at least 1", _NAME)


@dataclass(frozen=True)
class _Group:
    """A process group by its name, which can be copied and pickled."""

    group_name: str


class LinearCrossEntropyLoss(nn.Module, Generic[T]):
    """A linear layer and the cross-entropy of its output, with no logits tensor in memory.

    The names, the parameters and the keys of the state dict are those of
    `torch.nn.LinearCrossEntropyLoss` (torch >= 2.13). The module stores a process group by its
    name. So copies use the same group, and an unpickled module uses the group of that name.

    Args:
        in_features: D.
        num_classes: V.
        out_features: d_1, ..., d_K of the K-dimensional loss.
        bias: whether the layer learns a bias.
        device, dtype: device and dtype of the parameters.
        weight: (V,) weights of the classes, a buffer.
        options: any other keyword of `storage_ops.linear_cross_entropy`, except linear_bias,
            token_weight and accumulate_into, which `forward` takes.

    Raises:
        TypeError: an option has an unknown name, or a value of another type.
        ValueError: a size is not positive, or an option has a wrong value.

    Example:
        >>> head = storage_ops.LinearCrossEntropyLoss(16, 100, label_smoothing=0.1)
        >>> head(torch.randn(2, 8, 16), torch.randint(100, (2, 8))).backward()
        >>> head.linear.weight.grad.shape
        torch.Size([100, 16])
    """

    @overload
    def __init__(
        self: LinearCrossEntropyLoss[Tensor],
        in_features: int, num_classes: int, bias: bool = False, *, out_features: Sequence[int] = (),
        device: Any = None, dtype: torch.dtype | None = None, weight: Tensor | None = None,
        returns: tuple[TensorResult] = ..., **options: Unpack[ModuleOptions],
    ) -> None: ...  # fmt: skip
    @overload
    def __init__(
        self: LinearCrossEntropyLoss[tuple[Tensor, Tensor]],
        in_features: int, num_classes: int, bias: bool = False, *, out_features: Sequence[int] = (),
        device: Any = None, dtype: torch.dtype | None = None, weight: Tensor | None = None,
        returns: tuple[Literal["topk"]], **options: Unpack[ModuleOptions],
    ) -> None: ...  # fmt: skip
    @overload
    def __init__(
        self: LinearCrossEntropyLoss[tuple[Tensor, Tensor]],
        in_features: int, num_classes: int, bias: bool = False, *, out_features: Sequence[int] = (),
        device: Any = None, dtype: torch.dtype | None = None, weight: Tensor | None = None,
        returns: tuple[TensorResult, TensorResult], **options: Unpack[ModuleOptions],
    ) -> None: ...  # fmt: skip
    @overload
    def __init__(
        self: LinearCrossEntropyLoss[tuple[Tensor, Tensor, Tensor]],
        in_features: int, num_classes: int, bias: bool = False, *, out_features: Sequence[int] = (),
        device: Any = None, dtype: torch.dtype | None = None, weight: Tensor | None = None,
        returns: tuple[TensorResult, TensorResult, TensorResult], **options: Unpack[ModuleOptions],
    ) -> None: ...  # fmt: skip
    @overload
    def __init__(
        self: LinearCrossEntropyLoss[tuple[Tensor, ...]],
        in_features: int, num_classes: int, bias: bool = False, *, out_features: Sequence[int] = (),
        device: Any = None, dtype: torch.dtype | None = None, weight: Tensor | None = None,
        returns: Several, **options: Unpack[ModuleOptions],
    ) -> None: ...  # fmt: skip
    @overload
    def __init__(
        self: LinearCrossEntropyLoss[Any],
        in_features: int, num_classes: int, bias: bool = False, *, out_features: Sequence[int] = (),
        device: Any = None, dtype: torch.dtype | None = None, weight: Tensor | None = None,
        returns: Sequence[Result], **options: Unpack[ModuleOptions],
    ) -> None: ...  # fmt: skip
    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = False,
        *,
        out_features: Sequence[int] = (),
        device: Any = None,
        dtype: torch.dtype | None = None,
        weight: Tensor | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        own = {"linear_bias", "token_weight", "accumulate_into", "weight"}
        known = set(linear_cross_entropy.__kwdefaults__ or ()) - own
        if not set(options) <= known:
            raise TypeError(
                f"LinearCrossEntropyLoss: the options {sorted(set(options) - known)} are unknown. "
                f"Expected some of {sorted(known)}."
            )
        if isinstance(out_features, str) or not isinstance(out_features, Sequence):
            rule = "a tuple of sizes"
            raise checks.wrong(TypeError, "out_features is", repr(out_features), rule, _NAME)
        sizes = [("in_features", in_features), ("num_classes", num_classes)]
        for name, size in (*sizes, *(("out_features", d) for d in out_features)):
            _check_size(name, size)
        if not isinstance(bias, bool):
            raise checks.wrong(TypeError, "bias is", repr(bias), "True or False", _NAME)
        checks.check_tensors(_NAME, {"weight": weight}, required=())
        checks.check_rules(_NAME, [rule for rule in RULES if rule.option in options], options)
        self.num_classes, self.out_features = num_classes, tuple(out_features)
        rows = math.prod(self.out_features, start=num_classes)
        self.linear = nn.Linear(in_features, rows, bias, device=device, dtype=dtype)
        self.weight: Tensor | None
        self.register_buffer("weight", weight)
        group = options.get("process_group")
        if hasattr(group, "group_name"):
            options["process_group"] = _Group(ranks.name_of(group))
        self.options = options

    @property
    def in_features(self) -> int:
        """The hidden size D."""
        return self.linear.in_features

    def forward(
        self,
        input: Tensor,
        target: Tensor,
        *,
        token_weight: Tensor | None = None,
        accumulate_into: Tensor | None = None,
    ) -> T:
        """Return the loss, or what `returns` names. See `storage_ops.linear_cross_entropy`.

        Raises:
            TypeError: `linear` is no plain `torch.nn.Linear` any more, for example because of a
                PEFT adapter; or it has hooks, which would not run, such as those of `fully_shard`.
        """
        self._check_linear()
        linear_weight, linear_bias = self.linear.weight, self.linear.bias
        if self.out_features:
            shape = (self.num_classes, *self.out_features)
            linear_weight = linear_weight.unflatten(0, shape)
            linear_bias = None if linear_bias is None else linear_bias.unflatten(0, shape)
        result: T = linear_cross_entropy(
            input,
            linear_weight,
            target,
            linear_bias=linear_bias,
            weight=self.weight,
            token_weight=token_weight,
            accumulate_into=accumulate_into,
            **self.options,
        )
        return result

    if TYPE_CHECKING:  # torch.nn.Module's own `__call__` returns Any

        def __call__(
            self,
            input: Tensor,
            target: Tensor,
            *,
            token_weight: Tensor | None = None,
            accumulate_into: Tensor | None = None,
        ) -> T:
            """Call `forward` and its hooks."""

    def _check_linear(self) -> None:
        """Raise a TypeError if the layer's forward is more than a product with weight and bias."""
        linear = self.linear
        plain = runs(linear, nn.Linear.forward)  # a checkpoint of the layer changes no value
        hooked = plain and any(getattr(linear, name) for name in _HOOKS)
        # Hooks of tensor parallelism are for DTensors, whose placements have the same information.
        # FSDP2 has DTensors, too, but its hooks gather the weight; a module of it has `unshard`.
        gathered = hasattr(linear, "unshard")
        if not plain or (hooked and (gathered or not hasattr(linear.weight, "device_mesh"))):
            kind = f"{type(linear).__module__}.{type(linear).__qualname__}"
            raise TypeError(
                f"LinearCrossEntropyLoss: `linear` is {kind}{' with hooks' * hooked}. Expected "
                "torch.nn.Linear with a forward of its own and no hooks, because the loss reads "
                "its weight and bias alone. Merge an adapter into the weight, or train the layer "
                "whole. Use torch.nn.utils.parametrizations instead of hooks. Call fully_shard "
                "with the whole loss."
            )

    def extra_repr(self) -> str:
        """Return the options of the module, for `repr`."""
        options = {**self.options}
        if self.out_features:
            options["out_features"] = self.out_features
        return ", ".join(f"{name}={value!r}" for name, value in options.items())
