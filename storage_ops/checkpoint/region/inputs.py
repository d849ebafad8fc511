"""Keep the arguments of a region as autograd keeps saved tensors, until its recompute."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import BuiltinFunctionType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from storage_ops import _library
from storage_ops.checkpoint.saved.matching import ORIGIN, origin_of
from storage_ops.checkpoint.saved.outputs import producer_of
from storage_ops.checkpoint.saved.saved import fail, stride_of
from storage_ops.foundation.values import is_leaf

_CONSUMERS = "storage_ops.checkpoint.discard.consumers"
_MODIFIED = "modified by an inplace operation"  # in torch's error


class _HoldInput(torch.autograd.Function):
    """Keeps an input of a region as the saved tensor of a node.

    So an enclosing saved-tensor hook (offload, another checkpoint) gets them like any other
    activation, and torch raises an error if one is modified in place before the backward.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, anchor: Tensor, tensors: list[Tensor]) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)


class Inputs:
    """The arguments of one call.

    A recompute gets the same tensor objects as the forward, with their attributes and history. If
    saved-tensor hooks around the region return another tensor, that gets the traits of the first.
    Containers are new ones, filled as they were at the forward.

    Attributes:
        tensors: the tensors among the arguments, until `forget`.
        plain: the leaves that are not tensors.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._again: list[tuple[Tensor, int]] = []  # a recompute's inputs, and how many hooks
        self._same: dict[int, tuple[Tensor, int]] = {}
        self._at: Sequence[int]
        self._native: Any = None if _native is None else _native.KeptInputs(args, kwargs)
        self._spec: Any = None
        self.plain: list[Any] = []
        if self._native is not None:
            self.tensors = [self._native.unpack(i) for i in range(len(self._native))]
            return
        flat, self._spec = _flatten(args, kwargs)
        self.tensors, self.plain, self._at = flat, [], range(len(flat))
        if self._spec is not None:
            self._at = [i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor)]
            self.tensors = [flat[i] for i in self._at]
            self.plain = [leaf for leaf in flat if not isinstance(leaf, Tensor)]
        self._like = [TensorTraits(t) for t in self.tensors]
        # Hooks of others may return another tensor. If the graph, a module or this package's hooks
        # keep the tensor itself anyway, a recompute gets that one.
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        ours = top is not None and _keeps_others(top[0])
        for i, t in enumerate(self.tensors if top is not None else ()):
            if not t.is_inference() and (_is_kept(t) or (ours and producer_of(t) is None)):
                self._same[i] = (t, t._version)
        self._kept = _hold([] if ours and len(self._same) == len(self.tensors) else self.tensors)

    @staticmethod
    def of_library(native: Any) -> Inputs:
        """Return an object for arguments that the library keeps, after the forward."""
        inputs = Inputs.__new__(Inputs)
        inputs._again, inputs._same, inputs._native, inputs._spec = [], {}, native, None
        inputs.plain, inputs.tensors = [], []
        return inputs

    def forget(self) -> None:
        """Leave the tensors to autograd."""
        self.tensors = []

    def forget_new_hooks(self) -> None:
        """Remove the hooks that a recompute has registered on its inputs in addition."""
        again, self._again = self._again, []
        for t, number in again:
            forget_hooks(t, number)

    def again(self, region: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for a recompute of the region with this name."""
        if self._native is not None:
            arguments = self._native.again()
            if arguments is not None:
                args, kwargs, needing_grad = arguments
                self._again += ((t, len(t._backward_hooks or ())) for t in needing_grad)
                return args, kwargs
            self._leave_library()
        flat, kept = list(self.plain), self._kept()
        for i, (at, like) in enumerate(zip(self._at, self._like, strict=True)):
            if i in self._same:
                t, version = self._same[i]
                if t._version != version:
                    fail_argument(region, self._at[i], len(self.plain) + len(self._at), self._spec)
            else:
                try:
                    t = kept[i]()
                except RuntimeError as error:
                    if _MODIFIED not in str(error):
                        raise
                    fail_argument(region, self._at[i], len(self.plain) + len(self._at), self._spec)
            t = like.make(t)
            if like.needs_grad:
                self._again.append((t, len(t._backward_hooks or ())))
            flat.insert(at, t)
        if self._spec is None:
            return tuple(flat), {}
        args, kwargs = tree_unflatten(flat, self._spec)
        return args, kwargs

    def _leave_library(self) -> None:
        """Let Python return the arguments, because the library cannot return them as they were."""
        native, self._native = self._native, None
        flat, self._spec = _flatten(*native.structure())
        self._at = [i for i, leaf in enumerate(flat) if leaf is ...]
        self.plain = [leaf for leaf in flat if leaf is not ...]
        self._like = [TensorTraits.of(*traits) for traits in native.traits()]
        self._kept = lambda: [partial(native.unpack, i) for i in range(len(self._like))]


def _is_kept(t: Tensor) -> bool:
    """Return True for a trained leaf, a frozen parameter and a view of a frozen parameter."""
    root = t if t._base is None else t._base
    return is_leaf(t) and (t.requires_grad or isinstance(root, nn.Parameter))


