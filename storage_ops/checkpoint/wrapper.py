"""Modules that checkpoint their forward: the same modules, with another class.

Such a module changes its class for a subclass of it, as FSDP2 and torch.nn.utils.parametrize do, so
names, state dict, hooks, attributes and isinstance are what they were. Its hooks run outside of the
checkpoint, once. A forward set on the instance would keep the module in a reference cycle, and
would not survive a copy.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from storage_ops._subclass import like, subclass
from storage_ops.checkpoint import discard_scope
from storage_ops.checkpoint.config import ActivationCheckpointConfig, Mode
from storage_ops.checkpoint.execution import ExecutionState
from storage_ops.checkpoint.lowering import compiled_region
from storage_ops.checkpoint.policies import Policy
from storage_ops.checkpoint.reachable import Surroundings
from storage_ops.checkpoint.rules import policy_of
from storage_ops.checkpoint.selective import contexts
from storage_ops.graph import regions
from storage_ops.graph.torch_checkpoint import marked

# Options that choose layers of a model; a single module has no use for them.
_SELECTION = ("layer_classes", "layer_names", "every_k", "allow_no_match")


@dataclass(frozen=True)
class Checkpointing:
    """How one module is checkpointed."""

    mode: Mode
    policy: Policy | None
    use_reentrant: bool
    preserve_rng_state: bool
    determinism_check: str

    @staticmethod
    def of(cfg: ActivationCheckpointConfig, model: nn.Module) -> Checkpointing:
        """What a config says; shapes of layers are those of the model."""
        return Checkpointing(
            cfg.effective_mode,
            policy_of(cfg, model),
            cfg.use_reentrant,
            cfg.preserve_rng_state,
            cfg.determinism_check,
        )

    def run(self, module: nn.Module, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the plain forward of a module in a checkpoint."""
        if not torch.is_grad_enabled():
            return fn(*args, **kwargs)
        name = type(module).__name__
        discards = self.mode == "output_discard"
        if torch.compiler.is_compiling():
            if discards:
                return compiled_region(fn, args, kwargs, self.preserve_rng_state, None)
            call = functools.partial(fn, **kwargs)
            return torch_checkpoint(call, *args, **self._options(name, reentrant=False))
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return fn(*args, **kwargs)  # torch.func has no hooks of saved tensors
        if discards:
            fn.__qualname__ = name
            return discard_scope.run(fn, args, kwargs)
        # Tensors in containers and among keywords become arguments, so that autograd holds them:
        # one that is modified in place before the backward is noticed.
        leaves, spec = tree_flatten((args, kwargs))
        repeated = _Call(name, fn, spec)
        if not regions.tracing():
            around = Surroundings.of(fn, leaves)
            repeated.state = ExecutionState(around, self.preserve_rng_state, False)
        with marked() if regions.tracing() else contextlib.nullcontext():
            if self.use_reentrant:
                return self._run_reentrant(module, repeated, leaves)
            return torch_checkpoint(repeated, *leaves, **self._options(name, reentrant=False))

    def _options(self, name: str, reentrant: bool) -> dict[str, Any]:
        options: dict[str, Any] = {
            "use_reentrant": reentrant,
            "preserve_rng_state": self.preserve_rng_state,
        }
        if not reentrant:
            options["determinism_check"] = self.determinism_check
        if self.policy is not None:
            options["context_fn"] = functools.partial(
                contexts, self.policy, name, self.preserve_rng_state
            )
        return options

    def _run_reentrant(self, module: nn.Module, call: _Call, leaves: list[Any]) -> Any:
        if not any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            if not any(p.requires_grad for p in module.parameters()):
                return call(*leaves)
            raise RuntimeError(
                f"use_reentrant is True, but no input of {call.name} needs grad, so its "
                "parameters would get none; expected use_reentrant=False"
            )
        specs = []

        def flat(*leaves: Any) -> tuple[Any, ...]:
            outputs, spec = tree_flatten(call(*leaves))
            specs.append(spec)
            return tuple(outputs)

        outputs = torch_checkpoint(flat, *leaves, **self._options("", reentrant=True))
        return tree_unflatten(list(outputs), specs[0])


class _Call:
    """A call of a function with the leaves of its arguments.

    Every time but the first it is repeated in `state`, if that is given. torch's checkpoint itself
    repeats autocast and the default generators, but no others.
    """

    def __init__(self, name: str, fn: Callable[..., Any], spec: Any) -> None:
        self.name = name
        self.state: ExecutionState | None = None
        self._fn = fn
        self._spec = spec
        self._again = False

    def __call__(self, *leaves: Any) -> Any:
        args, kwargs = tree_unflatten(list(leaves), self._spec)
        around = self.state if self._again and self.state else contextlib.nullcontext()
        self._again = True
        with around:
            return self._fn(*args, **kwargs)


