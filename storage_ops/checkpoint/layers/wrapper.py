"""Modules with a checkpointed forward: the same modules, with another class.

Such a module changes its class to a subclass of it, as FSDP2 and torch.nn.utils.parametrize do. So
names, state dict, hooks, attributes and isinstance do not change. Its hooks run outside of the
checkpoint, once. A forward on the instance would keep the module in a reference cycle, and would be
lost in a copy. If another library has set one before, as torchtitan's `parallelize` does, the
checkpoint moves it from the instance and repeats it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from typing_extensions import Unpack

from storage_ops._subclass import Replaced, like
from storage_ops.checkpoint.discard import scope
from storage_ops.checkpoint.layers.config import ActivationCheckpointConfig, LayerOptions, Mode
from storage_ops.checkpoint.layers.config_policy import policy_of
from storage_ops.checkpoint.region.lowering import compiled_region, traced_region
from storage_ops.checkpoint.region.options import ContextFn, Options, is_repeatable
from storage_ops.checkpoint.region.plain_region import run
from storage_ops.checkpoint.region.reentrant import run_reentrant
from storage_ops.checkpoint.selective.policies import Policy
from storage_ops.checkpoint.selective.selective import contexts
from storage_ops.checkpoint.state.caches import warn_once, without_cache
from storage_ops.checkpoint.state.execution import is_disabled, is_traced_by_fx
from storage_ops.foundation import regions
from storage_ops.foundation.eager import eager

ModuleT = TypeVar("ModuleT", bound=nn.Module)
# Options that choose layers of a model do not apply to a single module.
_SELECTION = ("layer_classes", "layer_names", "every_k", "allow_no_match")


@dataclass(frozen=True)
class Checkpointing:
    """The checkpoint of one module."""

    mode: Mode
    policy: Policy | None
    use_reentrant: bool
    respect_saved_tensors_hooks: bool
    options: Options
    _of_names: dict[str, Options] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def of(
        cfg: ActivationCheckpointConfig, model: nn.Module, context_fn: ContextFn | None = None
    ) -> Checkpointing:
        """Return the checkpoint of a config, with shapes of the model's layers."""
        return Checkpointing(
            cfg.effective_mode,
            policy_of(cfg, model),
            cfg.use_reentrant,
            cfg.respect_saved_tensors_hooks,
            Options(
                cfg.preserve_rng_state,
                cfg.determinism_check,
                cfg.debug,
                context_fn,
                cfg.early_stop,
                discards=False,
            ),
        )

    @eager  # If the graph breaks inside of the region, the region runs eagerly, and stays a region.
    def run(
        self,
        module: nn.Module,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call the plain forward of a module in a checkpoint."""
        name, options = type(module).__name__, self.options
        discards = self.mode == "output_discard"
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling and is_traced_by_fx(args, kwargs):
            return fn(*args, **kwargs)
        if torch.is_grad_enabled() and not is_disabled():
            passed = kwargs
            args, kwargs = without_cache(module, args, kwargs)
            if kwargs is not passed and not is_compiling:
                warn_once(name)
        if is_compiling:
            if not torch.is_grad_enabled():
                return fn(*args, **kwargs)
            rng, context_fn = options.preserve_rng_state, self._context_fn(name)
            return compiled_region(fn, args, kwargs, rng, context_fn, discards)
        if regions.tracing() and not is_disabled():
            return traced_region(fn, args, kwargs, self._context_fn(name), discards)
        if not is_repeatable():
            return fn(*args, **kwargs)
        if discards:
            return scope.run(fn, args, kwargs, name)
        if self.use_reentrant:
            return run_reentrant(fn, args, kwargs, options, name, module.parameters())
        if self.policy is not None:
            options = self._with_policy(name)
        return run(fn, args, kwargs, options, name)

    def _with_policy(self, name: str) -> Options:
        """Return the options of a region with this name."""
        options = self._of_names.get(name)
        if options is None:
            options = replace(self.options, context_fn=self._context_fn(name))
            self._of_names[name] = options
        return options

    def _context_fn(self, name: str) -> ContextFn | None:
        if self.policy is None:
            return self.options.context_fn
        return functools.partial(
            contexts,
            self.policy,
            name,
            self.options.preserve_rng_state,
            self.respect_saved_tensors_hooks,
        )


class CheckpointWrapper(Replaced):
    """A module whose forward is checkpointed. It is the given module itself, with a new class.

    The class is a subclass of the module's own class and of `CheckpointWrapper`. Parameters, names,
    state dict, hooks and attributes do not change. Copies and pickles are checkpointed, too.
    Without grad mode, under the transforms of `torch.func` and in
    `storage_ops.disable_checkpointing` it runs the plain forward. Effects of the forward besides
    returning tensors happen once, as with `OutputDiscardCheckpoint`. `remove_activation_checkpoint`
    undoes the change.

    Args:
        module: the module; changed in place and returned.
        context_fn: as in `torch.utils.checkpoint`: returns two context managers, for the forward
            and for the recompute. Not allowed together with rules, which also need such a pair.
        options: the options of `ActivationCheckpointConfig` that do not choose layers: `mode`,
            `ops_to_save`, `policy`, `use_reentrant`, `early_stop`, `debug` and so on. Without
            options, everything is recomputed. Mode "output_discard" is an error here, because the
            module around this one must free the output. Only `apply_activation_checkpoint` knows
            that module.

    Raises:
        TypeError: `module` is not a module whose class can change. ValueError: an unknown or
            wrong option.
        RuntimeError: accelerate has replaced its forward and will restore it, or the module is
            checkpointed differently.

    Example:
        >>> block = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU())
        >>> wrapped = storage_ops.CheckpointWrapper(block, ops_to_save=["aten.addmm"])
        >>> isinstance(wrapped, torch.nn.Sequential), list(wrapped.state_dict())
        (True, ['0.weight', '0.bias'])
        >>> wrapped(torch.randn(4, 16)).sum().backward()
    """

    # On an instance, None means the plain forward.
    _checkpointing: Checkpointing | None = None
    # A forward that was set on the instance before. It runs instead of the forward of the class.
    _own_forward: Callable[..., Any] | None = None

    if TYPE_CHECKING:  # for a type checker, the module keeps its own type

        def __new__(  # type: ignore[misc]
            cls,
            module: ModuleT,
            context_fn: ContextFn | None = None,
            **options: Unpack[LayerOptions],
        ) -> ModuleT:
            """Change the class of the given module and return it."""

    else:

        def __new__(cls, *args: object, **kwargs: object) -> Any:
            """Change the class of the given module and return it."""
            if cls is not CheckpointWrapper:  # another instance of a module's new class is created
                new = super().__new__
                return new(cls) if new is object.__new__ else new(cls, *args, **kwargs)
            return _wrapped(*args, **kwargs)

        def __init__(self, *args: object, **kwargs: object) -> None:
            # Python calls this after `_wrapped` with the same arguments, when everything is done.
            if not any(module is self for module in (*args[:1], kwargs.get("module"))):
                super().__init__(*args, **kwargs)

    @staticmethod
    def forward_over(original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward that checkpoints the original one."""

        @like(original)
        def forward(self: CheckpointWrapper, *args: object, **kwargs: object) -> Any:
            checkpointing, own = self._checkpointing, self._own_forward
            plain = functools.partial(original, self)
            if own is not None:
                plain = functools.partial(_call_own, self, own)
            return (
                plain(*args, **kwargs)
                if checkpointing is None
                else checkpointing.run(self, plain, args, kwargs)
            )

        return forward


