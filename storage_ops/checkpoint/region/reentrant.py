"""The checkpoint of older torch: a forward without a graph, and a backward within the backward.

Torch's own runs it. The functions that it gets here repeat the state, the effects and the arguments
of the forward as a `Region` does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from storage_ops._callers import warn_caller
from storage_ops.checkpoint.region.inputs import TensorTraits, fail_argument
from storage_ops.checkpoint.region.options import Options
from storage_ops.checkpoint.saved.saved import fail_modified
from storage_ops.checkpoint.state.execution import ExecutionState
from storage_ops.checkpoint.state.reachable import Surroundings
from storage_ops.checkpoint.state.unchanged import own_cached_parametrizations


def run_reentrant(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    name: str,
    parameters: Iterable[Tensor],
) -> Any:
    """Call `fn(*args, **kwargs)` in a reentrant checkpoint.

    Args:
        fn: the function, with its arguments.
        options: of a region; there is no early stop and nothing to compare.
        name: what errors call the region.
        parameters: those that the function may read.

    Raises:
        RuntimeError: no input needs grad, but a parameter does, or an input is a dual number or a
            strided nested tensor.
    """
    leaves, spec = tree_flatten((args, kwargs))
    parameters = list(parameters)
    if not any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
        if not any(p.requires_grad for p in parameters):
            return fn(*args, **kwargs)
        raise RuntimeError(
            f"`use_reentrant` is True, but no input of {name} needs grad, so its parameters would "
            "get no gradients. Set use_reentrant=False."
        )
    _refuse_inputs(leaves, name)
    # The forward runs without grad, so a weight that it computes has no graph for later code.
    with own_cached_parametrizations():
        call = _ReentrantCall(fn, args, kwargs, leaves, spec, options, name, parameters)
        outputs = torch_checkpoint(call, *leaves, use_reentrant=True, preserve_rng_state=False)
    node = next((t.grad_fn for t in outputs if isinstance(t, Tensor) and t.grad_fn), None)
    # Hooks of saved tensors, where there are any, keep another tensor than the argument.
    if node is not None and torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
        node.register_prehook(call.check_arguments)
    return tree_unflatten(list(outputs), call.result)


def _refuse_inputs(leaves: list[Any], name: str) -> None:
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            continue
        if leaf.is_nested and leaf.layout is torch.strided:
            kind = "nested tensor of layout torch.strided"
        elif forward_ad.unpack_dual(leaf).tangent is not None:
            kind = "dual number"
        else:
            continue
        raise RuntimeError(
            f"`use_reentrant` is True, and an input of {name} is a {kind}, for which torch's "
            "reentrant checkpoint has no gradient. Set use_reentrant=False."
        )


class _ReentrantCall:
    """A call that returns leaves: the first time it is the forward, then the recompute."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: list[Any],
        spec: TreeSpec,
        options: Options,
        name: str,
        parameters: list[Tensor],
    ) -> None:
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        plain = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        self.result: Any = None
        self._fn, self._spec, self._name = fn, spec, name
        self._first: Any = (args, kwargs)  # the caller's own, for the forward
        self._like = [TensorTraits(t) for t in tensors]
        self._checks = options.determinism_check != "none"
        self._state = ExecutionState(
            Surroundings.of(fn, plain, tensors), options.preserve_rng_state
        )
        self._versions = [(p, p._version) for p in parameters]
        self._given = [
            (i, weakref.ref(t), t._version) for i, t in enumerate(leaves) if isinstance(t, Tensor)
        ]

    def __call__(self, *leaves: object) -> tuple[Any, ...]:
        if self._first is not None:
            (args, kwargs), self._first = self._first, None
            outputs = self._fn(*args, **kwargs)
            self._state.finish()
            self._versions = [(p, p._version) for p, _ in self._versions]
            self._warn_of_tensors(args, kwargs, leaves)
        else:
            state, modes, writes = self._state.contexts(self._name, self._checks)
            self._check()
            like = iter(self._like)
            again = [next(like).make(t) if isinstance(t, Tensor) else t for t in leaves]
            args, kwargs = tree_unflatten(again, self._spec)
            with state, modes, writes:
                outputs = self._fn(*args, **kwargs)
        flat, self.result = tree_flatten(outputs)
        return tuple(flat)

    def check_arguments(self, gradients: object) -> None:
        """Raise if an argument was modified in place, before torch does without its name."""
        for i, ref, version in self._given:
            t = ref()
            if t is not None and t._version != version:
                fail_argument(self._name, i, self._spec.num_leaves, self._spec)

    def _check(self) -> None:
        if not self._checks:
            return
        for p, version in self._versions:
            if p._version != version:
                fail_modified(self._name, p)
        self._state.effects.check(self._name)

    def _warn_of_tensors(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], given: tuple[Any, ...]
    ) -> None:
        known = {id(leaf) for leaf in given}
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and id(leaf) not in known:
                warn_caller(
                    f"{self._name} puts a tensor into one of its arguments. `use_reentrant` is "
                    "True, so that tensor has no gradient. Set use_reentrant=False."
                )
                return