class CheckpointWrapper(nn.Module):
    """A module whose forward is checkpointed. It is the given module itself, of a new class.

    The class is a subclass of the module's own and of `CheckpointWrapper`. Parameters, names, state
    dict, hooks and attributes stay. Copies and pickles are checkpointed as well. Without grad mode
    and under the transforms of `torch.func` its forward is the plain one.
    `remove_activation_checkpoint` undoes it.

    Args:
        module: the module; changed in place and returned.
        options: those of `ActivationCheckpointConfig` that do not choose layers: `mode`,
            `ops_to_save`, `policy`, `use_reentrant` and so on. None: all is recomputed. With mode
            "output_discard" the output is freed by the module around this one, which
            `apply_activation_checkpoint` knows and this does not, so it is refused here.

    Raises:
        TypeError: `module` is not a module whose class can change. ValueError: an unknown or
            wrong option.
        RuntimeError: its forward was replaced on the instance, or it is checkpointed differently.

    Example:
        >>> block = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU())
        >>> wrapped = storage_ops.CheckpointWrapper(block, ops_to_save=["aten.addmm"])
        >>> isinstance(wrapped, torch.nn.Sequential), list(wrapped.state_dict())
        (True, ['0.weight', '0.bias'])
        >>> wrapped(torch.randn(4, 16)).sum().backward()
    """

    # None on an instance: its forward is the plain one.
    _checkpointing: Checkpointing | None = None
    # On each class made here itself: the class it replaces.
    _original: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Change the class of the given module and return it."""
        if cls is not CheckpointWrapper:  # someone makes another instance of a module's class
            new = super().__new__
            return new(cls) if new is object.__new__ else new(cls, *args, **kwargs)
        return _wrapped(*args, **kwargs)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # After `_wrapped` python calls this with the same arguments; all is done then.
        if not any(given is self for given in (*args[:1], kwargs.get("module"))):
            super().__init__(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        if "_original" not in vars(type(self)):  # another library put its class above ours
            return reduced
        # The class has no name to be pickled by.
        function, args, *rest = reduced
        args = tuple(self._original if arg is type(self) else arg for arg in args)
        return (_rebuild, (function, args, self._checkpointing), *rest)


def _wrapped(module: nn.Module, **options: Any) -> nn.Module:
    refused = [name for name in _SELECTION if name in options]
    if refused:
        raise ValueError(
            f"CheckpointWrapper: {refused[0]} chooses layers of a model, and this wraps one "
            "module; expected apply_activation_checkpoint(model, cfg)"
        )
    cfg = ActivationCheckpointConfig.from_dict(options)
    if cfg.effective_mode == "output_discard":
        raise ValueError(
            "CheckpointWrapper: mode is 'output_discard', which needs the module that holds this "
            "one; expected apply_activation_checkpoint(model, cfg), or storage_ops.OutputDiscard"
        )
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"CheckpointWrapper: module is {module!r}, a {type(module).__name__}; expected a "
            "torch.nn.Module"
        )
    how = Checkpointing.of(cfg, module)
    check(module, how)
    set_checkpointing(module, how)
    return module


def check(module: Any, how: Checkpointing) -> None:
    """Refuse a module that cannot be checkpointed in this way.

    Raises:
        TypeError: its class cannot change.
        RuntimeError: its forward was replaced on the instance, or it is checkpointed differently.
    """
    name = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"{name} is a ScriptModule, whose forward cannot be replaced; expected a module in "
            "Python"
        )
    if "forward" in vars(module):
        raise RuntimeError(
            f"the forward of {name} was replaced on the instance; expected that of its class. "
            "Checkpoint a module before torch.compile or other libraries wrap it"
        )
    now = checkpointing_of(module)
    if now is not None and now != how:
        raise RuntimeError(
            f"{name} is checkpointed already, as {now}; expected the same, {how}, or "
            "remove_activation_checkpoint(model) first"
        )


def checkpointing_of(module: nn.Module) -> Checkpointing | None:
    """How a module is checkpointed; None if it is not."""
    return module._checkpointing if isinstance(module, CheckpointWrapper) else None


def set_checkpointing(module: Any, how: Checkpointing) -> None:
    """Checkpoint a module; `check` has passed."""
    if not isinstance(module, CheckpointWrapper):
        original: Any = type(module)
        try:
            module.__class__ = _subclass(original)
        except TypeError as error:
            raise TypeError(
                f"the class of {original.__name__} cannot change: {error}; expected an "
                "ordinary subclass of torch.nn.Module"
            ) from error
    module._checkpointing = how


def unset_checkpointing(module: Any) -> None:
    """Give a module its plain forward back, and its class unless another one was put above it."""
    vars(module).pop("_checkpointing", None)
    if "_original" in vars(type(module)):
        module.__class__ = type(module)._original


def _rebuild(function: Any, args: Any, how: Checkpointing | None) -> Any:
    module = function(*args)
    if how is not None:
        set_checkpointing(module, how)
    return module


@functools.cache
def _subclass(original: Any) -> Any:
    """A subclass that goes by the name of the original."""

    @like(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        how = self._checkpointing
        if how is None:
            return original.forward(self, *args, **kwargs)
        return how.run(self, functools.partial(original.forward, self), args, kwargs)

    return subclass(CheckpointWrapper, original, forward)