def _call_own(module: nn.Module, own: Callable[..., Any], *args: object, **kwargs: object) -> Any:
    """Call an instance's own forward. `module` is an argument so that a region reaches it."""
    return own(*args, **kwargs)


def _wrapped(
    module: nn.Module, context_fn: ContextFn | None = None, **options: object
) -> nn.Module:
    refused = [name for name in _SELECTION if name in options]
    if refused:
        raise ValueError(
            f"CheckpointWrapper: `{refused[0]}` selects layers of a model, and the wrapper takes "
            "one module. Use apply_activation_checkpoint(model, cfg)."
        )
    cfg = ActivationCheckpointConfig.from_dict(options)
    if cfg.effective_mode == "output_discard":
        raise ValueError(
            "CheckpointWrapper: `mode` is 'output_discard', which needs the module around this "
            "one. Use apply_activation_checkpoint(model, cfg), or storage_ops.OutputDiscard."
        )
    if context_fn is not None and not callable(context_fn):
        raise TypeError(f"`context_fn` is {context_fn!r}. Expected a function of no arguments.")
    if context_fn is not None and (cfg.effective_mode != "full" or cfg.use_reentrant):
        raise ValueError(
            f"`context_fn` is given with mode {cfg.effective_mode!r} and "
            f"use_reentrant={cfg.use_reentrant}. Expected mode 'full' and use_reentrant=False."
        )
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"CheckpointWrapper: `module` is {module!r}, a {type(module).__name__}. Expected a "
            "torch.nn.Module."
        )
    checkpointing = Checkpointing.of(cfg, module, context_fn)
    check(module, checkpointing)
    set_checkpointing(module, checkpointing)
    return module


def check(module: nn.Module, checkpointing: Checkpointing) -> None:
    """Raise an error for a module that cannot be checkpointed in this way.

    Raises:
        TypeError: its class cannot change.
        RuntimeError: accelerate has replaced its forward and will restore it, or the module is
            checkpointed differently.
    """
    name = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"{name} is a ScriptModule, whose forward cannot be replaced. Expected a module in "
            "Python."
        )
    if "forward" in vars(module) and "_old_forward" in vars(module):
        raise RuntimeError(
            f"The forward of {name} was replaced on the instance by accelerate, which will restore "
            "the old one, without a checkpoint. Checkpoint the module before accelerate adds its "
            "hook."
        )
    now = checkpointing_of(module)
    if now is not None and now != checkpointing:
        raise RuntimeError(
            f"{name} is checkpointed already, as {now}. Pass the same options ({checkpointing}), "
            "or call remove_activation_checkpoint(model) first."
        )


def checkpointing_of(module: nn.Module) -> Checkpointing | None:
    """Return the checkpoint of a module, or None if it has none."""
    return module._checkpointing if isinstance(module, CheckpointWrapper) else None


def set_checkpointing(module: Any, checkpointing: Checkpointing) -> None:
    """Checkpoint a module after `check` has passed."""
    if not isinstance(module, CheckpointWrapper):
        CheckpointWrapper.change(module)
    if "forward" in vars(module) and module._checkpointing is None:
        module._own_forward = module.forward
        del module.forward
    module._checkpointing = checkpointing


def unset_checkpointing(module: Any) -> None:
    """Restore the plain forward of a module, and its class unless another class is on top of it."""
    vars(module).pop("_checkpointing", None)
    CheckpointWrapper.change_back(module)
    if "_own_forward" in vars(module) and "forward" not in vars(module):
        module.forward = module._own_forward
        del module._own_forward