def _keeps_others(pack: Any) -> bool:
    """Return True for the hooks of a consumer that keep tensors as they are, but for outputs."""
    if type(pack) is BuiltinFunctionType:  # the library's
        return pack.__module__ == _CONSUMERS
    return bool(getattr(pack, "keeps_others", False))


def forget_hooks(t: Tensor, number: int) -> None:
    """Remove the hooks of a tensor that were registered after the first `number` of them."""
    while len(hooks := t._backward_hooks or {}) > number:
        hooks.popitem()


def fail_argument(region: str, at: int, leaves: int, spec: TreeSpec | None) -> NoReturn:
    """Raise the error for an argument of a region that was modified in place.

    Args:
        region: its name.
        at: which of the leaves of the arguments.
        leaves: how many there are.
        spec: the tree of the arguments by position and by name; None for plain tensors.
    """
    name: Any = at
    if spec is not None:
        args, kwargs = tree_unflatten(range(leaves), spec)
        named = (*enumerate(args), *((repr(key), value) for key, value in kwargs.items()))
        name = next(key for key, value in named if at in tree_leaves(value))
    fail(
        f"argument {name} of {region}, or a tensor in it, was modified in place between forward "
        f"and recompute, or by {region} itself. Return a new tensor instead of writing in place, "
        "as torch.cat does. If later code writes the argument, pass a copy."
    )


class TensorTraits:
    """The traits of a tensor besides its bytes and its history."""

    __slots__ = ("attributes", "kind", "needs_grad", "stride")

    def __init__(self, t: Tensor) -> None:
        self.kind = type(t)
        self.needs_grad = t.requires_grad
        self.stride = stride_of(t)
        attributes = t.__dict__
        self.attributes = dict(attributes) if attributes else None

    @staticmethod
    def of(needs_grad: bool, stride: tuple[int, ...]) -> TensorTraits:
        """Return the traits of a plain tensor."""
        traits = TensorTraits.__new__(TensorTraits)
        traits.kind, traits.needs_grad, traits.stride = Tensor, needs_grad, stride
        traits.attributes = None
        return traits

    def make(self, t: Tensor) -> Tensor:
        """Return the tensor with the traits, changed or copied where it lacks them."""
        before = t
        if type(t) is Tensor and stride_of(t) != self.stride:
            t = _strided(t.detach(), self.stride)
        if t.requires_grad != self.needs_grad:
            t = t.detach().requires_grad_(self.needs_grad)
        if t is not before:
            vars(t)[ORIGIN] = origin_of(before)
        if type(t) is not self.kind and type(t) is Tensor:
            t = t.as_subclass(self.kind)
        if self.attributes and not t.__dict__.keys() - {ORIGIN}:
            t.__dict__.update(self.attributes)
        return t


def _strided(t: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return a copy of a tensor with these strides, which a copy to pinned memory may lose."""
    copy = to = torch.empty_strided(t.shape, stride, dtype=t.dtype, device=t.device)
    for dim, step in enumerate(stride):
        if step == 0 and t.shape[dim]:
            t, to = t.narrow(dim, 0, 1), to.narrow(dim, 0, 1)
    to.copy_(t)
    return copy


def _hold(inputs: list[Tensor]) -> Callable[[], list[Callable[[], Tensor]]]:
    """Save the inputs as autograd saves tensors; return a function that gives a reader of each."""
    # Autograd cannot save inference tensors. They need no copy, because only code in inference mode
    # may write them.
    if any(t.is_inference() for t in inputs):
        held = _hold([t for t in inputs if not t.is_inference()])

        def readers() -> list[Callable[[], Tensor]]:
            rest = iter(held())
            return [partial(_same, t) if t.is_inference() else next(rest) for t in inputs]

        return readers
    save = getattr(torch._C._autograd, "_make_saved_tensor", None)
    if save is None:  # torch 2.10 and 2.11: a node for each, alive as long as its result
        anchor = torch.empty(0, requires_grad=True)
        # In a list, because there a strided nested tensor cannot be an argument of a Function.
        held_inputs: list[Any] = [_HoldInput.apply(anchor, [t]) for t in inputs]  # type: ignore[no-untyped-call]
        return lambda: [partial(_saved_for, each) for each in held_inputs]
    saved = [save(t, False) for t in inputs]
    return lambda: [s.unpack for s in saved]


def _saved_for(result: Any) -> Tensor:
    (t,) = result.grad_fn.saved_tensors
    return t  # type: ignore[no-any-return]


def _same(t: Tensor) -> Tensor:
    return t


# Trees are slow to walk in Python, and most calls have plain tensors only.
def _flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    if not kwargs and all(a is ... or isinstance(a, Tensor) for a in args):
        return list(args), None
    return tree_flatten((args, kwargs))


def leaves_of(value: object) -> list[Any]:
    """Return the leaves of a tree of outputs."""
    return [value] if isinstance(value, Tensor) else tree_leaves(value)


_native: Any = sys.modules.get(_library.SAVED_TENSORS)
